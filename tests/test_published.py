"""Published trainings beside predictions: the sources' own figures follow from ours, and plans are theirs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from benchmarks.megatron.formulas import MegatronIteration
from benchmarks.published import Published, best_plans, hopper, mpt
from benchmarks.published.__main__ import outside_percent, row_of, run, run_plans
from benchmarks.published.predicting import plan_of, predict, workload_of
from benchmarks.published.trainings import MEGATRON, TRAININGS, Training
from dejavu.foundation.errors import InputError
from dejavu.planning import Choice, Planner, PlanRequest
from dejavu.planning.prices import Prices
from dejavu.planning.proofs import none_found
from dejavu.plans import Infeasible
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of, model_of

every_training = pytest.mark.parametrize("training", TRAININGS, ids=lambda one: f"{one.name}-{one.num_devices}")
TERAFLOPS = (137, 138, 142, 135, 138, 140, 148, 155, 163, 163)  # of the table


@every_training
def test_the_plan_is_the_sources(training: Training) -> None:
    plan = plan_of(training, training.microbatch_size or 1, recompute=True)
    way = plan.stages[0].configuration
    assert way.num_devices * len(plan.ranks) == training.num_devices
    assert (way.tensor_parallel, way.data_parallel) == (training.tensor_parallel, training.data_parallel)
    assert way.context_parallel == training.context_parallel
    assert plan.num_microbatches * training.example_parts * (training.microbatch_size or 1) == training.batch_size
    assert training.cluster().num_devices == training.num_devices
    sizes = {stage.stop - stage.start for stage in plan.stages[1:-1]}
    assert len(sizes) <= 1, "as many blocks in each"
    assert plan.stages[-1].stop == training.model.options["num_blocks"] + 2


@every_training
def test_degrees_multiply_to_the_devices(training: Training) -> None:
    assert training.num_devices == training.tensor_parallel * training.pipeline_parallel * training.data_parallel
    assert training.data_parallel == training.context_parallel * training.example_parts
    assert training.model.sequence_length % (training.context_parallel * training.tensor_parallel) == 0
    assert training.batch_size % (training.example_parts * (training.microbatch_size or 1)) == 0
    assert training.sequence_parallel <= (training.tensor_parallel > 1)


@every_training
def test_a_published_share_of_the_peak_is_one(training: Training) -> None:
    """As the source states it, within its rounding, its count of tokens and its 989 TFLOP/s for 989.4."""
    found = training.utilization_percent(training.tokens_per_second)
    assert 0 < found < 100
    if training.mfu_percent is not None:
        assert found == pytest.approx(training.mfu_percent, rel=0.015)


@pytest.mark.parametrize("recipe", hopper.RECIPES, ids=lambda one: one.name)
def test_seconds_of_a_step_are_the_sources(recipe: hopper.Recipe) -> None:
    found = {one.num_devices: one for one in TRAININGS if one.name == recipe.name}
    assert len(found) == len(list(recipe.rows()))
    for devices, batch, seconds, percent in recipe.rows():
        one = found[devices]
        assert one.step_seconds(one.tokens_per_second) == pytest.approx(seconds)
        assert (one.batch_size, one.mfu_percent) == (batch, percent)


@pytest.mark.parametrize("depth, pipeline, blocks, chunks", [(12, 8, 96, 4), (5, 4, 80, 4), (7, 9, 126, 2)])
def test_stages_are_as_deep_as_schedules_go(depth: int, pipeline: int, blocks: int, chunks: int) -> None:
    assert hopper.chunks_of(depth, pipeline, blocks) == chunks
    assert hopper.chunks_of(1, pipeline, blocks) == 1


def _counted(training: Training) -> int:
    """Count the parameters of the project's model, tied ones once; equal layers are built once."""
    workload = workload_of(training, 1)
    counts: dict[object, int] = {}
    total = 0
    for builder in layers_of(workload):
        key = (builder.build.func, builder.build.args, *builder.build.keywords.items())
        if key not in counts:
            with torch.device("meta"):
                counts[key] = sum(parameter.numel() for parameter in builder.build().parameters())
        total += counts[key]
    return total - model_of(workload).untied_parameters(dataset_of(workload).shape)


def test_models_have_as_many_parameters_as_their_sources_count() -> None:
    """The project's own model has what the source's formula says, and what the name says, to 3 %."""
    distinct: dict[str, tuple[Training, Published]] = {}
    for one in TRAININGS:
        distinct.setdefault(str(one.model), (one, one.model))
    assert len(distinct) > 60
    for training, model in distinct.values():
        assert _counted(training) == pytest.approx(model.num_parameters, rel=3e-2 if not model.exact else 2e-3)
        billions = re.search(r"([0-9.]+)B\b", training.name)
        if billions and training.source != mpt.SOURCE:  # whose names round 1.3 billion to 1
            assert model.num_parameters / 1e9 == pytest.approx(float(billions[1]), rel=0.03)


@pytest.mark.parametrize("number", range(10))
def test_megatrons_figures_follow_from_ours(number: int) -> None:
    """Parameters are the name's; and the step, by Megatron's own formula, gives the table's FLOP/s back."""
    training = TRAININGS[number]
    assert training.source == MEGATRON
    billions = float(training.name.removeprefix("GPT ").removesuffix("B"))
    assert training.model.num_parameters / 1e9 == pytest.approx(billions, abs=0.06 if billions < 1000 else 0.6)
    options, seconds = training.model.options, training.step_seconds(training.tokens_per_second)
    flops = MegatronIteration(
        num_heads=options["num_heads"],
        hidden_size=options["width"],
        num_layers=options["num_blocks"],
        sequence_length=2048,
        tensor_parallel=1,  # nothing padded
        data_parallel=1,
        pipeline_parallel=1,
        microbatch_size=1,
        global_batch_size=training.batch_size,
        recompute=True,
    ).model_flops
    found = flops / seconds / training.num_devices
    assert found == pytest.approx(TERAFLOPS[number] * 1e12, rel=2e-3)  # biases and norms


