"""Sequences in slices: the losses and gradients of whole ones, whatever the slices, cuts and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import train_in_turn
from dejavu.cluster import Cluster, Link, NodeGroup, catalogue
from dejavu.foundation.errors import InputError
from dejavu.init import Draw
from dejavu.launch.preflight import check_spreading
from dejavu.planning import PlanRequest
from dejavu.plans.schedule import SCHEDULES, slice_by_slice, torch_actions
from dejavu.runtime.single import train_single
from dejavu.runtime.splits.sliceable import check_slices
from dejavu.runtime.splits.slices import SlicedSequence
from dejavu.runtime.training import Layers, build_layers
from dejavu.testing.schedules import sizes
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import MODELS, model_of
from dejavu.workload.settings import whole_backward_schedules
from dejavu.workload.slices import slice_lengths
from tests.test_hugging_face import CONFIGS, needs_transformers
from tests.test_hugging_face_training import workload_of as hugging_face
from tests.test_models import ZOO
from tests.test_pipeline import GPT, TOLERANCE

LENGTH = GPT.sequence_length
SMALL = {"width": 32, "num_heads": 4}
OF_LLAMA = {**SMALL, "num_kv_heads": 2, "feedforward": 48}
LLAMA = GPT.model_copy(update={"model": "llama", "model_options": {"num_blocks": 6, **OF_LLAMA}})
MIXTRAL = GPT.model_copy(update={"model": "mixtral", "model_options": {"num_blocks": 6, **OF_LLAMA, "num_experts": 4}})
DECODERS = {"gpt": GPT, "llama": LLAMA, "mixtral": MIXTRAL}
CPU = torch.device("cpu")
every_decoder = pytest.mark.parametrize("name", DECODERS)


def drawn_lengths(seed: int) -> tuple[int, ...]:
    """Uneven slices, down to a single position."""
    rng = np.random.default_rng(seed)
    ends = sorted(rng.choice(np.arange(1, LENGTH), size=rng.integers(1, 6), replace=False).tolist())
    return tuple(np.diff([0, *ends, LENGTH]).tolist())


def stages_of(
    workload: Workload, cut: int, sequence: SlicedSequence | None, *, recompute: bool = False
) -> list[Layers]:
    stages = [build_layers(workload, Draw(), CPU, *span, recompute=recompute) for span in ((0, cut), (cut, None))]
    for stage in stages:
        stage.sequence = sequence
    return stages


def gradients_of(stages: Sequence[Layers]) -> dict[str, torch.Tensor]:
    named = (pair for stage in stages for pair in stage.named_parameters())
    return {name: one.grad for name, one in named if one.grad is not None}


def whole(workload: Workload, cut: int) -> tuple[float, dict[str, torch.Tensor]]:
    stages = stages_of(workload, cut, None)
    inputs, targets = dataset_of(workload).batch(0, 4, seed=0)
    loss = model_of(workload).loss(stages[1](stages[0](inputs)), targets)
    loss.backward()
    return loss.item(), gradients_of(stages)


def in_slices(workload: Workload, cut: int, lengths: Sequence[int], *, recompute: bool = False) -> tuple[float, dict]:
    """Two microbatches, whose slices go through two stages that have only each other's messages."""
    sequence = SlicedSequence(lengths)
    stages, loss_of = (
        stages_of(workload, cut, sequence, recompute=recompute),
        sequence.part_of_loss(model_of(workload).loss),
    )
    inputs, targets = (sequence.cut(batch.chunk(2)) for batch in dataset_of(workload).batch(0, 4, seed=0))
    passed, losses = [], []
    for chunk, (x, target) in enumerate(zip(inputs, targets, strict=True)):
        stages[0].microbatch, sequence.index = divmod(chunk, sequence.count)
        stages[1].microbatch = stages[0].microbatch
        sent = stages[0](x)
        received = sent.detach().requires_grad_()
        losses.append(loss_of(stages[1](received), target) / 2)
        passed.append((sent, received))
    for chunk in reversed(range(len(losses))):
        losses[chunk].backward()
        sent, received = passed[chunk]
        sent.backward(received.grad)
    assert not any(kept.parts for row in sequence._kept.values() for pair in row for kept in pair)
    return sum(loss.item() for loss in losses), gradients_of(stages)


@every_decoder
@pytest.mark.parametrize("seed", range(3))
def test_slices_have_the_gradients_of_whole_sequences(name: str, seed: int) -> None:
    workload, cut = DECODERS[name], 1 + 3 * seed
    loss, gradients = whole(workload, cut)
    found, own = in_slices(workload, cut, drawn_lengths(seed), recompute=seed == 1)
    assert found == pytest.approx(loss, abs=1e-6)
    assert own.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert torch.allclose(own[key], gradient, rtol=0, atol=TOLERANCE), key


