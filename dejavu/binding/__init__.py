"""Which actual device runs which stage: from the plan and the cluster to a `Binding`.

site.py            the cluster as pools of equal devices
binding_prices.py  the step time of thousands of bindings at once
placing.py         the order of the cluster file; bottleneck assignment of ranks to kinds of devices
draws.py           random bindings
exact_labels.py    all bindings, compared rank by rank
local.py           improving one binding by local search, where there are too many
reasons.py         why each rank is where it is
"""

from dejavu.binding.binder import RANDOM_BINDINGS, bind, bind_in_order
from dejavu.binding.binding import BindError, Binding, Placement, VirtualWorker

__all__ = ["RANDOM_BINDINGS", "BindError", "Binding", "Placement", "VirtualWorker", "bind", "bind_in_order"]
