"""Weights and optimizer state under global names, whatever stage holds them: trials' files and distributed checkpoints.

A name is `model.<layer>.<parameter>` or `optimizer.<layer>.<parameter>.<what>`, so a state saved under one plan loads
under any other.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from dejavu.errors import DejavuError
from dejavu.runtime.job import write_json

MARKER = "COMPLETE.json"
KEPT = 2
State = dict[str, torch.Tensor]


class CheckpointError(DejavuError):
    """A state that does not hold what a stage needs."""


def gather_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """All tensors of the module and its optimizer, by their global names."""
    state = {f"model.{name}": tensor.detach() for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        for what, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                state[f"optimizer.{name}.{what}"] = torch.as_tensor(value)
    return state


def restore_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, torch.Tensor]) -> None:
    """Put a gathered state back.

    Raises:
        CheckpointError: a weight of the module is missing.
    """
    missing = [name for name in module.state_dict() if f"model.{name}" not in state]
    if missing:
        raise CheckpointError(
            f"the saved state lacks {missing[0]!r} and {len(missing) - 1} more of the stage's weights"
        )
    module.load_state_dict({name: state[f"model.{name}"] for name in module.state_dict()})
    for name, parameter in module.named_parameters():
        prefix = f"optimizer.{name}."
        found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if found:
            optimizer.state[parameter] = {
                what: value if value.dim() == 0 else value.to(parameter.device) for what, value in found.items()
            }


def belongs(name: str, layers: set[str]) -> bool:
    """Whether a global name is of one of these layers."""
    return name.split(".", 2)[1] in layers


def save_trial(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A whole model's state as one safetensors file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Copies, because the format refuses weights that two names share.
        state = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in gather_state(module, optimizer).items()
        }
        save_file(state, aside)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_trial(path: Path, layers: set[str]) -> State:
    """Of a trial's state, what these layers need; nothing else is read."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if belongs(name, layers)}  # noqa: SIM118


def save_checkpoint(folder: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """All ranks together: write aside, rename, and complete by a marker that is written last; older ones go."""
    final = folder / f"step-{step:08d}"
    aside = folder / f"step-{step:08d}.partial"
    if dist.get_rank() == 0:
        for stale in (aside, final):
            shutil.rmtree(stale, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dcp.save(gather_state(module, optimizer), checkpoint_id=aside)
    dist.barrier()
    if dist.get_rank() == 0:
        aside.rename(final)
        write_json(final / MARKER, {"step": step, "world_size": dist.get_world_size()})
        for old in complete_checkpoints(folder)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return final


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete ones, oldest first."""
    return sorted(
        path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and (path / MARKER).exists()
    )


def checkpoint_step(checkpoint: Path) -> int:
    """How many steps had been trained when it was saved."""
    return int(json.loads((checkpoint / MARKER).read_text())["step"])


def read_checkpoint(checkpoint: Path, layers: set[str]) -> State:
    """Of a distributed checkpoint, what these layers need."""
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state: State = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if isinstance(entry, dcp.metadata.TensorStorageMetadata) and belongs(name, layers)
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state
