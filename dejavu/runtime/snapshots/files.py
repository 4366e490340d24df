"""One rank's state after a step as one file: tensors by their global names, shards with their place in the whole.

A file is written aside and renamed, so whatever has its final name is complete, however its writer ended. Memory needs
no fsync: what a killed process wrote stays.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dejavu.runtime.state import State, belongs, named_step

SHARDS = "shards"  # the key of a file's metadata
PARTIAL = ".partial"
KEPT = 3  # of each rank; see `keeping`
_FILE = re.compile(r"attempt-(\d+)/step-(\d+)/rank-(\d+)\.safetensors")


class Taken(NamedTuple):
    """One complete snapshot of one rank: after so many steps."""

    attempt: int
    step: int
    rank: int

    def path(self, folder: Path) -> Path:
        return folder / f"attempt-{self.attempt}" / f"step-{self.step:08d}" / f"rank-{self.rank}.safetensors"


def inventory(folder: Path) -> list[Taken]:
    """List the complete snapshots in a host's memory."""
    found = (_FILE.fullmatch(str(path.relative_to(folder))) for path in folder.glob("attempt-*/step-*/rank-*"))
    return sorted(Taken(*map(int, match.groups())) for match in found if match)


def is_writing(folder: Path) -> bool:
    """Return whether a rank is about to complete a snapshot."""
    return any(folder.glob(f"attempt-*/step-*/*{PARTIAL}"))


@dataclass(frozen=True)
class Shard:
    """Where a shard is in its whole tensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def copied(state: Mapping[str, torch.Tensor]) -> tuple[State, dict[str, Shard]]:
    """Copy a state's tensors, or this rank's shards of them, to this host's memory."""
    own: State = {}
    shards: dict[str, Shard] = {}
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            shards[name] = Shard(tuple(tensor.shape), tuple(offset))
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        own[name] = local.detach().to("cpu", copy=True).contiguous()
    return own, shards


def packed(state: State, shards: Mapping[str, Shard]) -> bytes:
    """Return the content of a file."""
    told = {name: [shard.shape, shard.offset] for name, shard in shards.items()}
    return save(state, metadata={SHARDS: json.dumps(told)})


def begin(path: Path) -> Path:
    """Announce a snapshot; return where it is written aside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}{PARTIAL}")
    aside.touch()
    return aside


def write(path: Path, content: bytes) -> None:
    """Write a snapshot, and delete those of the same rank and attempt that are older than the last `KEPT`."""
    aside = begin(path)
    try:
        aside.write_bytes(content)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    own = path.parent.parent.glob(f"step-*/{path.name}")
    for old in sorted(own, key=lambda one: named_step(one.parent))[:-KEPT]:
        old.unlink(missing_ok=True)
        with suppress(OSError):  # other ranks' are there
            old.parent.rmdir()


def forget(folder: Path, kept: Collection[int]) -> None:
    """Delete the snapshots of all attempts but these."""
    for path in folder.glob("attempt-*"):
        if int(path.name.removeprefix("attempt-")) not in kept:
            shutil.rmtree(path, ignore_errors=True)


def read_layers(path: Path, layers: Collection[str]) -> tuple[State, dict[str, Shard]]:
    """Read what a file has of these layers.

    Raises:
        OSError: it is not there, or damaged.
    """
    wanted = set(layers)
    try:
        with safe_open(path, framework="pt") as file:
            shards = _shards_of((file.metadata() or {}).get(SHARDS))
            state = {name: file.get_tensor(name) for name in file.keys() if belongs(name, wanted)}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{path} is damaged: {error}") from error
    return state, {name: shard for name, shard in shards.items() if name in state}


def unpacked(content: bytes) -> tuple[State, dict[str, Shard]]:
    """Read what `packed` returned.

    Raises:
        SafetensorError: it is damaged.
    """
    state = load(content)  # so its header is sound: a length of 8 bytes, then JSON
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return state, _shards_of(header.get("__metadata__", {}).get(SHARDS))


def _shards_of(text: str | None) -> dict[str, Shard]:
    told: dict[str, Any] = json.loads(text or "{}")
    return {name: Shard(tuple(shape), tuple(offset)) for name, (shape, offset) in told.items()}


def whole(pieces: Iterable[tuple[State, Mapping[str, Shard]]]) -> State:
    """Put shards together; what several pieces have alike is taken from the last."""
    state: State = {}
    for part, shards in pieces:
        for name, tensor in part.items():
            shard = shards.get(name)
            if shard is None:
                state[name] = tensor
                continue
            if name not in state:
                state[name] = torch.zeros(shard.shape, dtype=tensor.dtype)
            ends = zip(shard.offset, tensor.shape, strict=True)
            state[name][tuple(slice(start, start + size) for start, size in ends)] = tensor
    return state
