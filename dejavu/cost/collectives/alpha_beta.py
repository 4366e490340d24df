"""Predict a collective's cost on links that were never measured: an α–β model that knows the topology.

The time is a sum of terms, each a number of seconds that the links alone would take, times a fitted coefficient without
a unit (`launch`, in seconds, excepted); so coefficients fitted on one cluster price another that is given only by its
links (Hockney 1994; Thakur et al., IJHPCA 2005; NCCL's rings and double binary trees).

Letters: n ranks of a group, on k nodes, r = n / k on each; h groups cross the network card of one node; S bytes.

- Rings (all_gather, reduce_scatter): n − 1 steps of S / n bytes. The slowest chunk crosses k node boundaries where a
  node has several ranks, and k − 1 where it has one (it need not go all the way round).
- all_reduce: starts through a tree (log₂ k crossings), sends 2 (n − 1) / n · S by rings, and from some size on by two
  binary trees, where the busiest card carries S · min(k / 2, 2).
- Where a node has several cards, h groups of r ranks there use those of their devices, all at once (NCCL's rails).
- all_to_all: a message to each peer, (n − r) of them beyond the node; rank to rank S / n² bytes.
- send_recv of S bytes is half of an all_gather of 2 S by two ranks, and at full duplex takes as long.

S is the whole tensor: what an all_gather puts together, what a reduce_scatter or an all_reduce takes, all n shards of
an all_to_all. `bus_bytes_per_second` is what nccl-tests calls busbw.

Shape suffixes: P = points, C = coefficients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from dejavu.cluster import Link
from dejavu.cluster.catalogue import NETWORK_LATENCY_SECONDS, NODE_LATENCY_SECONDS
from dejavu.profiles.collective import Collective

Floats = NDArray[np.float64]

TERMS = {
    "ring": (
        *("launch", "inside_hops", "crossing_hops", "inside_steps", "crossing_steps"),
        *("inside_bytes", "pair_bytes", "card_bytes"),
    ),
    "reduce": (
        *("launch", "inside_hops", "crossing_tree", "inside_steps", "crossing_steps"),
        *("inside_bytes", "pair_bytes", "card_bytes"),
    ),
    "exchange": ("launch", "inside_peers", "crossing_peers", "inside_bytes", "pair_bytes", "card_bytes"),
}
FAMILY = {
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "send_recv": "ring",
    "all_reduce": "reduce",
    "all_to_all": "exchange",
}
# Where all_reduce switches from rings to trees, and how gradually, in log2 bytes; tried when fitting.
_TREE_CENTERS, _TREE_WIDTHS = (22.0, 24.0, 26.0, 28.0, 30.0), (0.7, 1.5)
_ROBUST_LOG = 0.03  # log ratio below which an error counts by its square and above by its size (Huber)
_FIT_ROUNDS = 6  # of reweighting; a choice, not tuned
_PRIOR_WEIGHT = 1e-3  # of a shipped coefficient against one measurement: it decides only what no measurement tells


@dataclass(frozen=True)
class GroupLayout:
    """Where the ranks of the groups sit; costs depend on nothing else of a mesh.

    Attributes:
        num_ranks, num_nodes: of one group, of the one with most nodes.
        sharing: the most groups that cross one node's network card at once; 0 where all stay inside.
    """

    num_ranks: int
    num_nodes: int
    sharing: int

    @property
    def ranks_per_node(self) -> float:
        return self.num_ranks / self.num_nodes

    @classmethod
    def of(cls, collective: Collective) -> GroupLayout:
        nodes = [{collective.node(rank) for rank in group} for group in collective.replica_groups]
        crossing = [group for group in nodes if len(group) > 1]
        sharing = max((sum(node in group for group in crossing) for node in range(collective.mesh_nodes)), default=0)
        return cls(collective.num_ranks, max(len(group) for group in nodes), sharing)


@dataclass(frozen=True)
class Links:
    """The slowest link inside a node and the slowest between two nodes that a collective uses.

    Attributes:
        between: of one network card.
        cards_per_device: where a node has several, and its devices share them equally; 0: all share one.
    """

    inside: Link
    between: Link
    cards_per_device: float = 0.0


# Of the shipped coefficients: p3.16xlarge nodes, six NVLinks 2 one way, 25 Gbit/s, and the catalogue's latencies.
FITTED_LINKS = Links(Link(150e9, NODE_LATENCY_SECONDS), Link(3.125e9, NETWORK_LATENCY_SECONDS))


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of one collective: a factor for each of its terms.

    Attributes:
        tree_center_log2_bytes, tree_width_log2_bytes: where all_reduce switches to trees.
        log_error: nine of ten predictions on a mesh that was not fitted are this close, as a log ratio.
        deviations: what nine of ten are within once measured neighbours correct them, in the standard deviations that
            `CurveProcess` gives, again on a mesh that was not fitted.
    """

    values: tuple[float, ...]
    tree_center_log2_bytes: float = 26.0
    tree_width_log2_bytes: float = 1.5
    log_error: float = 0.35
    deviations: float = 1.645  # as a Gaussian

    def seconds(self, name: str, layouts: Sequence[GroupLayout], sizes_bytes_P: Floats, links: Links) -> Floats:
        """Return the seconds of one collective each, in the order given; 0 for one rank."""
        terms_PC = terms(name, layouts, sizes_bytes_P, links, self.tree_center_log2_bytes, self.tree_width_log2_bytes)
        alone_P = np.array([layout.num_ranks == 1 for layout in layouts])
        return np.where(alone_P, 0.0, terms_PC @ np.array(self.values))


