"""Every table and figure of the papers behind this project: what they state beside what one command of ours finds.

python -m benchmarks.paper --folder paper --json paper.json       # all, under ten minutes on two quiet cores
python -m benchmarks.paper --only knapsack,data-parallel --folder paper
python -m benchmarks.paper --list                                 # the claims and their commands

The folder gets each command's results and drawings, and `index.html`, which shows them side by side. A claim whose data
are not there is left out, and said to be.
"""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import Environment, StrictUndefined
from rich.console import Console

from benchmarks._report import machine, report
from benchmarks.paper.claims import CLAIMS, Claim, Verdict

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("index.html.jinja")


def main(
    folder: Annotated[Path, typer.Option(file_okay=False, help="for results, drawings and index.html")] = Path("paper"),
    data: Annotated[Path, typer.Option(file_okay=False, help="measurements of others")] = ROOT.parent / "shared/data",
    only: Annotated[str, typer.Option(help="names of claims, with commas; default: all")] = "",
    list_: Annotated[bool, typer.Option("--list", help="show the claims and their commands, and run nothing")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Hold each claim against its command."""
    known = {claim.name: claim for claim in CLAIMS}
    names = [name.strip() for name in only.split(",") if name.strip()] or list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown claim {unknown[0]!r}; wanted some of {', '.join(known)}")
    chosen = [known[name] for name in names]
    if list_:
        for claim in chosen:
            print(f"{claim.name}: {claim.where}: {claim.states}\n    {shlex.join(claim.command('DATA', 'FOLDER'))}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    console, rows = Console(stderr=True), list[dict[str, Any]]()
    for done, claim in enumerate(chosen):
        console.print(f"{claim.name} ({done + 1} of {len(chosen)})")
        same = next((row for row in rows if row["command"] == shlex.join(claim.command(str(data), str(folder)))), None)
        rows.append(row_of(claim, data, folder, known_as=same["claim"] if same else ""))
    (folder / "index.html").write_text(page(rows, folder), encoding="utf-8")
    summary = {"claims": {row["claim"]: row["verdict"] for row in rows}}
    report("The papers' tables and figures", rows, summary, json_path)
    print(f"shown side by side in {folder / 'index.html'}")
    if any(row["verdict"] == FAILED for row in rows):
        raise typer.Exit(1)


FAILED, LEFT_OUT = "failed", "not run"


def row_of(claim: Claim, data: Path, folder: Path, known_as: str = "") -> dict[str, Any]:
    """Run a claim's command and judge what it found.

    Args:
        known_as: a claim whose results are there already, of the same command.
    """
    command = claim.command(str(data), str(folder))
    row = {"claim": claim.name, "where": claim.where, "states": claim.states, "command": shlex.join(command)}
    if claim.needs_data and not data.is_dir():
        return {**row, "ours": f"{data} is not there", "verdict": LEFT_OUT, "wall_seconds": 0.0, "cpu_seconds": 0.0}
    result, started, before = folder / f"{known_as or claim.name}.json", time.monotonic(), _children_cpu_seconds()
    if not known_as:
        result.unlink(missing_ok=True)
        words = [sys.executable, *command[1:], "--json", str(result)]
        run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        (folder / f"{claim.name}.txt").write_text(run.stdout + run.stderr, encoding="utf-8")
    taken = {"wall_seconds": time.monotonic() - started, "cpu_seconds": _children_cpu_seconds() - before}
    if not result.exists():
        said = f"the command failed; what it said is in {folder / f'{known_as or claim.name}.txt'}"
        return {**row, "ours": said, "verdict": FAILED, **taken}
    measured = json.loads(result.read_text(encoding="utf-8"))
    found = claim.judge(measured["summary"], measured["rows"])
    return {**row, "ours": found.ours, "verdict": str(found.verdict), **taken}


def _children_cpu_seconds() -> float:
    """Return the processor time of all commands that have ended, and of what they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def page(rows: Sequence[dict[str, Any]], folder: Path) -> str:
    """Return the page that shows theirs beside ours."""
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE.read_text(encoding="utf-8"))
    drawn = sorted(path.name for path in folder.glob("*.png"))
    where = {name: row["where"] for row in reversed(rows) for name in drawn if name.startswith(row["claim"])}
    images = [(name, where.get(name, "")) for name in drawn]
    return template.render(
        rows=rows, images=images, machine=machine(), holds=Verdict.HOLDS.value, fails=Verdict.DOES_NOT.value
    )


if __name__ == "__main__":
    typer.run(main)
