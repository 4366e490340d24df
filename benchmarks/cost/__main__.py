"""How well costs are predicted; one table a call, with the peer or the baseline in the same table.

python -m benchmarks.cost --kernels KERNELS.parquet --models MODELS.parquet --devices DEVICES.csv \\
        --train Tesla_P100-PCIE-16GB,Tesla_T4 --test NVIDIA_L4 --json kernels.json
python -m benchmarks.cost --kernels KERNELS.parquet --models MODELS.parquet --devices DEVICES.csv --json left-out.json
python -m benchmarks.cost --fp16 COMPUTE.parquet --json fp16.json
python -m benchmarks.cost --collectives PROFILE.parquet --json collectives.json
python -m benchmarks.cost --iterations ITERATIONS.csv --json iterations.json
python -m benchmarks.cost --memory --json memory.json
python -m benchmarks.cost --profiling-time --json profiling.json
python -m benchmarks.cost --attention --json attention.json
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._report import report_table

FileOption = Annotated[Path | None, typer.Option(exists=True, dir_okay=False)]


def main(
    kernels: FileOption = None,
    models: FileOption = None,
    devices: FileOption = None,
    train: Annotated[
        str,
        typer.Option(help="names of the devices to learn from, with commas; neither this nor --test: each left out"),
    ] = "",
    test: Annotated[str, typer.Option(help="names of the devices to predict")] = "",
    fp16: FileOption = None,
    collectives: FileOption = None,
    iterations: FileOption = None,
    memory: Annotated[bool, typer.Option("--memory")] = False,
    profiling_time: Annotated[bool, typer.Option("--profiling-time")] = False,
    attention: Annotated[bool, typer.Option("--attention")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Run one of the tables."""
    tables: dict[str, tuple[bool, dict[str, Any]]] = {  # name: (asked for, its options)
        "kernels": (
            kernels is not None,
            {"kernels": kernels, "models": models, "devices": devices, "train": train, "test": test},
        ),
        "fp16": (fp16 is not None, {"path": fp16}),
        "collectives": (collectives is not None, {"path": collectives}),
        "iterations": (iterations is not None, {"path": iterations}),
        "memory": (memory, {}),
        "profiling_time": (profiling_time, {}),
        "attention": (attention, {}),
    }
    chosen = [name for name, (asked, _) in tables.items() if asked]
    if len(chosen) != 1:
        wanted = ", ".join(f"--{name.replace('_', '-')}" for name in tables)
        raise typer.BadParameter(f"{len(chosen)} tables were asked for; wanted one of {wanted}")
    (name,) = chosen
    table = importlib.import_module(f"benchmarks.cost.{name}")
    report_table(partial(table.run, **tables[name][1]), json_path)


if __name__ == "__main__":
    typer.run(main)
