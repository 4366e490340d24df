"""The campaign on a GPU: what it does with its time, what it writes and when, and ranks that share a device."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.gpu import ship
from benchmarks.gpu.__main__ import main as gpu
from benchmarks.gpu.parts import MEASURED_PARTS, Campaign, num_steps
from benchmarks.gpu.questions import NUM_RANKS, Question, questions
from benchmarks.gpu.results import Results, compared
from benchmarks.gpu.schedule import Part, Timetable, Unit
from benchmarks.gpu.site import NoDeviceError, Site, check_cuda
from benchmarks.pipeline.plans import by_hand, even_bounds, job_of, one_device
from benchmarks.pipeline.ranks import train_in_turn
from dejavu.cluster import this_machine
from dejavu.cost.kernels.calibration import calibration_kernels
from dejavu.init import Draw
from dejavu.launch.preflight import check_devices
from dejavu.launch.rendezvous import Host
from dejavu.plans.schedule import default_schedules
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.profiles.kernel import Kernel
from dejavu.profiling.kernels import (
    LEAST_REPEATS,
    MOST_LAUNCHES,
    MOST_REPEATS,
    MOST_TOGETHER,
    OperatorError,
    _time_on_gpu,
    time_work,
)
from dejavu.profiling.layer_passes import IN_FLIGHT, _repeat, _Work
from dejavu.runtime.process import claim_device
from dejavu.runtime.process.failures import LaunchError
from dejavu.runtime.process.group import SHARE_GPUS, backend_of, to_receive, to_send
from dejavu.runtime.single import train_single
from dejavu.workload import SyntheticSettings, TrialSettings, Workload
from tests.rows import row

CPU = torch.device("cpu")
PREDICTED = {"part": "layers", "precision": "float32", "seconds": 2.0, "low_seconds": 1.0, "high_seconds": 3.0}


def timetable(seconds: float) -> tuple[Timetable, list[str]]:
    told: list[str] = []
    return Timetable(seconds, told.append, lambda: told.append("saved")), told


def units(*work: Callable[[], None]) -> Callable[[], list[Unit]]:
    return lambda: [Unit(str(number), one) for number, one in enumerate(work)]


def test_what_fails_costs_itself_alone_and_everything_is_told() -> None:
    table, told = timetable(60.0)
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("no such kernel")

    table.run(Part("layers", 1.0, 0.1, units(fail, lambda: ran.append(1))))
    assert ran == [1]
    assert [one.outcome for one in table.done] == ["failed", "done"]
    assert table.done[0].why == "ValueError: no such kernel"
    assert told.count("saved") == 2
    assert any("layers, 0: failed" in said and "no such kernel" in said for said in told)


def test_what_does_not_fit_into_its_part_is_skipped_and_said_to_be() -> None:
    table, told = timetable(60.0)
    table.run(Part("layers", 0.5, 31.0, units(lambda: pytest.fail("it was run"))))
    (one,) = table.done
    assert one.outcome == "skipped" and "may take 31 s" in one.why
    assert told[-1] == "saved" and "skipped" in told[-2]


def test_a_unit_can_ask_what_is_left_of_its_part_s_time() -> None:
    table, _ = timetable(60.0)
    found: list[float] = []
    table.run(Part("searches", 0.5, 0.0, units(lambda: found.append(table.part_left_seconds))))
    assert 29.0 < found[0] <= 30.0 and 59.0 < table.left_seconds <= 60.0


def test_the_next_unit_is_expected_to_take_what_the_last_one_took() -> None:
    table, _ = timetable(1.0)
    table.run(Part("layers", 0.5, 0.0, units(lambda: time.sleep(0.4), lambda: pytest.fail("it was run"))))
    assert [one.outcome for one in table.done] == ["done", "skipped"]


def test_a_unit_is_cut_off_when_the_campaign_s_time_is_over() -> None:
    table, _ = timetable(0.3)
    table.run(Part("pipelines", 1.0, 0.0, units(lambda: time.sleep(30.0))))
    assert [one.outcome for one in table.done] == ["cut off"]
    assert table.left_seconds < 0


def results(tmp_path: Path, *, rehearsal: bool = False) -> Results:
    provenance = {
        "rehearsal": rehearsal, "device": "NVIDIA H200", "device_type": "H200-SXM-141GB", "devices": 1,
        "driver": "580", "torch": "2.13.0+cu130", "cuda": "13.0", "date_utc": "2026-11-24T00:00:00+00:00",
    }  # fmt: skip
    return Results(tmp_path / "gpu.json", ProfileDatabase(tmp_path / "rows"), provenance)


def test_a_prediction_is_on_the_disk_with_its_hash_before_it_is_returned(tmp_path: Path) -> None:
    found = results(tmp_path)
    made = found.predict("gpt", [PREDICTED])
    (kept,) = json.loads(found.path.read_text())["predictions"]
    assert kept["sha256"] == made.sha256 == hashlib.sha256(json.dumps([PREDICTED], sort_keys=True).encode()).hexdigest()
    assert kept["rows"] == [PREDICTED] and kept["made_at"] == made.made_at.isoformat()


@pytest.mark.parametrize(("measured", "inside", "difference"), [(2.0, True, 0.0), (4.0, False, -50.0)])
def test_differences_and_ranges_of_the_table(tmp_path: Path, measured: float, inside: bool, difference: float) -> None:
    found = results(tmp_path)
    found.rows.append(compared({**PREDICTED, "source": "roofline"}, measured))
    (row,) = found.rows
    assert row["in_range"] is inside and row["difference_percent"] == pytest.approx(difference)
    summary = found.summary()
    assert summary["layers_float32_mape_percent"] == pytest.approx(abs(difference))
    assert summary["layers_in_90_percent_range"] == f"{int(inside)} of 1"


def test_errors_of_what_measured_layers_predict_are_apart_from_blind_ones(tmp_path: Path) -> None:
    found = results(tmp_path)
    predicted = {**PREDICTED, "part": "steps", "source": "roofline"}
    found.rows += [compared(predicted, 4.0, from_layers_difference_percent=off) for off in (-3.0, 1.0)]
    summary = found.summary()
    assert summary["steps_float32_mape_percent"] == pytest.approx(50.0)
    assert summary["steps_float32_from_layers_mape_percent"] == pytest.approx(2.0)


def campaign(tmp_path: Path) -> Campaign:
    machine = this_machine()
    device = next(iter(machine.device_types.values()))
    site = Site(machine, device, 1, "gloo", "", is_rehearsal=True)
    return Campaign(site, questions(2**37, rehearsal=True), results(tmp_path))


def test_messages_are_measured_before_anything_is_predicted_from_them(tmp_path: Path) -> None:
    parts = campaign(tmp_path).parts(timetable(60.0)[0])
    names, ends = [one.name for one in parts], [one.until for one in parts]
    assert names[:3] == ["calibration", "messages", "predictions"] and sorted(ends) == ends and ends[-1] == 1.0
    assert max(names.index("trainings"), names.index("searches")) < names.index("pipelines")
    assert names[3:] == list(MEASURED_PARTS)


def test_a_part_that_there_is_not_is_refused_before_anything_runs(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(gpu)
    done = CliRunner().invoke(app, ["--rehearse", "--parts", "layers, pipeline", "--json", str(tmp_path / "gpu.json")])
    assert done.exit_code == 2 and "pipeline; wanted layers, steps" in " ".join(done.output.split())
    assert not list(tmp_path.iterdir())


def test_kernels_measured_before_one_fails_are_kept_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(kernels: Sequence[Kernel], device_type: str) -> Iterator[Measurement]:
        yield row(kind="operator", subject=kernels[0].subject, device_type=device_type, seconds=1e-3)
        raise OperatorError("the second one")

    monkeypatch.setattr("benchmarks.gpu.parts.measure_kernels", measure)
    found = campaign(tmp_path)
    with pytest.raises(OperatorError):
        found._compare_kernels("kernels", calibration_kernels(found.site.device)[:2])
    (one,) = found.results.rows
    assert one["measured_ms"] == pytest.approx(1.0)
    assert found.results.database.read(kind="operator")["seconds"].to_pylist() == [1e-3]


@pytest.mark.parametrize(("seconds", "steps"), [(0.05, 6), (0.2, 4), (1.0, 4)])
def test_of_long_steps_fewer_are_trained(seconds: float, steps: int) -> None:
    assert num_steps(seconds) == steps


def ship_to(folder: Path, found: Results) -> Any:
    return CliRunner().invoke(_app(), [str(found.rows_path), "--database", str(folder)])


def _app() -> Any:
    import typer

    app = typer.Typer()
    app.command()(ship.main)
    return app


def test_measured_rows_ship_with_their_provenance(tmp_path: Path) -> None:
    found = results(tmp_path)
    found.database.append([row(kind="operator", subject="a", device_type="H200-SXM-141GB", seconds=1e-3)])
    found.save()
    told = json.loads(pq.read_schema(found.rows_path).metadata[b"provenance"])
    assert told == found.provenance
    done = ship_to(tmp_path / "shipped", found)
    assert done.exit_code == 0 and "driver 580" in done.output and "CUDA 13.0" in done.output
    assert ProfileDatabase(tmp_path / "shipped").read().num_rows == 1
    assert "0 rows added" in ship_to(tmp_path / "shipped", found).output


def test_only_kernels_that_other_models_have_ship_with_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers stay behind, and so do sums whose records do not say which dimension is summed, and what was short."""
    found, named = results(tmp_path), {"device_type": "H200-SXM-141GB"}
    rows_summed = Kernel(family="reduction", name="sum", dtype="float32", m=1024, n=8192, is_indexed=True)
    found.database.append(
        [
            row(kind="operator", subject="a", name="matmul mm", seconds=1e-3, **named),
            row(kind="operator", subject="b", name="matmul mm", seconds=1e-5, **named),
            row(kind="operator", subject="c", name="reduction sum", seconds=1e-3, **named),
            row(kind="operator", subject="e", name="reduction sum", seconds=1e-3, extra=rows_summed.to_json(), **named),
            row(kind="launch", subject="forward", name="launch", seconds=1e-5, **named),
            row(kind="layer", subject="d", name="block", direction="forward", seconds=1e-3, **named),
        ]
    )
    found.save()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(_app(), [str(found.rows_path), "--least-microseconds", "60"])
    assert done.exit_code == 0, done.output
    assert ProfileDatabase(ship.SHIPPED).read()["subject"].to_pylist() == ["a", "e"]


