"""Read a distributed checkpoint without running what its list of tensors names.

Torch writes that list, `.metadata`, as a pickle, and reads it as any pickle: a folder that somebody else made
would run their code. The tensors themselves torch reads with `weights_only`.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.serialization import _get_layout

from dejavu.foundation.errors import InputError

MOST_BYTES = 64 * 2**20  # a tensor takes some 300 bytes: this is 200,000 of them
# All that torch 2.13 names there. None of it does anything but hold what it is given.
_KNOWN: dict[tuple[str, str], Any] = {
    **{
        (one.__module__, one.__qualname__): one
        for one in (
            *(records.Metadata, records.MetadataIndex, records.StorageMeta, records.BytesStorageMetadata),
            *(records.TensorStorageMetadata, records.TensorProperties, records.ChunkStorageMetadata),
            *(records._MEM_FORMAT_ENCODING, _StorageInfo, torch.Size),
        )
    },
    ("pathlib", "PosixPath"): PurePath,  # where it was saved
    ("torch.serialization", "_get_layout"): _get_layout,
}


class CheckpointReader(FileSystemReader):
    """Torch's reader of a folder, with a list of tensors that can name torch's records of tensors only.

    A hostile list runs nothing and leads out of the folder nowhere; it can still be wrong, and then the tensors that a
    stage wants are missing or have other shapes.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> records.Metadata:
        """Read the list of tensors.

        Raises:
            InputError: it is missing, or no list that torch wrote; or a file that it names is missing, cut off or
                outside the checkpoint.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        if not path.is_file():
            raise InputError(f"{path} is not there; wanted the list of the checkpoint's tensors")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise InputError(f"{path} has {size:,} bytes; wanted at most {MOST_BYTES:,}")
        try:
            with path.open("rb") as file:
                found: records.Metadata = _Records(file).load()
        except (pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError, EOFError) as error:
            raise InputError(
                f"{path}: {str(error)[:200]}; wanted a checkpoint's list of tensors as torch writes it. "
                "Nothing in it was run"
            ) from None
        _check_files(path, found)
        found.storage_meta = found.storage_meta or records.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch":
            dtype = getattr(torch, name, None)
            known = dtype if isinstance(dtype, torch.dtype) else None
        if known is None:
            raise pickle.UnpicklingError(f"it names {f'{module}.{name}'[:120]!r}")
        return known


def _check_files(path: Path, found: Any) -> None:
    if not isinstance(found, records.Metadata):
        raise InputError(f"{path} holds a {type(found).__name__}; wanted a checkpoint's list of tensors")
    ends: dict[str, int] = {}
    for info in (found.storage_data or {}).values():
        name = str(getattr(info, "relative_path", info))
        if PurePath(name).name != name:
            raise InputError(f"{path} names the file {name[:120]!r}; wanted files of the checkpoint's own folder")
        if isinstance(info, _StorageInfo):
            ends[name] = max(ends.get(name, 0), info.offset + info.length)
    for name, end in ends.items():
        file = path.with_name(name)
        has = file.stat().st_size if file.is_file() else None
        if has is None or has < end:
            what = "is not there" if has is None else f"has {has:,} bytes, so it is cut off"
            raise InputError(f"{file} {what}; wanted {end:,} bytes, as {path.name} beside it says")
