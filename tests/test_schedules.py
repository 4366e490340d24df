"""Schedules of the literature: what is simulated is what their papers say, and what a plainer simulation says."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.multiprocessing.spawn import spawn

from dejavu.cluster.catalogue import catalogue
from dejavu.cost.kernels.learned import shipped
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import capture
from dejavu.graphs.kernels import kernel_of
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.schedule import SCHEDULES, Pass, actions, default_schedules, torch_actions
from dejavu.schedules import (
    PIPELINE_SCHEDULES,
    UPDATE,
    AMPNet,
    PipelineSchedule,
    Synchronous,
    Task,
    WeightRule,
    best_slices,
    best_uniform_slices,
    cut_evenly,
    of_depth,
    simulate_schedule,
    synchronous,
)
from dejavu.schedules.ranks import train_rank
from dejavu.schedules.slices import slice_seconds
from dejavu.schedules.training import Rates, train_by
from dejavu.simulation import StageSeconds, simulate
from dejavu.workload import SyntheticSettings, TrialSettings, Workload

every_schedule = pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
ASYNCHRONOUS = [name for name, one in PIPELINE_SCHEDULES.items() if not one.is_synchronous]
SIZES = [(2, 2), (2, 8), (4, 4), (4, 8), (6, 6)]


def sizes(schedule: PipelineSchedule) -> Iterator[tuple[int, int]]:
    for size in SIZES:
        try:
            schedule.check(*size)
        except InputError:
            continue
        yield size


def alike(schedule: PipelineSchedule, num_ranks: int, backward: float = 1.0) -> list[StageSeconds]:
    """Stages of which every rank has one second of forward passes and holds one byte a microbatch."""
    v = schedule.stages_per_rank
    return [StageSeconds(1 / v, backward / v, 0.0, activation_bytes=1 / v, fixed_bytes=3 / v)] * (v * num_ranks)


@every_schedule
def test_what_is_refused_is_said_of_one_and_of_several(name: str) -> None:
    """`1 microbatch for 2 stages`, never `1 microbatches`; also where torch refuses."""
    schedule, said = PIPELINE_SCHEDULES[name], list[str]()
    for ranks, microbatches in itertools.product(range(4), range(4)):
        asked = [lambda size=(ranks, microbatches): schedule.check(*size)]
        if name in SCHEDULES and ranks and microbatches:
            asked.append(lambda size=(ranks, microbatches): actions(name, *size))
        for one in asked:
            try:
                one()
            except InputError as error:
                said.append(str(error))
    assert any(re.search(r"\b1 (microbatch|rank|stage)\b", one) for one in said)
    assert not [one for one in said if re.search(r"\b1 [a-z]+s\b", one)]


def unlike(num_stages: int, seed: int, *, transfers: bool) -> list[StageSeconds]:
    rng = np.random.default_rng(seed)
    rows = rng.uniform(0.5, 2.0, (num_stages, 4))
    return [StageSeconds(f, b, u, t if transfers else 0.0, b / 3, 2 * b / 3) for f, b, u, t in rows.tolist()]


@every_schedule
def test_stages_that_are_alike_take_and_hold_what_the_paper_says(name: str) -> None:
    schedule = PIPELINE_SCHEDULES[name]
    found = 0
    for P, B in sizes(schedule):
        said = schedule.theory(P, B)
        v = schedule.stages_per_rank
        simulated = simulate_schedule(schedule, alike(schedule, P), B, weight_bytes=[1 / v] * (v * P))
        if said.bubble_fraction is not None:
            assert simulated.bubble_fraction == pytest.approx(said.bubble_fraction, abs=1e-9)
            found += 1
        if said.activations_P is not None:
            assert simulated.activations_P == pytest.approx(said.activations_P)
        if said.staleness_steps_P is not None and schedule.stages_per_rank == 1:
            ages = [stage.forward_steps for stage in simulated.staleness_S]
            assert ages == pytest.approx(said.staleness_steps_P)
        assert simulated.weight_versions_P == pytest.approx(said.weight_versions_P)
        held = zip(simulated.activations_P, simulated.weight_versions_P, strict=True)
        wanted = [a + 3.0 * schedule.num_copies + (versions - schedule.num_copies) for a, versions in held]
        assert simulated.peak_bytes_P == pytest.approx(wanted)
    assert found or schedule.theory(4, 8).bubble_fraction is None


@pytest.mark.parametrize("P", [2, 4, 6, 8])
def test_chimera_with_backward_passes_of_twice_the_time(P: int) -> None:
    """(P − 2) / (3B/2 + P − 2) of the paper's section 3.1, where B = P."""
    schedule = PIPELINE_SCHEDULES["chimera"]
    found = simulate_schedule(schedule, alike(schedule, P, 2.0), P)
    assert found.bubble_fraction == pytest.approx((P - 2) / (1.5 * P + P - 2))


