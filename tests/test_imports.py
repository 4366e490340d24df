"""The walls of the house: who may import whom."""

from __future__ import annotations

import ast
import contextlib
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from dejavu.imports import uncollected

ROOT = Path(__file__).resolve().parents[1]
# Inside dejavu a part imports only what stands above it in this list.
ORDER = (
    *("imports", "compiled", "user_cache", "hashing", "dask_workers", "errors", "strict_yaml", "units", "tracing"),
    *("cluster", "schedule", "workload", "data", "models"),
    *("attention", "liveness", "graph", "kept_layers", "kernel", "collective", "stage_costs"),
    *("plan", "binding", "parallelism", "profiles", "importers"),
    *("cost", "problem", "search", "simulate", "simulated_bound", "iteration", "bind", "planning"),
    *("init", "runtime", "trials", "report", "track"),
)
# A library that only some parts may import, by the beginning of the module's name.
HOMES = {
    "prefect": ("flows", "tasks"),
    "mlflow": ("dejavu.track",),
    "distributed": ("dejavu.trials",),
    "dask": ("dejavu.trials",),
    "torch.distributed": ("dejavu.runtime", "dejavu.schedule"),  # schedule: action lists only, no process group
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


EVERY = [path for package in ("dejavu", "flows", "tasks") for path in modules(package)]


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_libraries_stay_at_home(path: Path) -> None:
    for library, homes in HOMES.items():
        if any(inside(name, library) for name in imports(path)):
            assert any(inside(name_of(path), home) for home in homes), f"{name_of(path)} imports {library}"


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    above = {"dejavu": ("flows", "tasks"), "tasks": ("flows",), "flows": ()}[name_of(path).split(".")[0]]
    for name in imports(path):
        assert not any(inside(name, package) for package in above), f"{name_of(path)} imports {name}"


@pytest.mark.parametrize("path", modules("dejavu"), ids=name_of)
def test_parts_import_what_stands_above_them(path: Path) -> None:
    own = name_of(path).split(".")
    if len(own) == 1:
        return
    assert own[1] in ORDER, f"{own[1]} has no place in the order"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "dejavu" and len(parts) > 1 and parts[1] in ORDER and parts[1] != own[1]:
            assert ORDER.index(parts[1]) < ORDER.index(own[1]), f"{name_of(path)} imports {name}, which stands below it"


def test_every_part_stands() -> None:
    for part in ORDER:
        path = ROOT / "dejavu" / part
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), f"dejavu has no {part}"


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_garbage_is_looked_for_while_a_process_imports(is_enabled: bool, fails: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with contextlib.suppress(ImportError), uncollected():
            assert not gc.isenabled()
            if fails:
                raise ImportError
        assert gc.isenabled() == is_enabled
        assert gc.get_freeze_count() > 0  # nor ever among what was imported
    finally:
        gc.unfreeze()
        (gc.enable if was_enabled else gc.disable)()


def test_every_benchmark_imports() -> None:
    """They are run by hand, so nothing else notices when what they use is gone."""
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    names = [f"{name_of(path)}{'.__main__' if path.name == '__main__.py' else ''}" for path in modules("benchmarks")]
    names = [name.replace(".__main__.__main__", ".__main__") for name in names]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
