"""Every plan under every schedule, simulated: too simple to be wrong. And small problems to try it on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from dejavu.foundation.registry import named
from dejavu.plans import Plan, Problem, Stage, StageConfiguration
from dejavu.plans.priced_problem import PassCost, PricedProblem
from dejavu.plans.schedule import SCHEDULES, allowed_microbatches
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.simulation import Simulation, simulate_plan

MICROBATCHES = (1, 2, 3, 4, 6, 8, 12)


def least_by_schedule(priced: PricedProblem) -> dict[str, float]:
    """The least simulated step of all plans that fit, under each schedule; inf where none does."""
    least = dict.fromkeys(SCHEDULES, np.inf)
    for name in SCHEDULES:
        for plan in every_plan(priced, name):
            simulation = simulate_plan(priced, plan)
            if _fits(priced, plan, simulation):
                least[name] = min(least[name], simulation.step_seconds)
    return least


def every_plan(priced: PricedProblem, name: str) -> Iterator[Plan]:
    """Every cut and every configuration of the ranks within the devices, fitting its memory or not."""
    problem, schedule = priced.problem, named(SCHEDULES, name)
    L, B = problem.num_layers, problem.num_microbatches
    for ranks in range(1, problem.most_stages + 1):
        S = ranks * schedule.stages_per_rank
        if S > L or not allowed_microbatches(name, S, B):
            continue
        for chosen in itertools.product(problem.configurations, repeat=ranks):
            used = dict.fromkeys(problem.device_counts, 0)
            for configuration in chosen:
                used[configuration.device_type] += configuration.num_devices
            if any(used[kind] > count for kind, count in problem.device_counts.items()):
                continue
            for cuts in itertools.combinations(range(1, L), S - 1):
                bounds = itertools.pairwise((0, *cuts, L))
                stages = (Stage(a, b, chosen[schedule.rank_of(s, S)]) for s, (a, b) in enumerate(bounds))
                yield Plan(tuple(stages), name, B)


def _fits(priced: PricedProblem, plan: Plan, simulated: Simulation) -> bool:
    costs = priced.problem.costs
    assert isinstance(costs, AdditiveCosts)
    for rank, stages in enumerate(plan.ranks):
        c = priced.problem.index(plan.stages[stages[0]].configuration)
        spans = [(plan.stages[s].start, plan.stages[s].stop, c) for s in stages]
        if len(stages) == 1 and costs.max_in_flight(*spans[0]) < simulated.in_flight[stages[0]]:
            return False
        if len(stages) > 1 and simulated.peak_bytes[rank] > costs.capacity_bytes_C[c]:
            return False
    return True


def small_priced(seed: int) -> PricedProblem:
    """A problem of few layers and devices: one or two types, replicas; messages, pass costs and memory, or without."""
    rng = np.random.default_rng(seed)
    L = int(rng.integers(3, 9))
    kinds = ("fast", "slow")[: int(rng.integers(1, 3))]
    counts = {kind: int(rng.integers(1, 4 if len(kinds) == 1 else 3)) for kind in kinds}
    configurations = [
        StageConfiguration(kind, devices_per_node=n, data_parallel=n)
        for kind in kinds
        for n in range(1, counts[kind] + 1)
    ]
    C, B = len(configurations), int(rng.choice(MICROBATCHES))
    n_C = np.array([configuration.num_devices for configuration in configurations])[:, None]
    pace_C = np.array(
        [
            1.0 if configuration.device_type == "fast" else float(rng.uniform(1.2, 4.0))
            for configuration in configurations
        ]
    )
    forward_L = rng.lognormal(0.0, rng.choice([0.0, 0.3, 0.8]), L)
    forward_CL = forward_L / n_C ** rng.uniform(0.6, 1.0) * pace_C[:, None] * rng.uniform(0.9, 1.1, (C, L))
    backward_CL = forward_CL * rng.uniform(1.5, 2.5, L)
    once = float(rng.choice([0.0, 0.1, 1.0]))
    weights_L = rng.lognormal(0.0, 0.5, L)
    needed = float((weights_L * 3 + B * 0.2).sum())
    capacity = needed * (float(rng.uniform(0.4, 1.2)) if rng.random() < 0.4 else 100.0)
    costs = AdditiveCosts(
        seconds_CL=forward_CL + backward_CL,
        per_step_seconds_CL=once * weights_L * (n_C > 1) * rng.uniform(0.5, 1.5, (C, 1)) + 0.1 * once * weights_L,
        per_step_latency_seconds_C=np.where(n_C[:, 0] > 1, 0.1 * once, 0.0),
        fixed_bytes_CL=np.broadcast_to(3.0 * weights_L, (C, L)),
        activation_bytes_CL=0.2 * rng.uniform(0.5, 1.5, L) / n_C,
        temporary_bytes_CL=np.broadcast_to(rng.uniform(0.0, 0.5, L), (C, L)),
        capacity_bytes_C=np.full(C, capacity),
        message_bytes_CL1=np.broadcast_to(rng.uniform(0.0, 0.2, L + 1), (C, L + 1)),
    )
    far = float(rng.choice([0.0, 0.02, 0.3]))
    problem = Problem(
        layers=tuple(f"layer{i}" for i in range(L)),
        configurations=tuple(configurations),
        device_counts=counts,
        costs=costs,
        cut_bytes_L1=rng.uniform(0.5, 2.0, L + 1),
        link_latency_seconds_CC=far * rng.uniform(0.0, 1.0, (C, C)),
        link_seconds_per_byte_CC=far * rng.uniform(0.0, 1.0, (C, C)),
        schedule="1f1b",
        num_microbatches=B,
        max_stages=B,
    )
    beside = {}
    if rng.random() < 0.5:
        beside = {kind: PassCost(*rng.uniform(0.0, 0.1, 3)) for kind in kinds}
    parts = {}
    if rng.random() < 0.5:
        share_L = rng.uniform(0.4, 0.7, L)
        parts = {kinds[0]: np.stack([share_L, rng.uniform(1.0, 1.1) - share_L], axis=1)}
    return PricedProblem(problem, forward_CL, backward_CL, beside, parts)


def count(priced: PricedProblem, most: int) -> int:
    """How many plans there are under all schedules, counted up to the most."""
    every = itertools.chain.from_iterable(every_plan(priced, name) for name in SCHEDULES)
    return sum(1 for _ in itertools.islice(every, most))