def test_torchtitans_shares_of_the_peak_follow_from_ours() -> None:
    """33 to 39 % without and with compilation on the H100; 51.7 % of 70B on A100 with the embedding's table."""
    (eight,) = [one for one in TRAININGS if one.name == "Llama 3 8B" and one.num_devices == 8]
    assert round(eight.utilization_percent(5762)) == 34
    assert round(eight.utilization_percent(6667)) == 39
    (large,) = [one for one in TRAININGS if one.name == "Llama 3 70B" and one.num_devices == 64]
    table = 6 * large.model.options["width"] * 128_256
    with_table = (large.flops_per_token + table) * 331 / large.device.peak_flops_per_second["bfloat16"]
    assert 100 * with_table == pytest.approx(51.7, abs=0.1)


@pytest.mark.parametrize("name", ["GPT 175B, full recomputation", "Llama 3 8B", "Llama 3.1 70B, NeMo"])
def test_a_row_says_what_was_predicted(name: str) -> None:
    training = next(one for one in TRAININGS if one.name == name)
    predictions = predict(training)
    rows = [row_of(training, one, alone=len(predictions) == 1) for one in predictions]
    for row, one in zip(rows, predictions, strict=True):
        assert 0 < row["predicted_mfu_percent"] < 100
        assert row["predicted"] * row["predicted_step_s"] == pytest.approx(row["tokens_s_gpu"] * row["step_s"])
        assert row["predicted_gib"] > 0 and (row["fits"] == "yes") == one.fits
    if training.recompute == "selective":
        kept, recomputed = predictions
        assert kept.tokens_per_second > recomputed.tokens_per_second
        assert kept.memory_gib > recomputed.memory_gib
        assert [row["difference_percent"] for row in rows] == [None, None]
        nearest = min(abs(one.tokens_per_second / training.tokens_per_second - 1) for one in predictions)
        assert abs(outside_percent(training, predictions)) in (0.0, pytest.approx(100 * nearest))
    else:
        assert rows[0]["difference_percent"] == pytest.approx(
            100 * (rows[0]["predicted"] / rows[0]["tokens_s_gpu"] - 1)
        )


def test_a_word_that_is_nowhere_is_told() -> None:
    with pytest.raises(InputError, match="no row of a published training has 'no such'"):
        run("no such")
    for only in ("no such", "MPT 30B", mpt.SOURCE):  # best plans are of the other sources
        with pytest.raises(InputError, match=f"no row of a published training but MosaicML's has {only!r}"):
            run_plans(only)


def test_a_best_plan_of_another_shape_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_plans, "BUDGET_SECONDS", 1.0)
    training = next(one for one in TRAININGS if one.name == "Llama 3 8B" and one.num_devices == 8)
    limited, free = best_plans.rows_of(training)
    theirs = min(one.step_seconds for one in predict(training) if one.fits)
    assert limited["source_step_s"] == theirs, "which sums gradients beside computing"
    assert limited["faster_percent"] == pytest.approx(100 * (theirs / limited["step_s"] - 1))
    assert limited["same_shape"] == (limited["ours_tp_pp_dp"] == "1·1·8 ZeRO-3") == (not limited["why"])
    assert free["step_s"] <= limited["step_s"] * (1 + 1e-9)
    assert "why" not in free


def test_where_no_plan_is_found_it_is_said_what_the_sources_own_would_need(monkeypatch: pytest.MonkeyPatch) -> None:
    training = next(one for one in TRAININGS if one.name == "GPT 530B, full recomputation")
    monkeypatch.setattr(best_plans, "BUDGET_SECONDS", 1.0)
    monkeypatch.setattr(none_found, "EXPLAIN_SECONDS", 1.0)
    answer = best_plans._planned(training, limited=True)
    assert not isinstance(answer, Choice)
    row = best_plans.without_plan(training, answer)
    assert row["ours_tp_pp_dp"] == ("none fits" if isinstance(answer, Infeasible) else "none was met")
    assert row["why"].startswith(f"{row['ours_tp_pp_dp']}; the source's is predicted not to fit: ")
    fits = [replace(one, fits=True) for one in predict(training)]
    monkeypatch.setattr(best_plans, "predict", lambda *_, **__: fits)
    assert best_plans.without_plan(training, answer)["why"].endswith("; the source's is predicted to fit")


@pytest.mark.parametrize(
    "fits, faster, said",
    [
        (False, 1.5, "not to fit"),
        (True, 1.03, "3.0 % faster, less than"),
        (True, 0.9, "source's is predicted 10.0 % faster"),
    ],
)
def test_a_reason_is_what_is_predicted_of_the_sources_plan(fits: bool, faster: float, said: str) -> None:
    training = next(one for one in TRAININGS if one.name == "Llama 3 8B" and one.num_devices == 8)
    asked = PlanRequest(workload_of(training, 1), training.cluster(), searches=("uniform",), schedules=("1f1b",))
    request = replace(asked, budget_seconds=0.5)
    choice = Planner().plan(request, Prices(request))
    other = replace(training, tensor_parallel=2)
    theirs = replace(predict(training)[0], fits=fits, step_seconds=faster * choice.simulated_seconds)
    assert said in best_plans.why(other, choice, theirs)
    far = replace(theirs, fits=True, step_seconds=2 * choice.simulated_seconds)
    assert "100 % faster: " in best_plans.why(other, choice, far)