@needs_transformers
@pytest.mark.parametrize("kind", CONFIGS)
def test_decoders_of_transformers_go_in_slices_of_any_length(kind: str, tmp_path: Path) -> None:
    """Also of one position, for which the library does not call attention causal."""
    workload = hugging_face(kind, tmp_path).model_copy(update={"slices": (1, 20, 3)})
    if kind in ("bert", "t5"):
        with pytest.raises(InputError, match="wanted a causal decoder"):
            check_slices(workload)
        return
    check_slices(workload)
    loss, gradients = whole(workload, 2)
    found, own = in_slices(workload, 2, slice_lengths(workload))
    assert found == pytest.approx(loss, abs=TOLERANCE)
    for key, gradient in gradients.items():
        assert torch.allclose(own[key], gradient, rtol=0, atol=TOLERANCE), key


def test_without_a_graph_nothing_is_kept() -> None:
    sequence = SlicedSequence((5, 11))
    stages, expected = stages_of(GPT, 4, sequence), whole(GPT, 4)[0]
    inputs, targets = (sequence.cut([batch]) for batch in dataset_of(GPT).batch(0, 4, seed=0))
    with torch.no_grad():
        total = 0.0
        for sequence.index, (x, target) in enumerate(zip(inputs, targets, strict=True)):
            total += sequence.part_of_loss(model_of(GPT).loss)(stages[1](stages[0](x)), target).item()
    assert total == pytest.approx(expected, abs=1e-6)
    assert not sequence._kept


def test_gradients_before_those_of_later_slices_are_an_error() -> None:
    sequence = SlicedSequence((8, 8))
    (stage, _), outputs = stages_of(GPT, 4, sequence), []
    parts = sequence.cut([dataset_of(GPT).batch(0, 4, seed=0)[0]])
    for sequence.index, x in enumerate(parts):
        outputs.append(stage(x))
    with pytest.raises(RuntimeError, match="slice 0 goes back after 0 of 1 later slices"):
        outputs[0].sum().backward()


@pytest.mark.parametrize("name", whole_backward_schedules())
def test_every_slice_passes_once_forward_in_order_and_back_in_reverse(name: str) -> None:
    """And no rank waits for ever: each rank's next pass has its input sooner or later."""
    schedule, num_slices = SCHEDULES[name], 3
    for S, B in sizes(schedule):
        if B > 4:
            continue
        listed = torch_actions(schedule, S, B)
        orders = {rank: slice_by_slice(order, num_slices) for rank, order in listed.items()}
        done: set[tuple[str, int, int]] = set()
        waiting = {rank: list(order) for rank, order in orders.items()}
        is_moving = True
        while is_moving:
            is_moving = False
            for order in waiting.values():
                while order:
                    kind, s, chunk = order[0].computation_type.name, order[0].stage_index, order[0].microbatch_index
                    end = s == S - 1 if kind != "FORWARD" else s == 0
                    before = (kind, s - 1 if kind == "FORWARD" else s + 1, chunk)
                    later = (kind, s, chunk + 1) if kind != "FORWARD" else (kind, s, chunk - 1)
                    is_first = chunk % num_slices == (num_slices - 1 if kind != "FORWARD" else 0)
                    if not (end or before in done):
                        break
                    assert is_first or later in done
                    assert kind == "FORWARD" or ("FORWARD", s, chunk) in done
                    done.add((kind, s, chunk))
                    order.pop(0)
                    is_moving = True
        assert not any(waiting.values())
        assert len(done) == 2 * S * B * num_slices


@pytest.mark.parametrize("asked", [1, 2, 3, 5, 16, (16,), (1, 15), (3, 3, 10)])
def test_slices_cover_the_sequence(asked: int | tuple[int, ...]) -> None:
    lengths = slice_lengths(GPT.model_copy(update={"slices": asked}))
    if asked in (1, (16,)):
        assert lengths == ()
    else:
        assert sum(lengths) == LENGTH and min(lengths) > 0
        assert lengths == asked or (len(lengths) == asked and max(lengths) - min(lengths) <= 1)
        assert Workload.model_validate_json(GPT.model_copy(update={"slices": asked}).model_dump_json()).slices == asked


@pytest.mark.parametrize("name", ZOO)
def test_what_is_no_causal_decoder_is_named(name: str) -> None:
    workload = ZOO[name].model_copy(update={"slices": 2})
    if workload.model in DECODERS:
        check_slices(workload)
        return
    with pytest.raises(InputError, match="slices: 2") as raised:
        check_slices(workload)
    assert repr(workload.model) in str(raised.value) or workload.data in str(raised.value)


