"""The command for hosts that are not reached from here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

launching = typer.Typer()


@launching.command(
    epilog="Examples:  dejavu launch .dejavu/runs/3f2a --torchrun  |  dejavu launch /shared/run1 --workload my.yaml "
    "--cluster hosts.yaml --slurm --dry-run"
)
def launch(
    training: Annotated[Path, typer.Argument(help="folder of a prepared training, or a new one; every host sees it")],
    torchrun: Annotated[bool, typer.Option("--torchrun", help="print one line for each host")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="write a batch script and submit it")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="of --slurm: only write it")] = False,
    workload: Annotated[Path | None, typer.Option(help="for a new folder: what to train")] = None,
    cluster: Annotated[Path | None, typer.Option(help="for a new folder: the cluster file to plan for")] = None,
    budget_seconds: Annotated[float | None, typer.Option(min=0.0, help="of planning: search time; default: 8")] = None,
    virtual_workers: Annotated[
        str,
        typer.Option(
            metavar="auto|always",
            help="of planning: several pipelines that share each batch; auto: where they are predicted to be faster",
        ),
    ] = "",
    address: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST=ADDRESS", help="of --torchrun: where a host's name does not lead to it"),
    ] = None,
    interface: Annotated[str, typer.Option(help="network interface of the ranks; default: that of the name")] = "",
    port: Annotated[int, typer.Option(min=1, max=65535, help="of the rendezvous, on the first host")] = 29400,
    time: Annotated[str, typer.Option(help="of --slurm: the time limit, as sbatch takes it")] = "",
    sbatch: Annotated[list[str] | None, typer.Option(help="of --slurm: another option, as --partition=gpu")] = None,
) -> None:
    """Train a prepared job on other hosts: complete torchrun lines for shells, or a script for SLURM.

    Run again, both go on from the last checkpoint.
    """
    from dejavu.foundation.errors import InputError
    from dejavu.launch.elsewhere import Places, Slurm
    from flows.launching import addresses_of, job_to_launch, print_lines, submit

    if torchrun == slurm:
        raise InputError("wanted one of --torchrun, which prints lines, and --slurm, which writes a batch script")
    if dry_run and not slurm:
        raise InputError("--dry-run is for --slurm; --torchrun only prints")
    if torchrun and (time or sbatch):
        raise InputError(
            f"{'--time' if time else '--sbatch'} is for --slurm; found --torchrun, whose lines have no limit"
        )
    if slurm and address:
        raise InputError(f"--address {address[0]} is for --torchrun; SLURM knows its nodes")
    job = job_to_launch(training, workload, cluster, budget_seconds, virtual_workers)
    places = Places(Path.cwd(), addresses_of(address or ()), interface, port)
    if torchrun:
        print_lines(job, places, typer.echo)
    else:
        submit(job, places, Slurm(time, tuple(sbatch or ())), dry=dry_run, say=typer.echo)