def terms(
    name: str,
    layouts: Sequence[GroupLayout],
    sizes_bytes_P: Floats,
    links: Links,
    center: float = 26.0,
    width: float = 1.5,
) -> Floats:
    """Return the seconds of each term at coefficient 1 (launch: 1): an array P × C, columns as in `TERMS`."""
    size = np.asarray(sizes_bytes_P, dtype=np.float64) * (2.0 if name == "send_recv" else 1.0)
    n, k, h = (np.array(column, dtype=np.float64) for column in zip(*_counts(layouts), strict=True))
    r = n / k
    inside_latency, between_latency = links.inside.latency_seconds, links.between.latency_seconds
    inside_rate, between_rate = links.inside.bytes_per_second, links.between.bytes_per_second
    node_rate = between_rate * np.maximum(1.0, links.cards_per_device * h * r)  # of the cards of all who take part
    one, crosses = np.ones_like(n), k > 1
    if FAMILY[name] == "exchange":
        inside, card = _slowest(size * (r - 1) / n**2 / inside_rate, size * h * r * (n - r) / n**2 / node_rate)
        peers = [(r - 1) * inside_latency, (n - r) * between_latency]
        return np.stack([one, *peers, inside, inside * (n == 2), card], axis=1)
    hops = np.where(crosses, np.where(r > 1, k, k - 1), 0.0)
    inner = n - 1 - hops
    rounds = 2.0 if FAMILY[name] == "reduce" else 1.0
    ring = rounds * (n - 1) / n
    card_share = ring
    if FAMILY[name] == "reduce":
        by_tree = 1.0 / (1.0 + np.exp(-(np.log2(np.maximum(size, 1.0)) - center) / width))
        card_share = ring * (1 - by_tree) + np.where(crosses, np.minimum(k / 2, 2.0), 0.0) * by_tree
    inside, card = _slowest(np.where(r > 1, size * ring / inside_rate, 0.0), size * h * card_share / node_rate)
    latency = (
        [(r - 1) * inside_latency, np.log2(k) * between_latency]
        if FAMILY[name] == "reduce"
        else [inner * inside_latency, hops * between_latency]
    )
    steps = [
        # A step of middle size is bound by neither: NCCL's protocols trade latency for bandwidth between the two.
        inner * np.sqrt(size / n * inside_latency / inside_rate),
        hops * np.sqrt(size / n * between_latency / between_rate),
    ]
    return np.stack([one, *latency, *steps, inside, inside * (n == 2), card], axis=1)


