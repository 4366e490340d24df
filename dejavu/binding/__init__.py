"""Which actual device runs which stage: from the plan and the cluster to a `Binding`.

site.py            the cluster as pools of equal devices
link_prices.py     what messages take over the links that are really used
binding_prices.py  the step time of thousands of bindings at once
placing.py         the order of the cluster file; bottleneck assignment of ranks to kinds of devices
draws.py           random bindings
exact_labels.py    all bindings, compared rank by rank
local.py           improving one binding by local search, where there are too many
by_steps.py        improving it on the simulated step, with devices of the same kinds
reasons.py         why each rank is where it is

Names are imported when they are first used: the record of a binding is read by every rank, which binds nothing, and
scipy's assignment takes a third of a second to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dejavu.binding.binder import RANDOM_BINDINGS, bind, bind_in_order
    from dejavu.binding.binding import BindError, Binding, Placement, VirtualWorker
    from dejavu.binding.link_prices import message_seconds, sum_seconds

__all__ = [
    "RANDOM_BINDINGS",
    "BindError",
    "Binding",
    "Placement",
    "VirtualWorker",
    "bind",
    "bind_in_order",
    "message_seconds",
    "sum_seconds",
]
_MODULES = dict.fromkeys(("RANDOM_BINDINGS", "bind", "bind_in_order"), "binder")
_MODULES |= dict.fromkeys(("message_seconds", "sum_seconds"), "link_prices")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'binding')}"), name)
