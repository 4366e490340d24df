"""Placing a branching graph of operations on devices: the family. To add one: its file, and one line in `PLACERS`."""

from __future__ import annotations

from dejavu.foundation.registry import Family
from dejavu.placement._base import PlacementAnswer, PlacementResult, Placer
from dejavu.placement.exact import Exact
from dejavu.placement.heft import HEFT
from dejavu.placement.local_search import LocalSearch
from dejavu.placement.one_device import OneDevice
from dejavu.placement.policy_gradient import PolicyGradient
from dejavu.placement.problem import Devices, Operation, PlacementProblem, Tensor
from dejavu.placement.random_draws import RandomDraws
from dejavu.placement.shared.bound import LowerBound, lower_bound
from dejavu.placement.simulation import Message, Placement, Timeline, check, simulate

__all__ = [
    "HEFT",
    "PLACERS",
    "Devices",
    "Exact",
    "LocalSearch",
    "LowerBound",
    "Message",
    "OneDevice",
    "Operation",
    "Placement",
    "PlacementAnswer",
    "PlacementProblem",
    "PlacementResult",
    "Placer",
    "PolicyGradient",
    "RandomDraws",
    "Tensor",
    "Timeline",
    "check",
    "lower_bound",
    "simulate",
]

PLACERS: Family[type[Placer]] = Family(
    "placer",
    {
        "heft": HEFT,
        "local_search": LocalSearch,
        "exact": Exact,
        "policy_gradient": PolicyGradient,
        "one_device": OneDevice,
        "random": RandomDraws,
    },
)
