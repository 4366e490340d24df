"""The commands that take care of what a project keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WaitOption = Annotated[bool, typer.Option("--wait", help="wait for a run in this folder to end")]
upkeep = typer.Typer()


@upkeep.command(epilog="Example:  dejavu backup /backups/dejavu-$(date +%F).tar.gz")
def backup(
    file: Annotated[Path, typer.Argument(help="where it goes; a name that ends in .tar is not compressed")],
    wait: WaitOption = False,
) -> None:
    """Save what this project keeps in one file: measured costs, runs, checkpoints, trials, records."""
    from flows.upkeep import backup as saving

    project = Path.cwd()
    saved = saving.backup(project, file, wait=wait)
    typer.echo(f"saved {saved} in {file}")
    if elsewhere := saving.kept_elsewhere(project):
        typer.echo(elsewhere)


@upkeep.command(epilog="Example:  dejavu restore /backups/dejavu-2026-11-22.tar.gz")
def restore(
    file: Annotated[Path, typer.Argument(help="what `dejavu backup` wrote")],
    force: Annotated[bool, typer.Option("--force", help="replace files that are here and differ")] = False,
    wait: WaitOption = False,
) -> None:
    """Put back what `dejavu backup` saved. Restore only files that you made: they hold what services will run."""
    from flows.upkeep import backup as saving

    typer.echo(f"restored {saving.restore(Path.cwd(), file, force=force, wait=wait)} from {file}")


@upkeep.command(epilog="Examples:  dejavu gc --keep 10 --dry-run  |  dejavu gc --keep 10 --mlflow")
def gc(
    keep: Annotated[int, typer.Option(min=0, help="how many of the newest runs stay, with their checkpoints")] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="delete nothing; say what would be")] = False,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="also erase older runs and their artifacts from mlflow.db")
    ] = False,
    wait: WaitOption = False,
) -> None:
    """Delete what only older runs need: checkpoints, states of trials, cached results and logs older than 30 days."""
    from dejavu.foundation.units import plural
    from flows.upkeep.cleaning import clean

    said = "would delete" if dry_run else "deleted"
    for found in (everything := clean(Path.cwd(), keep, dry_run=dry_run, wait=wait)):
        typer.echo(f"{said} {found}")
    if mlflow:
        from dejavu.track.old_runs import delete_old_runs

        typer.echo(f"{said} {delete_old_runs(Path.cwd(), keep, dry_run=dry_run)}")
    elif not everything:
        typer.echo(f"nothing to delete: only what is needed of the newest {plural(keep, 'run')} is here")
