"""Weights out of a checkpoint: they load into the plain module and into transformers, and give the same scores."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.runtime.job import TrainingJob, export
from dejavu.runtime.job.export import MOST_FILE_BYTES, Exported, kept_checkpoint
from dejavu.runtime.single import build_layers, trained_module
from dejavu.runtime.state import MARKER, CheckpointError, State, gather_state, read_checkpoint, save_checkpoint
from dejavu.workload import Workload
from tests.conftest import TINY
from tests.launching import job_of
from tests.test_hugging_face import CONFIGS, logits_of, needs_transformers, whole_class, workload_of


class Own(nn.Module):
    """A list of blocks, of which two share a weight, between two others."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.blocks[2].weight = self.blocks[1].weight
        self.last = nn.Sequential(nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.last(x)
        return scores


class Whole(Own):
    """Its forward pass does more than run its children, so it is one layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Flat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


def own(kind: str = "Own") -> nn.Module:
    return nn.Sequential(Flat(), Own()) if kind == "nested" else _WithFlat(Whole() if kind == "Whole" else Own())


class _WithFlat(nn.Module):
    def __init__(self, inner: Own) -> None:
        super().__init__()
        self.flat = Flat()
        for name, child in inner.named_children():
            setattr(self, name, child)
        self.double = isinstance(inner, Whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.flat(x))
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        return x * 2 if self.double else x


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process only: checkpoints are written by groups."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpointed(workload: Workload, folder: Path, step: int = 3) -> tuple[TrainingJob, Path]:
    """Write a checkpoint of drawn weights, as if it were of that step."""
    layers = build_layers(workload, Draw(), torch.device("cpu"))
    job = TrainingJob(workload, job_of(TINY, folder).binding, Draw(), None, 0, workload.num_steps, str(folder))
    job.write()
    job.progress_path.write_text("".join(json.dumps({"step": k, "loss": 4.0 - k}) + "\n" for k in range(step)))
    return job, save_checkpoint(job.checkpoints, step, gather_state(layers, torch.optim.SGD(layers.parameters(), 0.1)))


def scores(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        plain: Any = module.float().eval()
        found: torch.Tensor = logits_of(plain, inputs) if hasattr(plain, "config") else plain(inputs)
    return found


def check(plain: nn.Module, state: dict[str, torch.Tensor], job: TrainingJob, checkpoint: Path) -> None:
    plain.load_state_dict(state)  # strict: every name is there, and no other
    trained, inputs = trained_module(job, checkpoint)
    torch.testing.assert_close(scores(plain, inputs), scores(trained, inputs), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["Own", "Whole", "nested"])
def test_a_module_of_one_s_own_loads_its_weights(kind: str, tmp_path: Path, alone: None) -> None:
    fields = {"model": "tests.test_export:own", "model_options": {"kind": kind}, "data": "digits"}
    job, checkpoint = checkpointed(Workload(**fields, num_steps=9), tmp_path / "run")
    found = export.export(tmp_path / "run", checkpoint, "safetensors", tmp_path / "out")
    assert (found.step, found.loss) == (3, 2.0)
    check(own(kind), load_file(found.files[0]), job, checkpoint)
    export.export(tmp_path / "run", checkpoint, "state_dict", tmp_path / "pt")
    check(own(kind), torch.load(tmp_path / "pt" / "state_dict.pt", weights_only=True), job, checkpoint)


@needs_transformers
@pytest.mark.parametrize("most_bytes", [MOST_FILE_BYTES, 20_000], ids=["one file", "several files"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_transformers_loads_its_own_model(
    kind: str, most_bytes: int, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MOST_FILE_BYTES", most_bytes)
    (tmp_path / "config").mkdir()
    job, checkpoint = checkpointed(workload_of(kind, tmp_path / "config"), tmp_path / "run")
    found = export.export(tmp_path / "run", checkpoint, "hf", tmp_path / "out")
    assert (len(found.files) > 2) == (most_bytes < MOST_FILE_BYTES)
    plain, info = whole_class(kind).from_pretrained(found.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    trained, inputs = trained_module(job, checkpoint)
    ours = scores(trained, inputs)
    if kind == "bert":  # ours attends to all, which is its own default
        plain.config.is_decoder = False
    torch.testing.assert_close(scores(plain, inputs), ours, atol=1e-5, rtol=0)


@needs_transformers
@pytest.mark.parametrize("kind", ["mixtral", "t5"])
def test_a_traced_model_needs_no_operators_of_transformers(kind: str, tmp_path: Path, alone: None) -> None:
    (tmp_path / "config").mkdir()
    job, checkpoint = checkpointed(workload_of(kind, tmp_path / "config"), tmp_path / "run")
    module, inputs = trained_module(job, checkpoint)
    program = torch.export.export(module, (inputs,), strict=False)
    called = {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert "transformers" not in called
    torch.testing.assert_close(program.module()(inputs), module(inputs), atol=1e-6, rtol=0)


@pytest.mark.integration
def test_what_several_ranks_trained_loads_as_a_whole(tmp_path: Path) -> None:
    """Two stages, whose weights are in two ranks' files."""
    job = job_of(TINY, tmp_path / "run")
    result = launch(job)
    checkpoint = kept_checkpoint(tmp_path / "run")
    assert str(checkpoint) == result.final_checkpoint
    found: Exported = export.export(tmp_path / "run", checkpoint, "safetensors", tmp_path / "out")
    plain, _ = trained_module(job, kept_checkpoint(tmp_path / "run", 6))
    check(plain, load_file(found.files[0]), job, checkpoint)
    assert found.loss == pytest.approx(result.losses[-1])
    with safe_open(found.files[0], "pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "model": "gpt",
            "training": "run",
            "step": str(TINY.num_steps),
            "loss": str(result.losses[-1]),
        }


def test_what_cannot_be_written_is_said(tmp_path: Path, alone: None) -> None:
    job, checkpoint = checkpointed(TINY, tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    for to, folder, said in (
        ("safetensors", "full", "is in use; wanted a folder that is empty or not there"),
        ("onnx", "out", "unknown format 'onnx'; wanted one of safetensors, state_dict, hf"),
        ("hf", "out", "format hf is for models by `hf:PATH`, and this is 'gpt'"),
    ):
        with pytest.raises(InputError, match=said):
            export.export(tmp_path / "run", checkpoint, to, tmp_path / folder)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=r"has no checkpoint of step 9; kept are those of 3"):
        kept_checkpoint(tmp_path / "run", 9)
    with pytest.raises(InputError, match=r"no checkpoint whose step was evaluated, so none is the best"):
        kept_checkpoint(tmp_path / "run", best=True)
    with pytest.raises(InputError, match="has no training"):
        kept_checkpoint(tmp_path)
    empty = replace(job, folder=str(tmp_path / "empty"))
    empty.write()
    with pytest.raises(InputError, match="has no complete checkpoint"):
        kept_checkpoint(tmp_path / "empty")


DAMAGED = (
    b"",
    b"{",
    b"[]",
    b"3",
    b"null",
    b"{}",
    b'"step"',
    b"\xff\xfe",
    b"\0" * 40,
    b'{"step": null}',
    b'{"step": []}',
)


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize("damaged", [3, 6])
def test_a_damaged_marker_costs_its_own_checkpoint_only(
    content: bytes, damaged: int, tmp_path: Path, alone: None
) -> None:
    """The other is exported, and the training that goes on saves its next one."""
    checkpoints = {step: checkpointed(TINY, tmp_path / "run", step)[1] for step in (3, 6)}
    (checkpoints[damaged] / MARKER).write_bytes(content)
    with pytest.raises(InputError, match=f"{checkpoints[damaged].name} cannot be read: its marker is damaged"):
        export.export(tmp_path / "run", kept_checkpoint(tmp_path / "run", damaged), "safetensors", tmp_path / "out")
    whole = kept_checkpoint(tmp_path / "run", 9 - damaged)
    assert export.export(tmp_path / "run", whole, "safetensors", tmp_path / "out").step == 9 - damaged
    later = save_checkpoint(whole.parent, 9, read_checkpoint(whole, {"embedding"}), held_out_loss=1.0)
    assert kept_checkpoint(tmp_path / "run", best=True) == kept_checkpoint(tmp_path / "run") == later


@pytest.mark.parametrize("seed", range(6))
def test_a_checkpoint_that_cannot_be_there_is_said_with_the_one_before(seed: int, tmp_path: Path, alone: None) -> None:
    """A file in the folder's or the checkpoint's place; what is left of it goes."""
    rng = random.Random(seed)
    folder, last = tmp_path / "checkpoints", rng.randint(0, 3)
    state: State = {"model.x": torch.zeros(3)}
    for step in range(1, last + 1):
        kept = save_checkpoint(folder, step, state)
    before = f"the checkpoint before it, {kept}, is intact" if last else "there is no checkpoint before it"
    if last:
        (folder / f"step-{last + 1:08d}").write_text("")
        said = rf"step-0000000{last + 1} could not be completed: NotADirectoryError: .*; {before}$"
    else:
        (tmp_path / "checkpoints").write_text("")
        said = rf"{folder} can hold no checkpoint: FileExistsError: .*; wanted a folder to write to; {before}$"
    with pytest.raises(CheckpointError, match=said):
        save_checkpoint(folder, last + 1, state)
    assert not list(tmp_path.glob("**/*.partial"))
