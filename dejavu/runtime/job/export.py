"""A training's weights for use elsewhere: under the names of the plain module or of transformers, under any plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dejavu.foundation.errors import InputError
from dejavu.foundation.units import format_bytes
from dejavu.runtime.job import TrainingJob, job_in
from dejavu.runtime.job.progress import read_losses
from dejavu.runtime.state import (
    State,
    best_checkpoint,
    checkpoint_step,
    complete_checkpoints,
    held_out_loss_of,
    named_step,
    read_weights,
    weight_sizes,
)
from dejavu.workload.data import dataset_of
from dejavu.workload.models import Model, model_of
from dejavu.workload.models.hugging_face import HuggingFace

FORMATS = ("safetensors", "state_dict", "hf")
MOST_FILE_BYTES = 5 * 10**9  # of one safetensors file, as Hugging Face cuts them; as much is in memory at once
LEAST_FREE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        step: how many steps the weights were trained.
        loss: of the last of them; None: unknown.
        held_out_loss: after the last of them, on what is held out; None: not evaluated then.
    """

    folder: Path
    files: tuple[Path, ...]
    num_weights: int
    step: int
    loss: float | None
    held_out_loss: float | None = None


def kept_checkpoint(training: Path, step: int | None = None, *, best: bool = False) -> Path:
    """Return the checkpoint of a training after so many steps, or the best on what is held out, or the last one.

    Raises:
        InputError: there is no such training or checkpoint.
    """
    folder = training / _job_of(training).checkpoints.name
    complete = {named_step(path): path for path in complete_checkpoints(folder)}
    if not complete:
        raise InputError(f"{folder} has no complete checkpoint, so there are no weights to write")
    if step is not None and step not in complete:
        kept = ", ".join(map(str, complete))
        raise InputError(f"{folder} has no checkpoint of step {step}; kept are those of {kept}")
    if best:
        found = best_checkpoint(folder)
        if found is None:
            raise InputError(
                f"{folder} has no checkpoint whose step was evaluated, so none is the best; wanted evaluate_every and "
                "checkpoint_every in the workload with steps in common, or --step"
            )
        return found
    return complete[max(complete) if step is None else step]


def export(training: Path, checkpoint: Path, to: str, folder: Path) -> Exported:
    """Write the weights of a checkpoint.

    Args:
        training: the folder of a training, which has its job.json.
        checkpoint: as `kept_checkpoint` returns it.
        to: one of `FORMATS`. `safetensors` and `state_dict` load into the plain module (of the zoo: an `nn.Sequential`
            of its layers by name); `hf` is a folder for transformers' `from_pretrained`.
        folder: where to; it must not be there, or be empty.

    Raises:
        InputError: there is no such training, the folder is in use or has no room, or the model is not one of
            transformers.
    """
    job = _job_of(training)
    model = model_of(job.workload)
    if to not in FORMATS:
        raise InputError(f"unknown format {to!r}; wanted one of {', '.join(FORMATS)}")
    if to == "hf" and not isinstance(model, HuggingFace):
        raise InputError(
            f"format hf is for models by `hf:PATH`, and this is {job.workload.model!r}; wanted safetensors"
        )
    held = weight_sizes(checkpoint)
    names = _written(model, model.weight_names(dataset_of(job.workload).shape, held))
    sizes = {name: held[name] * len(written) for name, written in names.items()}
    _check_room(folder, sum(sizes.values()))
    trained = checkpoint_step(checkpoint)
    loss = read_losses(training / job.progress_path.name).get(trained - 1)
    held_out = held_out_loss_of(checkpoint)
    about = {"format": "pt", "step": trained, "loss": loss, "held_out_loss": held_out}
    about |= {"model": job.workload.model, "training": training.name}
    said = {key: str(value) for key, value in about.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    if to == "state_dict":
        files = [folder / "state_dict.pt"]
        torch.save(_renamed(read_weights(checkpoint), names), files[0])
    else:
        files = list(_safetensors(checkpoint, folder, sizes, names, said))
    if isinstance(model, HuggingFace) and to == "hf":
        model.save_config(folder)
        files.append(folder / "config.json")
    return Exported(folder, tuple(files), len(set(chain(*names.values()))), trained, loss, held_out)


def _job_of(training: Path) -> TrainingJob:
    path = training / "job.json"
    if not path.is_file():
        raise InputError(f"{training} has no training: {path} is not there; wanted a folder of .dejavu/runs")
    return job_in(training)


def _check_room(folder: Path, needed_bytes: int) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is in use; wanted a folder that is empty or not there")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < needed_bytes + LEAST_FREE_BYTES:
        raise InputError(
            f"{folder}: the weights take {format_bytes(needed_bytes)}, and {format_bytes(free_bytes)} are free there"
        )


Names = Mapping[str, tuple[str, ...]]  # by the name in a checkpoint, those that a tensor is written under


def _written(model: Model, names: Mapping[str, str]) -> Names:
    """Return all names that the plain module has for what is written, one of a weight with several by one of them.

    What several layers have under one name, as a buffer that they share, is written of the first of them.
    """
    first: dict[str, str] = {}
    for name, outer in names.items():
        first.setdefault(outer, name)
    written = set(first)
    more = {
        next(one for one in same if one in written): tuple(one for one in same if one not in written)
        for same in model.names_of_same()
        if written.intersection(same)
    }
    return {name: (outer, *more.get(outer, ())) for outer, name in first.items()}


def _renamed(state: State, names: Names) -> State:
    """Return tensors of their own under all names, as safetensors wants them."""
    named = ((name, tensor) for name, tensor in state.items() if name in names)
    return {
        outer: tensor.clone() if number else tensor
        for name, tensor in named
        for number, outer in enumerate(names[name])
    }


def _safetensors(
    checkpoint: Path, folder: Path, sizes: Mapping[str, int], names: Names, about: Mapping[str, str]
) -> Iterator[Path]:
    """Write files of at most `MOST_FILE_BYTES` and, where there are several, the list of what is where."""
    parts = list(_parts(sizes))
    where: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        state = _renamed(read_weights(checkpoint, part.__contains__), names)
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / name, dict(about))
        where |= dict.fromkeys(state, name)
        yield folder / name
    if len(parts) > 1:
        index = folder / "model.safetensors.index.json"
        content: dict[str, Any] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        index.write_text(json.dumps(content, indent=1))
        yield index


def _parts(sizes: Mapping[str, int]) -> Iterator[set[str]]:
    part: set[str] = set()
    held = 0
    for name, size in sizes.items():
        if part and held + size > MOST_FILE_BYTES:
            yield part
            part, held = set(), 0
        part.add(name)
        held += size
    yield part
