"""docs/faults.md: a row for each fault, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = range(1, 39)
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def rows() -> dict[int, str]:
    """What each fault's row says of its tests."""
    found = ROW.findall((ROOT / "docs" / "faults.md").read_text())
    assert len(found) == len({number for number, *_ in found}), "a fault has two rows"
    return {int(number): tests for number, _, _, tests in found}


@cache
def named_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_fault_has_a_row() -> None:
    assert sorted(rows()) == list(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_row_names_tests_that_exist(number: int) -> None:
    named = re.findall(r"`(\w+\.py)::(test_\w+)`", rows()[number])
    assert named and len(named) == rows()[number].count("::")
    missing = [f"{file}::{name}" for file, name in named if name not in named_in(file)]
    assert not missing
