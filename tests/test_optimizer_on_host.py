"""The optimizer's state in the host's memory: the same weights to the last bit, wherever its state was before."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.launch.launcher import launch
from dejavu.plans import Offload
from dejavu.runtime.optimizer import OPTIMIZERS, make_optimizer
from dejavu.runtime.process.state_files import DiskError, StateFiles
from dejavu.runtime.single import train_single
from dejavu.runtime.state import StateOnHost, gather_state, restore_state
from dejavu.workload import OptimizerSettings, SyntheticSettings, TrialSettings, Workload
from tests.conftest import spread

STEPS = 4
BASE = {"learning_rate": 0.1, "weight_decay": 0.2}
SETTINGS = {
    "adamw": OptimizerSettings(**BASE),
    "adamw, matrices": OptimizerSettings(**BASE, decayed="matrices"),
    "sgd": OptimizerSettings(name="sgd", **BASE),
    "sgd, momentum": OptimizerSettings(name="sgd", momentum=0.9, **BASE),
}
CASES = [
    pytest.param(settings.model_copy(update={"master_weights": masters}), id=f"{name}{', masters' * masters}")
    for (name, settings), masters in itertools.product(SETTINGS.items(), (False, True))
]


def module_of(settings: OptimizerSettings) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    return made.to(torch.bfloat16 if settings.master_weights else torch.float32)


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Steps with gradients that depend on their number alone; one weight has none in odd steps."""
    for number in numbers:
        torch.manual_seed(number)
        for place, weight in enumerate(module.parameters()):
            gradient = torch.randn(weight.shape)
            weight.grad = None if place == 2 and number % 2 else gradient.to(weight.grad_dtype or weight.dtype)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number)
        optimizer.step()


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def kept_on(place: str, folder: Path) -> dict[str, Any]:
    """Options of an optimizer whose state is there."""
    return {"files": StateFiles(folder)} if place == "disk" else {"on_host": place == "host"}


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("settings", CASES)
def test_weights_and_state_are_the_same_to_the_last_bit(
    settings: OptimizerSettings, place: str, tmp_path: Path
) -> None:
    plain, away = module_of(settings), module_of(settings)
    first = copy.deepcopy(dict(plain.state_dict()))
    here = make_optimizer(settings, plain.parameters())
    there = make_optimizer(settings, away.parameters(), **kept_on(place, tmp_path))
    assert isinstance(there, StateOnHost) and not isinstance(here, StateOnHost)
    steps(plain, here, range(STEPS))
    steps(away, there, range(STEPS))
    assert is_same(gather_state(plain, here), gather_state(away, there))
    assert not is_same(first, dict(plain.state_dict()))
    assert not list(tmp_path.iterdir())
    assert [len(group["params"]) for group in there.param_groups] == [len(g["params"]) for g in here.param_groups]


