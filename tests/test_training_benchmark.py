"""What `benchmarks.training` trains: every model under every schedule in every way that it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.training.losses import MODELS, SCHEDULES, WAYS, case_of
from benchmarks.training.throughput import MODEL, VOCABULARY, written_workload
from dejavu.runtime.layout import Layout
from dejavu.workload.loader import load_workload
from dejavu.workload.models import layers_of
from tests.test_hugging_face import installed

KNOWN = [name for name, family in MODELS.items() if installed or not family.model.startswith("hf:")]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", KNOWN)
def test_every_way_is_a_training_of_the_whole_model(model: str, schedule: str, tmp_path: Path) -> None:
    left_out = set()
    for way, how in WAYS.items():
        case = case_of(model, schedule, way, 2, 3, tmp_path)
        if case is None:
            left_out.add(way)
            continue
        job, builders = case.job, layers_of(case.job.workload)
        stages = job.binding.plan.stages
        assert (stages[0].start, stages[-1].stop) == (0, len(builders))
        assert len({stage.stop - stage.start for stage in stages}) > 1, "the cuts are uneven"
        Layout(job.binding, job.workload.microbatch_size)  # rejects what does not fit the microbatches
        assert bool(builders[-1].tied) == how.tied
    assert left_out <= {
        "tied ends on different stages",
        *(way for way, how in WAYS.items() if how.shards or how.first.context_parallel > 1),
    }
    assert ("tied ends on different stages" in left_out) == (MODELS[model].tied is None)


def test_two_models_of_the_zoo_are_trained_in_shards(tmp_path: Path) -> None:
    trained = [name for name in KNOWN if case_of(name, "1f1b", "2 shards and 1", 2, 0, tmp_path)]
    assert {"gpt", "llama", "mixtral"} <= set(trained)
    by_expert = [way for way, how in WAYS.items() if how.first.expert_parallel]
    assert by_expert and all(case_of("mixtral", "zbv", way, 2, 0, tmp_path) for way in by_expert)
    assert not any(case_of("llama", "zbv", way, 2, 0, tmp_path) for way in by_expert)
    split = [way for way, how in WAYS.items() if how.first.sequence_parallel and way not in by_expert]
    split += [way for way, how in WAYS.items() if how.first.context_parallel > 1]
    assert len(split) >= 4
    assert all(case_of(name, "zbv", way, 2, 0, tmp_path) for name in ("gpt", "llama", "mixtral") for way in split)


def test_the_throughput_is_of_ten_million_parameters(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(bytes(2 * 1000))
    workload = load_workload(written_workload(tmp_path, tokens, 300, 8, seed=1))
    parameters = sum(one.numel() for builder in layers_of(workload) for one in builder.build().parameters())
    assert parameters == pytest.approx(10e6, rel=0.1)
    assert workload.num_microbatches == 8 and workload.model_options == MODEL and VOCABULARY == 4096
