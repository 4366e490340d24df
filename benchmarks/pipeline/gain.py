"""What planning and binding gain: our plan against the even split and against random bindings, on emulated clusters.

1:2, 1:3      two cores, the second slowed by a CPU quota to 1/2 and 1/3
slow link     two hosts of two devices each, a quota of a core each, and 50 Mbit/s between the hosts

Layers are measured on each emulated device while the others are as busy. Our plan is the exact search's, under the
schedule whose simulated step is shortest, bound to devices. The even split gives every device as many layers, in the
order of the cluster file, under 1F1B; a random binding is our plan with its devices in any order. All are trained in
turn, some steps each, several times over, so that a change of the machine's own speed meets all alike.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.pipeline.emulation import Emulation, EmulationError, apart, measure_emulated, slowed
from benchmarks.pipeline.plans import even_bounds, job_of
from benchmarks.pipeline.ranks import train_in_turn
from dejavu.binding import Binding, Placement, bind
from dejavu.cluster import Cluster, Device, DeviceType, Link, NodeGroup, this_machine
from dejavu.graphs.capture import capture
from dejavu.parallelism import Parallelism
from dejavu.planning import Planner, PlanRequest
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.priced_problem import PricedProblem
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.profiling.pass_overhead import measure_passes
from dejavu.simulation import simulate_plan
from dejavu.workload import OptimizerSettings, SyntheticSettings, TrialSettings, Workload

WHOLE, SLOW = "core", "slow-core"
LINK_BITS_PER_SECOND = 50e6
LINK_LATENCY_SECONDS = 200e-6  # of a small message between two namespaces, the order of magnitude
SHARE = 0.4  # of a core for each of the four devices on two hosts: two of them share one, and something is left over
HOSTS = ("alpha", "beta")
OURS, EVEN, RANDOM = "our plan", "even split", "random binding"
SEARCH_SECONDS = 10.0
SEED = 0
TRANSFORMER = Workload(
    model="gpt",
    model_options={"num_blocks": 24, "width": 96, "num_heads": 4},
    data="synthetic",
    synthetic=SyntheticSettings(num_classes=256),
    sequence_length=64,
    batch_size=64,
    num_microbatches=16,
    trials=TrialSettings(count=0),
)
CONVOLUTIONS = Workload(  # large activations at first, small ones at the end
    model="vgg",
    model_options={"convolutions": (12, 2, 2, 1, 1), "width": 16, "hidden": 64},
    data="synthetic",
    synthetic=SyntheticSettings(num_classes=10, image_shape=(3, 32, 32)),
    optimizer=OptimizerSettings(name="sgd", learning_rate=0.05),
    batch_size=64,
    num_microbatches=8,
    trials=TrialSettings(count=0),
)
QUICK: dict[str, Any] = {"settings": ("1:2", "slow link"), "rounds": 1, "num_random": 2}


@dataclass(frozen=True)
class Site:
    """An emulated cluster, what is trained on it, and what was measured there."""

    cluster: Cluster
    emulation: Emulation
    workload: Workload
    rows: tuple[Measurement, ...]


def table(
    *,
    settings: tuple[str, ...] = ("1:2", "1:3", "slow link"),
    rounds: int = 2,
    steps: int = 5,
    num_random: int = 3,
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Every setting × competitor.

    Args:
        rounds: how often each is trained, in turn.
        steps: of each training, the first two without a clock.
        num_random: bindings; of two devices there are two.
    """
    passes = list(measure_passes(WHOLE))
    rows: list[dict[str, Any]] = []
    even: dict[str, float | None] = {}
    anyhow: dict[str, float | None] = {}
    mean: dict[str, float | None] = {}
    for name in settings:
        try:
            with SITES[name](passes) as site:
                found = _compare(name, site, rounds, steps, num_random)
        except EmulationError as error:
            rows.append({"setting": name, "competitor": f"skipped: {error}"})
            even[name] = anyhow[name] = mean[name] = None
            continue
        rows += found
        gains = [row["gain"] for row in found if row["competitor"].startswith(RANDOM)]
        even[name] = next(row["gain"] for row in found if row["competitor"] == EVEN)
        anyhow[name], mean[name] = median(gains), fmean(gains)
    summary = {
        "gain_over_even_split": even,
        "gain_over_random_binding": anyhow,
        "gain_over_random_binding_mean": mean,
    }
    return "Our plan against the even split and random bindings", rows, summary


@contextmanager
def _unequal(slowness: float, passes: list[Measurement], workload: Workload = TRANSFORMER) -> Iterator[Site]:
    """A whole core and a slower one."""
    kind = core()
    group = NodeGroup("here", 1, ("localhost",), ((WHOLE, 1), (SLOW, 1)), this_machine().groups[0].link)
    cluster = Cluster("unequal cores", (group,), {WHOLE: replace(kind, name=WHOLE), SLOW: replace(kind, name=SLOW)}, {})
    with slowed("slow", 1 / slowness) as quota:
        emulation = Emulation({("localhost", 1): quota})
        graph = capture(workload)
        rows = [row for name in (WHOLE, SLOW) for row in measure_emulated(workload, graph, cluster, emulation, name)]
        yield Site(cluster, emulation, workload, (*rows, *passes_of(passes, {WHOLE: 1.0, SLOW: 1 / slowness})))


