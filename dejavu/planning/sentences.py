"""Sentences about a choice: each is proved, or marked as predicted."""

from __future__ import annotations

import math
from collections.abc import Callable

from dejavu.cost.kernels.experts import fullest_part
from dejavu.cost.kernels.sequence import context_length
from dejavu.cost.priced_problem import SPLIT_MARGIN
from dejavu.cost.ranges import Range, memory_range
from dejavu.cost.rates import tokens_in_a_step
from dejavu.foundation.units import (
    PROVED_TO,
    format_bound,
    format_bytes,
    format_gap,
    format_seconds,
    in_microbatches,
    plural,
)
from dejavu.graphs.capture import COMPILED
from dejavu.parallelism import OFFLOADS
from dejavu.planning.candidates import LONG_WAITING, Candidate
from dejavu.planning.choice import BOTH_WAYS, SLICES, Choice, Considered
from dejavu.plans import Plan
from dejavu.plans.priced_problem import PricedProblem
from dejavu.simulation.bound import CLOSE
from dejavu.workload import AUTO
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of

MASKED_PART = 0.2  # of the FLOPs that MFU counts: worth a word
SMALL_GAIN = 1.05  # below, a gain is written in percent
OTHER_WAYS = {BOTH_WAYS: "of chimera", SLICES: "in slices"}
NAMES = {"uniform": "even split", "proportional": "split by speed", "balanced": "balanced split"}


def name_of(row: Considered) -> str:
    """Return what tables and figures call the search of a row."""
    return NAMES.get(row.search, row.search)


def names_apart(choice: Choice) -> dict[Considered, str]:
    """Name each row with a search's answer; the ways in which one search was asked have names of their own.

    Rows of the same way, with other numbers of microbatches, have the same name.
    """
    rows = [row for row in choice.considered if row.result]
    num_parts = len({row.devices for row in rows})
    found, known = dict[Considered, str](), set[tuple[str, int]]()
    for row in rows:
        name = name_of(row) + (f", {row.devices}" if num_parts > 1 else "")
        if (name, row.num_microbatches) in known:  # where nothing fitted, asked once more for less memory
            name += f", as {row.priced.problem.schedule}"
        known.add((name, row.num_microbatches))
        found[row] = name
    return found


def what_was_chosen(choice: Choice) -> str:
    """Describe the plan in a line."""
    plan = choice.plan
    devices = f"{choice.chosen.num_devices} of {plural(choice.request.cluster.num_devices, 'device')}"
    return (
        f"{plan.schedule_name}, {in_microbatches(plan.num_microbatches, choice.priced.accumulate)}, "
        f"{plural(len(plan.stages), 'stage')} on "
        f"{devices}: predicted step {format_seconds(choice.step_seconds)}{corrected(choice)}."
    )


def what_it_yields(choice: Choice) -> str:
    """Describe what the predicted step means: samples, tokens, the share of the devices' peak."""
    found = choice.rates
    said = [f"{short(found.samples_per_second)} samples/s"]
    if found.tokens_per_second is not None:
        said.append(f"{short(found.tokens_per_second)} tokens/s")
    if found.utilization is not None:
        devices = "devices" if choice.chosen.num_devices > 1 else "device"
        said.append(f"{found.utilization:.1%} of the {found.dtype} peak of the {devices} it uses (MFU)")
    if found.cost is not None:
        what = "samples" if found.tokens_per_second is None else "tokens"
        amount, currency = found.cost
        said.append(
            f"{short(amount)} {currency}/hour, {short(found.cost_of_1e9_tokens or 0.0)} {currency} for 10⁹ {what}"
        )
    return f"Predicted: {', '.join(said)}."


def what_is_masked(choice: Choice) -> str:
    """State how much of what MFU counts is never computed; nothing where little."""
    found = choice.rates
    if found.utilization is None or found.masked_part < MASKED_PART:
        return ""
    return (
        f"Of the FLOPs that MFU counts {found.masked_part:.0%} are scores that causal attention masks and its kernels "
        f"leave out: without them it is {found.utilization * (1 - found.masked_part):.1%}."
    )


