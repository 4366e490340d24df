"""Virtual workers: several pipelines with some examples of every batch each, whose steps are one process's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pipeline.plans import by_hand, one_device
from benchmarks.pipeline.ranks import train_all
from dejavu.binding import Binding, VirtualWorker
from dejavu.foundation.errors import InputError
from dejavu.launch.launcher import launch
from dejavu.launch.preflight import check_plan, check_spreading
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.layout import World
from dejavu.runtime.process.failures import LaunchError
from dejavu.runtime.single import train_single
from dejavu.workload import GradientSettings, ReplanSettings, Workload
from tests.launching import DRAW, TOLERANCE

ONE = one_device()


def together(*pipelines: tuple[Binding, int]) -> Binding:
    """One binding of several pipelines, each with so many examples."""
    placements = [
        replace(placed, worker=number, device=replace(placed.device, index=0))
        for number, (one, _) in enumerate(pipelines)
        for placed in one.placements
    ]
    placements = [replace(placed, device=replace(placed.device, index=rank)) for rank, placed in enumerate(placements)]
    workers = tuple(VirtualWorker(one.plan, examples) for one, examples in pipelines)
    return replace(pipelines[0][0], placements=tuple(placements), workers=workers)


def job_of(workload: Workload, binding: Binding) -> TrainingJob:
    return TrainingJob(workload, binding, DRAW, None, 0, workload.num_steps, folder="")


GPT = Workload(
    model="gpt",
    model_options={"width": 32, "num_heads": 4, "num_blocks": 2, "tied": True},
    sequence_length=16,
    batch_size=24,
    accumulate=2,
    num_microbatches=1,
    num_steps=4,
    evaluate_every=2,
    evaluation_examples=24,
    held_out=0.1,
    optimizer={"name": "adamw", "learning_rate": 1e-2, "clip_norm": 0.5},
)
L = 4  # of its layers
TWO = one_device(2)
SPLIT = one_device(tensor_parallel=2)
# What workers there are, each with its schedule, cuts, devices, number of microbatches and examples of a run's 12.
WORLDS = {
    "two stages beside one": [("1f1b", (2,), [ONE, ONE], 4, 8), ("gpipe", (), [ONE], 2, 4)],
    "unequal parts of the data": [("gpipe", (), [ONE], 2, 6), ("gpipe", (), [ONE], 5, 5), ("gpipe", (), [ONE], 1, 1)],
    "other cuts, with replicas": [("1f1b", (1,), [TWO, ONE], 4, 8), ("1f1b", (3,), [ONE, TWO], 2, 4)],
    "backward passes in two parts": [("zbv", (1, 2, 3), [ONE, ONE], 3, 9), ("1f1b", (1,), [ONE, ONE], 3, 3)],
    "two stages a rank": [("interleaved_1f1b", (1, 2, 3), [ONE, ONE], 4, 8), ("1f1b", (2,), [ONE, ONE], 2, 4)],
    "split layers": [("1f1b", (), [SPLIT], 2, 8), ("1f1b", (), [SPLIT], 2, 4)],
    "a split sequence": [
        ("1f1b", (2,), [replace(SPLIT, sequence_parallel=True), SPLIT], 4, 8),
        ("1f1b", (), [SPLIT], 2, 4),
    ],
}  # fmt: skip


def world(name: str) -> Binding:
    return together(
        *((by_hand(schedule, (0, *cuts, L), ways, B), examples) for schedule, cuts, ways, B, examples in WORLDS[name])
    )


@pytest.mark.integration
def test_steps_are_those_of_one_process() -> None:
    jobs = [job_of(GPT, world(name)) for name in WORLDS]
    for job in jobs:
        check_plan(job)
        check_spreading(job)
    evaluations: list[float] = []
    expected = train_single(GPT, DRAW, range(GPT.num_steps), on_evaluation=lambda _, loss: evaluations.append(loss))
    for name, trained in zip(WORLDS, train_all(jobs), strict=True):
        assert trained.losses == pytest.approx(expected, abs=TOLERANCE), name
        assert trained.evaluations == pytest.approx(evaluations, abs=TOLERANCE), name


@pytest.mark.parametrize("name", WORLDS)
def test_every_example_is_trained_once(name: str) -> None:
    found = World.of(world(name), GPT)
    assert [layout.first_example for layout in found.layouts] == [
        sum(examples for *_, examples in WORLDS[name][:k]) for k in range(len(WORLDS[name]))
    ]
    counts = np.zeros(GPT.run_size, dtype=np.int64)
    for layout in found.layouts:
        for place in layout.binding.placements:
            if place.pipeline_rank == 0 and place.shard == 0:
                start, stop = layout.rows(place)
                for microbatch in range(layout.plan.num_microbatches):
                    first = layout.first_example + microbatch * layout.microbatch_size
                    counts[first + start : first + stop] += 1
    assert (counts == 1).all()


@pytest.mark.parametrize("name", WORLDS)
def test_every_layer_is_summed_over_all_who_hold_it(name: str) -> None:
    binding = world(name)
    found = World.of(binding, GPT).holders
    assert [held.start for held in found] == [0, *(held.stop for held in found[:-1])] and found[-1].stop == L
    for held in found:
        for layer in range(held.start, held.stop):
            holding = {
                rank
                for rank, placed in enumerate(binding.placements)
                for s in binding.stages_of(rank)
                if binding.plan_of(placed).stages[s].start <= layer < binding.plan_of(placed).stages[s].stop
            }
            assert sorted(rank for row in held.ranks for rank in row) == sorted(holding)
            for shard, row in enumerate(held.ranks):
                assert {binding.placements[rank].shard for rank in row} == {shard}


def test_a_binding_comes_back_from_json() -> None:
    for name in WORLDS:
        assert Binding.from_dict(world(name).to_dict()) == world(name)
    alone = by_hand("1f1b", (0, 2, L), [ONE, ONE], 4)
    assert "workers" not in alone.to_dict() and alone.pipelines == (alone,)


def test_what_cannot_be_trained_together_is_said() -> None:
    def refused(*parts: tuple[Binding, int], **settings: object) -> str:
        with pytest.raises((LaunchError, InputError)) as caught:
            check_plan(job_of(GPT.model_copy(update=settings), together(*parts)))
        return str(caught.value)

    one, split = by_hand("gpipe", (0, L), [ONE], 2), by_hand("gpipe", (0, L), [SPLIT], 2)
    sharded = by_hand("gpipe", (0, L), [one_device(2, zero_level=1)], 2)
    assert "8 + 2 examples; wanted 12 in all" in refused((one, 8), (one, 2))
    assert "7 examples of a batch in 2 microbatches" in refused((one, 7), (one, 5))
    assert "over 1 and 2 tensor-parallel devices" in refused((one, 8), (split, 4))
    assert "virtual worker 1 has ZeRO level 1" in refused((one, 8), (sharded, 4))
    assert "gradients: median" in refused((one, 8), (one, 4), gradients=GradientSettings(rule="median"))
    replan = ReplanSettings(action="migrate")
    assert "replan: {action: migrate}" in refused((one, 8), (one, 4), replan=replan)


@pytest.mark.integration
@pytest.mark.slow
def test_a_training_goes_on_under_one_pipeline_and_back(tmp_path: Path) -> None:
    """A checkpoint knows no plan, of however many pipelines; a launch trains, tells its losses and its stages."""
    alone = by_hand("1f1b", (0, 2, L), [ONE, ONE], 4)
    losses = list[float]()
    for steps, binding in ((2, world("two stages beside one")), (3, alone), (4, world("two stages beside one"))):
        workload = GPT.model_copy(update={"num_steps": steps, "evaluate_every": 0, "checkpoint_every": 1})
        if not binding.workers:
            workload = workload.model_copy(update={"num_microbatches": binding.plan.num_microbatches})
        job = TrainingJob(workload, binding, DRAW, None, 0, steps, folder=str(tmp_path / "run"))
        job.write()
        result = launch(job)
        losses = list(result.losses)
        measured = [(one.worker, one.stage, one.replica) for one in result.stages]
        held = {(p.worker, s, p.replica) for rank, p in enumerate(binding.placements) for s in binding.stages_of(rank)}
        assert not measured or set(measured) == held
    expected = train_single(GPT.model_copy(update={"evaluate_every": 0}), DRAW, range(4))
    assert losses == pytest.approx(expected, abs=TOLERANCE)
