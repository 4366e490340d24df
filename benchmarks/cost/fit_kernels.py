"""Fit the kernel predictor that ships in the package, on every device of NeuSight's measurements.

python -m benchmarks.cost.fit_kernels --kernels KERNELS.parquet --devices DEVICES.csv

The figures of `python -m benchmarks.cost --kernels` are not of this file: there, the devices to predict are left out.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from benchmarks.cost.device_table import device_of, device_types
from benchmarks.cost.kernels import KERNEL_COLUMNS, fit, usable_rows
from dejavu.cost.kernels.learned import SHIPPED
from dejavu.importers.sources import check_columns, parquet_columns

FileOption = Annotated[Path, typer.Option(exists=True, dir_okay=False)]


def main(
    kernels: FileOption, devices: FileOption, output: Annotated[Path, typer.Option(help="the .npz to write")] = SHIPPED
) -> None:
    """Fit on all devices and write the file."""
    check_columns(kernels, parquet_columns(kernels, "NeuSight's kernels.parquet"), KERNEL_COLUMNS)
    rows, dropped = usable_rows(pd.read_parquet(kernels))
    table = device_types(devices)
    types = {name: device_of(name, table, devices) for name in rows["device"].astype(str).unique()}
    trained = ", ".join(sorted(device.name for device in types.values()))
    source = (
        f"fitted {date.today().isoformat()} on {len(rows):,} float32 kernels of {trained}; measured by NeuSight "
        "(Lee et al., ASPLOS 2025; sitar-lab/NeuSight, MIT)"
    )
    learned = fit(rows, types, source)
    learned.save(output)
    typer.echo(f"{learned.source}\nlaunch {learned.launch_seconds:.3g} s; dropped {dropped}; notes {learned.notes}")
    typer.echo(f"written to {output}, {output.stat().st_size:,} bytes")


if __name__ == "__main__":
    typer.run(main)