def test_rows_of_a_rehearsal_do_not_ship(tmp_path: Path) -> None:
    found = results(tmp_path, rehearsal=True)
    found.save()
    done = ship_to(tmp_path / "shipped", found)
    assert done.exit_code == 2 and not (tmp_path / "shipped").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_it_says_what_torch_lacks_and_what_to_install() -> None:
    with pytest.raises(NoDeviceError, match=r"built with(out)? CUDA.*rehearse: make gpu-rehearsal"):
        check_cuda()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rehearsal_plans_for_two_devices_and_shares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_GPUS, "0")
    site = Site.here(rehearsal=True)
    assert sum(site.cluster.device_counts.values()) == NUM_RANKS == len(site.places)
    assert max(site.places) < site.num_devices
    assert "gloo" in site.backend and site.provenance()["rehearsal"]


@pytest.mark.parametrize("rehearsal", [True, False])
def test_every_schedule_and_precision_is_asked(rehearsal: bool) -> None:
    asked = questions(2**37, rehearsal=rehearsal)
    assert len(asked) == len({str(one) for one in asked}) == 9
    for one in asked:
        assert [plan.schedule for plan in one.plans(8, "H200")] == list(default_schedules())
        assert all(len(plan.ranks) == NUM_RANKS for plan in one.plans(8, "H200"))


