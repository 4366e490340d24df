"""The commands that read what runs left."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flows.printing import console, json_text

records = typer.Typer()
RunArgument = Annotated[
    str, typer.Argument(help="an id or its beginning, a run's name, a folder of .dejavu/runs, or `last`")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="print JSON")]


def _project() -> Path:
    """Return the project, whose records are read where the services of `dejavu up` keep them."""
    from flows import server_settings, service_record

    project = Path.cwd()
    if (up := service_record.recorded(project)) is not None:
        os.environ.update(server_settings.records(up.needs, up.mlflow_url))
    return project


@records.command(epilog="Examples:  dejavu runs  |  dejavu runs --most 100 --json")
def runs(
    most: Annotated[int, typer.Option(min=1, help="at most so many, the latest")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List the runs of this folder: when, of what, their steps predicted and measured, loss, state and verdict."""
    from dataclasses import asdict

    from dejavu.track import runs as recorded_runs
    from flows.recorded.tables import runs_table

    project = _project()
    found = recorded_runs(project, most)
    if as_json:
        typer.echo(json_text([asdict(run) for run in found]))
    elif found:
        console().print(runs_table(found))
    else:
        typer.echo(f"no run is recorded for {project}; `dejavu run` makes one")


@records.command(
    epilog="Examples:  dejavu compare 3f2a last  |  dejavu compare 3f2a 91c0 --all  |  dejavu compare 3f2a last --json"
)
def compare(
    first: RunArgument,
    second: RunArgument,
    everything: Annotated[bool, typer.Option("--all", help="also parameters that are the same")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare two runs: how they ended, figures, plans and parameters side by side, and what differs."""
    from dejavu.track import find_run, recorded
    from flows.recorded.tables import compared, comparison_tables

    project = _project()
    content = compared(*(recorded(project, find_run(project, name)) for name in (first, second)))
    if as_json:
        typer.echo(json_text(content))
        return
    for table in comparison_tables(content, everything=everything):
        console().print(table)
        typer.echo()


@records.command(
    epilog="Examples:  dejavu report  |  dejavu report 3f2a --open  |  dejavu report .dejavu/runs/9a50360b-…"
)
def report(
    run: RunArgument = "last",
    open_: Annotated[bool, typer.Option("--open", help="open the page in a browser, too")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the path of a run's report page; of one whose artifacts are on a server, a copy is fetched."""
    from dataclasses import asdict

    from dejavu.track import report_of, writes_report
    from flows.recorded.naming import run_named

    project = _project()
    found = run_named(project, run, partial(writes_report, project), "writes a page")
    path = report_of(project, found)
    typer.echo(json_text({"run": asdict(found), "report": str(path)}) if as_json else str(path))
    if open_:
        typer.launch(path.as_uri())


@records.command(
    epilog="Examples:  dejavu export last --to safetensors  |  dejavu export 3f2a --to hf --out my-llama  |  "
    "dejavu export .dejavu/runs/3f2a --to state_dict --step 150  |  dejavu export last --best"
)
def export(
    run: RunArgument = "last",
    to: Annotated[
        str, typer.Option(help="safetensors or state_dict, for the plain module; hf, a folder for `from_pretrained`")
    ] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="a new folder; default: exported/<training>-step-<number>")] = None,
    step: Annotated[int | None, typer.Option(help="of a kept checkpoint; default: the last")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="the checkpoint with the least loss on what is held out (evaluate_every)")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a training's weights under the plain module's names, or transformers', whatever plan trained them."""
    from flows.recorded.exporting import exported, sentence

    found = exported(_project(), run, to, out, step, best=best)
    files = [str(path) for path in found.files]
    content = {"folder": str(found.folder), "files": files, "step": found.step, "loss": found.loss}
    content["held_out_loss"] = found.held_out_loss
    typer.echo(json_text(content) if as_json else sentence(found, to))


@records.command(epilog="Example:  dejavu replans --last 5")
def replans(last: Annotated[int, typer.Option(min=1, help="how many, the newest")] = 20) -> None:
    """List what the watch decided when the cluster changed, and why (`dejavu up --watch`)."""
    from flows.recorded.decisions import decisions_table

    console().print(decisions_table(Path.cwd(), last))


@records.command(epilog="Examples:  dejavu status  |  watch -n 5 dejavu status  |  dejavu status --json")
def status(as_json: JsonFlag = False) -> None:
    """Show the training that runs in this folder: step, loss, pace, time left, plan, hosts; else the last one."""
    from dejavu.launch.running import status_of
    from flows.recorded.status import status_lines, status_to_dict

    found = status_of(Path.cwd())
    if as_json:
        typer.echo(json_text(status_to_dict(found)))
        return
    for line in status_lines(found):
        typer.echo(line)
