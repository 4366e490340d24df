"""The operator level: shardings, cuts and placements that are found, beside Auto-MAP's tables and today's peers.

python -m benchmarks.operators --partitioning --referee-seconds 60      # two minutes; --seeds 0: without agents
python -m benchmarks.operators --partitioning --agents vgg19,bert48,t5-base --moves 6000      # half an hour
python -m benchmarks.operators --data-parallel
python -m benchmarks.operators --peers --referee-seconds 60
python -m benchmarks.operators --placement --json benchmarks/results/operators-placement.json
python -m benchmarks.operators --plans --json benchmarks/results/operators-plans.json
python -m benchmarks.operators --losses --json benchmarks/results/operators-losses.json
python -m benchmarks.operators --pipeline      # half an hour; --seeds 0, without agents: minutes
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks._report import report, write


def main(
    partitioning: Annotated[bool, typer.Option("--partitioning", help="Auto-MAP's models over a server's devices")] = (
        False
    ),
    data_parallel: Annotated[bool, typer.Option("--data-parallel", help="which dimensions are the batch's")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="Llama-like decoders, beside autoparallel's times")] = False,
    placement: Annotated[bool, typer.Option("--placement", help="branching graphs on several devices")] = False,
    pipeline: Annotated[bool, typer.Option("--pipeline", help="cuts of operators and devices, tables 7 and 8")] = False,
    losses: Annotated[bool, typer.Option("--losses", help="trainings under found splits, beside one process")] = False,
    plans: Annotated[bool, typer.Option("--plans", help="plans with found splits, beside declared ones")] = False,
    models: Annotated[str, typer.Option(help="which, of all but --peers and --placement; default: all")] = "",
    most_layers: Annotated[int, typer.Option(min=2, help="of --peers")] = 32,
    referee_seconds: Annotated[
        float, typer.Option(min=0, help="of --peers, --partitioning: HiGHS's budget; 0: none")
    ] = 0.0,
    operations: Annotated[int, typer.Option(min=1, help="of --placement: of each large graph")] = 500,
    budget_seconds: Annotated[float, typer.Option(min=0, help="of --placement: CPU seconds of each search")] = 7.0,
    seed: Annotated[int, typer.Option(min=0, help="of --placement: of graphs and searches")] = 0,
    seeds: Annotated[int, typer.Option(min=0, help="trainings of each DQN agent; 0: none")] = 5,
    agents: Annotated[str, typer.Option(help="of --partitioning: models that agents are trained on")] = "vgg19",
    moves: Annotated[int, typer.Option(min=1, help="of --partitioning: moves that an agent learns from")] = 1_000,
    steps: Annotated[int, typer.Option(min=1, help="of --pipeline: moves that an agent learns from")] = 10_000,
    figures: Annotated[Path | None, typer.Option(help="folder for the agents' convergence curves")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Run one of them."""
    if partitioning + data_parallel + peers + placement + pipeline + losses + plans != 1:
        raise typer.BadParameter(
            "wanted one of --partitioning, --data-parallel, --peers, --placement, --pipeline, --losses and --plans"
        )
    if plans:
        from benchmarks.operators import plans as planned

        rows, summary = planned.measure(_chosen(models, planned.MODELS))
        report("Plans with found and with declared splits", rows, summary, json_path)
        return
    if losses:
        from benchmarks.operators import losses as trained

        rows, found = trained.measure(_chosen(models, trained.MODELS))
        report("Trainings under splits that were found", rows, found, json_path)
        return
    if placement:
        from benchmarks.operators.placement import measure

        rows, found = measure(seed, budget_seconds, operations)
        report("Branching graphs on several devices", rows, {"placement": found}, json_path)
        return
    if pipeline:
        from benchmarks.operators.pipeline import show

        show(models, seeds, steps, figures, json_path)
        return
    from benchmarks.operators import shardings

    if peers:
        rows, summary = shardings.peers(most_layers, referee_seconds)
        report("Shardings of Llama-like decoders", rows, summary, json_path)
        return
    chosen = _chosen(models, shardings.MODELS)
    if partitioning:
        learning = tuple(_chosen(agents, shardings.MODELS)) if agents else ()
        besides = shardings.Besides(learning, seeds, moves, referee_seconds, figures)
        tables, summary = shardings.partitioning(chosen, besides)
        for title, own in tables.items():
            if own:
                report(f"Shardings over 8 V100{', ' * bool(title)}{title}", own, {}, None)
        if json_path is not None:
            write([row for own in tables.values() for row in own], summary, json_path)
    else:
        rows, summary = shardings.data_parallelism(chosen)
        report("Data parallelism, found", rows, summary, json_path)


def _chosen(models: str, known: Iterable[str]) -> list[str]:
    chosen = models.split(",") if models else list(known)
    if unknown := [name for name in chosen if name not in known]:
        raise typer.BadParameter(f"unknown model {unknown[0]!r}; wanted some of {', '.join(known)}")
    return chosen


if __name__ == "__main__":
    typer.run(main)
