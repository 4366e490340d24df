"""How initial weights are drawn (`SCHEMES`), the search space (`Space`), and which draws are tried (`PROPOSERS`)."""

from __future__ import annotations

from dejavu.init._base import Draw, Role, Scheme
from dejavu.init.drawing import draw_layer
from dejavu.init.output_scale import calibrate
from dejavu.init.proposers import PROPOSERS, Probe, Proposer, Scored
from dejavu.init.schemes import MENU, SCHEMES
from dejavu.init.space import DIMENSIONS, Dimension, Space, space_of

__all__ = [
    "DIMENSIONS",
    "MENU",
    "PROPOSERS",
    "SCHEMES",
    "Dimension",
    "Draw",
    "Probe",
    "Proposer",
    "Role",
    "Scheme",
    "Scored",
    "Space",
    "calibrate",
    "draw_layer",
    "space_of",
]
