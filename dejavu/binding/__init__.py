"""Which actual device runs which stage: from the plan and the cluster to a `Binding`.

site.py      the cluster as pools of like devices
pricing.py   the step time of thousands of bindings at once
layout.py    the order of the cluster file; bottleneck assignment of ranks to kinds of devices
draws.py     random bindings
labels.py    all bindings, compared rank by rank
local.py     improving one binding, where all are too many
reasons.py   why
"""

from dejavu.binding.binder import RANDOM_BINDINGS, bind
from dejavu.binding.binding import BindError, Binding, Placement

__all__ = ["RANDOM_BINDINGS", "BindError", "Binding", "Placement", "bind"]
