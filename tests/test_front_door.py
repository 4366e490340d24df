"""`import dejavu`: every name is there, is documented by an example that runs, and costs nothing until it is used."""

from __future__ import annotations

import doctest
import subprocess
import sys
from importlib import import_module

import pytest

import dejavu

VERBS = ("load_cluster", "load_workload", "this_machine", "capture", "plan", "simulate", "bind", "explain", "draw")


def test_all_names_are_there() -> None:
    assert sorted(dejavu.__all__) == sorted(dejavu._HOMES) == sorted(set(dejavu.__all__))
    for name in dejavu.__all__:
        value = getattr(dejavu, name)
        assert value is not None and (not callable(value) or value.__doc__), name
    assert set(dejavu.__all__) <= set(dir(dejavu))
    with pytest.raises(AttributeError, match="has no attribute 'plans_of_mine'"):
        dejavu.plans_of_mine  # noqa: B018


@pytest.mark.parametrize("name", VERBS)
def test_examples_in_docstrings_run(name: str) -> None:
    verb = getattr(dejavu, name)
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    found = [test for test in finder.find(verb, name, module=import_module(verb.__module__)) if test.examples]
    assert found, f"{name} has no example"
    for test in found:
        runner.run(test)
    assert runner.failures == 0


def test_the_package_s_example_runs() -> None:
    assert doctest.testmod(dejavu).failed == 0


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, dejavu; print([name for name in ('torch', 'numpy', 'numba', 'prefect') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ranks_import_nothing_that_only_searches_and_tables_want() -> None:
    """It took each a quarter of its start."""
    names = ("numba", "scipy", "pandas", "sklearn", "pyarrow")
    code = f"import sys, dejavu.runtime.worker; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