def test_small_gpus_get_smaller_microbatches() -> None:
    large, small = (questions(size, rehearsal=False) for size in (2**37, 2**34))
    for a, b in zip(large, small, strict=True):
        assert a.workload.microbatch_size == 4 * b.workload.microbatch_size


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_sent_arrives_whole_however_it_lies(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    monkeypatch.setenv(SHARE_GPUS, str(int(shared)))
    assert backend_of(CPU) == "gloo" and backend_of(torch.device("cuda")) == ("gloo" if shared else "nccl")
    whole = torch.arange(24.0).view(2, 3, 4)
    for part in (whole, whole[:, 1:], whole.transpose(0, 1)):
        sent, arriving = to_send(part), to_receive(part)
        assert sent.is_contiguous() and arriving.is_contiguous()
        assert torch.equal(sent, part) and (arriving.shape, arriving.dtype) == (part.shape, part.dtype)
        assert (arriving is part) == (part.is_contiguous() and not shared)


@pytest.mark.integration
def test_ranks_that_share_a_device_have_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages through the host's memory, under a schedule of two stages a rank."""
    workload = Workload(
        model_options={"num_blocks": 2, "width": 32, "num_heads": 2},
        data="synthetic",
        synthetic=SyntheticSettings(num_classes=32),
        sequence_length=16,
        batch_size=8,
        num_microbatches=4,
        trials=TrialSettings(count=0),
    )
    monkeypatch.setenv(SHARE_GPUS, "1")
    job = job_of(workload, by_hand("zbv", even_bounds(4, 4), [one_device()] * 2, 4), 3)
    (shared,) = train_in_turn([job])
    assert shared.losses == pytest.approx(train_single(workload, Draw(), range(3)), abs=1e-5)


class FakeEvent:
    """An event of a GPU that works as fast as its host."""

    told: ClassVar[list[str]] = []
    now = staticmethod(time.perf_counter)

    def __init__(self, *, enable_timing: bool) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.told.append("event")
        self.seconds = self.now()

    def synchronize(self) -> None: ...

    def elapsed_time(self, stop: FakeEvent) -> float:
        return 1e3 * (stop.seconds - self.seconds)


@pytest.fixture
def gpu_is_faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield what the GPU is told, in order."""
    told = FakeEvent.told
    told.clear()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: told.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: told.append(f"sleep {cycles}"))
    yield told


def test_a_gpu_sleeps_until_all_repeats_are_launched(gpu_is_faked: list[str]) -> None:
    """First a look at how long it takes, of several launches between two events; then a long kernel's repeats."""
    seconds = _time_on_gpu(lambda: time.sleep(1e-3))
    look, rest = gpu_is_faked[:5], gpu_is_faked[5:]
    assert [one.split()[0] for one in look] == ["wait", "sleep", "event", "event", "wait"]
    assert rest[0].startswith("sleep") and rest[1:] == ["event"] * (2 * len(seconds)) + ["wait"]
    assert int(rest[0].split()[1]) >= 2e9 * len(seconds) * 1e-3
    assert LEAST_REPEATS <= len(seconds) <= MOST_REPEATS and 1e-3 <= median(seconds) < 2e-3


@pytest.mark.parametrize(("each_seconds", "together"), [(0.0, MOST_TOGETHER), (50e-6, 2), (300e-6, 1)])
def test_short_kernels_are_timed_several_together(
    gpu_is_faked: list[str], monkeypatch: pytest.MonkeyPatch, each_seconds: float, together: int
) -> None:
    """Recording events takes time of the GPU's own, which a repeat of several launches divides among them."""
    clock = [0.0]
    monkeypatch.setattr(FakeEvent, "now", staticmethod(lambda: clock[0]))

    def work() -> None:
        gpu_is_faked.append("launch")
        clock[0] += each_seconds

    seconds = _time_on_gpu(work)
    last_sleep = max(k for k, one in enumerate(gpu_is_faked) if one.startswith("sleep"))
    once = ["event", *["launch"] * together, "event"]
    assert gpu_is_faked[last_sleep + 1 :] == once * len(seconds) + ["wait"]
    assert seconds == pytest.approx([each_seconds] * len(seconds), abs=1e-8)
    assert len(seconds) >= LEAST_REPEATS and len(seconds) * together <= MOST_LAUNCHES


def test_passes_of_a_layer_follow_each_other_without_a_wait(gpu_is_faked: list[str]) -> None:
    """Four microbatches forward, four backward and the optimizer, each between two events, as in a step."""
    layer = torch.nn.Linear(4, 4)
    work = _Work((layer,), torch.rand(2, 4), None, torch.zeros(2), splits=True, build=None)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for in_parts, names in ((False, {"backward"}), (True, {"backward_input", "backward_weight"})):
        taken = _repeat(work, optimizer, in_parts=in_parts)
        passes = {"forward", *names}
        assert {name: len(found) for name, found in taken.items() if found} == {
            **dict.fromkeys(passes, IN_FLIGHT),
            "optimizer": 1,
        }
        assert all(one.seconds > 0 for found in taken.values() for one in found)
    assert "wait" not in gpu_is_faked


@pytest.mark.gpu
def test_ranks_beyond_the_gpus_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_GPUS, "1")
    assert claim_device(torch.cuda.device_count()) == torch.device("cuda", 0)


