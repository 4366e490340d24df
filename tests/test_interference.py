"""Which work was undisturbed, and that only such work counts where layers and steps are measured."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.plans.schedule import Pass
from dejavu.profiling import layer_passes
from dejavu.profiling.layer_passes import (
    IN_FLIGHT,
    LEAST_REPEATS,
    MOST_COPIES,
    MOST_REPEATS,
    PARTS,
    _figures,
    _repeat,
    _Work,
)
from dejavu.runtime.process import MEASURING
from dejavu.timing import interference as quiet
from dejavu.timing.clock import Clock
from dejavu.timing.interference import DISTURBED, InterferenceProbe, has_quota, sample_seconds, undisturbed
from dejavu.workload import Workload

LOOKS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30)
ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


@given(LOOKS)
def test_a_look_is_the_slower_of_two_in_turn(looks: list[float]) -> None:
    watch = InterferenceProbe()
    found = [watch.sample(seconds) for seconds in looks]
    assert found == [looks[0], *(max(pair) for pair in itertools.pairwise(looks))]
    assert watch.least_seconds == min(looks)


@given(LOOKS, st.integers(0, 40))
def test_the_undisturbed_and_at_least_so_many(looks: list[float], least: int) -> None:
    watch = InterferenceProbe()
    for seconds in looks:
        watch.sample(seconds)
    chosen = undisturbed([watch.slowdown(seconds) for seconds in looks], least)
    assert chosen == sorted(set(chosen)) and len(chosen) >= min(least, len(looks))
    calm = {k for k, seconds in enumerate(looks) if seconds / min(looks) <= DISTURBED}
    assert calm <= set(chosen) and len(chosen) <= max(least, len(calm))
    left_out = [looks[k] for k in range(len(looks)) if k not in chosen]
    assert not left_out or max(looks[k] for k in chosen) <= min(left_out)


def test_a_loop_takes_time() -> None:
    assert 0.0 < sample_seconds() < 1.0


def asked(workload: Workload, graph: Graph) -> dict[str, Any]:
    signatures = list(dict.fromkeys(layer.signature for layer in graph.layers))
    return {"workload": workload.model_dump(mode="json"), "kind": graph.kind, "signatures": signatures}


def figures(
    workload: Workload,
    monkeypatch: pytest.MonkeyPatch,
    looks: Iterator[float],
    *,
    average: str = "median",
    most_seconds: float = 0.0,
) -> list[tuple[str, str, int]]:
    """Signature, direction and number of repeats of each figure, where the loop takes these seconds in turn."""
    monkeypatch.setattr(quiet, "sample_seconds", lambda: next(looks))
    monkeypatch.setattr(layer_passes, "MOST_SECONDS_PER_LAYER", most_seconds)
    monkeypatch.setattr(layer_passes, "SECONDS_PER_LAYER", 0.0)
    monkeypatch.setattr(layer_passes, "WAIT_SECONDS", math.inf)  # whoever works beside this test
    graph = capture(workload)
    job = {
        "models": [asked(workload, graph)],
        "average": average,
        "least_sample_seconds": math.inf,
        "is_alone": True,
        "until_ended": False,
    }
    return [(row["signature"], row["direction"], row["repeats"]) for row in _figures(job, CPU) if "signature" in row]


def test_one_process_measures_the_layers_of_several_models(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_passes, "SECONDS_PER_LAYER", 0.0)
    models = [tiny, tiny.model_copy(update={"batch_size": 2 * tiny.batch_size})]
    graphs = [capture(one) for one in models]
    job = {
        "models": [asked(*one) for one in zip(models, graphs, strict=True)], "average": "mean", "is_alone": False,
        "until_ended": False, "least_sample_seconds": math.inf,
    }  # fmt: skip
    rows = list(_figures(job, CPU))
    for number, graph in enumerate(graphs):
        found = {row["signature"] for row in rows if row["model"] == number}
        assert found == {layer.signature for layer in graph.layers}
    assert [row["model"] for row in rows] == sorted(row["model"] for row in rows)


@pytest.mark.parametrize(
    "end", [nn.Identity(), nn.Flatten(0), nn.Unflatten(1, (2, 2))], ids=["itself", "flat", "apart"]
)
def test_a_layer_is_measured_in_two_parts_whatever_view_it_returns(end: nn.Module) -> None:
    layer = nn.Sequential(nn.Linear(4, 4), end)
    work = _Work((layer,), torch.randn(2, 4), None, torch.empty(0), splits=True, build=None)
    optimizer = torch.optim.SGD(layer.parameters())
    took = _repeat(work, optimizer, in_parts=True)
    assert {len(took[part]) for part in PARTS} == {IN_FLIGHT}
    plain = _repeat(work, optimizer, in_parts=False)
    assert len(plain["backward"]) == IN_FLIGHT and layer[0].weight.grad is not None


def test_disturbed_repeats_do_not_count(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = figures(tiny, monkeypatch, itertools.repeat(1.0))
    # One look before each layer, one behind each repeat: of the first layer two repeats have a slow look beside them.
    looks = itertools.chain([1.0, 1.0, 2.0], itertools.repeat(1.0))
    assert figures(tiny, monkeypatch, looks, most_seconds=60.0) == calm
    assert {row[0] for row in calm} == {layer.signature for layer in capture(tiny).layers}
    assert {count for _, direction, count in calm if direction == "optimizer"} == {LEAST_REPEATS}
    # Where there is no time for more, the slow ones count too.
    looks = itertools.chain([1.0, 1.0, 2.0], itertools.repeat(1.0))
    hurried = figures(tiny, monkeypatch, looks)
    assert [row[:2] for row in hurried] == [row[:2] for row in calm]
    assert next(count for _, direction, count in hurried if direction == "optimizer") == LEAST_REPEATS


def test_a_layer_that_was_always_disturbed_is_measured_again(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.chain(itertools.repeat(2.0, LEAST_REPEATS + 1), itertools.repeat(1.0))
    found = figures(tiny, monkeypatch, looks)
    calm = figures(tiny, monkeypatch, itertools.repeat(1.0))
    first = [row[:2] for row in calm if row[0] == calm[0][0]]
    assert [row[:2] for row in found] == [*(row[:2] for row in calm), *first]


def test_one_that_is_never_undisturbed_is_counted_all_the_same(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first look every one is slow: nothing waits for ever, and every figure is there."""
    found = figures(tiny, monkeypatch, itertools.chain([1.0], itertools.repeat(2.0)))
    calm = figures(tiny, monkeypatch, itertools.repeat(1.0))
    assert [row[:2] for row in found] == [row[:2] for row in calm] * 2
    assert all(2 <= count <= 4 * MOST_REPEATS for _, _, count in found)