def fit(
    name: str,
    layouts: Sequence[GroupLayout],
    sizes_bytes_P: Floats,
    seconds_P: Floats,
    links: Links,
    prior: Coefficients,
) -> Coefficients:
    """Fit by robust nonnegative least squares of relative errors; what no measurement determines stays at `prior`."""
    centers = [(prior.tree_center_log2_bytes, prior.tree_width_log2_bytes)]
    if FAMILY[name] == "reduce":
        centers += [(center, width) for center in _TREE_CENTERS for width in _TREE_WIDTHS]
    prior_C = np.array(prior.values)
    best: tuple[float, Coefficients] | None = None
    for center, width in centers:
        terms_PC = terms(name, layouts, sizes_bytes_P, links, center, width)
        values_C = _robust_nnls(terms_PC, seconds_P, prior_C)
        loss = float(np.abs(np.log((terms_PC @ values_C) / seconds_P)).mean())
        if best is None or loss < best[0] - 1e-6:
            best = (
                loss,
                replace(
                    prior,
                    values=tuple(map(float, values_C)),
                    tree_center_log2_bytes=center,
                    tree_width_log2_bytes=width,
                ),
            )
    assert best is not None
    return best[1]


def bus_bytes_per_second(name: str, num_ranks: int, size_bytes: float, seconds: float) -> float:
    """Return what one link carries, comparable with its bandwidth: `busbw` of nccl-tests (doc/PERFORMANCE.md).

    algbw = S / t; busbw = algbw × (n − 1) / n for all_gather and reduce_scatter, × 2 (n − 1) / n for all_reduce, × 1
    for send_recv; for all_to_all × (n − 1) / n where S is one rank's buffer, so × (n − 1) / n² of the whole tensor.
    """
    n = num_ranks
    factor = {
        "all_gather": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_reduce": 2 * (n - 1) / n,
        "all_to_all": (n - 1) / n**2,
        "send_recv": 1.0,
    }[name]
    return factor * size_bytes / seconds


@lru_cache
def shipped() -> Mapping[str, Coefficients]:
    """Load the fitted coefficients of `collective_coefficients.json`, which names source and date."""
    text = resources.files("dejavu.cost.collectives").joinpath("collective_coefficients.json").read_text()
    entries = json.loads(text)["coefficients"]
    return {
        name: Coefficients(
            values=tuple(entry["terms"][term] for term in TERMS[FAMILY[name]]),
            tree_center_log2_bytes=entry["tree_center_log2_bytes"],
            tree_width_log2_bytes=entry["tree_width_log2_bytes"],
            log_error=entry["log_error"],
            deviations=entry["deviations"],
        )
        for name, entry in entries.items()
    }


def _counts(layouts: Sequence[GroupLayout]) -> list[tuple[int, int, int]]:
    return [(layout.num_ranks, layout.num_nodes, layout.sharing) for layout in layouts]


def _slowest(inside: Floats, card: Floats) -> tuple[Floats, Floats]:
    """Return the slower of the transfers inside a node and through its card: both run at once."""
    return np.where(inside > card, inside, 0.0), np.where(inside > card, 0.0, card)


def _robust_nnls(terms_PC: Floats, seconds_P: Floats, prior_C: Floats) -> Floats:
    scale_C = np.where(prior_C > 0, prior_C, 1.0)
    prior_rows = np.diag(_PRIOR_WEIGHT / scale_C)
    prior_target = _PRIOR_WEIGHT * prior_C / scale_C
    weights_P = np.ones(len(seconds_P))
    for _ in range(_FIT_ROUNDS):
        left = np.concatenate([terms_PC * (weights_P / seconds_P)[:, None], prior_rows]) * scale_C
        solved, _ = nnls(left, np.concatenate([weights_P, prior_target]))
        values_C: Floats = solved * scale_C
        errors_P = np.abs(np.log(np.maximum(terms_PC @ values_C, 1e-12) / seconds_P))
        weights_P = 1.0 / np.sqrt(np.maximum(errors_P, _ROBUST_LOG))
    return values_C
