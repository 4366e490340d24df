"""Saved weights to start a training from: safetensors files, read tensor by tensor, so nobody holds the whole model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.foundation.hashing import stable_hash
from dejavu.foundation.tracing import fake_tensors
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import Source, layers_of, model_of
from dejavu.workload.models.ties import ties_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}  # safetensors' names; others are quantized, or no weights
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "state_dict.pt")


class SavedWeights:
    """The tensors of a model's files by name. A file is opened when one of its tensors is asked for.

    Attributes:
        path: the folder, or the one file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        self._file_of = {
            name: file for file, names in _files(path).items() for name in (names or self._open(file).keys())
        }

    def __enter__(self) -> SavedWeights:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        return sorted(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def empty(self, name: str, *, is_floating_point: bool) -> torch.Tensor:
        """Return a tensor of the same shape without memory.

        Args:
            is_floating_point: what is to have its numbers is; a count or a mask is not.

        Raises:
            InputError: the numbers are none of floating point and should be, as where weights are quantized.
        """
        dtype = self._slice(name).get_dtype()
        if is_floating_point and dtype not in FLOATS:
            raise InputError(
                f"{self._file_of[name]}: {name!r} is of type {dtype}; wanted floating point, so weights that are "
                "not quantized",
                ("pretrained",),
            )
        return torch.empty(self.shape(name), device="meta")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open(self._file_of[name]).get_tensor(name)
        return tensor

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        try:
            return self._open(file).get_slice(name)
        except SafetensorError as error:
            raise InputError(f"{file}: {error}; {INDEX} says that it is there", ("pretrained",)) from error

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            try:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise InputError(
                    f"{file} cannot be read: {error}; wanted a whole safetensors file", ("pretrained",)
                ) from error
        return self._opened[file]


class Pretrained:
    """The saved weights that a workload starts from, under our names; close it after use.

    Raises:
        InputError: there are none, or their files are damaged.
    """

    def __init__(self, workload: Workload) -> None:
        self._model, self._shape = model_of(workload), dataset_of(workload).shape
        self._ties = ties_of(layers_of(workload))
        self.saved = SavedWeights(folder_of(workload))

    def __enter__(self) -> Pretrained:
        return self

    def __exit__(self, *raised: object) -> None:
        self.saved.__exit__()

    def sources(self, module: nn.Module) -> dict[str, tuple[Source, ...]]:
        """Return where each weight of some layers may be, by its name in the whole model.

        Names of one tensor may stand for each other, and so may those of a tied weight's two layers: many files have
        it once.
        """
        twins: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            twins.setdefault(id(parameter), []).append(name)
        same = [*twins.values(), *([f"{end.layer}.{end.weight}" for end in tie.ends] for tie in self._ties)]
        wanted = {*module.state_dict(), *(name for names in same for name in names)}
        found = self._model.weight_sources(self._shape, wanted)
        for names in same:
            every = {source.names: source for name in names for source in found.get(name, ())}
            found |= {
                name: (*found.get(name, ()), *(s for s in every.values() if s not in found.get(name, ())))
                for name in names
            }
        return found

    def source(self, name: str, sources: Iterable[Source], held: torch.Tensor) -> Source:
        """Return where a weight is, or a buffer.

        Args:
            held: what is to have its numbers.

        Raises:
            InputError: it is missing, of another shape, or of another kind of number.
        """
        sources, wanted = tuple(sources), tuple(held.shape)
        there = next((source for source in sources if all(one in self.saved for one in source.names)), None)
        if there is None:
            called = sources[0].names[0] if sources else name
            raise InputError(
                f"{self.saved.path} has no tensor {called!r} among its {len(self.saved.names)}; wanted one of shape "
                f"{wanted} for {name!r}",
                ("pretrained",),
            )
        parts = [self.saved.empty(one, is_floating_point=held.is_floating_point()) for one in there.names]
        try:
            found = tuple(there.join(parts).shape)
        except (RuntimeError, ValueError):  # parts that do not fit each other
            found = tuple(parts[0].shape)
        if found != wanted:
            raise InputError(
                f"{self.saved.path}: tensor {there.names[0]!r} has shape {found}; wanted {wanted} for {name!r}",
                ("pretrained",),
            )
        return there

    def read(self, source: Source) -> torch.Tensor:
        return source.join([self.saved.read(one) for one in source.names])


def folder_of(workload: Workload) -> Path:
    """Return the folder or the file of the weights to start from."""
    if isinstance(workload.pretrained, Path):
        return workload.pretrained
    path = Path(workload.model.partition(":")[2])
    return path if path.is_dir() else path.parent


def check_pretrained(workload: Workload) -> tuple[str, ...]:
    """Check that the weights to start from are there and fit the model, without reading their numbers.

    Returns:
        Sentences for the user.

    Raises:
        InputError: they are not, or one is missing or has another shape; the message names it.
    """
    if not workload.pretrained:
        return ()
    known: set[str] = set()
    with Pretrained(workload) as weights:
        for builder in layers_of(workload):
            with fake_tensors():
                layer = nn.ModuleDict({builder.name: builder.build()})
            sources = weights.sources(layer)
            for name, tensor in layer.state_dict().items():
                weights.source(name, sources.get(name, ()), tensor)
            known |= {name for every in sources.values() for source in every for name in source.names}
        unknown = [name for name in weights.saved.names if name not in known]
        notes = [f"the training starts from the weights in {weights.saved.path}"]
        if unknown:
            notes.append(
                f"{len(unknown)} of the {len(weights.saved.names)} tensors there are no part of the model and are left "
                f"out, such as {unknown[0]!r} of shape {weights.saved.shape(unknown[0])}"
            )
    return tuple(notes)


def fingerprint(workload: Workload) -> str:
    """Return a hash of which files the weights are in, their sizes and times; empty where there are none."""
    if not workload.pretrained:
        return ""
    found = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in _files(folder_of(workload))]
    return stable_hash(sorted(found))


