"""Plan pipeline-parallel training: from a model and a cluster to a plan with a proved optimality gap.

    >>> import dejavu
    >>> workload, cluster = dejavu.load_workload("bert"), dejavu.this_machine()
    >>> sorted(dejavu.SCHEDULES)[:2]
    ['1f1b', 'dualpipe_v']

Names are imported when they are first used, so that ranks and workers, which import parts of the package, start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dejavu.binding import Binding
    from dejavu.binding.binder import bind
    from dejavu.cluster import Cluster, load_cluster, this_machine
    from dejavu.foundation.errors import DejavuError, InputError
    from dejavu.graphs.capture import capture
    from dejavu.graphs.graph import Graph
    from dejavu.importers import IMPORTERS
    from dejavu.init.schemes import SCHEMES
    from dejavu.parallelism import Parallelism
    from dejavu.planning import Choice, Planner, PlanRequest
    from dejavu.planning.planner import plan
    from dejavu.planning.sentences import reason as explain
    from dejavu.plans import (
        Infeasible,
        NoPlanError,
        NotFound,
        Plan,
        PricedProblem,
        Problem,
        SearchResult,
        Stage,
        StageConfiguration,
    )
    from dejavu.plans.schedule import SCHEDULES
    from dejavu.profiles import ProfileDatabase
    from dejavu.report.figures import timeline_figure as draw
    from dejavu.search import SEARCHES
    from dejavu.simulation import Simulation
    from dejavu.simulation import simulate_plan as simulate
    from dejavu.workload import Workload
    from dejavu.workload.data import DATASETS
    from dejavu.workload.loader import load_workload
    from dejavu.workload.models import MODELS, LayerBuilder, Model

# Each name of the front door: the module that has it, and its name there where that is another.
_HOMES = {
    "Binding": "dejavu.binding",
    "Choice": "dejavu.planning",
    "Cluster": "dejavu.cluster",
    "DATASETS": "dejavu.workload.data",
    "DejavuError": "dejavu.foundation.errors",
    "Graph": "dejavu.graphs.graph",
    "IMPORTERS": "dejavu.importers",
    "Infeasible": "dejavu.plans",
    "InputError": "dejavu.foundation.errors",
    "LayerBuilder": "dejavu.workload.models",
    "MODELS": "dejavu.workload.models",
    "Model": "dejavu.workload.models",
    "NoPlanError": "dejavu.plans",
    "NotFound": "dejavu.plans",
    "Parallelism": "dejavu.parallelism",
    "Plan": "dejavu.plans",
    "PlanRequest": "dejavu.planning",
    "Planner": "dejavu.planning",
    "PricedProblem": "dejavu.plans",
    "Problem": "dejavu.plans",
    "ProfileDatabase": "dejavu.profiles",
    "SCHEDULES": "dejavu.plans.schedule",
    "SCHEMES": "dejavu.init.schemes",
    "SEARCHES": "dejavu.search",
    "SearchResult": "dejavu.plans",
    "Simulation": "dejavu.simulation",
    "Stage": "dejavu.plans",
    "StageConfiguration": "dejavu.plans",
    "Workload": "dejavu.workload",
    "bind": "dejavu.binding.binder",
    "capture": "dejavu.graphs.capture",
    "draw": "dejavu.report.figures:timeline_figure",
    "explain": "dejavu.planning.sentences:reason",
    "load_cluster": "dejavu.cluster",
    "load_workload": "dejavu.workload.loader",
    "plan": "dejavu.planning.planner",
    "simulate": "dejavu.simulation:simulate_plan",
    "this_machine": "dejavu.cluster",
}

__all__ = [
    "DATASETS",
    "IMPORTERS",
    "MODELS",
    "SCHEDULES",
    "SCHEMES",
    "SEARCHES",
    "Binding",
    "Choice",
    "Cluster",
    "DejavuError",
    "Graph",
    "Infeasible",
    "InputError",
    "LayerBuilder",
    "Model",
    "NoPlanError",
    "NotFound",
    "Parallelism",
    "Plan",
    "PlanRequest",
    "Planner",
    "PricedProblem",
    "Problem",
    "ProfileDatabase",
    "SearchResult",
    "Simulation",
    "Stage",
    "StageConfiguration",
    "Workload",
    "bind",
    "capture",
    "draw",
    "explain",
    "load_cluster",
    "load_workload",
    "plan",
    "simulate",
    "this_machine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dejavu' has no attribute {name!r}")
    module, _, own = _HOMES[name].partition(":")
    value = getattr(import_module(module), own or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
