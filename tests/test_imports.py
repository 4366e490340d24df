"""The walls of the house: who may import whom."""

from __future__ import annotations

import ast
import contextlib
import gc
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from dejavu.foundation.gc_frozen import gc_frozen

ROOT = Path(__file__).resolve().parents[1]
# Floors from the ground up: a room imports only what stands on a floor below its own. Rooms inside dejavu go by their
# own names, what stands on top of it by its package's.
FLOORS = (
    ("foundation",),
    ("cluster", "plans", "q_learning", "track"),
    ("binding", "parallelism", "profiles", "search", "simulation", "workload"),
    ("graphs", "importers", "init", "measured_plans", "placement", "timing"),
    ("cost", "runtime", "sharding"),
    ("launch", "operator_cuts", "planning", "profiling", "schedules", "testing", "trials", "watching"),
    ("migration", "report", "virtual_workers", "what_if"),
    ("tasks", "benchmarks"),
    ("flows",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MOST_FLOORS, MOST_FILES, MOST_LINES, MOST_PARAMETERS, MOST_LEVELS = 9, 12, 80, 8, 4
# A library that only some parts may import, by the beginning of the module's name.
HOMES = {
    "prefect": ("flows", "tasks"),
    "mlflow": ("dejavu.track",),
    "distributed": ("dejavu.trials",),
    "dask": ("dejavu.trials",),
    "dask_jobqueue": ("dejavu.trials",),
    # timing: ranks that are timed together; plans.schedule: action lists only, sharding: rules only, no process group;
    # graphs.in_parts: how torch's pipelines group weights;
    # schedules.ranks: small trainings under schedules that the runtime does not run
    "torch.distributed": (
        *("dejavu.runtime", "dejavu.launch", "dejavu.profiling"),
        *("dejavu.timing", "dejavu.plans.schedule", "dejavu.graphs.dtensor", "dejavu.graphs.in_parts"),
        *("dejavu.sharding.strategies", "dejavu.sharding.propagation", "dejavu.schedules.ranks"),
    ),
}
# What stays larger than the limits, and why.
LARGE = {
    "dejavu.simulation.bound._chain_walk._walk": "its step to the next option, made a function, took 4 to 19 × as long",
    "dejavu.simulation.bound._vee_walk._vee_walk": "likewise",
    "flows.__main__.run": "its parameters are the command's options",
    "flows.__main__.up": "its parameters are the command's options",
    "flows.__main__.plan": "its parameters are the command's options",
    "flows.launch_command.launch": "its parameters are the command's options",
    "flows.price_command.price": "its parameters are the command's options",
    "flows.full.dejavu": "its parameters are the form that Prefect shows",
    "flows.plan.plan": "its parameters are the form that Prefect shows",
}
# What nests deeper than the limit, and why.
DEEP = {
    "dejavu.simulation.bound._vee._begin": "both cuts from one list, so one loop in place of two, took 7 % longer",
    **{
        f"dejavu.search.coarse.levels.counted.{name}": "levels, configurations, cuts and a queue: one compiled loop"
        for name in ("fitting_stops", "looked_at", "followed")
    },
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
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


def room_of(name: str) -> str:
    """The room of a module; empty: the front door, which shows what is in all rooms of the engine."""
    parts = name.split(".")
    return parts[0] if parts[0] != "dejavu" else ".".join(parts[1:2])


@pytest.mark.parametrize("path", [*EVERY, *modules("benchmarks")], ids=name_of)
def test_rooms_import_what_stands_on_floors_below(path: Path) -> None:
    own = room_of(name_of(path))
    if not own:
        return
    assert own in FLOOR_OF, f"{own} has no floor"
    for name in imports(path):
        other = room_of(name) if name.split(".")[0] in ("dejavu", "tasks", "flows", "benchmarks") else own
        if other not in (own, ""):
            assert FLOOR_OF[other] < FLOOR_OF[own], f"{name_of(path)} imports {name}, which stands on no floor below"


def test_every_room_stands_and_floors_are_few() -> None:
    assert len(FLOORS) <= MOST_FLOORS
    for room in FLOOR_OF:
        path = ROOT / ("" if room in ("tasks", "flows", "benchmarks") else "dejavu") / room
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), f"there is no {room}"


def test_no_folder_of_the_engine_is_crowded() -> None:
    folders = {path.parent for path in modules("dejavu")}
    crowded = {str(folder): found for folder in folders if (found := len(list(folder.glob("*.py")))) > MOST_FILES}
    assert crowded == {}


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_functions_fit_a_screen_and_take_few_parameters(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            asked = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            number = len([one for one in asked if one.arg not in ("self", "cls")])
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if f"{name_of(path)}.{node.name}" not in LARGE:
                assert number <= MOST_PARAMETERS, f"{name_of(path)}.{node.name} takes {number} parameters"
                assert lines <= MOST_LINES, f"{name_of(path)}.{node.name} has {lines} lines"


def levels(node: ast.AST) -> int:
    """How deep loops, branches, `with`, `try` and `match` stand in one another; `elif` is no deeper, nor is `case`."""
    blocks = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, levels(child) + (isinstance(child, blocks) and not is_elif))
    return deepest


def test_levels_are_counted() -> None:
    code = "for a in b:\n  if c:\n    d\n  elif e:\n    f\n  else:\n    try:\n      g\n    except H:\n      with i: j"
    assert levels(ast.parse(code)) == 4
    assert levels(ast.parse("if a:\n  b\nelif c:\n  d\nelif e:\n  f")) == 1


def test_functions_of_the_engine_nest_four_deep_at_most() -> None:
    deep = set()
    for path in modules("dejavu"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and levels(node) > MOST_LEVELS:
                deep.add(f"{name_of(path)}.{node.name}")
    assert deep == set(DEEP)


MODULES = {name_of(path): path for path in modules("dejavu")}


def is_there(name: str, tree: ast.Module) -> bool:
    """Whether a name in a docstring is in that module if it is private, and in ours if it begins with one of them."""
    own = {value for node in ast.walk(tree) for value in vars(node).values() if isinstance(value, str)}
    parts = name.removesuffix(".py").split(".")
    if len(parts) == 1:
        return parts[0] in own or any(module.endswith(f".{parts[0]}") for module in MODULES)
    if not any(parts[0] in module.split(".") for module in MODULES):
        return True  # an object's attribute, another's module
    for length in range(len(parts), 0, -1):
        for module, path in MODULES.items():
            if f".{module}".endswith("." + ".".join(parts[:length])):
                text = path.read_text()
                if all(re.search(rf"\b{part}\b", text) for part in parts[length:]):
                    return True
    return False


@pytest.mark.parametrize("path", modules("dejavu"), ids=name_of)
def test_names_of_ours_in_docstrings_are_there(path: Path) -> None:
    tree = tree_of(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for name in re.findall(r"`(_[a-z]\w*|_?[a-z]\w*(?:\.\w+)+)`", ast.get_docstring(node) or ""):
                assert is_there(name, tree), f"{name_of(path)} speaks of `{name}`"


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_garbage_is_looked_for_while_a_process_imports(is_enabled: bool, fails: bool) -> None:
    was_enabled, frozen_before = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with contextlib.suppress(ImportError), gc_frozen():
            assert not gc.isenabled()
            if fails:
                raise ImportError
        assert gc.isenabled() == is_enabled
        assert gc.get_freeze_count() > frozen_before  # nor ever among what was imported
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_every_benchmark_imports() -> None:
    """They are run by hand, so nothing else notices when what they use is gone."""
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    names = [f"{name_of(path)}{'.__main__' if path.name == '__main__.py' else ''}" for path in modules("benchmarks")]
    names = [name.replace(".__main__.__main__", ".__main__") for name in names]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
