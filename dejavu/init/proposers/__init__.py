"""Which draws are tried. To add a way to choose them: its class, and one line here."""

from __future__ import annotations

from dejavu.foundation.errors import InputError
from dejavu.init.proposers._base import Probe, Proposer, Scored
from dejavu.init.proposers.adaptive import Adaptive
from dejavu.init.proposers.bayesian import Bayesian
from dejavu.init.proposers.loss_and_gradient import LossAndGradient
from dejavu.init.proposers.samples import Families, LatinHypercube, Mixed, Random, Seeds, Single

__all__ = ["PROPOSERS", "Probe", "Proposer", "Scored", "proposer_named"]

PROPOSERS: dict[str, Proposer] = {
    "mixed": Mixed(),
    "single": Single(),
    "random": Random(),
    "latin_hypercube": LatinHypercube(),
    "families": Families(),
    "adaptive": Adaptive(),
    "bayesian": Bayesian(),
    "loss_and_gradient": LossAndGradient(),
    "seeds": Seeds(),
}


def proposer_named(name: str) -> Proposer:
    """The proposer that a workload names.

    Raises:
        InputError: there is none of that name.
    """
    if name not in PROPOSERS:
        raise InputError(
            f"trials: unknown proposer {name!r}; wanted one of {', '.join(PROPOSERS)}", ("trials", "proposer")
        )
    return PROPOSERS[name]
