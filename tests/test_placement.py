"""Placing branching graphs: the price against a second simulation, `exact` against every schedule, all bounds hold."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.operators.every_schedule import fastest_of_all
from benchmarks.operators.placement import drawn
from benchmarks.operators.placement_graphs import SHAPES, generated
from dejavu.foundation.errors import InputError
from dejavu.placement import (
    PLACERS,
    Devices,
    Operation,
    Placement,
    PlacementProblem,
    PlacementResult,
    Tensor,
    check,
    lower_bound,
    simulate,
)
from dejavu.placement.problem import Floats
from dejavu.placement.shared.regions import regions
from dejavu.placement.shared.timeline import empty_state, resume, run_in_order
from dejavu.plans import Infeasible
from tests.conftest import draws, spread

MIXED = (1.0, 0.5, 0.25)
every_placer = pytest.mark.parametrize("name", list(PLACERS))


def step_by_step(problem: PlacementProblem, placement: Placement) -> Floats:
    """When each operation ends: devices and links look again and again whether their next work can begin."""
    index, D = problem.index_of, problem.num_devices
    runs = {d: [n for n in placement.order_N if placement.device_N[n] == d] for d in range(D)}
    made = [index[tensor.producer] for tensor in problem.tensors]
    reads = {
        n: [t for t, x in enumerate(problem.tensors) if op.name in x.readers] for n, op in enumerate(problem.operations)
    }
    queues: dict[tuple[int, int], list[list[int]]] = {}  # of a link, the tensors of one reader after another
    asked: set[tuple[int, int]] = set()
    for n in placement.order_N:
        d = placement.device_N[n]
        for c in range(D):
            new = [t for t in reads[n] if placement.device_N[made[t]] == c != d and (t, d) not in asked]
            asked |= {(t, d) for t in new}
            if new:
                queues.setdefault((c, d), []).append(new)
    finish: dict[int, float] = {}
    there: dict[tuple[int, int], float] = {}
    free: dict[object, float] = {}
    while len(finish) < len(problem.operations):
        for d, queue in runs.items():
            if queue and all((t, d) in there for t in reads[queue[0]]):
                n = queue.pop(0)
                start = max([free.get(d, 0.0), *(there[t, d] for t in reads[n])])
                finish[n] = free[d] = start + problem.operations[n].seconds[d]
                there |= {(t, d): finish[n] for t, producer in enumerate(made) if producer == n}
        for (c, d), groups in queues.items():
            if groups and all(made[t] in finish for t in groups[0]):
                for t in sorted(groups.pop(0), key=lambda t: finish[made[t]]):
                    seconds = problem.devices.latency_seconds_DD[c, d]
                    seconds += problem.tensors[t].size_bytes / problem.devices.bytes_per_second_DD[c, d]
                    free[c, d] = there[t, d] = max(free.get((c, d), 0.0), finish[made[t]]) + seconds
    return np.array([finish[n] for n in range(len(problem.operations))])


@pytest.mark.parametrize("seed", range(30))
def test_the_price_is_a_second_simulations(seed: int) -> None:
    problem = generated(list(SHAPES)[seed % 5], 40, 3, message_ratio=1.0, seed=seed, speeds=MIXED if seed % 2 else ())
    answer = PLACERS["random"]().run(problem, seed=seed)
    assert isinstance(answer, PlacementResult)
    timeline = simulate(problem, answer.placement)
    assert timeline.finish_N == pytest.approx(step_by_step(problem, answer.placement), rel=1e-12)
    assert timeline.seconds == answer.seconds == max(timeline.finish_N)
    assert len({(message.tensor, message.destination) for message in timeline.messages}) == len(timeline.messages)


@pytest.mark.parametrize("seed", range(20))
def test_going_on_from_what_is_placed_is_the_whole_simulation(seed: int) -> None:
    """What a walk skips, and what it gives up early, changes no price."""
    random = np.random.default_rng([seed, 3])
    problem = generated(list(SHAPES)[seed % 5], 40, 3, message_ratio=2.0, seed=seed, speeds=MIXED if seed % 2 else ())
    answer = PLACERS["random"]().run(problem, seed=seed)
    assert isinstance(answer, PlacementResult)
    arrays, order_N = problem.arrays, np.array(answer.placement.order_N)
    here_G = np.array(answer.placement.device_N)
    done, state, whole = (empty_state(arrays) for _ in range(3))
    assert run_in_order(arrays, done, here_G, order_N, np.inf) == answer.seconds
    at_N = np.argsort(order_N)
    for _ in range(20):
        n, try_G = int(random.integers(40)), here_G.copy()
        try_G[n] = random.integers(3)
        seconds = run_in_order(arrays, whole, try_G, order_N, np.inf)
        resume(arrays, done, order_N, at_N, int(at_N[n]), state)
        assert run_in_order(arrays, state, try_G, order_N, np.inf, int(at_N[n])) == seconds
        assert (state.arrival_TD == whole.arrival_TD).all() and (state.finish_N == whole.finish_N).all()
        assert (state.link_free_DD == whole.link_free_DD).all() and (state.free_D == whole.free_D).all()
        for limit in seconds * np.array([0.5, 0.99, 1.0, 1.01]):
            resume(arrays, done, order_N, at_N, int(at_N[n]), state)
            found = run_in_order(arrays, state, try_G, order_N, limit, int(at_N[n]))
            assert found == (seconds if seconds < limit else np.inf)


@draws(range(12), range(12, 90))
def test_exact_is_the_fastest_of_all_schedules(seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        problem = drawn(seed)
        answer = PLACERS["exact"]().run(problem, budget_seconds=60)
        best = fastest_of_all(problem)
        if math.isinf(best):
            assert isinstance(answer, Infeasible), seed
            continue
        assert isinstance(answer, PlacementResult), seed
        assert answer.seconds == pytest.approx(best, rel=1e-9), seed
        assert answer.gap <= 1e-9, seed
        assert lower_bound(problem).seconds <= best * (1 + 1e-9), seed


@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=pytest.mark.slow) if name == "series-parallel" else name for name in SHAPES]
)
def test_exact_is_the_fastest_of_twelve_operations(shape: str) -> None:
    """On two devices: millions of schedules each. Layers and experts have too many; they stay smaller."""
    problem = generated(shape, {"layered": 9, "mixture": 12}.get(shape, 12), 2, message_ratio=0.5, seed=3)
    answer = PLACERS["exact"]().run(problem, budget_seconds=60)
    assert isinstance(answer, PlacementResult) and answer.gap <= 1e-9
    assert answer.seconds == pytest.approx(fastest_of_all(problem), rel=1e-9)


def parts_that_meet(seed: int) -> PlacementProblem:
    """Two to four parts between two operations, chains or small webs, some of which pass the fork; dear messages."""
    draws = np.random.default_rng([seed, 11])
    num_devices, readers, n = 2 + seed % 2, dict[int, list[int]](), 1
    sizes = [int(draws.integers(1, 4)) for _ in range(int(draws.integers(2, 5)))]
    while sum(sizes) > (6 if num_devices == 2 else 5):
        sizes.pop()
    join = 1 + sum(sizes)
    readers[0] = [join] if draws.random() < 0.5 else []
    for size in sizes:
        part = list(range(n, n + size))
        readers[0].append(n)
        for k, one in enumerate(part):
            later = [other for other in part[k + 1 :] if other == one + 1 or draws.random() < 0.4]
            readers[one] = later + [join] * (not later or draws.random() < 0.2)
        n += size
    speed_D = np.array([1.0, 0.5, 1.0])[:num_devices] if seed % 3 else np.ones(num_devices)
    seconds = draws.uniform(0.4, 1.6, join + 1)
    groups = {1: "tied", join: "tied"} if seed % 5 == 0 else {}
    operations = [Operation(f"n{k}", tuple(seconds[k] / speed_D), group=groups.get(k, "")) for k in range(join + 1)]
    names = {k: tuple(f"n{reader}" for reader in dict.fromkeys(own)) for k, own in readers.items()}
    ratio = draws.choice([0.3, 1.0, 3.0])
    tensors = [Tensor(f"n{k}", own, float(ratio * draws.uniform(0.4, 1.6))) for k, own in names.items() if own]
    devices = Devices.alike(num_devices, latency_seconds=0.01, bytes_per_second=1.0)
    return PlacementProblem(tuple(operations), tuple(tensors), devices)


@draws(range(40), range(40, 400))
def test_what_parts_that_meet_take_is_never_bounded_above_the_fastest(seeds: tuple[int, ...]) -> None:
    tight = 0
    for seed in seeds:
        problem = parts_that_meet(seed)
        best = fastest_of_all(problem)
        bound = lower_bound(problem).seconds
        assert bound <= best * (1 + 1e-9), seed
        tight += bound >= best * (1 - 1e-9)
    assert tight > len(seeds) // 3


@pytest.mark.parametrize("seed", range(8))
def test_a_device_that_runs_nothing_changes_no_answer(seed: int) -> None:
    problem = parts_that_meet(2 * seed)  # on two devices
    operations = tuple(replace(op, seconds=(*op.seconds, math.inf)) for op in problem.operations)
    more = PlacementProblem(operations, problem.tensors, Devices.alike(3, latency_seconds=0.01, bytes_per_second=1.0))
    best = fastest_of_all(problem)
    assert lower_bound(more).seconds <= best * (1 + 1e-9)
    answer = PLACERS["exact"]().run(more, budget_seconds=30)
    assert isinstance(answer, PlacementResult) and answer.seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_regions_are_cut_where_no_tensor_passes(seed: int) -> None:
    problem = generated(list(SHAPES)[seed % 5], 60, 3, message_ratio=1.0, seed=seed)
    found = regions(problem)
    assert [n for part in found for n in part] == list(problem.topological_N)
    region_of = {problem.operations[n].name: k for k, part in enumerate(found) for n in part}
    ends = {problem.operations[part[-1]].name for part in found}
    for tensor in problem.tensors:
        for reader in tensor.readers:
            apart = region_of[reader] - region_of[tensor.producer]
            assert apart == 0 or (apart == 1 and tensor.producer in ends)
    assert len(found) > 1 or list(SHAPES)[seed % 5] != "mixture"


@every_placer
@pytest.mark.parametrize("seed", spread(range(10), 4))
def test_every_placement_holds_and_no_bound_is_above_the_best(name: str, seed: int) -> None:
    problem = drawn(seed, most=12)
    best = PLACERS["exact"]().run(problem, budget_seconds=60)
    answer = PLACERS[name]().run(problem, budget_seconds=0.5, seed=seed)
    if not isinstance(best, PlacementResult):
        assert not isinstance(answer, PlacementResult)
        return
    assert answer.lower_bound.seconds if isinstance(answer, PlacementResult) else True
    if isinstance(answer, PlacementResult):
        check(problem, answer.placement)
        assert simulate(problem, answer.placement).seconds == answer.seconds
        assert answer.seconds >= best.seconds * (1 - 1e-9)
        assert answer.lower_bound.seconds <= best.seconds * (1 + 1e-9)
        assert 0 <= answer.gap <= 1


@every_placer
def test_a_seed_decides_everything(name: str) -> None:
    problem = generated("mixture", 30, 3, message_ratio=1.0, seed=0)
    member = PLACERS[name]
    few = {"local_search": {"most_steps": 2000}, "policy_gradient": {"num_steps": 5}}
    placer = member(**few.get(name, {}))
    budget = 0.2 if name == "exact" else 60.0
    first, second = (placer.run(problem, budget_seconds=budget, seed=5) for _ in range(2))
    assert isinstance(first, PlacementResult) and isinstance(second, PlacementResult)
    if name != "exact":  # which ends by the clock
        assert first.placement == second.placement


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0])
def test_members_are_in_the_order_that_they_promise(shape: str, ratio: float) -> None:
    problem = generated(shape, 60, 3, message_ratio=ratio, seed=2)
    found = {name: PLACERS[name]().run(problem, budget_seconds=0.3) for name in ("one_device", "heft", "local_search")}
    assert all(isinstance(answer, PlacementResult) for answer in found.values())
    seconds = {name: answer.seconds for name, answer in found.items() if isinstance(answer, PlacementResult)}
    assert seconds["local_search"] <= min(seconds["one_device"], seconds["heft"])


@every_placer
@pytest.mark.parametrize("seed", spread(range(8), 3))
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_operation_that_no_device_but_some_can_run_is_placed_on_those(name: str, seed: int) -> None:
    """Without a warning of numbers that are none: what a device cannot run has no price there."""
    problem, random = drawn(seed, most=7), np.random.default_rng([seed, 11])
    keeps = {op.group or op.name: int(random.integers(problem.num_devices)) for op in problem.operations}
    operations = tuple(
        replace(
            op,
            seconds=tuple(
                seconds if d == keeps[op.group or op.name] or random.random() < 0.5 else math.inf
                for d, seconds in enumerate(op.seconds)
            ),
        )
        for op in problem.operations
    )
    problem = PlacementProblem(operations, problem.tensors, problem.devices)
    best, answer = fastest_of_all(problem), PLACERS[name]().run(problem, budget_seconds=10, seed=seed)
    assert not isinstance(answer, Infeasible) or math.isinf(best)
    if isinstance(answer, PlacementResult):
        assert answer.lower_bound.seconds <= best * (1 + 1e-9) and best <= answer.seconds * (1 + 1e-9)
        assert all(math.isfinite(op.seconds[d]) for op, d in zip(operations, answer.placement.device_N, strict=True))
    if name == "exact" and math.isfinite(best):
        assert isinstance(answer, PlacementResult) and answer.seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_one_speed_for_all_changes_nothing_but_the_unit(seed: int) -> None:
    problem = drawn(seed)
    operations = tuple(replace(op, seconds=tuple(8 * x for x in op.seconds)) for op in problem.operations)
    devices = replace(problem.devices, bytes_per_second_DD=problem.devices.bytes_per_second_DD / 8)
    slower = PlacementProblem(operations, problem.tensors, devices)
    assert lower_bound(slower).seconds == pytest.approx(8 * lower_bound(problem).seconds, rel=1e-9)
    here, there = (PLACERS["heft"]().run(asked) for asked in (problem, slower))
    if isinstance(here, PlacementResult) and isinstance(there, PlacementResult):
        assert there.seconds == pytest.approx(8 * here.seconds, rel=1e-9)


def of(*operations: Operation, tensors: tuple[Tensor, ...] = (), devices: Devices | None = None) -> PlacementProblem:
    count = len(operations[0].seconds) if operations else 2
    return PlacementProblem(operations, tensors, devices or Devices.alike(count, memory_bytes=100, bytes_per_second=1))


def test_a_tensor_moves_once_to_each_device_and_links_carry_one_message_at_a_time() -> None:
    names = ("a", "b", "c", "d")
    problem = of(
        *(Operation(name, (1.0, 1.0)) for name in names),
        tensors=(Tensor("a", ("b", "c", "d"), 3.0), Tensor("b", ("d",), 2.0)),
    )
    timeline = simulate(problem, Placement((0, 0, 1, 1), (0, 1, 2, 3)))
    assert timeline.finish_N == (1, 2, 5, 7)  # a's 3 bytes arrive at 4, b's 2 bytes wait for the link until 6
    assert [(m.tensor, m.arrival_seconds) for m in timeline.messages] == [(0, 4.0), (1, 6.0)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: of(), "found none"),
        (lambda: of(Operation("a", (1.0, 1.0)), Operation("a", (1.0, 1.0))), "'a' twice"),
        (lambda: of(Operation("a", (1.0, -1.0))), "wanted numbers from 0 on"),
        (lambda: of(Operation("a", (1.0, math.nan))), "wanted numbers from 0 on"),
        (lambda: of(Operation("a", (1.0,)), Operation("b", (1.0, 1.0))), "seconds for 2 devices; wanted 1"),
        (lambda: of(Operation("a", (1.0, 1.0), memory_bytes=-1)), "memory of -1 bytes"),
        (lambda: of(Operation("a", (math.inf, math.inf))), "no device where it takes finite time"),
        (lambda: of(Operation("a", (1.0, 1.0), memory_bytes=2048)), "wanted 2 KiB, the least that would do"),
        (
            lambda: of(*(Operation(name, (1.0, 1.0), 60, "both") for name in "ab")),
            "the group of 'a': found 100 B on device 0, the largest device that runs it; wanted 120 B",
        ),
        (lambda: of(Operation("load", (1.0, 1.0)), tensors=(Tensor("laod", (), 1),)), "did you mean 'load'"),
        (lambda: of(Operation("a", (1.0, 1.0)), tensors=(Tensor("a", (), -1),)), "found -1 bytes"),
        (
            lambda: of(
                *(Operation(name, (1.0, 1.0)) for name in "xabc"),
                tensors=(
                    Tensor("x", ("a",), 1),
                    Tensor("a", ("b",), 1),
                    Tensor("b", ("c",), 1),
                    Tensor("c", ("a",), 1),
                ),
            ),
            "found a cycle, ",
        ),
        (lambda: of(Operation("a", (1.0, 1.0)), devices=Devices.alike(2, bytes_per_second=0)), "wanted numbers above"),
        (lambda: of(Operation("a", ()), devices=Devices.alike(0, bytes_per_second=1)), "devices: found none"),
    ],
)
def test_what_is_wrong_is_named(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(InputError) as caught:
        make()
    assert words in str(caught.value)


def test_a_cycle_is_named_in_its_direction() -> None:
    with pytest.raises(InputError, match=r"found a cycle, (a -> b -> c -> a|b -> c -> a -> b|c -> a -> b -> c);"):
        of(
            *(Operation(name, (1.0,)) for name in "cba"),
            tensors=(Tensor("a", ("b",), 1), Tensor("b", ("c",), 1), Tensor("c", ("a",), 1)),
        )


def test_a_placement_that_is_none_is_refused() -> None:
    problem = of(
        Operation("a", (1.0, 1.0), 60, "same"),
        Operation("b", (1.0, math.inf), 60),
        Operation("c", (1.0, 1.0), 1, "same"),
        tensors=(Tensor("a", ("b",), 1),),
    )
    for device_N, order_N, words in (
        ((0, 0), (0, 1), "wanted all 3"),
        ((0, 0, 0), (0, 1, 1), "wanted all 3"),
        ((0, 0, 5), (0, 1, 2), "found device 5"),
        ((0, 0, 0), (1, 0, 2), "'b' before 'a'"),
        ((0, 0, 1), (0, 1, 2), "on two devices"),
        ((0, 1, 0), (0, 1, 2), "cannot run"),
        ((0, 0, 0), (0, 1, 2), "found 121 B on device 0; wanted 100 B or less"),
    ):
        with pytest.raises(InputError) as caught:
            check(problem, Placement(device_N, order_N))
        assert words in str(caught.value)
    check(problem, Placement((1, 0, 1), (0, 1, 2)))


@every_placer
def test_too_little_memory_in_all_is_proved(name: str) -> None:
    problem = of(*(Operation(letter, (1.0, 1.0), 80) for letter in "abc"))
    answer = PLACERS[name]().run(problem)
    assert isinstance(answer, Infeasible)
    assert "keep 240 B and the devices have 200 B in all; wanted 240 B or more" in str(answer)


def test_what_cannot_be_packed_is_proved_by_exact() -> None:
    problem = of(*(Operation(letter, (1.0, 1.0), 60) for letter in "abc"))
    assert isinstance(PLACERS["exact"]().run(problem), Infeasible)
