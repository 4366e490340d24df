"""Add a campaign's measurements to those that ship: python -m benchmarks.gpu.ship gpu-rows.parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from dejavu.profiles import ProfileDatabase

SHIPPED = Path("profiles_db/shipped")


def main(
    rows: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="what the campaign wrote")],
    database: Annotated[Path, typer.Option(help="which database they are added to")] = SHIPPED,
    least_microseconds: Annotated[float, typer.Option(min=0, help="kernels that took less are left out")] = 0.0,
) -> None:
    """Append the rows of a campaign on a GPU, and say where they are from; those of a rehearsal are refused.

    Of layers nothing is shipped: no other model has them. Nor are hosts. Sums ship where the record
    says that rows are added up; of others it does not say which dimension is, and they differ several times.
    """
    told = (pq.read_schema(rows).metadata or {}).get(b"provenance")
    if told is None:
        typer.echo(f"{rows} does not say where it is from; wanted a file that benchmarks.gpu wrote", err=True)
        raise typer.Exit(2)
    provenance = json.loads(told)
    if provenance["rehearsal"]:
        typer.echo(f"{rows} is of a rehearsal on {provenance['device_type']}; wanted one of a GPU", err=True)
        raise typer.Exit(2)
    table = pq.read_table(rows)
    if database == SHIPPED:
        by_rows = pc.match_substring(pc.field("extra"), '"is_indexed": true')
        sound = ~pc.starts_with(pc.field("name"), "reduction ") | by_rows
        table = table.filter((pc.field("kind") == "operator") & sound)
    table = table.filter((pc.field("kind") != "operator") | (pc.field("seconds") >= 1e-6 * least_microseconds))
    count = ProfileDatabase(database).append_table(table)
    typer.echo(f"{count} rows added to {database}; say in profiles_db/README.md what they are:")
    typer.echo(
        f"{provenance['devices']} × {provenance['device']}, driver {provenance['driver']}, torch "
        f"{provenance['torch']}, CUDA {provenance['cuda']}, {provenance['date_utc']}"
    )


if __name__ == "__main__":
    typer.run(main)
