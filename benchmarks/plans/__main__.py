"""Plans that were measured elsewhere, priced from measured layers and links, beside what was measured.

    python -m benchmarks.plans FOLDER --json plans.json

The folder holds plans.jsonl, layers.parquet and network.parquet (shared/data/sailor/README.md says what is in them).
Nothing is fitted to the plans: the default, messages in parts that block until both ends are there, is what the engine
does that trained them. `variants` are the same rows with what other engines do.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks._report import report_table
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.measured_plans import BadPlan, MeasuredFolder, MeasuredPlan, MessageForm, PlanPrice, price_plan, read_folder
from dejavu.simulation import Sending

FORMS = [(form, sending) for form in MessageForm for sending in Sending]


def main(
    folder: Annotated[Path, typer.Argument(help="with plans.jsonl, layers.parquet and network.parquet")],
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Every plan of the folder, by the searches' formula and by simulation."""
    report_table(lambda: run(folder), json_path)


def run(folder: Path) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """The table, and how far each way is off."""
    found = read_folder(folder)
    plans = [plan for plan in found.plans if isinstance(plan, MeasuredPlan)]
    bad = [f"{plan.place}: {plan.problem}" for plan in found.plans if isinstance(plan, BadPlan)]
    if not plans:
        raise InputError(f"{folder / 'plans.jsonl'}: no line is a plan; {bad[0]}")
    rows = [row_of(plan, found) for plan in plans]
    variants = {
        f"{form.value}, {sending.value}": mape_percent([row_of(plan, found, form, sending) for plan in plans])
        for form, sending in FORMS
    }
    sites = sorted({row["site"] for row in rows})
    summary = {
        **errors_of(rows),
        "by_site": {site: errors_of([row for row in rows if row["site"] == site]) for site in sites},
        "not_priced": sum(row["simulated_s"] is None for row in rows),
        "left_out_rows": dict(found.left_out),
        "bad_lines": bad,
        "mape_without_doubt_percent": mape_percent([row for row in rows if row["doubt"] is None]),
        "variants": variants,
    }
    return "Measured plans, and what is predicted of them", rows, summary


def row_of(
    plan: MeasuredPlan,
    found: MeasuredFolder,
    form: MessageForm = MessageForm.PARTS,
    sending: Sending = Sending.RENDEZVOUS,
) -> dict[str, Any]:
    """A row; a plan that cannot be priced says why in its notes."""
    price: PlanPrice | None = None
    try:
        price = price_plan(plan, found.layers, found.network, form=form, sending=sending)
        notes = "; ".join([*price.notes, *_of_sequences(plan, found)])
    except DejavuError as error:
        notes = f"not priced: {error}"
    measured = plan.measured_seconds
    simulated = price.simulated_seconds if price is not None else None
    formula = price.formula_seconds if price is not None else None

    def off(predicted: float | None) -> float | None:
        return 100.0 * (predicted / measured - 1.0) if predicted is not None and measured is not None else None

    return {
        "plan": plan.id,
        "site": plan.site,
        "stages": len(plan.stages),
        "replicas": len(plan.stages[0].replicas),
        "microbatches": plan.num_microbatches,
        "measured_s": measured,
        "simulated_s": simulated,
        "formula_s": formula,
        "peer_s": plan.peer_seconds,
        "difference_percent": off(simulated),
        "formula_percent": off(formula),
        "peer_percent": off(plan.peer_seconds),
        "reduction_s": price and price.reduction_seconds,
        "doubt": plan.doubt,
        "notes": notes,
    }


def _of_sequences(plan: MeasuredPlan, found: MeasuredFolder) -> list[str]:
    """Say where plans of a model differ in the length of their sequences, which layers.parquet does not tell."""
    alike = [one for one in found.plans if isinstance(one, MeasuredPlan) and one.model == plan.model]
    lengths = sorted({one.sequence_length for one in alike})
    if len(lengths) == 1:
        return []
    what = " and ".join(f"{length:,}" for length in lengths)
    return [f"plans of {plan.model} have sequences of {what} tokens, and its layers were measured at one length"]


def errors_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean absolute percentage errors of rows; the peer's on the rows that are priced here too, and ours on its."""
    compared = [row for row in rows if row["difference_percent"] is not None]
    beside = [row for row in compared if row["peer_percent"] is not None]
    return {
        "rows": len(rows),
        "mape_percent": mape_percent(compared),
        "formula_mape_percent": mape_percent(compared, "formula_percent"),
        "peer_mape_percent": mape_percent(compared, "peer_percent"),
        "compared_rows": len(compared),
        "peer_rows": len(beside),
        "mape_beside_peer_percent": mape_percent(beside),
    }


def mape_percent(rows: Sequence[dict[str, Any]], column: str = "difference_percent") -> float | None:
    """The mean of a column's absolute values; None where it has none."""
    known = [abs(row[column]) for row in rows if row[column] is not None]
    return statistics.fmean(known) if known else None


if __name__ == "__main__":
    typer.run(main)