@contextmanager
def _slow_link(passes: list[Measurement], workload: Workload = CONVOLUTIONS) -> Iterator[Site]:
    """Two hosts of two devices each, equal but for their name: the search knows links by the kinds of devices."""
    kind, link = core(), Link(LINK_BITS_PER_SECOND / 8, LINK_LATENCY_SECONDS)
    names = {host: f"core-{host}" for host in HOSTS}
    inside = this_machine().groups[0].link
    groups = tuple(NodeGroup(host, 1, (host,), ((names[host], 2),), inside) for host in HOSTS)
    types = {name: replace(kind, name=name) for name in names.values()}
    cluster = Cluster("two hosts", groups, types, {HOSTS: link})
    with ExitStack() as stack:
        seats = [(device.host, device.index) for device in cluster.devices()]
        quotas = {seat: stack.enter_context(slowed(f"{seat[0]}-{seat[1]}", SHARE)) for seat in seats}
        emulation = Emulation(quotas, stack.enter_context(apart(HOSTS, LINK_BITS_PER_SECOND)))
        once = measure_emulated(workload, capture(workload), cluster, emulation, names[HOSTS[0]])
        rows = [replace(row, device_type=name) for name in types for row in once]
        yield Site(cluster, emulation, workload, (*rows, *passes_of(passes, dict.fromkeys(types, SHARE))))


SITES: dict[str, Callable[[list[Measurement]], AbstractContextManager[Site]]] = {
    "1:2": partial(_unequal, 2.0),
    "1:3": partial(_unequal, 3.0),
    "slow link": _slow_link,
}


def core() -> DeviceType:
    (kind,) = this_machine().device_types.values()
    return kind


def passes_of(rows: list[Measurement], shares: Mapping[str, float]) -> list[Measurement]:
    """What the runtime takes of each kind of device: processor seconds, of which it has this share."""
    return [
        replace(
            row,
            device_type=name,
            **{column: getattr(row, column) / share for column in ("seconds", "seconds_low", "seconds_high")},
        )
        for row in rows
        for name, share in shares.items()
    ]


def _compare(name: str, site: Site, rounds: int, steps: int, num_random: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="dejavu-costs-") as folder:
        ProfileDatabase(Path(folder)).append(site.rows)
        counts = (site.workload.num_microbatches,)
        request = PlanRequest(site.workload, site.cluster, Path(folder), Parallelism.one_device(), microbatches=counts)
        choice = Planner().plan(request)
    priced, ours = choice.priced, bind(choice.priced.problem, choice.plan, site.cluster, seed=SEED)
    bindings = {OURS: ours, EVEN: _even(priced, site.cluster)}
    bindings |= {f"{RANDOM} {k}": other for k, other in enumerate(anyhow(ours, num_random), start=1)}
    seconds = _step_seconds(list(dict.fromkeys(bindings.values())), site, rounds, steps)
    return [_row(name, label, priced, binding, seconds[binding], seconds[ours]) for label, binding in bindings.items()]


def _even(priced: PricedProblem, cluster: Cluster) -> Binding:
    devices = cluster.devices()
    bounds = even_bounds(priced.problem.num_layers, len(devices))
    stages = [
        Stage(start, stop, StageConfiguration(device.type_name))
        for (start, stop), device in zip(itertools.pairwise(bounds), devices, strict=True)
    ]
    plan = Plan(tuple(stages), "1f1b", priced.problem.num_microbatches)
    return Binding(plan, tuple(Placement(rank, 0, 0, device) for rank, device in enumerate(devices)), 0.0, 0.0)


def anyhow(binding: Binding, count: int) -> list[Binding]:
    """The same stages on the same devices in other orders, all or so many of them."""
    orders = list(itertools.permutations([place.device for place in binding.placements]))
    return [reordered(binding, order) for order in random.Random(SEED).sample(orders, min(count, len(orders)))]


def reordered(binding: Binding, devices: Sequence[Device]) -> Binding:
    stages = list(binding.plan.stages)
    for device, of_rank in zip(devices, binding.plan.ranks, strict=True):
        for s in of_rank:
            configuration = replace(stages[s].configuration, device_type=device.type_name)
            stages[s] = replace(stages[s], configuration=configuration)
    places = [replace(place, device=device) for place, device in zip(binding.placements, devices, strict=True)]
    return replace(binding, plan=replace(binding.plan, stages=tuple(stages)), placements=tuple(places))


def _step_seconds(bindings: list[Binding], site: Site, rounds: int, steps: int) -> dict[Binding, list[float]]:
    """Of every step of all rounds."""
    jobs = [job_of(site.workload, binding, steps) for binding in bindings] * rounds
    found: dict[Binding, list[float]] = {binding: [] for binding in bindings}
    for job, trained in zip(jobs, train_in_turn(jobs, emulation=site.emulation), strict=True):
        found[job.binding] += trained.step_seconds
    return found


def _row(
    setting: str, competitor: str, priced: PricedProblem, binding: Binding, seconds: list[float], ours: list[float]
) -> dict[str, Any]:
    low, high = np.percentile(seconds, (10, 90))
    devices = [place.device for place in binding.placements]
    whole_model_C = (priced.forward_seconds_CL + priced.backward_seconds_CL).sum(axis=1)
    return {
        "setting": setting,
        "competitor": competitor,
        "cuts": ", ".join(map(str, binding.plan.cuts)),
        "schedule": binding.plan.schedule,
        "devices": ", ".join(f"{device.type_name} {device.index}" for device in devices),
        "measured_ms": 1e3 * median(seconds),
        "10_to_90_ms": f"{1e3 * low:.0f}–{1e3 * high:.0f}",
        "predicted_ms": 1e3 * simulate_plan(priced, binding.plan).step_seconds,
        "gain": median(seconds) / median(ours),
        "slowest_kind_to_fastest": float(whole_model_C.max() / whole_model_C.min()),
    }
