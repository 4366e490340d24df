"""Real ranks on two emulated hosts, the second one's core slower, with a slow network between them.

`one pipeline`: the planner's. `unequal parts`: virtual workers as planned. `equal parts`: the same two workers with
half of each batch, which is what data parallelism would give them. All are trained in turn, several times over.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pipeline.emulation import Emulation, EmulationError, apart, measure_emulated, slowed
from benchmarks.pipeline.gain import SLOW, WHOLE, Site, core, passes_of
from benchmarks.pipeline.ranks import train_in_turn
from dejavu.binding import Binding, VirtualWorker, bind
from dejavu.cluster import Cluster, Link, NodeGroup, this_machine
from dejavu.graphs.capture import capture
from dejavu.init import Draw
from dejavu.parallelism import Parallelism
from dejavu.planning import Planner, PlanRequest
from dejavu.profiles import ProfileDatabase
from dejavu.profiling.pass_overhead import measure_passes
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.single import train_single
from dejavu.virtual_workers import NoTeam, Team, Teams
from dejavu.workload import SyntheticSettings, TrialSettings, Workload

HOSTS = ("alpha", "beta")
LATENCY_SECONDS = 200e-6
IMAGES = Workload(  # much to compute for each weight: where data parallelism pays at all over a slow link
    model="cnn",
    model_options={"num_blocks": 4, "width": 32},
    data="synthetic",
    synthetic=SyntheticSettings(num_classes=10, image_shape=(3, 64, 64)),
    batch_size=64,
    num_microbatches=8,
    trials=TrialSettings(count=0),
)
ALONE, UNEQUAL, EQUAL = "one pipeline", "unequal parts", "equal parts"


@contextmanager
def unequal_hosts(slowness: float, bits_per_second: float, workload: Workload) -> Iterator[Site]:
    """A host with a whole core and one with a slower core."""
    kind, inside = core(), this_machine().groups[0].link
    types = dict(zip(HOSTS, (WHOLE, SLOW), strict=True))
    groups = tuple(NodeGroup(host, 1, (host,), ((types[host], 1),), inside) for host in HOSTS)
    link = Link(bits_per_second / 8, LATENCY_SECONDS)
    cluster = Cluster(
        "unequal hosts", groups, {name: replace(kind, name=name) for name in types.values()}, {HOSTS: link}
    )
    with ExitStack() as stack:
        quota = stack.enter_context(slowed("slow", 1 / slowness))
        emulation = Emulation({(HOSTS[1], 0): quota}, stack.enter_context(apart(HOSTS, bits_per_second)))
        graph = capture(workload)
        rows = [row for name in (WHOLE, SLOW) for row in measure_emulated(workload, graph, cluster, emulation, name)]
        passes = passes_of(list(measure_passes(WHOLE)), {WHOLE: 1.0, SLOW: 1 / slowness})
        yield Site(cluster, emulation, workload, (*rows, *passes))


def rows(slownesses: Sequence[float], rounds: int, steps: int, bits_per_second: float) -> list[dict[str, Any]]:
    """Train every competitor at every slowness."""
    found = list[dict[str, Any]]()
    for slowness in slownesses:
        try:
            with unequal_hosts(slowness, bits_per_second, IMAGES) as site:
                found += _compared(slowness, site, rounds, steps)
        except EmulationError as error:
            found.append({"slower_by": slowness, "competitor": f"skipped: {error}"})
    return found


def _compared(slowness: float, site: Site, rounds: int, steps: int) -> list[dict[str, Any]]:
    workload = site.workload
    with tempfile.TemporaryDirectory(prefix="dejavu-costs-") as folder:
        ProfileDatabase(Path(folder)).append(site.rows)
        planner = Planner()
        choice = planner.plan(PlanRequest(workload, site.cluster, Path(folder), Parallelism.one_device()))
        team = Teams(choice, planner).best()
    assert not isinstance(team, NoTeam), team
    alone = bind(choice.priced.problem, choice.plan, site.cluster)
    ways = {
        ALONE: (alone, choice.simulated_seconds),
        UNEQUAL: (team.binding, team.step_seconds),
        EQUAL: (_equal(team, workload), None),
    }
    jobs = {name: _job(workload, binding, steps) for name, (binding, _) in ways.items()}
    trained = train_in_turn(list(jobs.values()) * rounds, emulation=site.emulation)
    expected = train_single(workload, Draw(), range(steps))
    found = list[dict[str, Any]]()
    for k, (name, (binding, predicted)) in enumerate(ways.items()):
        own = trained[k :: len(ways)]
        seconds = median(second for one in own for second in one.step_seconds)
        shares = ", ".join(str(worker.num_examples) for worker in binding.workers) or "–"
        found.append(
            {
                "slower_by": slowness,
                "competitor": name,
                "ranks": len(binding.placements),
                "examples": shares,
                "measured_ms": 1e3 * seconds,
                "predicted_ms": None if predicted is None else 1e3 * predicted,
                "loss_difference": max(
                    abs(a - b) for one in own for a, b in zip(one.losses, expected[: len(one.losses)], strict=True)
                ),
            }
        )
    least = next(float(row["measured_ms"]) for row in found if row["competitor"] == UNEQUAL)
    return [row | {"over_unequal_parts": row["measured_ms"] / least} for row in found]


def _job(workload: Workload, binding: Binding, steps: int) -> TrainingJob:
    count = 1 if binding.workers else binding.plan.num_microbatches
    fitting = workload.model_copy(update={"schedule": binding.plan.schedule, "num_microbatches": count})
    return TrainingJob(fitting, binding, Draw(), None, 0, steps, "")


def _equal(team: Team, workload: Workload) -> Binding:
    """The same workers with equal numbers of examples, in microbatches as large as theirs or of all they have."""
    binding, share = team.binding, workload.run_size // len(team.workers)
    workers = []
    for worker in binding.workers:
        count = worker.plan.num_microbatches if share % worker.plan.num_microbatches == 0 else 1
        workers.append(VirtualWorker(replace(worker.plan, num_microbatches=count), share))
    return replace(binding, workers=tuple(workers))
