"""The user's cache: layers and schedules that were worked out before are the same; nothing else is taken for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dejavu.graphs.capture
from dejavu.foundation import user_cache
from dejavu.graphs import kept_layers
from dejavu.graphs.capture import capture
from dejavu.graphs.kept_layers import KeptInUserCache
from dejavu.plans import schedule
from dejavu.simulation import _action_table
from tests.conftest import spread
from tests.test_models import ZOO, graph_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache folder with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dejavu"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the layers that are traced."""
    names, inner = [], dejavu.graphs.capture.trace_layer

    def counted(builder, *rest):  # type: ignore[no-untyped-def]
        names.append(builder.name)
        return inner(builder, *rest)

    monkeypatch.setattr(dejavu.graphs.capture, "trace_layer", counted)
    return names


@pytest.mark.parametrize("name", spread(ZOO, 8))
def test_a_model_is_the_same_from_the_cache(name: str, traced: list[str]) -> None:
    workload = ZOO[name]
    assert capture(workload, kept=KeptInUserCache()) == graph_of(name)
    first = len(traced)
    assert capture(workload, kept=KeptInUserCache()) == graph_of(name)
    is_ours = ":" not in workload.model
    assert len(traced) == first if is_ours else len(traced) > first


def test_another_size_dtype_kind_or_code_is_traced_anew(traced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    workload = ZOO["gpt"]
    halves = workload.model_copy(update={"num_microbatches": 2 * workload.num_microbatches})
    shorter = workload.model_copy(update={"dtype": "bfloat16" if workload.dtype == "float32" else "float32"})
    others = [(halves, "cpu"), (shorter, "cpu"), (workload, "cuda")]
    capture(workload, kept=KeptInUserCache())
    for other, kind in others:
        traced.clear()
        assert capture(other, kind, kept=KeptInUserCache()) == capture(other, kind)  # type: ignore[arg-type]
        assert len(traced) % 2 == 0 and traced
    monkeypatch.setattr(kept_layers, "_code", lambda: ["another torch"])
    traced.clear()
    capture(workload, kept=KeptInUserCache())
    assert traced


def test_a_damaged_entry_is_made_again(cache: Path, traced: list[str]) -> None:
    workload = ZOO["mlp"]
    whole = capture(workload, kept=KeptInUserCache())
    for path in filter(Path.is_file, cache.rglob("layers/*/*")):
        path.write_bytes(path.read_bytes()[:-3])
    first = len(traced)
    assert capture(workload, kept=KeptInUserCache()) == whole and len(traced) == 2 * first
    assert capture(workload, kept=KeptInUserCache()) == whole and len(traced) == 2 * first


def test_what_cannot_be_written_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    user_cache.save("layers", ["key"], b"value")
    assert user_cache.load("layers", ["key"]) is None


def test_no_half_written_entry_is_left(cache: Path) -> None:
    user_cache.save("layers", ["key"], b"value")
    assert user_cache.load("layers", ["key"]) == b"value"
    assert user_cache.load("layers", ["other"]) is None and user_cache.load("others", ["key"]) is None
    assert len([path for path in cache.rglob("*") if path.is_file()]) == 1


@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_a_schedule_is_the_same_from_the_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = 4 * schedule.SCHEDULES[name].stages_per_rank
    made = _action_table.action_table.__wrapped__(schedule.SCHEDULES[name], stages, 8)
    monkeypatch.setattr(_action_table, "actions_of", lambda *asked: pytest.fail("torch is asked again"))
    kept = _action_table.action_table.__wrapped__(schedule.SCHEDULES[name], stages, 8)
    for one, other in zip(made, kept, strict=True):
        assert np.array_equal(one, other) and np.asarray(one).dtype == np.asarray(other).dtype
        assert np.asarray(other).flags.c_contiguous
    with pytest.raises(pytest.fail.Exception):
        _action_table.action_table.__wrapped__(schedule.SCHEDULES[name], stages, 16)


def test_a_schedule_of_another_torch_is_asked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    _action_table.action_table.__wrapped__(schedule.SCHEDULES["1f1b"], 4, 8)
    monkeypatch.setattr(_action_table, "code_of_lists", lambda: ["another torch"])
    monkeypatch.setattr(_action_table, "actions_of", lambda *asked: pytest.fail("torch is asked again"))
    with pytest.raises(pytest.fail.Exception):
        _action_table.action_table.__wrapped__(schedule.SCHEDULES["1f1b"], 4, 8)
