"""A cache of computed values in the user's cache folder, next to the compiled loops.

Only values that are determined by their key are kept here, so that an entry is never stale: a key includes the source
of the code that computes the value, the versions of what that code calls, and every argument. Entries of other keys
stay until the user deletes the folder. An unreadable entry is recomputed, one that cannot be written is not kept, and
processes that write the same entry at the same time write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

_DIGEST_BYTES = 32
_COMPRESSION = 1  # zlib's fastest: entries are numbers that repeat


def user_cache_folder() -> Path:
    """Return the folder of all that this user's projects share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dejavu"


def load(kind: str, key: Any) -> bytes | None:
    """Load the entry of this key; None where there is no intact one.

    Args:
        kind: the folder, such as `layers`.
        key: what JSON can write.
    """
    try:
        content = _path_of(kind, key).read_bytes()
        payload = zlib.decompress(content[_DIGEST_BYTES:])
    except (OSError, RuntimeError, zlib.error):  # RuntimeError: a user without a home
        return None
    return payload if hashlib.sha256(payload).digest() == content[:_DIGEST_BYTES] else None


def save(kind: str, key: Any, payload: bytes) -> None:
    """Save the entry, if the folder can be written."""
    try:
        path = _path_of(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    except (OSError, RuntimeError):
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest() + zlib.compress(payload, _COMPRESSION))
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)


def text_hash(paths: Iterable[Path]) -> str:
    """Hash the files' names and texts."""
    return _text_hash(tuple(sorted(paths)))


@cache  # of the code as this process loaded it
def _text_hash(paths: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _path_of(kind: str, key: Any) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return user_cache_folder() / kind / name[:2] / name