def what_is_likely(choice: Choice) -> str:
    """State the 90 % ranges of the predicted step, of what it yields, and of memory."""
    step = choice.range_seconds
    said = [f"a step of {between(step, format_seconds)}"]
    workload = choice.request.workload
    tokens = tokens_in_a_step(workload)
    amount, what = (workload.batch_size, "samples") if tokens is None else (tokens, "tokens")
    said.append(f"{between(step.of_rate(amount), short)} {what}/s")
    held, capacity = choice.fullest
    if held == held:  # the costs say more than whether it fits
        likely = memory_range(choice.plan, held)
        said.append(f"{between(likely, format_bytes)} of {format_bytes(capacity)} on the fullest device")
    compiled = f" {COMPILED.capitalize()}." if workload.compile else ""
    return f"In nine of ten cases: {', '.join(said)}.{compiled}"


def which_way(plan: Plan) -> str:
    """Say how sequences and microbatches go through the ranks, where not whole and one way; predictions are of that."""
    if plan.both_ways:
        return (
            "Half of the microbatches go up the ranks, through a second copy of the model; step and memory are of both."
        )
    if plan.slices:
        lengths = list(dict.fromkeys(plan.slices))
        said = f"{lengths[0]}" if len(lengths) == 1 else ", ".join(map(str, plan.slices))
        return f"Each sequence goes through the stages in {plan.num_slices} slices of {said} positions."
    return ""


def what_was_compared(choice: Choice) -> str:
    """Say which other ways were compared, of which nothing is proved; nothing where none was."""
    if not choice.request.listed_schedules:
        return ""
    found = [row for row in choice.considered if row.search in OTHER_WAYS]
    ways = {name: sum(len(row.candidates) for row in found if row.search == name) for name in OTHER_WAYS}
    said = [f"{plural(count, 'plan')} {OTHER_WAYS[name]}" for name, count in ways.items() if count]
    return f"Simulated besides, without a proof: {' and '.join(said)}." if said else ""


def between(found: Range, form: Callable[[float], str]) -> str:
    """Write both ends of a range, the unit once where both have the same: `11.9 to 26.9 s`."""
    low, high = form(found.low), form(found.high)
    number, _, unit = low.partition(" ")
    return f"{number if unit and high.endswith(f' {unit}') else low} to {high}"


def short(number: float) -> str:
    """Write three digits: 0.123, 12.3, 123,000."""
    rounded = float(f"{number:.3g}")  # first: 9.999 is 10.0
    digits = max(0, 2 - math.floor(math.log10(rounded))) if 0 < rounded < math.inf else 0
    return f"{rounded:,.{digits}f}"


def faster(speedup: float) -> str:
    """Write `1.14 × as fast as`, or for a small gain `0.5% faster than`."""
    return f"{speedup:.2f} × as fast as" if speedup >= SMALL_GAIN else f"{speedup - 1.0:.1%} faster than"


def corrected(choice: Choice) -> str:
    """Say whether the prediction is the simulated step, or that corrected by earlier trainings."""
    if abs(choice.chosen.factor.factor - 1.0) < CLOSE:
        return " (simulated)"
    return f" (simulated {format_seconds(choice.simulated_seconds)}, corrected by earlier trainings)"


def what_is_proved(choice: Choice) -> str:
    """State the lower bound on every plan's simulated step."""
    counts, names = choice.counts, choice.request.listed_schedules
    if choice.gap is None:
        return "Proved: nothing about other plans."
    among = f"under {plural(len(names), 'schedule')}" if len(names) > 1 else f"under {names[0]}"
    among += f" and with {plural(len(counts), 'number')} of microbatches" if len(counts) > 1 else ""
    of, where = _limits(choice)
    those = [*(["of whole sequences"] if choice.request.may_slice else []), *([of] if of else [])]
    among += f", {', '.join(those)}," if those else ""
    is_not = faster_than_the_best(choice.gap)
    if choice.gap >= CLOSE:
        is_not = f"below {format_bound(choice.simulated_lower_bound_seconds)}, {format_gap(choice.gap)} less"
    limits = f" The proof is of plans {', and '.join(where)}." if where else ""
    if choice.gap >= CLOSE and choice.has_slow_links:
        limits += " The bound may let more stages share a node than have room on one."
    return f"Proved: no plan {among} is simulated {is_not}.{limits}"


def faster_than_the_best(gap: float) -> str:
    """Say what no plan is where the bound is so close: faster, or by no more than is missing to a proof of that."""
    return "faster" if gap <= PROVED_TO else f"more than {CLOSE:.1%} shorter"


