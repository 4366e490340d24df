"""The user's cache of compiled loops: where it is, who shares it, and who is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from numba.core.caching import _CacheLocator

from benchmarks.bound.every_plan import small_priced
from dejavu.foundation import compiled
from dejavu.foundation.compiled import (
    UserCacheLocator,
    cache_folder,
    compiling_elsewhere,
    has_compiled,
    told_of_compiling,
)
from dejavu.planning import loops
from dejavu.search.pipedream import PipeDream
from dejavu.search.pipedream import line as _line
from dejavu.search.shared import stage_table as _stage_table

ROOT = Path(__file__).resolve().parents[1]
LOOP = """
from dejavu.foundation.compiled import njit, told_of_compiling
from {package} import twice

said = []
with told_of_compiling(lambda: said.append("compiling")):
    assert twice(21) == 42 and twice(21.0) == 42.0
print(len(said))
"""


def run_loop(tmp_path: Path, copy: str, text: str, **environment: str) -> int:
    """How often a process was told, whose package `dejavu` is a copy with one loop."""
    package = tmp_path / copy / "dejavu"
    package.mkdir(parents=True, exist_ok=True)
    for room in (package, package / "foundation", package / "room", package / "room" / "inner"):
        room.mkdir(exist_ok=True)
        (room / "__init__.py").touch()
    for name in ("compiled.py", "user_cache.py"):
        shutil.copy(Path(compiled.__file__).with_name(name), package / "foundation")
    (package / "room" / "inner" / "loop.py").write_text(text)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(package.parent), **environment}
    command = [sys.executable, "-c", LOOP.format(package="dejavu.room.inner.loop")]
    environment = {**{k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}, **environment}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    return int(done.stdout)


TWICE = "from dejavu.foundation.compiled import njit\n\n@njit(cache=True)\ndef twice(x):\n    return x + x\n"
OTHERWISE = TWICE.replace("x + x", "2 * x")


def test_a_loop_is_compiled_once_for_all_checkouts_of_one_text(tmp_path: Path) -> None:
    assert run_loop(tmp_path, "first", TWICE) == 1  # told once, though two signatures are compiled
    assert run_loop(tmp_path, "first", TWICE) == 0
    assert run_loop(tmp_path, "second", TWICE) == 0
    assert run_loop(tmp_path, "second", OTHERWISE) == 1
    assert run_loop(tmp_path, "first", TWICE) == 0  # the other version's did not take its place
    own = tmp_path / "own"
    assert run_loop(tmp_path, "first", TWICE, NUMBA_CACHE_DIR=str(own)) == 1
    assert list(own.rglob("*.nbi"))
    folders = list((tmp_path / "cache" / "dejavu" / "numba").iterdir())
    assert len(folders) == 2
    assert not list(tmp_path.glob("first/dejavu/**/*.nb*"))


def test_what_cannot_be_written_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert run_loop(tmp_path, "first", TWICE) == 1


def test_functions_of_others_keep_their_place(tmp_path: Path) -> None:
    def function() -> None: ...

    assert UserCacheLocator.from_function(function, str(tmp_path / "elsewhere.py")) is None
    assert issubclass(UserCacheLocator, _CacheLocator)
    assert cache_folder().parts[-2:] == ("dejavu", "numba")


def test_every_loop_of_the_package_is_compiled_this_way() -> None:
    for path in sorted((ROOT / "dejavu").rglob("*.py")):
        if path.name != "compiled.py":
            assert "from numba import" not in path.read_text(), f"{path}: wanted dejavu.foundation.compiled"


def test_loops_of_pipedream_are_compiled_once_and_before_its_clock_starts() -> None:
    """A second signature would be compiled while its budget runs, so that a first run would find worse plans."""
    for seed in range(4):
        PipeDream().run(small_priced(seed).problem, budget_seconds=10.0)
    assert len(_line.list_stages.signatures) == len(_line.fewest_stages.signatures) == 1
    assert len(_stage_table._between.signatures) <= 1


def test_what_has_no_folder_can_have_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not has_compiled("search")
    (folder,) = cache_folder().iterdir()
    (folder / "loop.nbi").touch()
    assert has_compiled("search") and not has_compiled("simulation")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert has_compiled("search")  # nobody would read what others compile
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "own"))
    assert has_compiled("simulation")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_loops_that_were_never_compiled_are_compiled_side_by_side(
    is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forks, of which those who want to know are told once; then all are loaded here."""

    def package(name: str) -> ModuleType:
        found = ModuleType(name)
        found.load_compiled_loops = lambda: (tmp_path / f"{name}-{os.getpid()}").touch()  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(loops, "TOGETHER", ((package("a"), package("b")), (package("c"),)))
    monkeypatch.setattr(loops, "has_compiled", lambda room: is_compiled)
    monkeypatch.setattr(loops, "num_cores", lambda: 2)
    told = list[str]()
    with told_of_compiling(lambda: told.append("compiling")):
        loops.load_compiled_loops()
    by_process: dict[int, set[str]] = {}
    for path in tmp_path.iterdir():
        name, pid = path.name.split("-")
        by_process.setdefault(int(pid), set()).add(name)
    assert by_process.pop(os.getpid()) == {"a", "b", "c"}
    assert sorted(by_process.values(), key=len) == ([] if is_compiled else [{"c"}, {"a", "b"}])
    assert told == ([] if is_compiled else ["compiling"])


@pytest.mark.parametrize("at_first", ["here", "in a fork"])
def test_those_who_want_to_know_are_told_once_by_all_forks_together(at_first: str, tmp_path: Path) -> None:
    """Searches run in forks, and each compiles what only it needs."""

    def tell() -> None:
        with (tmp_path / "told").open("a") as file:
            file.write("compiling\n")

    with told_of_compiling(tell):
        if at_first == "here":
            with compiling_elsewhere():
                pass
        for _ in range(3):
            child = os.fork()
            if not child:
                with compiling_elsewhere():
                    os._exit(0)
            os.waitpid(child, 0)
    assert (tmp_path / "told").read_text() == "compiling\n"
