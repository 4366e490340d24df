"""A choice as JSON: `dejavu plan --json`, and the artifact of a run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from dejavu.cost.ranges import memory_range
from dejavu.cost.rates import Rates, tokens_in_a_step
from dejavu.foundation.errors import InputError
from dejavu.foundation.processes.files import written_aside
from dejavu.planning.candidates import Candidate
from dejavu.planning.choice import Choice, Considered
from dejavu.planning.request import PlanRequest
from dejavu.planning.sentences import OTHER_WAYS, reason
from dejavu.plans.schedule import CHIMERA

# Keys of a workload that change what a plan takes or holds, and that no plan names.
_PRICED_KEYS = (
    *("model", "model_options", "data", "synthetic", "sequence_length", "batch_size", "accumulate"),
    *("dtype", "mixed_precision", "compile"),
)


def check_target(path: Path | None) -> None:
    """Check, before there is an answer, that it can be written into a file; None: to standard output.

    Raises:
        InputError: it cannot.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"--json {path} is a folder; wanted a file, such as {path / 'plan.json'}")
    if not path.parent.is_dir():
        raise InputError(f"--json {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"--json {path}: no permission to write there")


def write_answer(content: dict[str, Any], path: Path | None) -> None:
    """Write what `dejavu plan` answers as JSON into a file, whole or not at all; None: to standard output.

    Raises:
        InputError: the file cannot be written.
    """
    text = json.dumps(content, indent=2, allow_nan=False)
    if path is None:
        print(text)
        return
    file = path.resolve()  # a link stays one
    is_alone = (file.exists() and not file.is_file()) or not os.access(file.parent, os.W_OK)  # a device, or a pipe
    try:
        with file.open("w") if is_alone else written_aside(file) as opened:
            opened.write(text + "\n")
    except OSError as error:
        raise InputError(f"--json {path}: {error.strerror}") from error


def choice_to_dict(choice: Choice) -> dict[str, Any]:
    """Return the choice as seconds, bytes and counts by name.

    `simulated_…` is the simulated step, `step_seconds` and `lower_bound_seconds` are the cost model's;
    `predicted_step_seconds` is the simulated step corrected by earlier trainings, `…_range` are 90 % ranges.
    `most_devices` is how many of the cluster's devices stages may take together in the ways that a row was searched in,
    `of_devices` how many of which type, or of which type on which groups of nodes.
    `cuts_moved` says whether the plan is that of its `search` with other cuts.
    `gap_percent` is the cost model's (null: no search found a plan), `simulated_gap_percent` what the best plan could
    save of the simulated step at most. `assumed_host_…` is what launching takes of it, where that is most of the step
    and the hosts' pace was not measured but taken for another's. `made_for` is what else decides these numbers.
    """
    plan, chosen = choice.plan, choice.chosen
    cheapest, gap = choice.cheapest, choice.gap
    origin = choice.origin.result
    bound = choice.lower_bound_seconds
    return {
        "step_seconds": origin and origin.step_seconds,
        "lower_bound_seconds": bound if bound < float("inf") else None,
        "gap_percent": cheapest
        and (100.0 * max(0.0, 1.0 - bound / cheapest.step_seconds) if cheapest.step_seconds else 0.0),
        "cheapest_step_seconds": cheapest and cheapest.step_seconds,
        "uniform_step_seconds": choice.uniform_step_seconds,
        "simulated_step_seconds": choice.simulated_seconds,
        "simulated_lower_bound_seconds": choice.simulated_lower_bound_seconds,
        "simulated_gap_percent": 100.0 * gap if gap is not None else None,
        "predicted_step_seconds": choice.step_seconds,
        "predicted_step_seconds_range": list(choice.range_seconds),
        **_rates(choice.rates),
        **_ranges(choice),
        "assumed_host_launching_seconds": choice.assumed_host and choice.assumed_host.launching_seconds,
        "speedup": choice.speedup,
        "baselines": {name: _baseline(row) for name, row in choice.baselines.items()},
        "bubble_fraction": chosen.simulation.bubble_fraction,
        "devices_used": chosen.num_devices,
        "devices": choice.request.cluster.num_devices,
        "stages": stages_to_list(chosen, choice),
        "schedule": CHIMERA if plan.both_ways else plan.schedule,
        "slices": list(plan.slices),
        "microbatches": plan.num_microbatches,
        "accumulate": choice.priced.accumulate,
        "schedules": [
            {
                "schedule": one.plan.schedule_name,
                "cuts": list(one.plan.cuts),
                "simulated_step_seconds": one.simulated_seconds,
                "bubble_fraction": one.simulation.bubble_fraction,
            }
            for one in choice.schedules
        ],
        "search": choice.origin.search,
        "cuts_moved": choice.cuts_moved,
        "reason": reason(choice),
        "made_for": made_for(choice.request),
        "considered": [_row(choice, row) for row in choice.considered],
    }


def made_for(request: PlanRequest) -> dict[str, Any]:
    """Return what decides a plan's numbers beside the plan and the measured costs, as JSON has it."""
    workload = request.workload
    return {
        **workload.model_dump(mode="json", include=set(_PRICED_KEYS)),
        "optimizer": workload.optimizer.kind,
        "gradients": workload.gradients.rule,
        "cluster": request.cluster.name,
        "seed": request.seed,
    }


def _rates(found: Rates) -> dict[str, float | str | None]:
    share = found.utilization
    return {
        "samples_per_second": found.samples_per_second if math.isfinite(found.samples_per_second) else None,
        "tokens_per_second": found.tokens_per_second,
        "model_flops_utilization_percent": None if share is None else 100.0 * share,
        "masked_flops_percent": 100.0 * found.masked_part,
        "cost_per_hour": found.cost and found.cost[0],
        "cost_of_1e9_tokens": found.cost_of_1e9_tokens,
        "currency": found.cost and found.cost[1],
    }


def _ranges(choice: Choice) -> dict[str, Any]:
    """Return 90 % ranges, each as [low, high]; the memory of the device that is filled most."""
    step, tokens = choice.range_seconds, tokens_in_a_step(choice.request.workload)
    held, capacity = choice.fullest
    rates = {"samples": float(choice.request.workload.batch_size)}
    if tokens is not None:
        rates["tokens"] = float(tokens)
    ranges = {f"{name}_per_second_range": step.of_rate(amount) for name, amount in rates.items()}
    return {
        **{name: [x if math.isfinite(x) else None for x in found] for name, found in ranges.items()},
        "fullest_device_bytes": held if math.isfinite(held) else None,
        "fullest_device_bytes_range": list(memory_range(choice.plan, held)) if math.isfinite(held) else None,
        "fullest_device_capacity_bytes": capacity,
    }


def stages_to_list(chosen: Candidate, choice: Choice) -> list[dict[str, Any]]:
    """Return the stages in the model's order; the stages of a pipeline rank share its devices."""
    problem, plan, found = chosen.priced.problem, chosen.plan, chosen.price
    types = choice.request.cluster.device_types
    ranks = {s: rank for rank, stages in enumerate(plan.ranks) for s in stages}
    return [
        {
            "layers": {
                "start": stage.start,
                "stop": stage.stop,
                "names": list(problem.layers[stage.start : stage.stop]),
            },
            "rank": ranks[s],
            "configuration": stage.configuration.to_dict(),
            "device_type": stage.configuration.device_type,
            "seconds": found.stage_seconds[s] * plan.num_slices / choice.priced.accumulate,
            "peak_bytes": found.peak_bytes[ranks[s]],
            "capacity_bytes": float(types[stage.configuration.device_type].memory_bytes),
            **(chosen.away[s]._asdict() if stage.configuration.offload else {}),
        }
        for s, stage in enumerate(plan.stages)
    ]


def _row(choice: Choice, row: Considered) -> dict[str, Any]:
    shown = choice.chosen if row is choice.origin else row.shown
    bound = choice.simulated_bound_seconds(row.num_microbatches)
    found = row.result
    return {
        "search": row.search,
        "microbatches": row.num_microbatches,
        "most_devices": sum(row.priced.problem.device_counts.values()),
        "of_devices": dict(row.priced.problem.device_counts),
        "schedule": shown and shown.plan.schedule_name,
        "step_seconds": found and found.step_seconds,
        "lower_bound_seconds": None if row.is_proved_infeasible else row.lower_bound_seconds,
        "simulated_step_seconds": shown and shown.simulated_seconds,
        "simulated_lower_bound_seconds": bound if bound < math.inf and row.search not in OTHER_WAYS else None,
        "predicted_step_seconds": shown and shown.step_seconds,
        "fits": bool(shown and shown.fits),
        "stages": shown and len(shown.plan.stages),
        "devices": shown and shown.num_devices,
        "bubble_fraction": shown and shown.simulation.bubble_fraction,
        "search_seconds": found and found.seconds,
        "chosen": row is choice.origin,
        "failure": row.failure or None,
    }


def _baseline(row: Considered) -> dict[str, Any] | None:
    """Return the baseline's fastest answer; None where none fits."""
    best = row.best
    if best is None:
        return None
    return {
        "step_seconds": row.result and row.result.step_seconds,
        "simulated_step_seconds": best.simulated_seconds,
        "predicted_step_seconds": best.step_seconds,
        "microbatches": best.plan.num_microbatches,
        "schedule": best.plan.schedule_name,
        "stages": len(best.plan.stages),
        "devices": best.num_devices,
        "cuts": list(best.plan.cuts),
    }
