"""The searches, measured; one table a call.

python -m benchmarks.search --cases ../shared/data/dp_cases --microbatches 16,64 --json cases.json
python -m benchmarks.search --generate FOLDER       # cases in the same form, up to 96 layers on 8 × 8 devices
python -m benchmarks.search --heterogeneous --problems 15 --json heterogeneous.json
python -m benchmarks.search --scale --figures docs/images --json scale.json
python -m benchmarks.search --anytime --figures docs/images --json anytime.json
python -m benchmarks.search --quality --json quality.json
python -m benchmarks.search --feasibility --problems 100 --seed 0 --json feasibility.json
python -m benchmarks.search --scales --json scales.json
python -m benchmarks.search --gradient --problems 21 --seed 900 --json gradient.json
python -m benchmarks.search --restarts --problems 2 --json restarts.json
python -m benchmarks.search --growth --json growth.json
python -m benchmarks.search --workers --json workers.json

Without a table asked for: short runs of --heterogeneous and --anytime.
CPU seconds are those of all threads of the process. Compiled loops are loaded before anything is timed.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._report import report_table

# What each table takes; `--quick` gives it its module's QUICK, and what a person gives goes before.
TABLES = {
    "cases": ("cases", "microbatches", "searches", "repeats", "budget_seconds", "alpa_up_to_layers", "alpa_most_steps"),
    "generate": ("folder", "seed"),
    "heterogeneous": ("searches", "num_problems", "seed", "budget_seconds"),
    "scale": ("searches", "seed", "budget_seconds", "figures"),
    "anytime": ("searches", "num_problems", "seed", "budget_seconds", "figures"),
    "quality": ("searches", "budget_seconds"),
    "feasibility": ("searches", "num_problems", "seed", "budget_seconds"),
    "gradient": ("num_problems", "seed", "budget_seconds"),
    "restarts": ("num_problems", "seed", "budget_seconds"),
    "growth": ("searches", "num_problems", "seed", "budget_seconds"),
    "workers": ("seed", "budget_seconds"),
    "scales": ("searches", "num_problems", "seed", "budget_seconds"),
}

OPTIONS = {"num_problems": "problems"}  # the command's names where they are others than the tables'


def main(
    cases: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="folder of problems in .npz")] = None,
    generate: Annotated[Path | None, typer.Option(file_okay=False, help="folder to write such problems to")] = None,
    heterogeneous: Annotated[bool, typer.Option("--heterogeneous", help="generated mixed clusters")] = False,
    scale: Annotated[bool, typer.Option("--scale", help="1,000 to 10,000 operators")] = False,
    anytime: Annotated[bool, typer.Option("--anytime", help="gap against time")] = False,
    quality: Annotated[bool, typer.Option("--quality", help="the example models on the example clusters")] = False,
    feasibility: Annotated[bool, typer.Option("--feasibility", help="memory about the least that works")] = False,
    scales: Annotated[bool, typer.Option("--scales", help="the same problems in other units of time")] = False,
    gradient: Annotated[bool, typer.Option("--gradient", help="the same search with and without gradient")] = False,
    restarts: Annotated[bool, typer.Option("--restarts", help="32 to 4,096 of them at once, on CPU and GPU")] = False,
    growth: Annotated[bool, typer.Option("--growth", help="time by size, an integer program beside `exact`")] = False,
    workers: Annotated[bool, typer.Option("--workers", help="a proof's parts on more and more, on paper")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="few and small problems")] = False,
    microbatches: Annotated[str | None, typer.Option(help="for --cases; 16,64 if not given")] = None,
    searches: Annotated[str | None, typer.Option(help="names with commas; the table's own if not given")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="for --cases")] = None,
    budget_seconds: Annotated[float | None, typer.Option(min=0, help="for each search on each problem")] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="how many, for tables of generated ones")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="of the first generated problem")] = None,
    alpa_up_to_layers: Annotated[int | None, typer.Option(min=0, help="Alpa's loop beside --cases; 0: never")] = None,
    alpa_most_steps: Annotated[float | None, typer.Option(help="and where it has no more steps than this")] = None,
    figures: Annotated[Path | None, typer.Option(file_okay=False, help="folder for the curves")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Run one of the tables."""
    flags = {"heterogeneous": heterogeneous, "scale": scale, "anytime": anytime, "quality": quality}
    flags |= {"feasibility": feasibility, "scales": scales, "gradient": gradient, "growth": growth}
    flags |= {"workers": workers, "restarts": restarts}
    asked = [name for name, value in {"cases": cases, "generate": generate, **flags}.items() if value]
    if len(asked) > 1 or (json_path is not None and not asked):
        wanted = ", ".join(f"--{name}" for name in TABLES)
        raise typer.BadParameter(f"{len(asked)} tables were asked for; wanted one of {wanted}")
    settings = {
        "cases": cases,
        "folder": generate,
        "microbatches": microbatches,
        "searches": searches,
        "repeats": repeats,
        "budget_seconds": budget_seconds,
        "num_problems": problems,
        "seed": seed,
        "alpa_up_to_layers": alpa_up_to_layers,
        "alpa_most_steps": alpa_most_steps,
        "figures": figures,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    tables = asked or ["heterogeneous", "anytime"]
    for option in given:
        takers = [name for name in TABLES if option in TABLES[name]]
        if not set(takers) & set(tables):
            which = " and ".join(f"--{name}" for name in tables)
            wanted = ", ".join(f"--{name}" for name in takers)
            raise typer.BadParameter(
                f"--{OPTIONS.get(option, option).replace('_', '-')} is not for {which}; it is for {wanted}"
            )
    for name in tables:
        module = importlib.import_module(f"benchmarks.search.{name}")
        options: dict[str, Any] = dict(module.QUICK) if quick or not asked else {}
        options |= {option: given[option] for option in TABLES[name] if option in given}
        report_table(partial(module.table, **options), json_path)


if __name__ == "__main__":
    typer.run(main)
