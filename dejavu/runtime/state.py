"""Weights and optimizer state under global names, independent of stages: trials' files and distributed checkpoints.

A name is `model.<layer>.<parameter>` or `optimizer.<layer>.<parameter>.<what>`, so a state saved under one plan loads
under any other. What an optimizer knows of all weights together is `optimizer.*.<what>`, the same on every rank. What a
rule of combining gradients knows of replicas is `gradients.<layer>.judged`.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.processes.files import largest_file_bytes, write_json
from dejavu.runtime.job.checkpoint_reader import CheckpointReader
from dejavu.runtime.process.state_files import StateFiles
from dejavu.workload import Workload
from dejavu.workload.pretrained import Pretrained

MARKER = "COMPLETE.json"
WEIGHT = "model."  # how the name of a weight begins
MASTER = "master"  # the key of a weight's float32 master in the optimizer's state and in checkpoints
USED = "used"  # the key of what says that a weight had a gradient, where the optimizer knows nothing else of it
_COUNTS = ("step", USED)  # of a weight's state what is no tensor like the weight; torch keeps it on the CPU
OF_ALL = "*"  # the key of what an optimizer's state has of all weights together
KEPT = 2  # the last ones; and the best, of those that were evaluated on what is held out
State = dict[str, torch.Tensor]


class StateOnHost(torch.optim.Optimizer):
    """An optimizer whose state is in the host's memory, whatever devices its weights are on.

    Attributes:
        files: or there, on the node's disks.
    """

    files: StateFiles | None = None


class Remembers(Protocol):
    """What a stage knows besides weights and the optimizer's state; a module has it as its `besides`."""

    def remembered(self) -> State:
        """Return it by global names, `<kind>.<layer>.<what>`."""

    def recall(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take of a gathered state what is its own; there may be nothing."""


class CheckpointError(DejavuError):
    """A saved state lacks what a stage needs, or could not be saved."""


def gather_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return all tensors of the module and its optimizer, by their global names.

    A module that holds masters in the weights' place has both.
    """
    state = {f"model.{name}": tensor.detach() for name, tensor in module.state_dict().items()}
    for name, master in _masters(module).items():
        state[f"optimizer.{name}.{MASTER}"] = state[f"model.{name}"]
        state[f"model.{name}"] = master.detach().to(_computes_in(module))
    for name, parameter in module.named_parameters():
        for what, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                state[f"optimizer.{name}.{what}"] = torch.as_tensor(value)
    for what, value in states_of(optimizer).get(OF_ALL, {}).items():
        state[f"optimizer.{OF_ALL}.{what}"] = value
    besides: Remembers | None = getattr(module, "besides", None)
    return state if besides is None else state | besides.remembered()


def restore_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, torch.Tensor]) -> None:
    """Load a gathered state; each device takes its own part of whole tensors.

    Raises:
        CheckpointError: a weight of the module is missing.
    """
    own = module.state_dict()
    missing = [name for name in own if f"model.{name}" not in state]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise CheckpointError(f"the saved state lacks {missing[0]!r}{more} of the stage's weights")
    masters = _masters(module)
    with torch.no_grad():
        for name, tensor in own.items():
            whole = state.get(f"optimizer.{name}.{MASTER}") if name in masters else None
            local_of(tensor).copy_(own_part(state[f"model.{name}"] if whole is None else whole, tensor))
    if shared := _of(OF_ALL, state):
        states_of(optimizer)[OF_ALL] = shared
    for name, parameter in module.named_parameters():
        found = _of(name, state)
        if name in masters:
            found.pop(MASTER, None)
        if found:
            optimizer.state[parameter] = {
                what: value if what in _COUNTS else _like(value, parameter, optimizer) for what, value in found.items()
            }
    besides: Remembers | None = getattr(module, "besides", None)
    if besides is not None:
        besides.recall(state)


def _computes_in(module: nn.Module) -> torch.dtype | None:
    found: torch.dtype | None = getattr(module, "computes_in", None)
    return found


def _masters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the float32 masters that the module holds in place of weights of another type, by their names."""
    if _computes_in(module) is None:
        return {}
    return {name: one for name, one in module.named_parameters() if one.requires_grad}


def states_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return an optimizer's state. Torch allows keys that are no weights, though its types do not."""
    return optimizer.state


