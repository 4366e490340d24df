"""A training while its cluster changes, beside torchrun's restart from a checkpoint under the same plan.

Where a fault ends no rank, torchrun notices nothing and the same plan goes on: the row is called `no re-plan`.

python -m benchmarks.elastic --json elastic.json     # all faults with and without replicas, 25 minutes on 2 quiet cores
python -m benchmarks.elastic --fault "host killed" --without

Four hosts are emulated by network namespaces and CPU quotas, which needs the rights of root. For each fault:
seconds from the fault to the next new step, and from the moment it was noticed; steps that had been done and were done
again; the throughput of the plan after the change over that of the best plan for what is left, trained in turn while
the fault lasts; and the worst difference of a loss from those of one process that trains the same steps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._report import report_table
from benchmarks.elastic.faults import FAULTS
from benchmarks.elastic.prices import WORKLOAD, first_binding, measured_rows, running_problem
from benchmarks.elastic.running import ours, row_of, throughput, torchrun
from benchmarks.elastic.site import LAUNCHER, Site, emulated, is_inside
from benchmarks.pipeline.emulation import EmulationError
from dejavu.foundation.errors import InputError
from dejavu.init import Draw
from dejavu.migration import ClusterNow
from dejavu.migration.changes import HostLost
from dejavu.runtime.process import die_with_parent, named_parent
from dejavu.runtime.single import train_single

NUM_STEPS, MANY_STEPS = 90, 300  # the latter where a change has to be noticed, or a host to start, before it can pay
OURS, BASELINE, NO_REPLAN = "ours", "torchrun restart", "no re-plan"


def table(
    site: Site, faults: tuple[str, ...], replicas: tuple[bool, ...]
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every fault with and without replicas, ours and the baseline."""
    known = {fault.name: fault for fault in FAULTS}
    if unknown := set(faults) - set(known):
        raise InputError(f"there is no fault {unknown.pop()!r}; wanted one of {', '.join(map(repr, known))}")
    measured = measured_rows(site)
    expected = train_single(WORKLOAD, Draw(), range(MANY_STEPS))
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for name in faults or tuple(known):
        for has in replicas:
            found = _rows(site, known[name], measured, expected, has)
            for row in found:
                typer.echo(row, err=True)
            rows += found
            wanted = (
                *("seconds_to_next_step", "seconds_from_noticing", "steps_lost"),
                *("throughput_over_fresh_optimum", "worst_loss_difference"),
            )
            summary.setdefault(name, {})["replicas" if has else "none"] = {key: found[0][key] for key in wanted}
    return "A training while its cluster changes", rows, summary


def _rows(site: Site, fault: Any, measured: Any, expected: list[float], has: bool) -> list[dict[str, Any]]:
    running = running_problem(measured, replicas=has)
    before = ClusterNow(running.cluster).after(*([HostLost(fault.changes[0].host)] if fault.comes else []))
    try:
        mine = ours(site, running, fault, NUM_STEPS if fault.ends_ranks else MANY_STEPS, replicas=has)
        bindings = {OURS: mine.binding, BASELINE: first_binding(running, before, replicas=has)}
        shares, _ = throughput(site, running, fault, bindings)
    finally:
        site.as_usual()
    theirs = torchrun(site, running, fault, NUM_STEPS, replicas=has) if fault.ends_ranks else None
    return [
        row_of(OURS, fault, has, mine, shares[OURS], expected),
        row_of(BASELINE if fault.ends_ranks else NO_REPLAN, fault, has, theirs, shares[BASELINE], expected),
    ]


def main(
    fault: Annotated[list[str] | None, typer.Option("--fault", help="which ones; all without it")] = None,
    with_replicas: Annotated[bool, typer.Option("--with", help="only with replicas")] = False,
    without: Annotated[bool, typer.Option("--without", help="only without replicas")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Run the trainings that were asked for, or all."""
    replicas = tuple(has for has, asked in ((True, with_replicas), (False, without)) if asked) or (True, False)
    if is_inside():
        die_with_parent(signal.SIGTERM)
        report_table(lambda: table(Site.from_environment(), tuple(fault or ()), replicas), json_path)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing emulated is left behind
    try:
        with emulated() as site:
            words = site.inside(LAUNCHER, [sys.executable, "-m", "benchmarks.elastic", *sys.argv[1:]])
            code = subprocess.run(words, env={**os.environ, **site.to_environment(), **named_parent()}).returncode
    except EmulationError as error:
        typer.echo(f"skipped: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
