"""What a `dejavu` command prints, kept as a result, so that the blocks README shows can be held against it.

    python -m benchmarks.printed --json benchmarks/results/printed-plan.json -- \\
        plan --model t5-11b --cluster examples/clusters/4x8-v100.yaml

Everything after `--` is the command's; what it says on standard error, progress for instance, is not kept.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._report import report

ROOT = Path(__file__).resolve().parents[1]


def main(
    words: Annotated[list[str], typer.Argument(help="the command's words, after --")],
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Run the command in the repository's root and keep its lines, its wall-clock and its processor seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "flows", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wall_seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    rows: list[dict[str, Any]] = [{"line": line.rstrip().replace(str(ROOT), "…")} for line in done.stdout.splitlines()]
    summary = {
        "printed_by": " ".join(["dejavu", *words]),
        "exit_status": done.returncode,
        "wall_seconds": wall_seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }
    report("What was printed", rows, summary, json_path)


if __name__ == "__main__":
    typer.run(main)