def _of(name: str, state: Mapping[str, torch.Tensor]) -> State:
    prefix = f"optimizer.{name}."
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def start_from_pretrained(module: nn.Module, workload: Workload) -> None:
    """Load saved weights into a stage's layers, one tensor at a time; each device takes its own part.

    Raises:
        InputError: one is missing or does not fit.
    """
    with Pretrained(workload) as weights, torch.no_grad():
        sources, masters = weights.sources(module), _masters(module)
        for name, held in module.state_dict().items():
            source = weights.source(name, sources.get(name, ()), held)
            own = own_part(weights.read(source), held)
            local_of(held).copy_(own.to(_computes_in(module)) if name in masters else own)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this device holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(whole: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return this device's part of a whole tensor."""
    if not isinstance(held, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def moment_like(parameter: torch.nn.Parameter, dtype: torch.dtype, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Make zeros for a moment or a master, split as its weight is, where the optimizer keeps its state."""
    if not isinstance(optimizer, StateOnHost):
        return torch.zeros_like(parameter.data, dtype=dtype)
    if optimizer.files is None:
        return torch.zeros_like(parameter.data, dtype=dtype, device="cpu")
    own = optimizer.files.zeros(local_of(parameter.data).shape, dtype)
    if not isinstance(parameter.data, DTensor):
        return own
    split = cast("DTensor", torch.zeros_like(parameter.data, dtype=dtype, device="cpu"))
    split._local_tensor = own  # `from_local` would move it to the device of the mesh
    return split


def _like(whole: torch.Tensor, parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Shard a moment of the optimizer, or a master, as its weight is, and place it where that is."""
    moment = moment_like(parameter, whole.dtype, optimizer)
    local_of(moment).copy_(own_part(whole, moment))
    return moment


def first_not_finite(state: Mapping[str, torch.Tensor], given: Container[str] = ()) -> str | None:
    """Return the name of the first tensor with a NaN or an infinity on this device; None: all are finite.

    Args:
        given: tensors that may have them, as `given_not_finite` names them.
    """
    every = ((name, local_of(tensor)) for name, tensor in state.items() if name not in given)
    return next((name for name, tensor in every if not tensor.isfinite().all()), None)


def given_not_finite(module: nn.Module) -> set[str]:
    """Return the global names of what the module has that is neither trained nor finite, as an attention's mask of −∞.

    Before a training it is the model's own; what becomes so in a training is not.
    """
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    kept = {name: tensor for name, tensor in module.state_dict().items() if name not in trained}
    return {f"{WEIGHT}{name}" for name, tensor in kept.items() if not local_of(tensor).isfinite().all()}


def belongs(name: str, layers: set[str]) -> bool:
    """Return whether a global name belongs to one of these layers, or to all."""
    return name.split(".", 2)[1] in {*layers, OF_ALL}


def save_trial(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a whole model's state atomically as one safetensors file.

    Raises:
        CheckpointError: it could not be written, for example on a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Copies, because the format rejects weights that two names share.
        state = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in gather_state(module, optimizer).items()
        }
        save_file(state, aside)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} was not saved: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def read_trial(path: Path, layers: set[str]) -> State:
    """Read only what these layers need of a trial's state."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if belongs(name, layers)}  # noqa: SIM118


def save_checkpoint(folder: Path, step: int, state: State, held_out_loss: float | None = None) -> Path:
    """Save a checkpoint, all ranks together: write aside, rename, write a marker last, then delete older ones.

    Args:
        state: of all stages of this rank; what several ranks hold alike is written once.
        held_out_loss: after this step, on ranks that have it; None on all: it was not evaluated.

    Raises:
        CheckpointError: it could not be written, for example on a full disk; the partial checkpoint is removed. Where
            the folder can hold none, or it cannot be completed there, rank 0 says so alone.
    """
    final = folder / f"step-{step:08d}"
    aside = folder / f"step-{step:08d}.partial"
    if dist.get_rank() == 0:
        remove_incomplete_checkpoints(folder)  # also what an attempt that was killed began elsewhere
        shutil.rmtree(final, ignore_errors=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            said = f"{folder} can hold no checkpoint: {type(error).__name__}: {error}; wanted a folder to write to"
            raise CheckpointError(f"{said}; {_before(folder)}") from error
    known: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(known, held_out_loss)
    try:
        state_dict_saver.save(dict(state), checkpoint_id=aside)
    except CheckpointException as error:  # on every rank, whichever failed
        raise _not_saved(aside, state, error) from None
    dist.barrier()
    if dist.get_rank() == 0:
        try:
            aside.rename(final)
            loss = next((one for one in known if one is not None), None)
            write_json(final / MARKER, {"step": step, "world_size": dist.get_world_size(), "held_out_loss": loss})
        except OSError as error:
            for partial in (aside, final):
                shutil.rmtree(partial, ignore_errors=True)
            said = f"{final} could not be completed: {type(error).__name__}: {error}"
            raise CheckpointError(f"{said}; {_before(folder)}") from error
        best = best_checkpoint(folder)
        for old in complete_checkpoints(folder)[:-KEPT]:
            if old != best:
                shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return final


def _not_saved(aside: Path, state: State, error: CheckpointException) -> CheckpointError:
    """Remove a partial checkpoint, all ranks together, and return the reason as an error."""
    rank, (cause, _) = min(error.failures.items())
    sizes: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(sizes, {name: tensor.nbytes for name, tensor in state.items()})
    needed_bytes = sum({name: size for held in sizes for name, size in held.items()}.values())
    written_bytes = sum(path.stat().st_size for path in aside.glob("**/*") if path.is_file()) if aside.exists() else 0
    limit_bytes = largest_file_bytes()
    limited = "" if limit_bytes is None else f", where no file may be larger than {limit_bytes:,} (`ulimit -f`)"
    free_bytes, before = shutil.disk_usage(aside.parent).free, _before(aside.parent)
    dist.barrier()  # all have looked
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
    dist.barrier()  # space is free again, for this message too
    return CheckpointError(
        f"{aside} was not saved: rank {rank}: {type(cause).__name__}: {cause}; it needs {needed_bytes:,} bytes, "
        f"its disk had {written_bytes + free_bytes:,} for it ({written_bytes:,} written, {free_bytes:,} free)"
        f"{limited}; {before}"
    )


def _before(folder: Path) -> str:
    """Say which checkpoint is there, where another could not be saved."""
    complete = complete_checkpoints(folder)
    return f"the checkpoint before it, {complete[-1]}, is intact" if complete else "there is no checkpoint before it"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    found = (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
    return sorted((path for path in found if (path / MARKER).exists()), key=named_step)


def remove_incomplete_checkpoints(folder: Path) -> None:
    """Delete what ranks that have ended were writing: without its marker it is no checkpoint, and takes its space."""
    for path in folder.glob("step-*"):
        if not (path / MARKER).exists():
            shutil.rmtree(path, ignore_errors=True)


def named_step(checkpoint: Path | str) -> int:
    """Return how many steps its name says: those of its marker, if that can be read. From 10⁸ on names are longer."""
    return int(str(checkpoint).rpartition("-")[2])


def checkpoint_step(checkpoint: Path) -> int:
    """Return how many steps had been trained when it was saved.

    Raises:
        InputError: its marker is damaged.
    """
    try:
        return int(json.loads((checkpoint / MARKER).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{checkpoint} cannot be read: its marker is damaged ({type(error).__name__}: {error}); delete the "
            "folder, and the training continues from the checkpoint before it"
        ) from error


def held_out_loss_of(checkpoint: Path) -> float | None:
    """Return the loss on what is held out after its step; None: not evaluated then, not finite, or not to be read."""
    try:
        return held_out_loss_in((checkpoint / MARKER).read_bytes())
    except OSError:  # a training saves its next ones
        return None


def held_out_loss_in(marker: bytes) -> float | None:
    """Return the same, from what a checkpoint's marker holds."""
    try:
        loss = json.loads(marker).get("held_out_loss")
        return loss if loss is not None and math.isfinite(loss) else None
    except (ValueError, TypeError, AttributeError):  # it is damaged
        return None


def best_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the least loss on what is held out, the first of equals; None: no such."""
    losses = {path: loss for path in complete_checkpoints(folder) if (loss := held_out_loss_of(path)) is not None}
    return min(losses, key=lambda path: losses[path], default=None)


def read_checkpoint(checkpoint: Path, layers: set[str]) -> State:
    """Read what these layers need of a distributed checkpoint."""
    return _read(checkpoint, lambda name: belongs(name, layers))


def read_weights(checkpoint: Path, wanted: Callable[[str], bool] = lambda name: True) -> State:
    """Read weights of a distributed checkpoint, by their names in the whole model; all, or those that are wanted."""

    def is_wanted(name: str) -> bool:
        return _is_weight(name) and wanted(name.removeprefix(WEIGHT))

    return {name.removeprefix(WEIGHT): tensor for name, tensor in _read(checkpoint, is_wanted).items()}


def weight_sizes(checkpoint: Path) -> dict[str, int]:
    """Return the bytes of each weight of a distributed checkpoint, by its name in the whole model."""
    saved = _saved(checkpoint, _is_weight).items()
    return {name.removeprefix(WEIGHT): entry.size.numel() * entry.properties.dtype.itemsize for name, entry in saved}


def weight_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a distributed checkpoint, by its name in the whole model.

    Raises:
        InputError: its list of tensors cannot be read, or a file of it is missing or cut off.
    """
    return {name.removeprefix(WEIGHT): tuple(entry.size) for name, entry in _saved(checkpoint, _is_weight).items()}


def weights_bytes(checkpoint: Path) -> int:
    """Return the size of all weights of a distributed checkpoint."""
    return sum(weight_sizes(checkpoint).values())


def _is_weight(name: str) -> bool:
    return name.startswith(WEIGHT)


def _read(checkpoint: Path, wanted: Callable[[str], bool]) -> State:
    saved = _saved(checkpoint, wanted)
    state: State = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads all: that is meant
        try:
            state_dict_loader.load(
                state, checkpoint_id=checkpoint, storage_reader=CheckpointReader(checkpoint), no_dist=True
            )
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            why = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
            raise CheckpointError(f"{checkpoint} cannot be read, so it is damaged: {why}") from None
    return state


def _saved(checkpoint: Path, wanted: Callable[[str], bool]) -> dict[str, TensorStorageMetadata]:
    """Return shapes and types of the tensors with wanted names."""
    saved = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    return {name: entry for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata) and wanted(name)}
