"""A new user's walk: a fresh clone, an empty home, and the README's lines typed one by one; each works.

It installs everything and trains four times: half an hour on two busy cores (`make slow`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks._processes import processes_of
from tests.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).parents[1]
KEPT = re.compile(r"PIP_|SSL_|REQUESTS_CA|https?_proxy$|HTTPS?_PROXY$|PATH$|LANG$|TZ$|TMPDIR$")
PROMPT = "dejavu-walk-status "
MOST_SECONDS = 3600


def lines_of(readme: str) -> list[str]:
    """What the README has people type, in its order: the lines of its consoles, and Python in a file."""
    typed = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL):
        if language == "console":
            typed += [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
        elif language == "python":
            typed.append(f"python -c {shlex.quote(block)}")
    return typed


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "project"], check=True)
    if (ROOT.parent / "shared").is_dir():
        (tmp_path / "shared").symlink_to(ROOT.parent / "shared")
    (tmp_path / "home").mkdir()
    yield tmp_path / "project"
    for process in processes_of(tmp_path / "project"):  # where the walk was broken off
        process.kill()


def test_there_are_lines_to_type() -> None:
    lines = lines_of((ROOT / "README.md").read_text())
    assert lines[:2] == [next(line for line in lines if line.startswith("make run")), ". .venv/bin/activate"]
    assert sum(line.startswith("dejavu run") for line in lines) >= 3
    assert any(line.startswith("prefect deployment run dejavu/full") for line in lines)


def test_each_line_of_the_readme_works(clone: Path) -> None:
    lines = lines_of((clone / "README.md").read_text())
    ports = f" --prefect-port {free_port()} --mlflow-port {free_port()}"  # others may use the usual ones
    script = [f"{_with(line, ports)}\necho '{PROMPT}'$?" for line in lines]
    own = shutil.which("python3", path=_path()) or "python3"
    environment = {name: value for name, value in os.environ.items() if KEPT.match(name)}
    environment |= {"HOME": str(clone.parent / "home"), "PATH": _path(), "PYTHON": own}
    shell = subprocess.run(
        ["bash"],
        input="\n".join(script),
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_SECONDS,
    )
    said = re.split(rf"^{PROMPT}(\d+)\n", shell.stdout, flags=re.MULTILINE)
    ends = dict(zip(lines, map(int, said[1::2]), strict=True))
    assert set(ends.values()) == {0}, "\n".join(
        f"$ {line}\n{text[-3000:]}" for line, text in zip(lines, said[::2], strict=False) if ends[line]
    )
    left = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert left.stdout.split() in ([], ["??", "step.png"]), "files that git does not ignore, but the drawing"
    assert not processes_of(clone), "processes after `dejavu down`"


def _with(line: str, ports: str) -> str:
    """Return `dejavu up` with free ports, and other lines as they are."""
    command, mark, comment = line.partition(" #")
    return f"{command.rstrip()}{ports}{mark}{comment}" if command.strip() == "dejavu up" else line


def _path() -> str:
    """The caller's PATH without the environment of these tests."""
    own = sys.prefix
    return os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if not part.startswith(own))