@pytest.mark.parametrize("depth", [2, 3, 5])
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_interleaved_stages_of_any_depth(depth: int, backward: float) -> None:
    for name, formula in (("interleaved_1f1b", synchronous.interleaved), ("looped_bfs", synchronous.breadth_first)):
        schedule = Synchronous(of_depth(name, depth), formula)
        found = simulate_schedule(schedule, alike(schedule, 4, backward), 8)
        assert found.bubble_fraction == pytest.approx(3 / (8 * depth + 3))
        assert found.activations_P == pytest.approx(schedule.theory(4, 8).activations_P)


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_waves_hold_no_more_than_as_many_microbatches_as_ranks(waves: int) -> None:
    schedule = Synchronous(of_depth("hanayo", 2 * waves), synchronous.waves)
    for P, B in ((2, 6), (4, 4), (4, 12), (3, 5)):
        found = simulate_schedule(schedule, alike(schedule, P), B)
        assert max(found.activations_P) <= min(P, B)
        if B % P == 0:
            assert found.bubble_fraction == pytest.approx((P - 1) / (2 * waves * B + P - 1))


def relaxed(schedule: PipelineSchedule, orders: tuple[tuple[Task, ...], ...], stages: list[StageSeconds]) -> float:
    """When all is done, by raising every task's end until nothing changes: no events, no queues."""
    P, S = len(orders), len(stages)
    rank_of = {(t.copy, t.stage): rank for rank, row in enumerate(orders) for t in row}
    kinds: dict[str, int] = {
        Pass.FORWARD: 0,
        Pass.BACKWARD: 1,
        Pass.BACKWARD_INPUT: 2,
        Pass.BACKWARD_WEIGHT: 3,
        UPDATE: 4,
    }
    ends = {task: 0.0 for row in orders for task in row}
    backs = {(t.copy, t.stage, t.number): t for t in ends if t.kind in (Pass.BACKWARD, Pass.BACKWARD_INPUT)}
    changed = True
    while changed:
        changed = False
        for row in orders:
            before = 0.0
            for task in row:
                after = [before]
                if task.kind == Pass.FORWARD and task.stage:
                    source = task._replace(stage=task.stage - 1)
                    after.append(ends[source] + delay(stages, rank_of, source, task))
                if task in backs.values() and task.stage + 1 < S:
                    source = backs[task.copy, task.stage + 1, task.number]
                    after.append(ends[source] + delay(stages, rank_of, source, task))
                if task.kind == UPDATE and schedule.num_copies > 1:
                    after += [ends[t] for t in backs.values() if t.stage == task.stage]  # of the one step
                end = max(after) + stages[task.stage].passes_seconds[kinds[task.kind]]
                changed |= end != ends[task]
                before = ends[task] = end
    assert len(set(rank_of.values())) == P
    return max(ends.values())


def delay(stages: list[StageSeconds], rank_of: dict[tuple[int, int], int], a: Task, b: Task) -> float:
    apart = rank_of[a.copy, a.stage] != rank_of[b.copy, b.stage]
    return stages[min(a.stage, b.stage)].transfer_seconds if apart else 0.0