def scope(choice: Choice) -> str:
    """Say which plans the proof covers, where they are not all that were allowed: not those of other ways."""
    request = choice.request
    is_free = request.workload.schedule == AUTO and request.workload.slices == AUTO and not request.schedules
    others = is_free or request.listed_schedules != request.allowed_schedules
    return (" of whole sequences through one copy of the model" if others else "") + within(choice)


def within(choice: Choice) -> str:
    """Say which ways of spreading a stage the proof covers, where not all of them were allowed; between commas."""
    of, where = _limits(choice)
    said = [*([of] if of else []), *where]
    return "".join(f", {part}" for part in said) + ("," if said else "")


def _limits(choice: Choice) -> tuple[str, list[str]]:
    """Return of how many devices for each stage the plans are that the proof covers, and where it covers them."""
    spread = choice.request.spread
    if spread.max_data_parallel == 1 and spread.max_tensor_parallel == 1:
        return "of one device for each stage", []
    limits = {"replica": spread.max_data_parallel, "tensor-parallel device": spread.max_tensor_parallel}
    said = [plural(most, name) for name, most in limits.items() if most is not None]
    of, parts = f"of at most {' and '.join(said)} for each stage" if said else "", list[str]()
    if not spread.also_unsplit and any(one.sequence_parallel for one in choice.priced.problem.configurations):
        parts.append(f"where shards split the sequence unless that is predicted {SPLIT_MARGIN:.0%} slower")
    if widths := choice.prices.widths_left_out:
        parts.append(f"where {widths}")
    if islands := choice.prices.islands:
        named = ", ".join(map(str, islands))
        parts.append(f"where links inside stages are the slowest of their type unless each stage is on one of {named}")
    workload = choice.request.workload
    could_share = spread.context_parallel and spread.max_data_parallel != 1 and not workload.compile
    could_share &= not workload.in_slices and choice.request.cluster.num_devices > 1
    if could_share and context_length(choice.prices.graph_of(choice.counts[0])):
        levels = " or ".join(map(str, spread.context_parallel_zero_levels))
        parts.append(
            "where replicas share examples only if a microbatch has fewer examples than there are replicas, then as "
            f"few as must, with ZeRO {levels}"
        )
    if any(map(_leaves_weights_out, choice.problems)) and not spread.only and spread.offload == OFFLOADS:
        parts.append("where weights are in their node's memory only if stages of one kind have no room without")
    mixtures = any(one.tensor_parallel and one.tensor_parallel.experts for one in layers_of(workload))
    if not spread.also_unsplit and mixtures and len(set(spread.expert_parallel)) > 1:
        parts.append(f"where shards hold whole experts only if that is predicted {SPLIT_MARGIN:.0%} faster")
    return of, parts


def _leaves_weights_out(priced: PricedProblem) -> bool:
    """Return whether stages may keep something in their node's memory, but not their weights."""
    away = [one.offload for one in priced.problem.configurations if one.offload]
    return bool(away) and not any(one.parameters for one in away)


def what_is_away(choice: Choice) -> str:
    """State what a device keeps at most in its node's memory and on its disks; nothing where nothing is there."""
    ranks = [[choice.chosen.away[s] for s in stages] for stages in choice.plan.ranks]
    in_memory = max((sum(one.host_bytes for one in own), own[0].host_capacity_bytes) for own in ranks)
    on_disk = max((sum(one.disk_bytes for one in own), own[0].disk_capacity_bytes) for own in ranks)
    kept = ((in_memory, "its node's memory"), (on_disk, "its node's disks"))
    said = [f"{format_bytes(held)} in its {format_bytes(room)} of {where}" for (held, room), where in kept if held]
    return f"Predicted: a device keeps at most {' and '.join(said)}." if said else ""


def what_links_cost(choice: Choice) -> str:
    """State how much longer links make the step than the fastest that its stages might have; nothing where little."""
    return links_cost(choice.simulator.waiting(choice.chosen))


def links_cost(waiting: float) -> str:
    """Say that links make a step longer by so much of what the fastest that its types of devices have would."""
    if waiting <= LONG_WAITING:
        return ""
    return (
        f"Predicted: its links make the step {waiting:.0%} longer than the fastest between devices of its types would."
    )


