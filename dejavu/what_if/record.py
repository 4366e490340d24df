"""Answers to what-if questions as JSON: seconds, bytes and counts by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dejavu.planning import choice_to_dict
from dejavu.what_if.answers import Answered, difference
from dejavu.what_if.cheapest import Cheapest, Trained


def rows_to_dict(rows: Sequence[Answered], *, compares: bool = False) -> dict[str, Any]:
    """Return each case with its whole plan, as `dejavu plan --json` alone has it.

    Args:
        compares: the first row is before a change and the last after it; `difference` says what it brings.
    """
    found: dict[str, Any] = {"rows": [_row(row) for row in rows]}
    if compares:
        change = difference(rows[0], rows[-1])
        found["difference"] = change and change._asdict()
    return found


def _row(row: Answered) -> dict[str, Any]:
    request, cost = row.case.request, row.cost_of_a_step
    return {
        "case": row.case.name,
        "cluster": request.cluster.name,
        "nodes": {group.name: group.count for group in request.cluster.groups},
        "model": request.workload.model,
        "batch_size": request.workload.batch_size,
        "sequence_length": request.workload.sequence_length,
        "failure": row.failure or None,
        "cost_per_step": cost and cost[0],
        "plan": choice_to_dict(row.choice) if row.choice is not None else None,
    }


def cheapest_to_dict(found: Cheapest) -> dict[str, Any]:
    """Return the goal, every cluster that was planned, and the places of the cheapest and the fastest among them."""

    def place(row: Trained | None) -> int | None:
        return found.rows.index(row) if row is not None else None

    return {
        "tokens": found.goal.tokens,
        "within_seconds": found.goal.within_seconds,
        "currency": found.currency,
        "cheapest": place(found.best),
        "fastest": place(found.fastest),
        "rows": [
            _row(row.answered)
            | {
                "num_nodes": row.num_nodes,
                "num_used_nodes": None,
                "training_seconds": None,
                "training_seconds_range": None,
                "cost": None,
            }
            | (
                {
                    "training_seconds": row.seconds,
                    "training_seconds_range": list(row.range_seconds),
                    "cost": row.cost,
                    "num_used_nodes": row.num_used_nodes,
                    "in_time": row.is_in_time,
                    "proved_late": row.is_proved_late,
                }
                if row.answered.choice is not None
                else {"in_time": False, "proved_late": False}
            )
            for row in found.rows
        ],
    }