@pytest.mark.gpu
def test_a_host_that_launches_slowly_makes_no_kernel_slow() -> None:
    x = torch.rand(256, device="cuda")

    def launch_late() -> None:
        time.sleep(2e-4)
        torch.relu(x)

    assert median(time_work(launch_late, x.device)) < 1e-4


@pytest.mark.gpu
def test_work_on_a_gpu_is_timed_by_its_events() -> None:
    x = torch.rand(256, 256, device="cuda")
    seconds = time_work(lambda: x @ x, x.device)
    assert len(seconds) >= LEAST_REPEATS and all(one > 0 for one in seconds)


@pytest.mark.parametrize("needed_bytes", [None, [2**30, 2**30]])
def test_a_launch_on_gpus_whose_memory_nobody_asked_for_is_checked(
    needed_bytes: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no memory is predicted, hosts are not asked what their GPUs have free."""
    monkeypatch.setenv(SHARE_GPUS, "1")
    job = job_of(question().workload, by_hand("1f1b", even_bounds(4, 2), [one_device()] * 2, 4), 3)
    free = () if needed_bytes is None else (2**31,)
    host = Host("localhost", "localhost", "", "lo", 1, 2**34, free, 1, sees_folder=True)
    check_devices(job, [host], needed_bytes)
    if needed_bytes:
        with pytest.raises(LaunchError, match="device 0 of localhost need 4"):
            check_devices(job, [host], [2 * one for one in needed_bytes])


def question() -> Question:
    return questions(2**37, rehearsal=True)[0]


def test_a_plan_of_one_rank_has_every_layer() -> None:
    plan = question().whole(8, "cpu")
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 8)] and plan.num_microbatches == 4