@every_schedule
@pytest.mark.parametrize("seed", range(2))
def test_uneven_stages_take_what_a_plainer_simulation_says(name: str, seed: int) -> None:
    schedule = PIPELINE_SCHEDULES[name]
    for P, B in list(sizes(schedule))[:3]:
        stages = unlike(P * schedule.stages_per_rank, seed, transfers=True)
        found = simulate_schedule(schedule, stages, B)
        orders = found.timeline.orders
        last = max(stops[-1] for stops in found.timeline.stop_seconds)
        assert last == pytest.approx(relaxed(schedule, orders, stages))
        if schedule.is_synchronous:
            assert found.step_seconds == last
            busy = sum(b - a for rows in zip(found.timeline.start_seconds, found.timeline.stop_seconds, strict=True)
                       for a, b in zip(*rows, strict=True))  # fmt: skip
            assert found.bubble_fraction == pytest.approx(1 - busy / (P * last))


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_runs_is_simulated_here_as_the_planner_simulates_it(name: str) -> None:
    (schedule,) = (one for one in PIPELINE_SCHEDULES.values() if one.runs_as == name)
    for P, B in sizes(schedule):
        stages = unlike(P * schedule.stages_per_rank, 0, transfers=False)
        here = simulate_schedule(schedule, stages, B)
        spans = tuple(Stage(s, s + 1, StageConfiguration("device")) for s in range(len(stages)))
        there = simulate(Plan(spans, name, B), stages)
        assert here.step_seconds == pytest.approx(there.step_seconds)
        assert here.bubble_fraction == pytest.approx(there.bubble_fraction)
        assert here.in_flight_S == there.in_flight


