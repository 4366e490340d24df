"""Compiled loops: numba's `njit`, and a cache of what it compiled that belongs to the user and not to a checkout.

A loop is compiled once per machine and version of its top-level package (such as `dejavu/search`): the cache's folders
are named by a hash of the package's source, so that two versions never read each other's loops (numba itself checks a
function's own file only, though loops of other files are compiled into it), and a second checkout of the same version
reuses what the first compiled. Numba writes each file under a temporary name and renames it, so processes that compile
at the same time do not disturb each other.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import event
from numba.core.caching import _CacheLocator

from dejavu.foundation.user_cache import user_cache_folder

__all__ = ["cache_folder", "compiling_elsewhere", "has_compiled", "njit", "told_of_compiling"]

_PACKAGE = Path(__file__).resolve().parents[1]
_NUMBAS_OWN = (
    "UserProvidedCacheLocator",
    "InTreeCacheLocator",
    "UserWideCacheLocator",
    "IPythonCacheLocator",
    "ZipCacheLocator",
)
_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def njit(**options: Any) -> Callable[[_Loop], _Loop]:
    """Apply numba's `njit` without the wrapper for calls from C, which saves a twentieth of the compile time."""
    compiled: Any = numba.njit  # a type checker does not see all of its options
    decorator: Callable[[_Loop], _Loop] = compiled(no_cfunc_wrapper=True, **options)
    return decorator


def cache_folder() -> Path:
    """Return the folder of compiled loops, unless `NUMBA_CACHE_DIR` names another."""
    return user_cache_folder() / "numba"


def has_compiled(room: str) -> bool:
    """Return whether the cache has loops of this top-level package, as it is; also where there can be no such cache."""
    if os.environ.get("NUMBA_CACHE_DIR") or not _can_write(_folder_of(room)):
        return True
    return any(_folder_of(room).glob("*.nbi"))


def _folder_of(room: str) -> Path:
    return cache_folder() / f"{room or _PACKAGE.name}-{_hash_of(room)[:16]}"


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


class UserCacheLocator(_CacheLocator):
    """Locates a function's cache for numba; see the module. Not used where the folder cannot be written."""

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        inside = Path(py_file).resolve().relative_to(_PACKAGE).with_suffix("").parts
        room = inside[0] if len(inside) > 1 else ""
        self._stamp = _hash_of(room)
        self._path = _folder_of(room)
        self._place = f"{'.'.join(inside)}-{py_func.__code__.co_firstlineno}"

    def get_cache_path(self) -> str:
        return str(self._path)

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> str:
        return self._place

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> UserCacheLocator | None:
        if os.environ.get("NUMBA_CACHE_DIR") or not Path(py_file).resolve().is_relative_to(_PACKAGE):
            return None
        try:
            locator = cls(py_func, py_file)
            locator.ensure_cache_path()  # type: ignore[no-untyped-call]  # numba's has no types
        except (OSError, RuntimeError):  # not writable, or a user without a home
            return None
        return locator


@cache
def _hash_of(room: str) -> str:
    """Hash the names and texts of a top-level package's modules; without a name, of the modules in none."""
    digest = hashlib.sha256()
    for path in sorted((_PACKAGE / room).rglob("*.py") if room else _PACKAGE.glob("*.py")):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class _Telling(event.Listener):
    """Calls once, at the first loop that is compiled, here or in a process that is forked from this one."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._told = mmap.mmap(-1, 1)  # shared with what is forked
        self._lock = threading.Lock()

    def on_start(self, event: Any) -> None:
        with self._lock:
            before, self._told[0] = self._told[0], 1
        if not before:
            self._tell()

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def told_of_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` once, before the first loop is compiled inside the block because it is not cached.

    Loading what an earlier process compiled does not count. Sees this process, and what is forked from it.
    """
    listener = _Telling(tell)
    event.register("numba:compile", listener)
    try:
        yield
    finally:
        event.unregister("numba:compile", listener)


@contextmanager
def compiling_elsewhere() -> Iterator[None]:
    """Tell those that are `told_of_compiling` that other processes compile loops for this one, inside the block."""
    with event.trigger_event("numba:compile", data={}):
        yield


_CONFIG: Any = numba.config  # made when numba is loaded: a type checker does not see its attributes
if not _CONFIG.CACHE_LOCATOR_CLASSES:
    # The attribute is what NUMBA_CACHE_LOCATOR_CLASSES sets; functions outside this package keep numba's own places.
    _CONFIG.CACHE_LOCATOR_CLASSES = ",".join([f"{__name__}.{UserCacheLocator.__name__}", *_NUMBAS_OWN])
