"""Why a problem has no plan, and what would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dejavu.foundation.units import counted_devices, format_bytes, plural
from dejavu.plans import Problem
from dejavu.plans.stage_costs import AdditiveCosts, DenseCosts
from dejavu.search.shared.clock import SearchClock

_PRECISION = 1e-3  # of the least memory that is reported
_ROUNDING = 1e-9  # sums in another order are within this


IsFeasible = Callable[[Problem, float], bool | None]


def why_infeasible(problem: Problem, is_feasible: IsFeasible, budget_seconds: float) -> str:
    """The sentence for a problem that was proved to have no plan; what would do only as far as the budget goes.

    Args:
        is_feasible: (problem, seconds) -> whether it has a plan; None where that cannot be settled.
    """
    clock = _Time(budget_seconds, is_feasible)
    counts = counted_devices(problem.device_counts)
    if all(
        configuration.num_devices > problem.device_counts[configuration.kind]
        for configuration in problem.configurations
    ):
        return f"no plan fits: every stage configuration takes more devices than there are ({counts})"
    layer = _layer_in_no_stage(problem)
    if layer is not None:
        return f"no plan fits: layer {layer} ({problem.layers[layer]!r}) fits in no stage{_alone(problem, layer)}"
    few = _too_few_stages(problem, clock)
    roomy = replace(problem, costs=_with_all_memory(problem))
    with_memory = clock.is_feasible(roomy)
    if with_memory is False:
        rule = " with every device used" if problem.use_all_devices else ""
        few = few or _too_few_stages(roomy, clock)
        return f"no plan fits, whatever the memory: no stages cover the layers on {counts}{rule}{few}"
    suffices: bool | None = with_memory
    if with_memory and isinstance(problem.costs, AdditiveCosts) and problem.costs.host_shares_2CL1.any():
        suffices = clock.is_feasible(replace(problem, costs=_with_all_memory(problem, of_nodes=False)))
        if suffices is False:
            return f"no plan fits, whatever the devices' memory: that of their nodes is too small{few}"
    least = _least_memory(problem, clock) if suffices else None
    would_do = f"; {_size(least)} on every device would do" if least is not None else ""
    together = f"no stages together fit their memory under {problem.schedule}{few}"
    return f"no plan fits: each layer does, but {together}{would_do}"


class _Time:
    """What is left for explanations; no question takes all of it."""

    def __init__(self, budget_seconds: float, is_feasible: IsFeasible) -> None:
        self._clock, self._budget_seconds, self._is_feasible = SearchClock(), budget_seconds, is_feasible

    @property
    def left_seconds(self) -> float:
        return self._budget_seconds - self._clock.elapsed_seconds

    def is_feasible(self, problem: Problem) -> bool | None:
        return self._is_feasible(problem, max(0.25 * self.left_seconds, 0.0))


def _too_few_stages(problem: Problem, clock: _Time) -> str:
    """How many stages would do where `max_stages` is to blame, to the last one only as far as the budget goes."""
    if problem.max_stages is None or not clock.is_feasible(replace(problem, max_stages=None)):
        return ""
    lo, hi = problem.max_stages, min(problem.num_layers, sum(problem.device_counts.values()))
    while hi - lo > 1 and clock.left_seconds > 0:
        middle = (lo + hi) // 2
        fits = clock.is_feasible(replace(problem, max_stages=middle))
        if fits is None:
            break
        lo, hi = (lo, middle) if fits else (middle, hi)
    # Plans for torch's schedules have no more stages than microbatches, whose number a person chooses.
    which = ", the number of microbatches, as --microbatches sets it of a batch_size that divides so"
    named = f"max_stages{which if problem.max_stages == problem.num_microbatches else ''}"
    return f", at most {plural(problem.max_stages, 'stage')} ({named}; {hi} or more would do)"


def _layer_in_no_stage(problem: Problem) -> int | None:
    """A layer that every stage around it is too large for, with the fewest microbatches in flight of any position.

    Where costs are sums a stage needs at least what the layer does alone at the cuts with the smallest messages.
    """
    L, costs = problem.num_layers, problem.costs
    least = min(problem.in_flight(s, n) for n in (1, L) for s in (0, n - 1))
    counts = problem.device_counts
    usable = np.array(
        [configuration.num_devices <= counts[configuration.kind] for configuration in problem.configurations]
    )
    if isinstance(costs, AdditiveCosts):
        held = np.maximum(least * costs.activation_bytes_CL + costs.temporary_bytes_CL, costs.step_bytes_CL)
        need_CL = costs.fixed_bytes_CL + held + 2 * costs.message_bytes_CL1.min(axis=1)[:, None]
        alone_CL = costs.can_run_CL & (need_CL <= costs.room_bytes_C[:, None] * (1 + _ROUNDING))
        in_node_2CL = np.diff(costs.host_shares_2CL1, axis=2)
        alone_CL &= in_node_2CL[0] + least * in_node_2CL[1] <= 1 + _ROUNDING
        nowhere = np.flatnonzero(~alone_CL[usable].any(axis=0))
        return int(nowhere[0]) if len(nowhere) else None
    finite = np.logical_and(np.isfinite(costs.seconds_CLL1), np.isfinite(costs.per_step_seconds_CLL1))
    fits = np.logical_and(costs.max_in_flight_CLL1 >= least, finite)
    possible = np.logical_and(fits, usable[:, None, None]).any(axis=0)
    for layer in range(L):
        if not possible[: layer + 1, layer + 1 :].any():
            return layer
    return None


def _alone(problem: Problem, layer: int) -> str:
    """What the layer would need on its own, where that is known."""
    costs, needs = problem.costs, []
    if not isinstance(costs, AdditiveCosts):
        return ""
    for c, configuration in enumerate(problem.configurations):
        if configuration.num_devices > problem.device_counts[configuration.kind]:
            continue
        if costs.can_run_CL[c, layer] and costs.host_share(layer, layer + 1, c, problem.in_flight(0, 1)) <= 1:
            needs.append((costs.peak_bytes(layer, layer + 1, c, problem.in_flight(0, 1)), c))
    if not needs:
        return "; it can run under no configuration that the cluster has devices and memory in their nodes for"
    need, c = min(needs)
    has = float(costs.capacity_bytes_C[c])
    return f"; alone it needs at least {_size(need)} (on {problem.configurations[c]}, which has {_size(has)})"


def _size(size_bytes: float) -> str:
    """Write a size for people, and behind it the exact number, which decides what fits."""
    exact = f"{size_bytes:,.0f} bytes"
    return exact if size_bytes < 1024 else f"{format_bytes(size_bytes)} ({exact})"


def _with_all_memory(problem: Problem, *, of_nodes: bool = True) -> AdditiveCosts | DenseCosts:
    """The costs on devices, and perhaps in nodes, with more memory than any stage needs."""
    costs = problem.costs
    if isinstance(costs, AdditiveCosts):
        roomy = replace(costs, capacity_bytes_C=np.full(len(costs.capacity_bytes_C), _enough_bytes(problem)))
        none = np.zeros((1, 1))
        return replace(roomy, host_fixed_bytes_CL=none, host_activation_bytes_CL=none) if of_nodes else roomy
    return replace(costs, max_in_flight_CLL1=np.full_like(costs.max_in_flight_CLL1, problem.num_microbatches))


def _enough_bytes(problem: Problem) -> float:
    """Memory with which any stage fits."""
    L, B, costs = problem.num_layers, problem.num_microbatches, problem.costs
    messages = 2 * float(costs.message_bytes_CL1.max()) if isinstance(costs, AdditiveCosts) else 0.0
    whole = max(costs.peak_bytes(0, L, c, B) for c in range(len(problem.configurations)))
    return 1.001 * (whole + messages) + 1.0


def _least_memory(problem: Problem, clock: _Time) -> float | None:
    """A memory of every device with which a plan fits: the least to a thousandth, as far as that is settled in time."""
    costs = problem.costs
    if not isinstance(costs, AdditiveCosts):
        return None
    lo, hi = float(costs.capacity_bytes_C.min()), _enough_bytes(problem)
    while hi - lo > _PRECISION * hi and clock.left_seconds > 0:
        middle = float(np.sqrt(max(lo, 1.0) * hi))
        larger = replace(costs, capacity_bytes_C=np.maximum(costs.capacity_bytes_C, middle))
        fits = clock.is_feasible(replace(problem, costs=larger))
        lo, hi = (lo, middle) if fits else (middle, hi)
    return float(np.ceil(hi))