def test_every_model_of_the_zoo_was_asked() -> None:
    assert {workload.model for workload in ZOO.values()} >= set(MODELS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slices": 17}, "17 of a sequence of 16 positions"),
        ({"slices": (4, 4)}, r"\[4, 4\] are 8 positions; wanted the 16"),
        ({"slices": 2, "schedule": "zbv"}, "schedule zbv runs the backward pass in two parts"),
        ({"slices": 2, "compile": True}, "wanted compile: false"),
        (
            {"slices": 2, "model": "bert", "model_options": {"num_blocks": 2, **SMALL}},
            "model 'bert': its loss is no mean",
        ),
        ({"slices": 2, "model": "tests.own_losses:LastOnly"}, "model 'tests.own_losses:LastOnly': its loss is no mean"),
    ],
)
def test_mistakes_are_named(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_slices(GPT.model_copy(update=change))


@pytest.mark.parametrize("slices", [0, -1, (3, 0), "two"])
def test_slices_are_counted(slices: object) -> None:
    with pytest.raises(ValueError, match="slices"):
        Workload.model_validate({**GPT.model_dump(exclude={"synthetic"}), "data": "text", "slices": slices})


def test_plans_of_slices(tmp_path: Path) -> None:
    """No part of a sequence elsewhere, no backward pass in two parts, found or given."""
    link = Link(50e9, 1e-5)
    group = NodeGroup("g", 1, (), (("H200-SXM-141GB", 4),), link)
    known = {"H200-SXM-141GB": catalogue()["H200-SXM-141GB"]}
    cluster = Cluster("test", (group,), known, {("g", "g"): link})
    sliced = GPT.model_copy(update={"slices": 2})
    request = PlanRequest(sliced, cluster, tmp_path)
    assert set(request.allowed_schedules) <= set(whole_backward_schedules())
    with pytest.raises(InputError, match="schedule zbv"):
        replace(request, schedules=("zbv",))
    shards = [one_device(1, 2, sequence_parallel=True), one_device(2, context_parallel=2)]
    for one in shards:
        with pytest.raises(InputError, match="have a part of the sequence each"):
            check_spreading(job_of(sliced, by_hand("1f1b", (0, 8), [one], 4), 1))
    with pytest.raises(InputError, match="schedule dualpipe_v"):
        check_spreading(job_of(sliced, by_hand("dualpipe_v", (0, 4, 8), [one_device()], 4), 1))


one = one_device()
# In the order in which they are trained: shards first (see `train_in_turn`), those of two ranks, those of four.
BY_RANKS = {
    "gpt_shards": (GPT, 5, "1f1b", (0, 8), [one_device(1, 2)], 4),
    "gpt_uneven_gpipe": (GPT, (7, 1, 5, 3), "gpipe", (0, 1, 8), [one, one], 2),
    "llama_looped_recomputed": (LLAMA, 3, "interleaved_1f1b", (0, 1, 3, 5, 8), [one_device(recompute=True), one], 2),
    "gpt_accumulated": (GPT.model_copy(update={"accumulate": 3}), 3, "1f1b", (0, 4, 8), [one, one], 2),
    "gpt_zero_2": (GPT, (9, 7), "1f1b", (0, 8), [one_device(2, zero_level=2)], 2),
    "gpt_of_four": (GPT, (6, 5, 4, 1), "1f1b", (0, 1, 2, 4, 8), [one] * 4, 4),
    "gpt_one_of_four": (GPT, (6, 5, 4, 1), "1f1b", (0, 1, 2, 4, 8), [one] * 4, 1),
    "gpt_few_of_four": (GPT, 4, "gpipe", (0, 2, 3, 4, 8), [one] * 4, 2),
    "gpt_three_of_four": (GPT, 2, "1f1b", (0, 2, 3, 4, 8), [one] * 4, 3),
    "llama_of_four": (LLAMA, 4, "gpipe", (0, 3, 4, 5, 8), [one] * 4, 4),
    "llama_waves": (LLAMA, 2, "hanayo", (0, 1, 2, 3, 4, 5, 6, 7, 8), [one] * 4, 4),
    "mixtral_replicas": (MIXTRAL, (3, 13), "1f1b", (0, 5, 8), [one_device(3), one], 4),
}


QUICK = ("gpt_uneven_gpipe", "llama_looped_recomputed", "gpt_one_of_four", "gpt_three_of_four", "mixtral_replicas")
OTHERS = tuple(name for name in BY_RANKS if name not in QUICK)


@pytest.mark.integration
@pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_ranks_have_the_losses_of_one_process(names: tuple[str, ...]) -> None:
    """Over gloo: uneven slices and cuts, replicas, shards; what is held out is evaluated alike."""
    jobs = []
    for workload, slices, schedule, bounds, ranks, count in (BY_RANKS[name] for name in names):
        jobs.append(job_of(workload.model_copy(update={"slices": slices}), by_hand(schedule, bounds, ranks, count), 3))
        check_spreading(jobs[-1])
    for name, found, job in zip(names, train_in_turn(jobs), jobs, strict=True):
        workload, evaluations = job.workload, list[float]()
        single = train_single(workload, Draw(), range(3), on_evaluation=lambda _, loss, to=evaluations: to.append(loss))
        assert found.losses == pytest.approx(single, abs=TOLERANCE), name
        assert found.evaluations[: len(evaluations)] == pytest.approx(evaluations, abs=TOLERANCE), name
        count = len(slice_lengths(workload)) * workload.num_microbatches * workload.accumulate
        for rank in found.passes:
            assert sorted({one.microbatch for one in rank}) == list(range(count))
