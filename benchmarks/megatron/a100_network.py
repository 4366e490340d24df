"""Collectives among DGX A100 nodes: the α–β model with coefficients fitted inside such a node, and declared links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from dejavu.cluster import Link
from dejavu.cluster.catalogue import NETWORK_LATENCY_SECONDS, NODE_LATENCY_SECONDS
from dejavu.cost.collectives.alpha_beta import FAMILY, TERMS, Coefficients, GroupLayout, Links, shipped
from dejavu.cost.estimates import CostError
from dejavu.profiles.collective import Collective

# By `alpha_beta.fit`, 2026-11-21, to vidur's times of 2, 4 and 8 ranks inside one DGX A100 (Agrawal et al., MLSys 2024;
# 2 kB to 64 MiB); median error 4 % of all_reduce and 6 % of send_recv, where the coefficients of V100 nodes, without
# NVSwitch, are 45 % and 162 % off. Terms that cross nodes stay as shipped.
A100_TERMS: Mapping[str, Mapping[str, float]] = {
    "all_reduce": {
        "launch": 2.732e-05,
        "inside_hops": 0.0,
        "inside_steps": 1.975,
        "inside_bytes": 1.395,
        "pair_bytes": 0.2465,
    },
    "send_recv": {
        "launch": 1.962e-06,
        "inside_hops": 2.361,
        "inside_steps": 0.0,
        "inside_bytes": 0.9668,
        "pair_bytes": 0.0,
    },
}
NVLINK_3 = Link(300e9, NODE_LATENCY_SECONDS)
# What nobody measured here: four HDR InfiniBand cards of 200 Gbit/s in each node, at their full rate.
FOUR_HDR_CARDS = Link(4 * 200e9 / 8, NETWORK_LATENCY_SECONDS, assumed=True)


@dataclass(frozen=True)
class A100Network:
    """Knows its node well, 4 to 6 % off; between nodes it has the links' word alone.

    Attributes:
        links: between two devices of a node; and of all cards of one node together, one way.
    """

    links: Links = field(default_factory=lambda: Links(NVLINK_3, FOUR_HDR_CARDS))

    def seconds(self, collective: Collective, size_bytes: float) -> float:
        """All groups at once; 0 for groups of one rank.

        Raises:
            CostError: a collective that was not fitted.
        """
        if collective.name not in A100_TERMS:
            raise CostError(f"no coefficients of {collective.name!r} on A100; wanted one of {', '.join(A100_TERMS)}")
        coefficients = _coefficients(collective.name)
        sizes, layouts = np.array([float(size_bytes)]), [GroupLayout.of(collective)]
        return float(coefficients.seconds(collective.name, layouts, sizes, self.links)[0])


def _coefficients(name: str) -> Coefficients:
    """The shipped coefficients with those terms replaced that an A100 node told."""
    known = shipped()[name]
    terms = zip(TERMS[FAMILY[name]], known.values, strict=True)
    return replace(known, values=tuple(A100_TERMS[name].get(term, value) for term, value in terms))
