"""Plans whose sequences come in slices (TeraPipe): where few sequences leave a pipeline empty for long.

Letters: B = microbatches, S = stages, N = slices, W = the seconds of one microbatch through all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dejavu.cost.priced_problem import SPLIT_MARGIN
from dejavu.foundation.errors import InputError
from dejavu.planning.candidates import Candidate, Simulator
from dejavu.planning.choice import SLICES, Considered
from dejavu.planning.prices import Prices
from dejavu.planning.request import PlanRequest
from dejavu.planning.schedules import cut_evenly
from dejavu.plans import Offload, Plan, StageConfiguration
from dejavu.plans.schedule import OF_FEW
from dejavu.plans.slicing import best_slices
from dejavu.workload.data import dataset_of

MOST_UNITS = 16  # of a sequence, of which slices are made
MOST_TRIED = 4  # pairs of a number of microbatches and a configuration


class _Sketch(NamedTuple):
    """Stages alike of one configuration, and the least that slices could make of their step."""

    seconds: float
    num_microbatches: int
    num_stages: int
    configuration: StageConfiguration


def plans_in_slices(request: PlanRequest, prices: Prices, simulator: Simulator) -> list[Considered]:
    """Return the best plans of equal stages in the best slices, of the sketches that promise most.

    A slice costs calls, copies of keys and sums of gradients of its own, and no prediction is closer than
    `SPLIT_MARGIN`: so a plan has to be that much faster than the best of whole sequences.
    """
    best, units = simulator.best, _units(request)
    if best is None or units < 2:
        return []
    limit = best.step_seconds / (1 + SPLIT_MARGIN)
    rows = []
    for sketch in sorted(_sketches(request, prices, limit), key=_promise)[:MOST_TRIED]:
        found = _planned(sketch, units, request, prices, simulator)
        if found is not None and found.fits and found.step_seconds <= limit:
            rows.append(Considered(SLICES, found.priced, None, (found,)))
    return rows


def _promise(sketch: _Sketch) -> tuple[float, int, int]:
    """Return what sketches are sorted by: configurations have no order, where all else is equal."""
    return sketch.seconds, sketch.num_microbatches, sketch.num_stages


def _units(request: PlanRequest) -> int:
    """Return into how many equal units a sequence is divided."""
    length = dataset_of(request.workload).shape.length
    return max(one for one in range(1, MOST_UNITS + 1) if length % one == 0)


def _sketches(request: PlanRequest, prices: Prices, limit: float) -> Iterator[_Sketch]:
    """Yield configurations that could keep the limit: all stages busy but while the first slice goes through.

    Of each number of microbatches the configuration with most to promise, and the same stages with recomputation.
    """
    if not set(OF_FEW) & set(request.listed_schedules):
        return
    for priced in (one for count in request.counts for one in prices.problems(count)):
        problem, found = priced.problem, list[_Sketch]()
        count = problem.whole_microbatches
        for c, one in enumerate(problem.configurations):
            whole = float((priced.forward_seconds_CL[c] + priced.backward_seconds_CL[c]).sum())
            stages = min(problem.device_counts[one.kind] // one.num_devices, problem.num_layers, count * MOST_UNITS)
            if one.sequence_parts > 1 or one.offload != Offload() or stages < 2 or one.zero_level > 1:
                continue
            least = whole * (count + (stages - 1) / MOST_UNITS) / stages
            once = problem.costs.per_step_seconds(0, problem.num_layers, c) / stages
            if least + once < limit:
                found.append(_Sketch(least + once, count, stages, one))
        for recompute in (False, True):
            alike = [one for one in found if one.configuration.recompute == recompute]
            if alike:
                yield min(alike, key=lambda one: one.seconds)


def _planned(
    sketch: _Sketch, units: int, request: PlanRequest, prices: Prices, simulator: Simulator
) -> Candidate | None:
    """Slice sequences by TeraPipe's program for stages alike, cut the layers evenly, and simulate; None: no slices."""
    B, S, one = sketch.num_microbatches, sketch.num_stages, sketch.configuration
    table = prices.slice_seconds(one, B, units)
    lengths = best_slices(table / S, S, B).lengths
    if len(lengths) == 1 or B * len(lengths) < S:
        return None
    unit = dataset_of(request.workload).shape.length // units
    slices = tuple(length * unit for length in lengths)
    try:
        priced = prices.priced(B, slices, (one,))
        name = next(name for name in OF_FEW if name in request.listed_schedules)
        plan = Plan(cut_evenly(priced, (one,) * S), name, B, slices=slices)
        return simulator.candidate(priced, plan)
    except InputError:  # the layers cannot be split so in slices
        return None
