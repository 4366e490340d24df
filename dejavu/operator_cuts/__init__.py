"""Pipeline cuts on operators. To add a member: its file, and one line in `CUTTERS`; the family's tests pick it up."""

from __future__ import annotations

from dejavu.foundation.registry import Family
from dejavu.operator_cuts._base import Answer, Cutter, Found, NoneFits, NoneFound
from dejavu.operator_cuts.coarsen import coarsen, joined
from dejavu.operator_cuts.dqn import Dqn, DqnOffline
from dejavu.operator_cuts.enumeration import Enumeration
from dejavu.operator_cuts.generated import generated_arrays
from dejavu.operator_cuts.label_program import LabelProgram
from dejavu.operator_cuts.pricing import CutPrice, fits, price
from dejavu.operator_cuts.problem import CONFIGURATIONS, CutPlan, CutProblem, OperatorArrays, Servers

__all__ = [
    "CONFIGURATIONS",
    "CUTTERS",
    "Answer",
    "CutPlan",
    "CutPrice",
    "CutProblem",
    "Cutter",
    "Dqn",
    "DqnOffline",
    "Enumeration",
    "Found",
    "LabelProgram",
    "NoneFits",
    "NoneFound",
    "OperatorArrays",
    "Servers",
    "coarsen",
    "fits",
    "generated_arrays",
    "joined",
    "price",
]

CUTTERS: Family[type[Cutter]] = Family(
    "cutter",
    {"label_program": LabelProgram, "enumeration": Enumeration, "dqn": Dqn, "dqn_offline": DqnOffline},
)
