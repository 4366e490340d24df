"""The key of a plan's cache: all that the answer follows from, so that a changed input is never answered from it."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch

import dejavu
from dejavu.foundation.hashing import stable_hash
from dejavu.planning import PlanRequest
from dejavu.profiles.manifest import state_of
from dejavu.workload.models import model_of

_OURS = (".py", ".csv", ".npz", ".json", ".parquet")


def question_key(context: Any, parameters: dict[str, Any]) -> str:
    """Return the cache key of `choose_plan`: of the request, the database's state, the code, and torch's version."""
    return f"plan-{request_key(parameters['request'])}"


def request_key(request: PlanRequest) -> str:
    """Hash a request with what it refers to."""
    spread = request.parallelism
    return stable_hash(
        {
            "workload": request.workload.model_dump(mode="json"),
            "cluster": request.cluster.to_dict(),
            "database": state_of(request.database),
            "parallelism": spread and [list(map(str, vars(spread).values()))],
            "asked": [request.searches, request.schedules, request.microbatches, request.budget_seconds, request.seed],
            "code": [_package_hash(), model_of(request.workload).code, torch.__version__],
        }
    )


@cache  # of the code as this process loaded it
def _package_hash() -> str:
    root = Path(dejavu.__file__).parent
    found = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _OURS):
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()