def test_of_a_device_that_pauses_all_repeats_count(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU quota's pauses would look like a disturbance."""
    found = figures(tiny, monkeypatch, iter(()), average="mean")
    assert all(count >= 2 for _, _, count in found) and found


@pytest.mark.parametrize(("groups", "files", "expected"), [
    ("0::/", {}, False),
    ("0::/a/b", {"a/cpu.max": "max 100000", "a/b/cpu.max": "max 100000"}, False),
    ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, True),  # a limit above holds below
    ("0::/", {"cpu.max": "50000 100000"}, True),  # a container that sees itself as the root
    ("2:cpuset:/x\n1:cpu,cpuacct:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "-1"}, False),
    ("2:cpuset:/x\n1:cpu,cpuacct:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "4000"}, True),
    ("1:cpu:/a", {"cpu/cpu.cfs_quota_us": "4000", "cpu/a/cpu.cfs_quota_us": "-1"}, True),
    ("3:memory:/a", {"cpu/a/cpu.cfs_quota_us": "4000"}, False),
])  # fmt: skip
def test_a_quota_of_the_group_or_above_is_seen(
    groups: str, files: dict[str, str], expected: bool, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert has_quota(groups, tmp_path) == expected


class Spinning:
    """As one of torch's stages, with passes that take the processor as long as they are told."""

    number = first_microbatch = 0
    seconds = 0.0

    def forward_one_chunk(self, microbatch: int) -> None:
        stop = time.thread_time() + self.seconds
        while time.thread_time() < stop:
            pass

    def backward_one_chunk(self, microbatch: int, full_backward: bool = True) -> None: ...

    def backward_weight_one_chunk(self, microbatch: int) -> None: ...

    def perform_reduce_grad(self, factor: int) -> None: ...

    def finish_gradients(self) -> None: ...


@pytest.mark.parametrize(("kept", "milliseconds"), [((0, 2), 2), ((1,), 20), ((), 0), (range(99), 2)])
def test_a_clock_counts_the_steps_that_are_kept(kept: Sequence[int], milliseconds: float) -> None:
    clock, stage = Clock(CPU), Spinning()
    clock.watch(stage)
    for stage.seconds in (0.002, 0.02, 0.002):
        clock.begin_step()
        for microbatch in range(3):
            stage.forward_one_chunk(microbatch)
        clock.end_step()
    clock.keep(kept)
    found = clock.median_seconds(0, Pass.FORWARD)
    assert milliseconds / 1e3 <= found < milliseconds / 1e3 + 0.01
    assert [timed.microbatch for timed in clock.last_step] == [0, 1, 2]


SHOW = "go_first(); print(os.getpriority(os.PRIO_PROCESS, 0))"
CAP_SYS_NICE = 23  # linux/capability.h


def test_what_measures_comes_first_where_that_is_permitted() -> None:
    """With this process's privileges and without any; where they do not do, it measures as it is."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    permitted = int(status["CapEff"], 16) >> CAP_SYS_NICE & 1
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for drop, expected in (("", MEASURING if permitted else own), ("os.geteuid() or os.setuid(65534)", own)):
        code = f"import os; from dejavu.runtime.process import go_first; {drop}; {SHOW}".replace("; ;", ";")
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.strip() == str(expected), done.stderr


POLICIES = """
import os
import torch.distributed as dist
from dejavu.runtime.process import claim_device
from dejavu.runtime.process.group import join_group

others = set(os.listdir("/proc/self/task")) - {str(os.getpid())}  # of libraries, asleep
device = claim_device(0)
join_group(device, store=dist.HashStore(), rank=0, world_size=1)
print(device.type, *(os.sched_getscheduler(int(one)) for one in os.listdir("/proc/self/task") if one not in others))
dist.destroy_process_group()
"""


def test_no_thread_of_a_rank_takes_the_core_from_another() -> None:
    """Else gloo's reader spins on the lock of the rank that sends, until its time is up: 4 ms of a message."""
    asked = [sys.executable, "-c", POLICIES]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]).stdout
    kind, *policies = said.split()
    assert kind == "cuda" or (len(policies) > 2 and set(policies) == {str(os.SCHED_BATCH)}), said


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("repeat_seconds, copies", [(1e-3, MOST_COPIES), (0.1, 2), (0.2, 1), (math.inf, 1)])
def test_a_short_layer_takes_turns_with_copies(repeat_seconds: float, copies: int, in_parts: bool) -> None:
    """Forward as in a stage, backward in reversed order for each microbatch; an optimizer's time is one copy's."""
    turns = list[tuple[str, int]]()

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turns.append(("forward", id(self)))
            output = super().forward(x)
            output.register_hook(lambda gradient: turns.append(("backward", id(self))))
            return output

    work = _Work((Layer(8, 8),), torch.rand(2, 8), None, torch.zeros(2), splits=True, build=lambda: Layer(8, 8))
    work = work.with_copies(repeat_seconds)
    names = [id(module) for module in work.modules]
    assert len(names) == copies
    optimizer = torch.optim.SGD([weight for module in work.modules for weight in module.parameters()], lr=0.1)
    taken = _repeat(work, optimizer, in_parts=in_parts)
    forward = [("forward", name) for _ in range(IN_FLIGHT) for name in names]
    backward = [("backward", name) for _ in range(IN_FLIGHT) for name in reversed(names)]
    assert turns[: len(forward)] == forward
    if not in_parts:  # whose second part visits the outputs again
        assert turns[len(forward) :] == backward
    assert all(
        weight.grad is None or not weight.grad.any() for module in work.modules for weight in module.parameters()
    )
    passes = {"forward", *(("backward_input", "backward_weight") if in_parts else ("backward",))}
    assert {name: len(its) for name, its in taken.items() if its} == {
        **dict.fromkeys(passes, copies * IN_FLIGHT),
        "optimizer": 1,
    }
