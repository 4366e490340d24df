"""Every sentence that names a `dejavu …` command names one that exists, with options that it has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from dejavu.profiling.profiler import KINDS
from flows.__main__ import app

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("dejavu", "flows", "tasks") for path in (ROOT / folder).rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "profiles_db" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HISTORY = {"log.md"}  # says what commands were called when it was written
VALUE = "VALUE"  # in the place of what is filled in at run time
COMMANDS: Any = typer.main.get_command(app)
QUOTED = re.compile(r"`dejavu ([^`]+)`")
BARE = re.compile(rf"(?<![`\w/.])dejavu ((?:{'|'.join(COMMANDS.commands)})\b(?: --[a-z][a-z-]*)*)")


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module, each f-string as one with its values left open."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            parts = (str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def named() -> Iterator[tuple[str, str]]:
    """Find where a command is named, and the words after `dejavu`."""
    for path in SOURCES:
        for line, text in sentences(path):
            for words in {*QUOTED.findall(text), *BARE.findall(text)}:
                yield f"{path.relative_to(ROOT)}:{line}", " ".join(words.split())
    for path in PAGES:
        if path.name not in HISTORY:
            for words in sorted(set(QUOTED.findall(path.read_text()))):
                yield str(path.relative_to(ROOT)), " ".join(words.split())


NAMED = sorted(set(named()))
assert len(NAMED) > 20, "the sentences are found"


@pytest.mark.parametrize(("where", "words"), NAMED, ids=[f"{where}: {words}" for where, words in NAMED])
def test_the_command_and_its_options_exist(where: str, words: str) -> None:
    name, *rest = re.split(r"\s+(?:\||&&|#)\s*", words)[0].split()
    if name.startswith(("-", "<", "…", "VALUE")):
        return  # of every command
    assert name in COMMANDS.commands, f"{where} names `dejavu {words}`; the commands are {', '.join(COMMANDS.commands)}"
    options = {option for parameter in COMMANDS.commands[name].params for option in parameter.opts}
    options |= {option for parameter in COMMANDS.commands[name].params for option in parameter.secondary_opts}
    for word in rest:
        option = word.split("=")[0]
        assert not word.startswith("--") or option in options | {"--help"}, f"{where}: `dejavu {name}` has no {option}"
    if name == "profile" and "--measure" in rest[:-1]:
        kinds = rest[rest.index("--measure") + 1].strip(",;.").split(",")
        assert VALUE in kinds or set(kinds) <= set(KINDS), where


@pytest.mark.parametrize("name", sorted(COMMANDS.commands))
def test_help_says_what_every_command_takes(name: str) -> None:
    """In a terminal of any width, without starting anything."""
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for parameter in COMMANDS.commands[name].params:
        if parameter.param_type_name == "option":
            assert parameter.opts[0] in result.output
