"""The command that prices a plan of one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dejavu.what_if import OwnPlan

pricing = typer.Typer()

FORMULA = "by the searches' formula, which takes the fastest links between devices of its types"


@pricing.command(
    epilog="Examples:  dejavu plan --model bert48 --cluster examples/clusters/4x8-v100.yaml --json plan.json && "
    "dejavu price plan.json --model bert48 --cluster examples/clusters/4x8-v100.yaml"
)
def price(
    plan: Annotated[
        Path, typer.Argument(help="stages, schedule (any) and microbatches; as `dejavu plan --json` writes them")
    ],
    model: Annotated[str | None, typer.Option(help="a workload file, one of examples/workloads, or a model")] = None,
    workload: Annotated[Path | None, typer.Option(help="likewise, a file")] = None,
    cluster: Annotated[Path, typer.Option("--cluster", help="the cluster file")] = Path("cluster.yaml"),
    sequence_length: Annotated[int | None, typer.Option(min=1, help="in place of the workload's")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="likewise")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="of the drawn range; default: the workload's")] = None,
    blocking: Annotated[
        bool, typer.Option("--blocking", help="messages block both of their ends, as in Megatron-DeepSpeed")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the prices as JSON")] = None,
    database: Annotated[Path | None, typer.Option(help="folder of measured costs, profiles_db without it")] = None,
) -> None:
    """Predict the step and the memory of a plan of your own, also where it does not fit or torch cannot run it."""
    from dejavu.foundation.gc_frozen import gc_frozen

    with gc_frozen():
        from dejavu.foundation.errors import InputError
        from dejavu.planning import PlanRequest, check_target, write_answer
        from dejavu.plans.stage_costs import PlanError
        from dejavu.what_if import price_own_plan, read_plan, unlike, varied
        from flows.inputs import measured_costs, read_what_if

    check_target(json_path)
    asked = read_plan(plan)
    machines, told = read_what_if(cluster, model, workload)
    lengths, batches = ([] if one is None else [one] for one in (sequence_length, batch_size))
    ((_, wanted),) = varied(told, lengths, batches)
    request = PlanRequest(wanted, machines, measured_costs(database), seed=wanted.seed if seed is None else seed)
    differs = unlike(plan, request)
    try:
        found = price_own_plan(request, asked, is_blocking=blocking)
    except PlanError as error:
        raise InputError(f"{plan}: {error}{differs and '; '}{differs}") from error
    found = replace(found, notes=(*([differs] if differs else []), *found.notes))
    show(found)
    if json_path is not None:
        write_answer(found.to_dict(), json_path)


def show(found: OwnPlan) -> None:
    """Print what a plan is predicted to take and to hold."""
    from rich.table import Table

    from dejavu.foundation.tables import print_whole
    from dejavu.foundation.units import format_bytes, format_seconds, in_microbatches
    from dejavu.planning.sentences import between
    from flows.printing import console

    table = Table(title=f"{found.plan.schedule_name}, {in_microbatches(found.plan.num_microbatches, found.accumulate)}")
    for name in ("stage", "on", "a microbatch", "memory", "of"):
        table.add_column(name, no_wrap=name != "on", overflow="fold")
    for s, stage in enumerate(found.plan.stages):
        table.add_row(
            stage.layers,
            str(stage.configuration),
            format_seconds(found.stage_seconds_S[s]),
            format_bytes(found.peak_bytes_S[s]),
            format_bytes(found.capacity_bytes_S[s]),
        )
    screen = console()
    print_whole(screen, table)
    formula, likely = found.formula_seconds, between(found.range_seconds, format_seconds)
    lines = [
        f"predicted step, simulated: {format_seconds(found.simulated_seconds)} (in nine of ten cases {likely})",
        *([f"{FORMULA}: {format_seconds(formula)}"] if formula is not None else []),
        "it fits its devices' memory"
        if found.fits
        else "it does not fit: a stage needs more memory than its devices, or their nodes, have",
        *found.notes,
    ]
    for line in lines:
        screen.print(line, highlight=False, markup=False, soft_wrap=True)
