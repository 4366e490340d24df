"""What the workload's layers cost on an emulated host, and the plans that trainings begin with."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.elastic.site import BITS_PER_SECOND, HOSTS, SHARE, Site
from benchmarks.pipeline.emulation import measure_emulated
from dejavu.binding import Binding, bind
from dejavu.cluster import Cluster, Link, NodeGroup, this_machine
from dejavu.graphs.capture import capture
from dejavu.migration import ClusterNow, RunningProblem
from dejavu.migration.replanning import best_on
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest, Prices
from dejavu.plans import Plan, Stage
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.profiling.pass_overhead import measure_passes
from dejavu.simulation import simulate_plan
from dejavu.workload import SyntheticSettings, TrialSettings, Workload

CORE = "core"
LATENCY_SECONDS = 200e-6  # of a small message between two namespaces, the order of magnitude
WORKLOAD = Workload(
    model="gpt",
    model_options={"num_blocks": 10, "width": 64, "num_heads": 4},
    data="synthetic",
    synthetic=SyntheticSettings(num_classes=64),
    sequence_length=64,
    batch_size=16,
    num_microbatches=8,
    checkpoint_every=20,
    trials=TrialSettings(count=0),
    schedule="1f1b",
)


def emulated_cluster() -> Cluster:
    """One device on each host."""
    (kind,) = this_machine().device_types.values()
    link = Link(BITS_PER_SECOND / 8, LATENCY_SECONDS)
    group = NodeGroup("hosts", len(HOSTS), HOSTS, ((CORE, 1),), link)
    return Cluster("emulated", (group,), {CORE: replace(kind, name=CORE)}, {("hosts", "hosts"): link})


def measured_rows(site: Site) -> list[Measurement]:
    """Measure every layer on one host while the others are as busy."""
    cluster = emulated_cluster()
    rows: list[Measurement] = []
    for size in (WORKLOAD.microbatch_size, WORKLOAD.microbatch_size // 2):  # of one replica, and of each of two
        workload = WORKLOAD.model_copy(update={"num_microbatches": WORKLOAD.batch_size // size})
        rows += measure_emulated(workload, capture(workload), cluster, site.emulation, CORE)
    return [*rows, *(_slower(row) for row in measure_passes(CORE))]


def _slower(row: Measurement) -> Measurement:
    """The runtime's own work is measured on a whole core."""
    names = ("seconds", "seconds_low", "seconds_high")
    return replace(row, **{name: getattr(row, name) / SHARE for name in names})


def running_problem(rows: list[Measurement], *, replicas: bool) -> RunningProblem:
    """Pose the problem of all hosts; with replicas a stage may be on two of them."""
    one = Parallelism.one_device()
    with tempfile.TemporaryDirectory(prefix="dejavu-costs-") as folder:
        ProfileDatabase(Path(folder)).append(rows)
        counts = (WORKLOAD.num_microbatches,)
        spread = replace(one, max_data_parallel=2, zero_levels=(0,)) if replicas else one
        request = PlanRequest(
            WORKLOAD, emulated_cluster(), Path(folder), spread, schedules=("1f1b",), microbatches=counts
        )
        return RunningProblem.of(Prices(request), WORKLOAD.num_microbatches)


def first_binding(running: RunningProblem, now: ClusterNow, *, replicas: bool) -> Binding:
    """Return the plan to begin with: the best, or with replicas on four hosts the best where every stage has two."""
    if not replicas or len(now.hosts) < len(HOSTS):
        return best_on(running, now).binding
    (two,) = (one for one in running.priced.problem.configurations if one.data_parallel == 2)
    layers = running.priced.problem.num_layers
    plans = [
        Plan((Stage(0, cut, two), Stage(cut, layers, two)), "1f1b", WORKLOAD.num_microbatches)
        for cut in range(1, layers)
    ]
    best = min(plans, key=lambda plan: simulate_plan(running.priced, plan).step_seconds)
    return bind(running.priced.problem, best, running.cluster)