def _files(path: Path) -> Mapping[Path, set[str]]:
    """Return the files with the names of their tensors; an empty set: all that it has.

    Raises:
        InputError: there are none.
    """
    if path.is_file() and path.suffix == ".safetensors":
        return {path: set()}
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / SINGLE).is_file():
        return {path / SINGLE: set()}
    pickled = [path] if path.is_file() else [path / name for name in PICKLES if (path / name).exists()]
    if pickled:
        raise InputError(
            f"{pickled[0]} is a pickle, which may run code of whoever wrote it; wanted safetensors. One that you trust "
            f'is converted by `python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{pickled[0].parent}').save_pretrained('{pickled[0].parent}')\"`, "
            "or by the model's own class",
            ("pretrained",),
        )
    what = f"neither {SINGLE} nor {INDEX}" if path.is_dir() else "no such folder or file"
    raise InputError(f"{path} has no weights: {what}; wanted a folder with one of them, or a file", ("pretrained",))


def _indexed(folder: Path) -> Mapping[Path, set[str]]:
    index = folder / INDEX
    try:
        where = json.loads(index.read_text())["weight_map"]
        found: dict[Path, set[str]] = {}
        for name, file in where.items():
            if Path(file).name != file:
                raise ValueError(f"tensor {name!r} is said to be in {file!r}, outside the folder")
            found.setdefault(folder / file, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index} cannot be read: {type(error).__name__}: {error}; wanted a weight_map of tensors to files",
            ("pretrained",),
        ) from error
    missing = [file for file in found if not file.is_file()]
    if missing:
        raise InputError(
            f"{missing[0]} is not there; {index} says that {min(found[missing[0]])!r} and "
            f"{len(found[missing[0]]) - 1} other tensors are in it",
            ("pretrained",),
        )
    return found