def what_routing_is_assumed(choice: Choice) -> str:
    """State what predictions for whole experts assume of the router; nothing where the work does not follow it."""
    workload, fullest = choice.request.workload, 1.0
    builders, length = layers_of(workload), dataset_of(workload).shape.length
    for stage in choice.plan.stages:
        configuration = stage.configuration
        examples = workload.run_size / choice.plan.num_microbatches / configuration.data_parallel
        for builder in builders[stage.start : stage.stop] if configuration.expert_parallel else ():
            experts = builder.tensor_parallel.experts if builder.tensor_parallel else None
            if experts and experts.choices:
                part = fullest_part(experts, configuration.tensor_parallel, examples * length)
                fullest = max(fullest, part)
    if fullest == 1.0:
        return ""
    return (
        "Predicted for routers that choose all experts alike: the fullest of a group's devices then has "
        f"{fullest - 1:.1%} more rows than an equal part. Memory is counted for the most that a router may send to one."
    )


def what_hosts_are_assumed(choice: Choice) -> str:
    """State whose host's pace is assumed, where launching takes most of the step and was not measured."""
    return str(choice.assumed_host or "")


def what_devices_are_assumed(choice: Choice) -> str:
    """State how many multiprocessors GPUs are assumed to have of which the cluster file does not say it."""
    types = choice.request.cluster.device_types
    used = [types[name] for name in types if any(one.configuration.device_type == name for one in choice.plan.stages)]
    said = [
        f"{one.name} has {one.num_multiprocessors}, as many for its peaks as {one.like}" for one in used if one.like
    ]
    return f"Assumed multiprocessors: {'; '.join(said)}." if said else ""


def what_was_gained(choice: Choice) -> str:
    """State the predicted gain over the best baseline."""
    row = choice.best_baseline
    if row is None or row.best is None or choice.speedup is None:
        cannot_run = any(one.result is not None and not one.candidates for one in choice.baselines.values())
        also = " and runs under the schedules that are allowed" if cannot_run else ""
        return f"Baselines: none fits in memory{also}."
    what = f"{NAMES[row.search]}, {row.best.plan.schedule_name}, {plural(row.num_microbatches, 'microbatch')}"
    best = f"the best baseline ({what}: {format_seconds(row.best.step_seconds)})"
    if choice.speedup < 1.0 - CLOSE:
        slower = f"Predicted to be {1.0 / choice.speedup - 1.0:.1%} slower than {best}"
        return f"{slower}{why_slower(choice.chosen, row.best)}."
    if choice.speedup < 1.0 + CLOSE:
        return f"Predicted to be as fast as {best}, not faster."
    return f"Predicted to be {faster(choice.speedup)} {best}."


def why_slower(chosen: Candidate, baseline: Candidate) -> str:
    """Go on after "slower than" the best baseline: why that was not taken."""
    if chosen.was_trained:
        steps = chosen.factor.num_steps
        measured = f" ({plural(steps, 'step')} measured)" if steps else ""
        return f"; kept because it was trained before{measured} and no other plan's gain is certain"
    if baseline.plan.both_ways:
        return f", which holds the weights twice and is taken only if predicted {SPLIT_MARGIN:.0%} faster"
    return ""


def what_the_formula_says(choice: Choice) -> str:
    """State the optimum of the cost model that the searches use."""
    if choice.cheapest is None:
        return ""
    bound = choice.lower_bound_seconds
    low = f"lower bound {format_bound(bound, choice.cheapest.step_seconds)}" if bound > 0 else "no lower bound"
    return f"Estimated cost (cost model): best {format_seconds(choice.cheapest.step_seconds)}, {low}."


def reason(choice: Choice) -> str:
    """Say what was chosen, what is proved of it, what it gains, and what the cost model's own optimum is.

    Example:
        >>> import dejavu
        >>> choice = dejavu.plan("mlp", "examples/clusters/h100-and-l4.yaml", searches=("exact",), microbatches=(8,))
        >>> "Proved: no plan" in dejavu.explain(choice)
        True
    """
    parts = (
        what_was_chosen,
        lambda choice: which_way(choice.plan),
        what_is_away,
        what_links_cost,
        what_routing_is_assumed,
        what_hosts_are_assumed,
        what_devices_are_assumed,
        what_is_proved,
        what_was_compared,
        what_was_gained,
        what_the_formula_says,
    )
    return " ".join(sentence for part in parts if (sentence := part(choice)))