@pytest.mark.parametrize("settings", CASES)
@pytest.mark.parametrize(
    ("before", "then"), [("host", "device"), ("device", "host"), ("disk", "host"), ("device", "disk")]
)
def test_a_saved_state_goes_on_wherever_it_is_kept_then(
    settings: OptimizerSettings, before: str, then: str, tmp_path: Path
) -> None:
    whole, begun, resumed = (module_of(settings) for _ in range(3))
    unbroken = make_optimizer(settings, whole.parameters())
    steps(whole, unbroken, range(STEPS))
    first = make_optimizer(settings, begun.parameters(), **kept_on(before, tmp_path))
    steps(begun, first, range(STEPS // 2))
    second = make_optimizer(settings, resumed.parameters(), **kept_on(then, tmp_path))
    restore_state(resumed, second, gather_state(begun, first))
    steps(resumed, second, range(STEPS // 2, STEPS))
    assert is_same(gather_state(resumed, second), gather_state(whole, unbroken))


@pytest.mark.parametrize("settings", spread(CASES, 3))
def test_all_state_is_in_files_but_for_what_torch_counts(settings: OptimizerSettings, tmp_path: Path) -> None:
    files, module = StateFiles(tmp_path), module_of(settings)
    optimizer = make_optimizer(settings, module.parameters(), files=files)
    steps(module, optimizer, range(STEPS))
    in_files = Path("/proc/self/maps").read_text()
    held = [one for state in optimizer.state.values() for one in state.values() if one is not None and one.dim()]
    assert sum(one.nbytes for one in held) == files.used_bytes
    assert in_files.count(f"{tmp_path}/state-") == len(held)
    del optimizer, held
    gc.collect()
    assert f"{tmp_path}/state-" not in Path("/proc/self/maps").read_text()


def test_disks_without_room_are_named_with_what_was_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, real = SETTINGS["adamw"], os.posix_fallocate

    def full(file: int, start: int, size: int) -> None:
        if files.used_bytes + size > 1024:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    files, module = StateFiles(tmp_path), module_of(settings)
    with pytest.raises(
        DiskError, match=rf"{tmp_path}: No space left on device for 64 bytes, after the 1,024 that this"
    ):
        steps(module, make_optimizer(settings, module.parameters(), files=files), range(1))
    assert not list(tmp_path.iterdir())
    with pytest.raises(DiskError, match="nowhere: No such file or directory"):
        StateFiles(tmp_path / "nowhere").zeros(torch.Size([1]), torch.float32)


def test_the_fused_step_which_weights_of_gpus_get_is_as_near_as_rounding() -> None:
    settings = SETTINGS["adamw"]
    plain, away = module_of(settings), module_of(settings)
    here, there = (
        make_optimizer(settings, plain.parameters()),
        make_optimizer(settings, away.parameters(), on_host=True),
    )
    for group in there.param_groups:
        group |= {"fused": True, "foreach": False}
    steps(plain, here, range(STEPS))
    steps(away, there, range(STEPS))
    for one, other in zip(plain.parameters(), away.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_state_is_read_before_a_step_changes_it() -> None:
    """Hooks run before a step, whatever was made in this process before: until then a snapshot may be copied."""
    settings = SETTINGS["adamw"]
    make_optimizer(settings, module_of(settings).parameters())
    module, told = module_of(settings), list[int]()
    optimizer = make_optimizer(settings, module.parameters(), on_host=True)
    optimizer.register_step_pre_hook(lambda *_: told.append(1))
    steps(module, optimizer, range(1))
    assert told


def test_there_is_one_for_every_optimizer() -> None:
    assert {key[:2] for key in OPTIMIZERS if key[2]} == {key[:2] for key in OPTIMIZERS if not key[2]}


@pytest.mark.integration
@pytest.mark.slow
def test_a_training_goes_on_where_the_state_is_kept_elsewhere_and_back(tmp_path: Path) -> None:
    """From ranks with ZeRO, state and weights on the host, by a checkpoint, to other cuts with none there, and back."""
    workload = Workload(
        model_options={"num_blocks": 2, "width": 16, "num_heads": 2},
        data="synthetic",
        synthetic=SyntheticSettings(num_classes=20),
        sequence_length=8,
        batch_size=8,
        num_microbatches=2,
        num_steps=6,
        checkpoint_every=2,
        optimizer=OptimizerSettings(learning_rate=1e-2, clip_norm=0.5),
        trials=TrialSettings(count=0),
    )
    on_host, fetched = Offload(None, "host"), Offload(None, "host", "host")
    away = by_hand("1f1b", (0, 1, 4), [one_device(2, zero_level=1, offload=on_host), one_device(offload=fetched)], 2)
    disk = one_device(offload=Offload(None, "nvme"))
    here = by_hand("1f1b", (0, 3, 4), [disk, one_device()], 2, disk_folder=str(tmp_path))
    job = replace(job_of(workload, away, 2), folder=str(tmp_path / "run"))
    for binding, stop, resumed in ((away, 2, None), (here, 4, 2), (away, 6, 4)):
        done = launch(replace(job, binding=binding, last_step=stop))
        assert done.resumed_from_step == resumed
    assert done.losses == pytest.approx(train_single(workload, job.draw, range(6)), abs=1e-5)