@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if schedule.orders is None])
def test_orders_are_those_that_torch_shows_of_a_schedule(name: str) -> None:
    schedule, compared = SCHEDULES[name], 0
    for ranks, B in itertools.product((1, 2, 3, 5), (1, 3, 4, 8, 10)):
        S = ranks * schedule.stages_per_rank
        try:
            shown = get_schedule_ops(schedule.torch_name, ranks, B, num_stages_per_rank=schedule.stages_per_rank)
        except ValueError:
            with pytest.raises(InputError, match=f"microbatch.* under {name}"):
                torch_actions(schedule, S, B)
            continue
        if ranks * schedule.microbatches_per_rank > B:
            continue  # torch lists them all the same, and runs no step of so few
        for order, shown_of_rank in zip(torch_actions(schedule, S, B).values(), shown, strict=True):
            parts = [part for action in shown_of_rank if action for part in (action.sub_actions or (action,))]
            parts = [part for part in parts if part.computation_type.name != "REDUCE_GRAD"]
            if schedule.stages_per_rank == 1:  # torch numbers the last rank's forward passes of these from 1
                assert [action[:2] for action in order] == [part[:2] for part in parts]
            else:
                assert [action[:3] for action in order] == [part[:3] for part in parts]
        compared += 1
    assert compared >= 5


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize("seed", range(2))
def test_ages_and_versions_of_weights_are_those_that_are_counted(name: str, seed: int) -> None:
    """Of each stage, from its rank's order alone; a version is kept from its update until its last use."""
    schedule = PIPELINE_SCHEDULES[name]
    for P, B in ((2, 4), (4, 4), (4, 6)):
        found = simulate_schedule(schedule, unlike(P, seed, transfers=True), B)
        num_steps = 1 + max(t.number for row in found.timeline.orders for t in row if t.kind != UPDATE) // B
        for s, row in enumerate(found.timeline.orders):
            updates = [i for i, task in enumerate(row) if task.kind == UPDATE]
            place = {(task.kind, task.number): i for i, task in enumerate(row)}
            newest = {key: sum(u < i for u in updates) for key, i in place.items()}
            ages, until = [], defaultdict[int, int](int)
            for m in range(B * num_steps):
                forward, backward = newest[Pass.FORWARD, m], newest[Pass.BACKWARD, m]
                if schedule.weights is WeightRule.STASHED:
                    backward = forward
                elif schedule.weights is WeightRule.DOUBLE_BUFFERED:
                    assert max(m // B - 1, 0) <= forward, "the version is not there yet"
                    forward = backward = max(m // B - 1, 0)
                until[forward] = max(until[forward], place[Pass.FORWARD, m])
                until[backward] = max(until[backward], place[Pass.BACKWARD, m])
                added = [k for k, u in enumerate(updates) if u > place[Pass.BACKWARD, m]]
                if m >= B * (num_steps // 2) and added:
                    ages.append(added[0] - forward)
            assert found.staleness_S[s].forward_steps == pytest.approx(np.mean(ages))
            assert found.staleness_S[s].most_forward_steps == max(ages)
            made = [0, *updates]  # when each version came to be
            alive = (
                sum(at <= i and (i <= until[v] or v == len(made) - 1 or made[v + 1] > i) for v, at in enumerate(made))
                for i in range(len(row))
            )
            assert found.weight_versions_P[s] == max(alive)


def test_gradients_of_ampnet_are_older_the_more_is_under_way() -> None:
    stages = [StageSeconds(1.0, 2.0, 0.0)] * 4
    ages = [
        simulate_schedule(AMPNet(max_active_keys=k, min_update_frequency=1), stages, 8).staleness_steps
        for k in (1, 2, 4)
    ]
    assert ages == [0.0, 1.0, 3.0]
    assert simulate_schedule(AMPNet(max_active_keys=1), stages, 8).bubble_fraction == pytest.approx(0.75)


def test_searches_have_the_synchronous_ones_that_run_and_no_others() -> None:
    assert {one.runs_as for one in PIPELINE_SCHEDULES.values()} == {*SCHEDULES, None}
    assert all(one.is_synchronous or one.runs_as is None for one in PIPELINE_SCHEDULES.values())
    assert ASYNCHRONOUS == ["pipedream", "pipedream_2bw", "pipemare", "ampnet"]
    assert set(default_schedules()) == set(SCHEDULES) - {"interleaved_1f1b_4", "hanayo", "hanayo_2"}


@every_schedule
def test_of_sizes_without_an_order_it_is_said(name: str) -> None:
    schedule = PIPELINE_SCHEDULES[name]
    with pytest.raises(InputError, match="wanted"):
        simulate_schedule(schedule, [StageSeconds(1.0, 1.0, 0.0)] * schedule.stages_per_rank * 2, 0)
    with pytest.raises(InputError, match="wanted a multiple of"):
        simulate_schedule(schedule, [], 4)


@pytest.mark.parametrize("what", ["odd", "few", "depth", "keys", "layers"])
def test_bad_input_is_a_sentence(what: str) -> None:
    stages = [StageSeconds(1.0, 1.0, 0.0)] * 4
    with pytest.raises(InputError, match="wanted"):
        if what == "odd":
            simulate_schedule(PIPELINE_SCHEDULES["chimera"], stages, 3)
        elif what == "few":
            simulate_schedule(PIPELINE_SCHEDULES["pipedream_2bw"], stages, 3)
        elif what == "depth":
            of_depth("hanayo", 3)
        elif what == "keys":
            AMPNet(max_active_keys=0)
        else:
            cut_evenly(stages, 5)


@pytest.mark.parametrize("seed", range(5))
def test_layers_are_cut_so_that_the_slowest_stage_is_fastest(seed: int) -> None:
    layers = unlike(7, seed, transfers=True)
    seconds = [layer.forward_seconds + layer.backward_seconds for layer in layers]
    for S in range(1, 8):
        found = [stage.forward_seconds + stage.backward_seconds for stage in cut_evenly(layers, S)]
        ways = ((0, *cuts, 7) for cuts in itertools.combinations(range(1, 7), S - 1))
        slowest = min(max(sum(seconds[a:b]) for a, b in itertools.pairwise(way)) for way in ways)
        assert max(found) == pytest.approx(slowest) and sum(found) == pytest.approx(sum(seconds))


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    for cuts in range(total):
        for at in itertools.combinations(range(1, total), cuts):
            yield tuple(b - a for a, b in itertools.pairwise((0, *at, total)))


@pytest.mark.parametrize("seed", range(6))
def test_slices_are_the_best_of_all(seed: int) -> None:
    """Any times at all, and such as attention makes: a fixed part, one by tokens, one by tokens and context."""
    rng, L = np.random.default_rng(seed), 7
    j, i = np.arange(1, L + 1)[:, None], np.arange(L)[None, :]
    smooth = rng.uniform(0, 3) + rng.uniform(0, 1) * j + rng.uniform(0, 0.3) * j * (i + j)
    table = np.asarray(rng.uniform(0, 5, (L, L)) if seed % 2 else smooth, dtype=np.float64)
    for K, sequences in ((1, 1), (2, 1), (4, 1), (4, 3), (12, 1)):
        least = min(
            sequences * sum(times) + (K - 1) * max(times)
            for way in compositions(L)
            for times in [[table[n - 1, at] for n, at in zip(way, np.cumsum([0, *way[:-1]]), strict=True)]]
        )
        found = best_slices(table, K, sequences)
        assert found.seconds == pytest.approx(least)
        assert sum(found.lengths) == L
        assert best_uniform_slices(table, K, sequences).seconds >= found.seconds - 1e-12


def test_times_of_slices_that_are_none_are_refused() -> None:
    for table in (np.zeros((2, 3)), np.full((2, 2), np.nan), -np.ones((2, 2)), np.zeros((0, 0))):
        with pytest.raises(InputError, match="wanted"):
            best_slices(table, 2)
    with pytest.raises(InputError, match="wanted one or more of each"):
        best_slices(np.ones((2, 2)), 0)


DECODER = Workload(
    model="gpt",
    model_options={"num_blocks": 1, "width": 64, "num_heads": 4},
    data="synthetic",
    synthetic=SyntheticSettings(num_classes=64),
    sequence_length=64,
    batch_size=2,
    num_microbatches=1,
    trials=TrialSettings(count=0),
)


def test_slices_of_a_decoder_are_priced_as_its_kernels_are() -> None:
    """The whole sequence as the layer; a slice the more, the more comes before it."""
    device = catalogue()["A100-PCIE-80GB"]
    layer = capture(DECODER, "cuda").layers[1]
    found = slice_seconds([layer], device, 64, 8)
    kernels = [kernel for operator in layer.operators if (kernel := kernel_of(operator)) is not None]
    whole = shipped().predict(kernels, device).seconds_K.sum()
    assert found[7, 0] == pytest.approx(whole)
    assert (np.diff(found[0]) > 0).all() and (found[np.add.outer(range(1, 9), range(8)) > 8] == 0).all()
    with pytest.raises(InputError, match="64 tokens in 7 units; wanted equal units"):
        slice_seconds([layer], device, 64, 7)
    with pytest.raises(InputError, match="wanted attention as one kernel of 32 positions"):
        slice_seconds([layer], device, 32, 8)
    half = capture(DECODER.model_copy(update={"dtype": "bfloat16"}), "cuda").layers[1]
    with pytest.raises(InputError, match="has no time on V100"):
        slice_seconds([half], catalogue()["V100-SXM2-16GB"], 64, 8)


RANKS, STEPS, RATE = 4, 5, 0.2


def model(num_stages: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    widths = [6] * num_stages + [3]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return [nn.Sequential(layer, nn.Tanh()) for layer in layers[:-1]] + [nn.Sequential(layers[-1])]


def batches(count: int, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=drawn), torch.randint(0, 3, (size,), generator=drawn)) for _ in range(count)
    ]


def late(
    num_stages: int, delays: list[int], rows: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[list[float], list[torch.Tensor]]:
    """w(t + 1) = w(t) − ν ∇f(w(t − delay)), each stage by its own delay, in so many words."""
    stages = model(num_stages)
    history = [[{n: w.detach().clone() for n, w in stage.named_parameters()} for stage in stages]]
    losses = []
    for t, (inputs, targets) in enumerate(rows):
        met = [
            {n: w.clone().requires_grad_() for n, w in history[max(0, t - delay)][s].items()}
            for s, delay in enumerate(delays)
        ]
        x = inputs
        for stage, weights in zip(stages, met, strict=True):
            x = torch.func.functional_call(stage, weights, (x,))
        loss = nn.functional.cross_entropy(x, targets)
        loss.backward()
        losses.append(float(loss.detach()))
        history.append([
            {n: w - RATE * one[n].grad for n, w in newest.items()}  # type: ignore[operator]
            for newest, one in zip(history[-1], met, strict=True)
        ])  # fmt: skip
    return losses, [w for weights in history[-1] for w in weights.values()]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs_4", "hanayo_2", "chimera"])
def test_synchronous_orders_train_as_one_process_does(name: str) -> None:
    schedule = PIPELINE_SCHEDULES[name]
    stages = model(RANKS * schedule.stages_per_rank)
    found = train_by(schedule, stages, batches(STEPS), nn.functional.cross_entropy, Rates(RATE), 4)
    losses, weights = late(len(stages), [0] * len(stages), batches(STEPS))
    assert found == pytest.approx(losses, abs=1e-6)
    for one, other in zip((w for stage in stages for w in stage.parameters()), weights, strict=True):
        torch.testing.assert_close(one.detach(), other, atol=1e-6, rtol=1e-5)


SPLIT = {name for name, one in SCHEDULES.items() if one.splits_backward}


@pytest.mark.parametrize("name", [name for name in PIPELINE_SCHEDULES if name not in SPLIT])
def test_frozen_and_unused_weights_stay_and_the_others_train_as_without_them(name: str) -> None:
    """Whatever versions of the weights a schedule keeps; a stage may have none that are trained."""
    schedule = PIPELINE_SCHEDULES[name]
    rates = Rates(RATE, corrects_weights=True, taus=(1.0,) * RANKS) if name == "pipemare" else Rates(RATE)

    def trained(*, frozen: bool, without: bool = False) -> tuple[list[float], list[torch.Tensor]]:
        stages = model(RANKS * schedule.stages_per_rank)
        for stage in stages if frozen else ():
            stage.register_parameter("unused", nn.Parameter(torch.ones(2)))
        for weight in (*stages[0].parameters(), stages[1][0].weight) if frozen else ():
            weight.requires_grad_(False)
        for layer, held in ((stages[0][0], ("weight", "bias")), (stages[1][0], ("weight",))) if without else ():
            for one in held:  # no parameters, but the same numbers
                kept = layer._parameters.pop(one)
                layer.register_buffer(one, kept.detach())
        found = train_by(schedule, stages, batches(STEPS), nn.functional.cross_entropy, rates, 4)
        return found, [w.detach() for stage in stages for w in stage.state_dict().values() if w.shape != (2,)]

    fresh = [w for stage in model(RANKS * schedule.stages_per_rank) for w in stage.state_dict().values()]
    losses, weights = trained(frozen=True)
    expected, others = trained(frozen=False, without=True)
    assert losses == expected
    key = torch.Tensor.sum
    assert sorted(float(key(w)) for w in weights) == sorted(float(key(w)) for w in others)
    assert all(map(torch.equal, weights[:3], fresh[:3])) and not torch.equal(weights[-1], fresh[-1])


def test_late_gradients_are_those_of_the_papers_equations() -> None:
    """PipeDream: stage s of P by P − 1 − s microbatches (section 3.3); 2BW: all by one step (section 3.1)."""
    for name, delays, num_microbatches in (("pipedream", [3, 2, 1, 0], 4), ("pipedream_2bw", [1] * 4, 4)):
        stages, rows = model(RANKS), batches(STEPS)
        found = train_by(
            PIPELINE_SCHEDULES[name], stages, rows, nn.functional.cross_entropy, Rates(RATE), num_microbatches
        )
        each = rows if name == "pipedream_2bw" else [
            pair for x, y in rows for pair in zip(x.chunk(4), y.chunk(4), strict=True)
        ]  # fmt: skip
        losses, weights = late(RANKS, delays, each)
        by_step = np.reshape(losses, (STEPS, -1)).mean(axis=1)
        assert found == pytest.approx(by_step.tolist(), abs=1e-6)
        for one, other in zip((w for stage in stages for w in stage.parameters()), weights, strict=True):
            torch.testing.assert_close(one.detach(), other, atol=1e-6, rtol=1e-5)


def test_of_a_single_layer_pipemare_is_late_by_one_step() -> None:
    """No gradient goes through its weights, so it does not matter which ones the backward pass meets."""
    for rates in (Rates(RATE), Rates(RATE, corrects_weights=True, taus=(1.0,))):
        found = train_by(
            PIPELINE_SCHEDULES["pipemare"], model(1), batches(STEPS), nn.functional.cross_entropy, rates, 1
        )
        assert found == pytest.approx(late(1, [1], batches(STEPS))[0], abs=1e-6)


def test_pipemares_corrections() -> None:
    """T1: the rate over τ at first, itself in the end; T2 changes what deeper stages meet, and loses none of it."""
    rates = Rates(0.5, rescheduled_steps=10, taus=(4.0, 0.5))
    assert [rates.rate(0, k) for k in (0, 5, 10, 20)] == [0.125, 0.25, 0.5, 0.5]
    assert rates.rate(1, 0) == 0.5
    schedule = PIPELINE_SCHEDULES["pipemare"]
    taus = schedule.theory(RANKS, 2).staleness_steps_P
    assert taus is not None
    plain, corrected = (
        train_by(schedule, model(RANKS), batches(12), nn.functional.cross_entropy, one, 2)
        for one in (Rates(RATE), Rates(RATE, corrects_weights=True, taus=taus))
    )
    assert plain != corrected
    assert plain == pytest.approx(corrected, abs=0.1)


def test_a_split_backward_pass_is_not_trained_here() -> None:
    schedule = PIPELINE_SCHEDULES["zbv"]
    with pytest.raises(InputError, match="wanted a schedule that does not split it"):
        train_by(schedule, model(4), batches(1), nn.functional.cross_entropy, Rates(RATE), 4)


BY_RANKS = ("chimera", "hanayo", "interleaved_1f1b", "pipedream", "pipedream_2bw", "pipemare")


def a_rank(rank: int, folder: str) -> None:
    """One of the ranks: every schedule in turn, on its own threads' share of a core."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)  # type: ignore[attr-defined]  # public, though not in its __all__
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for name in BY_RANKS:
        schedule = PIPELINE_SCHEDULES[name]
        stages = model(RANKS * schedule.stages_per_rank)
        losses = train_rank(schedule, stages, batches(STEPS), nn.functional.cross_entropy, Rates(RATE), 4)
        Path(folder, f"{name}-{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


@pytest.mark.integration
@pytest.mark.slow
def test_ranks_have_the_losses_of_one_process(tmp_path: Path) -> None:
    """Over gloo, each rank its own order; Chimera's two copies add their gradients up, late ones are as late."""
    spawn(a_rank, (str(tmp_path),), nprocs=RANKS)  # type: ignore[no-untyped-call]
    for name in BY_RANKS:
        schedule = PIPELINE_SCHEDULES[name]
        own = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]
        losses = {int(number): loss for one in own for number, loss in one.items()}
        by_step = np.reshape([losses[m] for m in range(4 * STEPS)], (STEPS, 4)).mean(axis=1)
        stages = model(RANKS * schedule.stages_per_rank)
        single = train_by(schedule, stages, batches(STEPS), nn.functional.cross_entropy, Rates(RATE), 4)
        assert by_step == pytest.approx(single, abs=1e-6)
        if schedule.is_synchronous:
            assert by_step == pytest.approx(late(len(stages), [0] * len(stages), batches(STEPS))[0], abs=1e-6)
            assert sum(map(bool, own)) == schedule.num_copies, "both directions end somewhere"
