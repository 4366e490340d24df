"""Comparing clusters, finding what is there by its Dask workers, and deciding; the flow is in tests/test_up.py."""

from __future__ import annotations

import errno
import json
import logging
import math
import multiprocessing
import os
import random
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dejavu.cluster import Cluster, DeviceType, NodeGroup, load_cluster, pair
from dejavu.cluster.records import HostMemory, Nvme
from dejavu.cost import CostError
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.launch.training_lock import alone_in
from dejavu.planning import PlanRequest
from dejavu.plans import Infeasible, NoPlanError, Plan
from dejavu.profiles.manifest import DataFile, write_manifest
from dejavu.watching import Decided, Decision, Notes, WorkerDevices, as_present, decide, differences, with_slow_links
from dejavu.workload import Workload
from dejavu.workload.loader import load_workload
from dejavu.workload.training_settings import ReplanSettings
from flows import planned as choosing
from flows import replan as looking
from flows import replanned as replanning
from flows.recorded.decisions import decisions_table
from tasks import deciding
from tasks.deciding import without_plan
from tasks.watching import look_at_cluster
from tests.conftest import TINY
from tests.launching import job_of
from tests.ports import free_port

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.yaml"))


def workers_on(cluster: Cluster) -> list[WorkerDevices]:
    """One worker on every host, with the devices that the file says."""
    found: dict[str, dict[str, int]] = {}
    for device in cluster.devices():
        counts = found.setdefault(device.host, {})
        counts[device.type_name] = counts.get(device.type_name, 0) + 1
    return [
        WorkerDevices(
            (host, f"10.0.0.{k}", f"machine-{k}"), tuple((cluster.device_types[t], n) for t, n in devices.items())
        )
        for k, (host, devices) in enumerate(found.items())
    ]


def test_a_look_that_finds_nothing_imports_no_torch(tmp_path: Path) -> None:
    """It is made once a minute, by a process of its own: a second of a core to start, six with torch and searches."""
    code = f"""
import sys
from pathlib import Path
from prefect.logging import disable_run_logger
import flows.replan
from dejavu.watching import Notes, differences
from dejavu.workload.settings import Workload
from tasks.watching import look_at_cluster
with disable_run_logger():
    now = look_at_cluster.fn(Path({str(EXAMPLES[0])!r}), "")
print(Notes(Path({str(tmp_path)!r}), Workload(), "cluster.yaml", "").planned, differences(now, now))
print([name for name in ("torch", "scipy", "numba") if name in sys.modules])
"""
    environment = {**os.environ, "PREFECT__FLOW_RUN_ID": "one", "PREFECT_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["None ()", "[]", ""]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_cluster_with_a_worker_on_every_host_is_itself(path: Path) -> None:
    cluster = load_cluster(path)
    there = as_present(cluster, workers_on(cluster))
    assert there.fingerprint == cluster.fingerprint
    assert differences(cluster, there) == ()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_hosts_without_a_worker_are_gone_and_said(path: Path) -> None:
    cluster, rng = load_cluster(path), random.Random(5)
    workers = workers_on(cluster)
    for _ in range(5):
        left = rng.sample(workers, rng.randint(1, len(workers)))
        there = as_present(cluster, left)
        hosts = {device.host for device in there.devices()}
        assert hosts == {worker.names[0] for worker in left}
        assert there.num_devices == sum(n for worker in left for _, n in worker.devices)
        gone = [one for one in differences(cluster, there) if one.startswith("host") and "is gone" in one]
        assert len(gone) == len(workers) - len(left)
        devices = there.devices()
        for a, b in pairwise(devices):
            assert there.link(a, b) == cluster.link(
                *(next(d for d in cluster.devices() if (d.host, d.index) == (c.host, c.index)) for c in (a, b))
            )
        Cluster.from_dict(there.to_dict())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_slow_links_are_those_of_the_slow_hosts_and_are_said(path: Path) -> None:
    cluster, rng = load_cluster(path), random.Random(6)
    assert with_slow_links(cluster, {}).fingerprint == cluster.fingerprint
    hosts = sorted({device.host for device in cluster.devices()})
    usual = {(device.host, device.index): device for device in cluster.devices()}
    for _ in range(5):
        slow = {host: rng.choice([3.0, 10.0]) for host in rng.sample(hosts, rng.randint(1, min(3, len(hosts))))}
        there = with_slow_links(cluster, slow)
        assert sorted((d.host, d.index, d.type_name) for d in there.devices()) == sorted(
            (d.host, d.index, d.type_name) for d in cluster.devices()
        )
        devices = there.devices()
        for a, b in (rng.sample(devices, 2) for _ in range(min(200, len(devices) - 1))):
            was = cluster.link(usual[a.host, a.index], usual[b.host, b.index])
            factor = 1.0 if a.host == b.host else max(slow.get(a.host, 1.0), slow.get(b.host, 1.0))
            assert there.link(a, b) == replace(was, bytes_per_second=was.bytes_per_second / factor)
        if len(hosts) > 1:
            said = differences(cluster, there)
            assert said and all(one.startswith("link between ") for one in said), said
            assert differences(there, cluster)
        Cluster.from_dict(there.to_dict())


def test_no_host_at_all_is_an_error() -> None:
    with pytest.raises(InputError, match="no Dask worker is on a host"):
        as_present(load_cluster(EXAMPLES[0]), [])


def cluster_of(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


TWO = """
nodes:
- {name: a, hosts: [one, two], devices: {type: V100-SXM2-16GB, count: 4}}
links: {default: {bandwidth: 10 Gbit/s}}
"""


def test_an_added_host_joins_the_group_of_its_like(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, TWO)
    more = WorkerDevices(("three", "10.0.0.9", "m"), workers_on(cluster)[0].devices)
    there = as_present(cluster, [*workers_on(cluster), more])
    assert there.groups[0].hosts == ("one", "two", "three")
    assert differences(cluster, there)[0] == "host three is new, with 4 × V100-SXM2-16GB"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_host_like_one_of_the_file_is_new_beside_all_of_the_file(path: Path) -> None:
    """Whether the file names its hosts or counts them."""
    cluster, workers = load_cluster(path), workers_on(load_cluster(path))
    for worker in random.Random(7).sample(workers, min(4, len(workers))):
        there = as_present(cluster, [*workers, replace(worker, names=("new", "10.1.0.0", "another"))])
        assert {d.host for d in there.devices()} == {d.host for d in cluster.devices()} | {"new"}
        counts = ", ".join(sorted(f"{n} × {kind.name}" for kind, n in worker.devices))
        assert differences(cluster, there)[0] == f"host new is new, with {counts}"
        assert Cluster.from_dict(there.to_dict()) == there


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_host_of_the_file_has_no_more_devices_than_the_file_gives_it(path: Path) -> None:
    cluster, rng = load_cluster(path), random.Random(8)
    more = [
        replace(worker, devices=tuple((kind, n + rng.randint(0, 5)) for kind, n in worker.devices))
        for worker in workers_on(cluster)
    ]
    assert as_present(cluster, more).fingerprint == cluster.fingerprint
    others = [DeviceType("T9", "cuda", {"float32": 1e12}, 1 << 34, 1e11, None, None, "this machine")]
    others += [kind for kind in cluster.device_types.values() if kind.kind != "cpu"]
    given = {worker.names[0]: sum(n for _, n in worker.devices) for worker in workers_on(cluster)}
    for _ in range(10):
        mixed = [
            replace(worker, devices=tuple((kind, rng.randint(1, 9)) for kind in rng.sample(others, len(others))))
            for worker in more
        ]
        there = as_present(cluster, [more[0], *mixed[1:]])
        for group in there.groups:
            assert len(dict(group.devices)) == len(group.devices), "one entry for a type"
            assert all(group.devices_per_node <= given[group.host(node)] for node in range(group.count))


def test_an_added_host_of_another_kind_gets_the_slowest_link_that_is_known(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, TWO)
    kind = replace(cluster.device_types["V100-SXM2-16GB"], name="T4", memory_bytes=15 << 30)
    there = as_present(cluster, [*workers_on(cluster), WorkerDevices(("three", "10.0.0.9", "m"), ((kind, 1),))])
    assert there.device_counts == {"V100-SXM2-16GB": 8, "T4": 1}
    link = there.link(there.devices()[0], there.devices()[-1])
    assert link.bytes_per_second == 1.25e9
    assert link.assumed
    assert "Between a and added-1" in there.assumptions[-1]


def test_a_replaced_and_a_lost_device_are_seen(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, TWO)
    first, second = workers_on(cluster)
    v100 = cluster.device_types["V100-SXM2-16GB"]
    other = replace(v100, name="T4")
    there = as_present(cluster, [first, replace(second, devices=((v100, 2), (other, 1)))])
    assert there.device_counts == {"V100-SXM2-16GB": 6, "T4": 1}
    assert differences(cluster, there)[0] == "host two has 1 × T4, 2 × V100-SXM2-16GB, and had 4 × V100-SXM2-16GB"
    a, b = there.devices()[0], there.devices()[-1]
    assert there.link(a, b) == cluster.link(cluster.devices()[0], cluster.devices()[-1])


def test_two_workers_on_one_machine_are_two_hosts_by_their_names(tmp_path: Path) -> None:
    core = DeviceType("a-core", "cpu", {"float32": 1e11}, 1 << 30, 1e10, None, None, "this machine")
    cluster = cluster_of(
        tmp_path,
        "nodes:\n- {name: a, hosts: [w0, w1], devices: {type: slow, count: 1}}\nlinks: {default: {bandwidth: 1 GB/s}}\n"
        "devices: {slow: {kind: cpu, memory: 1 GiB, bandwidth: 1 GB/s, float32: 10 GFLOP/s}}\n",
    )
    workers = [WorkerDevices((f"w{k}", "127.0.0.1", "here"), ((core, 1),)) for k in range(3)]
    assert as_present(cluster, workers[:2]).fingerprint == cluster.fingerprint
    assert as_present(cluster, workers[1:2]).groups[0].hosts == ("w1",)
    assert as_present(cluster, workers).groups[0].hosts == ("w0", "w1", "w2")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("10 Gbit/s", "1 Gbit/s"), "link between two nodes of a: 1.25 GB/s one way, 14 µs, now 125 MB/s"),
        (("count: 4", "count: 2"), "host one has 2 × V100-SXM2-16GB, and had 4 × V100-SXM2-16GB"),
        (("two]", "three]"), "host two is gone, with 4 × V100-SXM2-16GB"),
        (("name: a", "name: b"), "groups of nodes have other names or another order"),
        (("[one, two]", "[two, one]"), "groups of nodes have other names or another order"),
    ],
)
def test_an_edited_file_is_said(tmp_path: Path, edit: tuple[str, str], said: str) -> None:
    changes = differences(cluster_of(tmp_path, TWO), cluster_of(tmp_path, TWO.replace(*edit)))
    assert changes[0].startswith(said) or said in changes[0]


def test_what_an_own_device_is_said_to_be_is_said_by_its_keys(tmp_path: Path) -> None:
    """And what it was: "num_multiprocessors, cache_bytes of V100-SXM2-16GB changed" said neither."""
    device = "{kind: %s, memory: 16 GiB, bandwidth: 900 GB/s, float32: 15.7 TFLOP/s, float16: 125 TFLOP/s, %s}"

    def with_device(kind: str, rest: str) -> Cluster:
        own = TWO.replace("V100-SXM2-16GB, count: 4}", "own, count: 4}, link: {bandwidth: 100 GB/s}")
        return cluster_of(tmp_path, f"{own}devices:\n  own: {device % (kind, rest)}\n")

    was = with_device("cuda", "multiprocessors: 80, cache: 40 MiB, board_watts: 300")
    now = with_device("rocm", "multiprocessors: 108, cache: 40.1 MiB, board_watts: 2350.5, architecture: CDNA 3")
    assert differences(was, now) == (
        "kind of own: cuda, now rocm",
        "multiprocessors of own: 80, now 108",
        "cache of own: 40 MiB, now 40.1 MiB",
        "board_watts of own: 300, now 2350.5",
        "architecture of own: not given, now CDNA 3",
    )


def edits_of(cluster: Cluster, factor: float) -> list[tuple[Cluster, list[str]]]:
    """Every number that a plan may depend on, so many times what it is; and the beginnings of what is to be said."""
    edits: list[tuple[Cluster, list[str]]] = []
    memory, disks = HostMemory(10**12, 2e10, 1e11), Nvme(10**13, 5e9, 3e9)

    def add_group(old: NodeGroup, new: NodeGroup, *said: str) -> None:
        groups = tuple(new if group.name == old.name else group for group in cluster.groups)
        edits.append((replace(cluster, groups=groups), list(said)))

    for group in cluster.groups:
        at = f"of a node of {group.name}: "
        speeds = [f"bandwidth of host memory {at}", f"update bandwidth of host memory {at}"]
        add_group(group, replace(group, host_memory=memory), f"host memory {at}not given, now 931 GiB", *speeds)
        writing = [f"reading bandwidth of NVMe {at}", f"writing bandwidth of NVMe {at}"]
        add_group(group, replace(group, nvme=disks), f"NVMe {at}not given, now 9.09 TiB", *writing)
        add_group(group, replace(group, cards=7), f"network cards {at}{group.cards}, now 7")
        link = replace(group.link, bytes_per_second=group.link.bytes_per_second * factor)
        add_group(group, replace(group, link=link), f"link inside a node of {group.name}: ")
    for name, kind in cluster.device_types.items():
        others = [
            (replace(kind, memory_bytes=round(kind.memory_bytes * factor)), f"memory of {name}: "),
            (replace(kind, memory_bytes_per_second=kind.memory_bytes_per_second * factor), "memory bandwidth of "),
        ]
        for dtype, peak in kind.peak_flops_per_second.items():
            peaks = {**kind.peak_flops_per_second, dtype: peak * factor}
            others.append((replace(kind, peak_flops_per_second=peaks), f"peak {dtype} of {name}: "))
        edits += [
            (replace(cluster, device_types={**cluster.device_types, name: other}), [said]) for other, said in others
        ]
    for names, link in cluster.links_between.items():
        other = replace(link, bytes_per_second=link.bytes_per_second * factor)
        where = f"two nodes of {names[0]}" if names[0] == names[1] else " and ".join(names)
        edits.append(
            (replace(cluster, links_between={**cluster.links_between, names: other}), [f"link between {where}: "])
        )
    return edits


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("factor", [1 + 1e-8, 1.0001, 0.999, 0.5, 1000.0])
def test_every_changed_number_is_said_and_alone(path: Path, factor: float) -> None:
    """With as many digits as tell it from what it was, both ways, and beside a host that is gone."""
    cluster = load_cluster(path)
    for edited, wanted in edits_of(cluster, factor):
        assert edited.fingerprint != cluster.fingerprint
        for old, new in ((cluster, edited), (edited, cluster)):
            said = differences(old, new)
            assert len(said) == len(wanted), said
            for sentence, beginning in zip(said, wanted, strict=True):
                assert sentence.startswith(beginning.split(": ")[0])
                was, now = sentence.split(": ")[1].split(", now ")
                assert was != now, sentence
        assert all(map(str.startswith, differences(cluster, edited), wanted))
        group = max(cluster.groups, key=lambda group: group.count)
        if group.count > 2:  # a link between two of them is left
            others = [worker for worker in workers_on(cluster) if worker.names[0] != group.host(0)]
            with_one_gone = differences(cluster, as_present(edited, others))
            assert with_one_gone[0].startswith(f"host {group.host(0)} is gone")
            assert {*differences(cluster, edited)} <= {*with_one_gone}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_links_that_recover_are_said_as_those_that_slow_down(path: Path) -> None:
    cluster, rng = load_cluster(path), random.Random(9)
    hosts = sorted({device.host for device in cluster.devices()})
    for _ in range(10 if len(hosts) > 1 else 0):
        slow = {host: rng.choice([3.0, 10.0]) for host in rng.sample(hosts, rng.randint(1, min(3, len(hosts))))}
        there = with_slow_links(cluster, slow)
        speeds = [sentence.split(": ")[1].split(", now ") for sentence in differences(cluster, there)]
        back = [sentence.split(": ")[1].split(", now ") for sentence in differences(there, cluster)]
        assert sorted(back) == sorted([now, was] for was, now in speeds)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_other_names_and_orders_are_said_only_where_they_are(path: Path) -> None:
    cluster = load_cluster(path)
    names = {group.name: f"other-{group.name}" for group in cluster.groups}
    named = replace(
        cluster,
        groups=tuple(
            replace(g, name=names[g.name], hosts=tuple(g.host(k) for k in range(g.count))) for g in cluster.groups
        ),
        links_between={pair(names[a], names[b]): link for (a, b), link in cluster.links_between.items()},
    )
    assert differences(cluster, named) == ("groups of nodes have other names or another order",)
    turned = replace(cluster, groups=cluster.groups[::-1])
    assert differences(cluster, turned) == (
        ("groups of nodes have other names or another order",) if len(cluster.groups) > 1 else ()
    )
    listed = tuple(replace(g, hosts=tuple(g.host(k) for k in range(g.count))) for g in cluster.groups)
    assert differences(cluster, replace(cluster, groups=listed)) == (
        ("the same nodes and links are written in another way",) if listed != cluster.groups else ()
    )
    for group in cluster.groups:
        two = replace(group, devices=(*group.devices, ("A9", 1)))
        kinds = {**cluster.device_types, "A9": replace(next(iter(cluster.device_types.values())), name="A9")}
        old, new = (
            replace(cluster, groups=tuple(one if g is group else g for g in cluster.groups), device_types=kinds)
            for one in (two, replace(two, devices=two.devices[::-1]))
        )
        assert differences(old, new) == (f"devices of a node of {group.name} are in another order",)


@pytest.mark.parametrize(
    ("action", "old", "is_followed", "decided"),
    [
        ("notify", 1.0, True, Decided.NOTIFIED),
        ("plan", 1.0, True, Decided.PLANNED),
        ("migrate", 1.0, True, Decided.PLANNED),
        ("migrate", 1.0, False, Decided.PLANNED),
        ("migrate", 0.91, True, Decided.KEPT),
        ("plan", 0.91, False, Decided.KEPT),
        ("notify", None, False, Decided.NOTIFIED),
        ("migrate", None, True, Decided.PLANNED),
    ],
)
def test_a_decision(action: str, old: float | None, is_followed: bool, decided: Decided) -> None:
    found, why = decide(action, old, 0.9, 0.03, is_followed=is_followed)
    assert found == decided
    assert "predicted at 900 ms" in why


def test_a_decision_says_figures_that_bear_it_out() -> None:
    rng = random.Random(4)
    for _ in range(500):
        margin = rng.choice([0.0, 0.001, 0.03, 0.1])
        gain = rng.choice([margin, 0.0]) + rng.choice([-1, 1]) * 10 ** rng.uniform(-7, -1)
        decided, why = decide("plan", 1.0, 1 - gain, margin)
        assert decided == (Decided.PLANNED if gain >= margin else Decided.KEPT)
        figures = [float(figure) for figure in re.findall(r"(-?[\d.]+)%", why)]
        assert ("over the plan that is there" in why) == (gain < 0)
        if gain < 0:
            assert figures == [pytest.approx(-100 * gain, abs=0.051)]
            assert figures[0] > 0
        elif gain < margin:
            assert figures[0] < figures[1] == pytest.approx(100 * margin, abs=0.051)


@pytest.mark.parametrize("action", ["notify", "plan", "migrate"])
@pytest.mark.parametrize("margin", [0.0, 1e-9, 0.03])
@pytest.mark.parametrize("seconds", [1e-4, 0.3, 7.0])
def test_no_gain_is_worth_no_change(action: str, margin: float, seconds: float) -> None:
    """As while it trains. With a margin of 0 the same plan was a new one, 0.0% under itself, after every change."""
    for is_followed in (False, True):
        decided, why = decide(action, seconds, seconds, margin, is_followed=is_followed)
        assert decided == Decided.KEPT and why.endswith(", as long as the plan's that is there") and "%" not in why
        better, _ = decide(action, seconds, seconds * (1 - margin - 1e-6), margin, is_followed=is_followed)
        assert better != Decided.KEPT


A_DECISION = Decision("2026-01-01T00:00:00+00:00", "gpt", "x", "", "", None, 0.5, 0.03, "planned", "y", "r")
A_PLAN: dict[str, Any] = {
    "stages": [{"start": 0, "stop": 2, "configuration": {"device_type": "V100-SXM2-16GB"}}],
    "num_microbatches": 4,
    "schedule": "1f1b",
}


def test_notes_are_kept_and_read_back(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, TWO)
    plan = Plan.from_dict(A_PLAN)
    notes, other = (
        Notes(tmp_path, Workload(), "cluster.yaml", ""),
        Notes(tmp_path, Workload(seed=1), "cluster.yaml", ""),
    )
    assert notes.planned is None
    notes.keep(cluster, plan, 0.5, "a run")
    kept = notes.planned
    assert kept is not None
    assert (kept.cluster, kept.plan, kept.step_seconds, kept.run) == (cluster, plan, 0.5, "a run")
    assert other.planned is None
    decision = Decision("2026-01-01T00:00:00+00:00", "gpt", "x", "", "f", None, 0.5, 0.03, "planned", "y", "r")
    notes.decided(decision)
    assert list(Notes.decisions(tmp_path)) == [decision]
    (path,) = (tmp_path / "watch").glob("*.json")
    whole = json.loads(path.read_text())
    damages: list[Any] = [{}, [], 3, None]
    for name, record in (("cluster", whole["cluster"]), ("plan", whole["plan"])):  # a key is gone, at any depth
        damages += [whole | {name: other} for other in (None, [], 3, "x")]
        damages += [whole | {name: {k: v for k, v in record.items() if k != gone}} for gone in record]
    first, *others = whole["cluster"]["groups"]
    for gone in ("name", "count", "hosts", "devices", "link"):
        groups = [{k: v for k, v in first.items() if k != gone}, *others]
        damages.append(whole | {"cluster": whole["cluster"] | {"groups": groups}})
    damages += [whole | {name: other} for name in ("step_seconds", "at_seconds") for other in NO_NUMBERS]
    damages += [whole | {"run": other} for other in NO_TEXTS]
    for damaged in ("{", *map(json.dumps, damages)):
        path.write_text(damaged)
        with pytest.raises(DejavuError, match=rf"^{re.escape(str(path))} is no record of a plan .*; delete it"):
            _ = notes.planned


NO_NUMBERS: list[Any] = ["0.5", True, [], {}, math.nan, math.inf]
NO_TEXTS: list[Any] = [None, 3, False, ["a"], {}]


def test_decisions_of_the_wrong_types_are_named(tmp_path: Path) -> None:
    notes = Notes(tmp_path, Workload(), "cluster.yaml", "")
    notes.decided(Decision("2026-01-01T00:00:00+00:00", "gpt", "x", "", "f", 0.7, 0.5, 0.03, "planned", "y", "r"))
    path = tmp_path / "watch" / "decisions.jsonl"
    whole = json.loads(path.read_text())
    numbers = {"old_step_seconds", "new_step_seconds", "margin"}
    for name in whole.keys() - {"question"}:
        for other in NO_NUMBERS if name in numbers else NO_TEXTS:
            path.write_text(json.dumps(whole | {name: other}) + "\n")
            with pytest.raises(DejavuError, match=rf"line 1 of .* is no record of a decision \({name} is .*; wanted"):
                list(Notes.decisions(tmp_path))
    for absent in ("old_step_seconds", "new_step_seconds"):
        path.write_text(json.dumps(whole | {absent: None}) + "\n")
        assert [one.gain for one in Notes.decisions(tmp_path)] == [None]


@pytest.mark.parametrize("seed", range(4))
def test_a_cluster_without_a_plan_is_announced_once(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at clusters that come and go: of each change an event, whether or not its re-plan finds a plan.

    One without a plan that came a second time, with the last plan's between, was not announced any more.
    """
    rng = random.Random(seed)
    clusters = [load_cluster(path) for path in EXAMPLES[:3]]
    hopeless = {cluster.fingerprint for cluster in clusters if rng.random() < 0.6}
    notes, others = (Notes(tmp_path / ".dejavu", Workload(seed=k), "cluster.yaml", "") for k in (0, 1))
    planned = A_DECISION
    none = NoPlanError(Infeasible("exact", "no plan fits", 0.0))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dejavu.watching.notes.SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(looking, "get_run_logger", lambda: logging.getLogger("test"))
    found_none, decided = "", 0
    for now in rng.choices(clusters, k=10):
        monkeypatch.setattr("tasks.watching.look_at_cluster", lambda *_, now=now: now)
        for _ in range(2):
            before = notes.planned
            changed = before is None or before.cluster.fingerprint != now.fingerprint
            looking._to_announce.clear()
            said = looking.replan.fn().message
            assert bool(looking._to_announce) == (changed and now.fingerprint != found_none), said
            if looking._to_announce and now.fingerprint in hopeless:
                notes.decided(without_plan(Workload(), now, before, "x", "r", none))
                found_none = now.fingerprint
            elif looking._to_announce:
                notes.keep(now, Plan.from_dict(A_PLAN), 0.5, "r")
                notes.decided(replace(planned, new_fingerprint=now.fingerprint))
                found_none = ""
            else:
                assert ("no plan fits" if changed else "nothing changed") in said
            if not changed and found_none:
                assert notes.last is not None and notes.last.decided == "kept"
                found_none = ""
                decided += 1
            others.decided(replace(planned, new_fingerprint=now.fingerprint))  # of another question
            decided += 1 + bool(looking._to_announce)
    assert decisions_table(tmp_path, 100).row_count == decided


@pytest.mark.parametrize("action", ["notify", "plan", "migrate"])
@pytest.mark.parametrize("seed", range(4))
def test_the_plan_that_is_there_stays_while_it_runs_and_no_other_takes_its_place(
    action: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new plan that was only said was the one that is there at the next change: `notify` did what `plan` does."""
    workload = Workload.model_validate({"replan": {"action": action, "margin": 0.21}})
    notes = Notes(tmp_path / ".dejavu", workload, "cluster.yaml", "")
    (stage,) = A_PLAN["stages"]

    def seconds(plan: Plan) -> float:
        return 1 / len(plan.stages)

    def planned(request: PlanRequest, *_: object, **__: object) -> SimpleNamespace:
        """The best plan has all devices."""
        stages = [stage | {"start": k, "stop": k + 1} for k in range(request.cluster.num_devices)]
        plan = Plan.from_dict(A_PLAN | {"stages": stages})

        def candidate(other: Plan) -> SimpleNamespace:
            return SimpleNamespace(step_seconds=seconds(other), fits=True)

        choice = SimpleNamespace(request=request, plan=plan, step_seconds=seconds(plan), candidate=candidate)
        return SimpleNamespace(choice=choice)

    run = SimpleNamespace(tags=lambda tags: None)
    here = SimpleNamespace(database=tmp_path, project=tmp_path, run=run)
    monkeypatch.setattr(replanning, "session", lambda *_, **__: nullcontext(here))
    monkeypatch.setattr(replanning, "planned", planned)
    monkeypatch.setattr(replanning, "decide_on", deciding.decide_on.fn)
    monkeypatch.setattr(deciding, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(deciding, "create_markdown_artifact", lambda *_, **__: None)
    there = 0  # devices of the plan that is there
    for count in random.Random(seed).choices(range(1, 9), k=12):
        now = cluster_of(tmp_path, TWO.replace("[one, two]", "[one]").replace("count: 4", f"count: {count}"))
        decision = replanning.replanned(workload, "cluster.yaml", now, notes, 1.0, "x")
        assert (decision.old_step_seconds is not None) == (0 < there <= count)
        if not 0 < there <= count or (action != "notify" and 1 - there / count > 0.21):
            there = count
        assert notes.planned is not None
        assert (len(notes.planned.plan.stages), notes.planned.cluster) == (there, now)
        assert notes.planned.step_seconds == pytest.approx(1 / there)


def test_a_re_plan_that_is_ended_before_it_decides_leaves_the_change_to_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new plan was noted before the decision: looks said that nothing changed, and `notify` did as `plan` does."""
    notes = Notes(tmp_path / ".dejavu", Workload(), "cluster.yaml", "")
    was, now = (cluster_of(tmp_path, TWO.replace("count: 4", f"count: {count}")) for count in (4, 2))
    notes.keep(was, Plan.from_dict(A_PLAN), 0.5, "r")
    before = notes.planned
    _plans_without_searching(tmp_path, now, monkeypatch)

    def ended(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(replanning, "decide_on", ended)
    with pytest.raises(KeyboardInterrupt):
        replanning.replanned(Workload(), "cluster.yaml", now, notes, 1.0, "x")
    assert notes.planned == before
    assert not list(Notes.decisions(tmp_path / ".dejavu"))


def _replans_that_fail(error: BaseException, project: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Every search of a plan for a cluster that has changed fails so."""
    now = cluster_of(project, TWO)
    _plans_without_searching(project, now, monkeypatch)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("flows.planned.choose_plan", fail)
    monkeypatch.chdir(project)
    monkeypatch.setattr("dejavu.watching.notes.SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(looking, "get_run_logger", lambda: logging.getLogger("test"))
    return now


@pytest.mark.parametrize(
    ("error", "is_noted"),
    [
        (CostError("no cost for layer 'head' on 'T4'"), True),
        (ZeroDivisionError("a bug"), True),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), False),
        (KeyboardInterrupt("interrupted"), False),
    ],
)
def test_a_re_plan_that_fails_is_tried_again_for_another_question(
    error: BaseException, is_noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look announced the change again, and its re-plan failed again, once a minute."""
    now = _replans_that_fail(error, tmp_path, monkeypatch)
    for changed in (now, cluster_of(tmp_path, TWO.replace("count: 4", "count: 2"))):
        monkeypatch.setattr("tasks.watching.look_at_cluster", lambda *_, changed=changed: changed)
        assert looking.replan.fn().message.startswith("changed: ")
        with pytest.raises(type(error)):
            looking.replan.fn(reason="it changed")
        said = looking.replan.fn().message
        assert (str(error) in said and said.startswith("no plan was found")) == is_noted
        assert said.startswith("changed: ") != is_noted
    decisions = [decision.why for decision in Notes.decisions(tmp_path / ".dejavu")]
    assert len(decisions) == 2 * is_noted and all(str(error) in why for why in decisions)


@pytest.mark.parametrize("error", [CostError("no cost for layer 'a'"), NoPlanError(Infeasible("exact", "none", 0.0))])
def test_a_re_plan_that_lacked_a_cost_is_tried_again_when_others_are_known(
    error: DejavuError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dejavu profile` had measured it, and looks went on to say that no plan was found."""
    now = _replans_that_fail(error, tmp_path, monkeypatch)
    monkeypatch.setattr("tasks.watching.look_at_cluster", lambda *_: now)
    for measured in (0, 1):
        if measured:
            (tmp_path / "profiles_db").mkdir()
            write_manifest(tmp_path / "profiles_db" / "manifest.json", [DataFile("0" * 64, 1, 1, ("a",))])
        is_tried = not measured or isinstance(error, CostError)
        assert looking.replan.fn().message.startswith("changed: ") == is_tried
        if is_tried:
            with pytest.raises(type(error)):
                looking.replan.fn(reason="it changed")
        assert looking.replan.fn().message.startswith("no plan was found")


@pytest.mark.parametrize("is_for_it", [True, False])
def test_a_plan_that_another_run_makes_meanwhile_is_the_one_that_is_there(
    is_for_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `dejavu/full` does: its plan was lost, and the decision was told of the plan before."""
    was, now = (cluster_of(tmp_path, TWO.replace("count: 4", f"count: {count}")) for count in (4, 2))
    notes = Notes(tmp_path / ".dejavu", Workload(), "cluster.yaml", "")
    notes.keep(was, Plan.from_dict(A_PLAN), 0.5, "before")
    _plans_without_searching(tmp_path, now, monkeypatch)
    found = choosing.choose_plan(None, "")
    made = replace(Plan.from_dict(A_PLAN), num_microbatches=2)

    def meanwhile(*_: object) -> Any:
        Notes(tmp_path / ".dejavu", Workload(), "cluster.yaml", "").keep(now if is_for_it else was, made, 0.2, "full")
        return found

    monkeypatch.setattr("flows.planned.choose_plan", meanwhile)
    monkeypatch.setattr(deciding, "_fits_on", lambda *_: True)
    monkeypatch.setattr(deciding, "_step_seconds", lambda _, plan: 0.2 if plan == made else 0.5)
    decision = replanning.replanned(Workload(), "cluster.yaml", now, notes, 1.0, "x")
    assert (decision.decided, decision.old_step_seconds) == ("kept", 0.2)
    assert (decision.change == "another run has planned for it") == is_for_it
    there = notes.planned
    assert there is not None and (there.plan, there.cluster) == (made, now)


def _decide(work: Path, number: int) -> None:
    notes = Notes(work, Workload(seed=number), "cluster.yaml", "")
    for _ in range(50):
        notes.decided(A_DECISION)


def test_decisions_of_several_processes_are_all_kept(tmp_path: Path) -> None:
    """One process cut off what another had appended since it had read the file."""
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(_decide, [(tmp_path, number) for number in range(4)])
    assert len(list(Notes.decisions(tmp_path))) == 200


def test_a_re_plan_waits_for_no_worker_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its searches were tasks of the Dask workers, whose only thread a training has until it ends."""
    now = cluster_of(tmp_path, TWO)
    searched = _plans_without_searching(tmp_path, now, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(looking, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr("tasks.watching.look_at_cluster", lambda *_: now)
    assert looking.replan.fn(dask="tcp://127.0.0.1:1", reason="a host").message.startswith("planned: ")
    assert searched == [""]


@pytest.mark.parametrize("action", ["notify", "plan", "migrate"])
def test_a_training_is_said_to_follow_its_cluster_where_it_does(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said of every training that ran in the folder, by the workload that is watched."""
    now, workload = cluster_of(tmp_path, TWO), Workload.model_validate({"replan": {"action": "migrate"}})
    _plans_without_searching(tmp_path, now, monkeypatch)
    notes = Notes(tmp_path / ".dejavu", workload, "cluster.yaml", "")
    notes.keep(cluster_of(tmp_path, TWO.replace("count: 4", "count: 2")), Plan.from_dict(A_PLAN), 0.5, "r")
    monkeypatch.setattr(deciding, "_fits_on", lambda *_: False)
    folder = tmp_path / ".dejavu" / "runs" / "r"
    trained = TINY.model_copy(update={"replan": ReplanSettings.model_validate({"action": action})})
    folder.mkdir(parents=True)
    with alone_in(tmp_path, "gpt on desk"):
        job_of(trained, folder).write()
        decision = replanning.replanned(workload, "cluster.yaml", now, notes, 1.0, "x")
    assert ("a training that runs follows" in decision.why) == (action == "migrate")


def _plans_without_searching(folder: Path, now: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let re-plans find `A_PLAN`; return where searches ran: each time the address of a scheduler, or none."""
    searched: list[str] = []
    plan, run = Plan.from_dict(A_PLAN), SimpleNamespace(tags=lambda tags: None)
    asked = SimpleNamespace(cluster=now, workload=Workload())
    choice = SimpleNamespace(plan=plan, step_seconds=0.25, chosen=None, best_baseline=None, request=asked)

    def session(*_: object, dask: str = "", **__: object) -> Any:
        work = {
            "database": folder / "profiles_db",
            "project": folder,
            "work": folder / ".dejavu",
            "file": "cluster.yaml",
        }
        return nullcontext(SimpleNamespace(**work, cluster=now, run=run, dask=dask, log=None))

    def choose_plan(_: object, dask: str) -> SimpleNamespace:
        searched.append(dask)
        return choice

    monkeypatch.setattr(replanning, "session", session)
    monkeypatch.setattr("flows.planned.choose_plan", choose_plan)
    monkeypatch.setattr(deciding, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(deciding, "create_markdown_artifact", lambda *_, **__: None)
    monkeypatch.setattr(replanning, "decide_on", deciding.decide_on.fn)
    for name in ("say_choice", "show_choice", "bind_stages", "record_choice", "as_planned", "without_memory"):
        monkeypatch.setattr(f"flows.planned.{name}", lambda *_: None)
    return searched


@pytest.mark.parametrize("seed", range(4))
def test_a_cluster_file_with_a_mistake_fails_one_look(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look failed, once a minute, until the file was mended; `dejavu replans` had nothing of it.

    The same mistake made again later failed none, and `dejavu replans` had nothing of when the file was mended.
    """
    file = tmp_path / "cluster.yaml"
    right = [TWO, TWO.replace("count: 4", "count: 2")]
    wrong = ["nodes: [oops", TWO.replace("V100", "V1OO"), TWO.replace("10 Gbit/s", "fast"), ""]
    notes = Notes(tmp_path / ".dejavu", Workload(), "cluster.yaml", "")
    planned = A_DECISION
    again = "the plan that is there is for this cluster"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dejavu.watching.notes.SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(looking, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr("tasks.watching.get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr("tasks.watching.look_at_cluster", look_at_cluster.fn)
    said: list[str] = []
    for text in random.Random(seed).choices([*right, *wrong], k=12):
        file.write_text(text)
        for look in range(3):
            looking._to_announce.clear()
            if text in right:
                assert looking.replan.fn().message
                if looking._to_announce:
                    notes.keep(load_cluster(file), Plan.from_dict(A_PLAN), 0.5, "r")
                    notes.decided(planned)
                    said.append(planned.why)
                elif said and said[-1] not in (planned.why, again):
                    said.append(again)
                continue
            with pytest.raises(InputError) as found:
                load_cluster(file)
            if said[-1:] != [str(found.value)]:
                assert look == 0
                with pytest.raises(InputError, match=re.escape(str(found.value))):
                    looking.replan.fn()
                said.append(str(found.value))
            else:
                assert str(found.value) in looking.replan.fn().message
                with pytest.raises(InputError):  # an event asks, and is answered
                    looking.replan.fn(reason="an event")
            assert not looking._to_announce
    assert [one.why for one in Notes.decisions(tmp_path / ".dejavu")] == said
    assert {one.decided for one in Notes.decisions(tmp_path / ".dejavu")} <= {"planned", "no plan", "kept"}


def test_a_workload_file_with_a_mistake_fails_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look failed, before the flow began, and `dejavu replans` had nothing of it."""
    now, file = cluster_of(tmp_path, TWO), tmp_path / "w.yaml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(looking, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr("tasks.watching.look_at_cluster", lambda *_: now)
    right, work = "model: mlp\ndata: digits\n", tmp_path / ".dejavu"
    file.write_text(right)
    Notes(work, load_workload(file), "cluster.yaml", "").keep(now, Plan.from_dict(A_PLAN), 0.5, "r")
    said: list[str] = []
    for text in (right, "model: mlq", "model: mlq", right, right, "model: mlq", "modle: mlp", right):
        file.write_text(text)
        typed = looking.replan.validate_parameters({"workload": "w.yaml"})["workload"]
        if text == right:
            assert looking.replan.fn(typed).message == "nothing changed since the last plan"
            said += ["the plan that is there is for this workload"] if said and "plan" not in said[-1] else []
            continue
        with pytest.raises(InputError) as found:
            load_workload("w.yaml")
        if said[-1:] != [str(found.value)]:
            with pytest.raises(InputError, match=re.escape(str(found.value))):
                looking.replan.fn(typed)
            said.append(str(found.value))
        assert str(found.value) in looking.replan.fn(typed).message
        with pytest.raises(InputError):  # an event asks, and is answered
            looking.replan.fn(typed, reason="an event")
    assert [one.why for one in Notes.decisions(work)] == said
    assert [one.decided for one in Notes.decisions(work)] == ["no plan", "kept", "no plan", "no plan", "kept"]
    assert {one.model for one in Notes.decisions(work)} == {"w.yaml", "mlp"}


def test_a_scheduler_that_does_not_answer_fails_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look failed, once a minute, and `dejavu replans` had nothing of it."""
    cluster_of(tmp_path, TWO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dejavu.trials.clients.CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(looking, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr("tasks.watching.get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr("tasks.watching.look_at_cluster", look_at_cluster.fn)
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(InputError, match=f"no Dask scheduler answers at {address}"):
        looking.replan.fn(dask=address)
    assert f"no Dask scheduler answers at {address}" in looking.replan.fn(dask=address).message
    (decision,) = Notes.decisions(tmp_path / ".dejavu")
    assert decision.decided == Decided.NONE


def test_a_question_is_the_same_however_its_cluster_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absolute, from the project's folder, or with dots: the watch said that there is no plan yet."""
    project = tmp_path / "my project"
    (project / "clusters").mkdir(parents=True)
    monkeypatch.chdir(project)

    def key(file: str, work: Path = project / ".dejavu") -> str:
        return Notes(work, Workload(), file, "").key

    ways = ("{}", "./{}", f"{project}/{{}}", "clusters/../{}")
    inside = {file: {key(way.format(file)) for way in ways} for file in FILES}
    outside = {key(way) for way in ("../other.yaml", str(tmp_path / "other.yaml"), "clusters/../../other.yaml")}
    assert all(len(keys) == 1 for keys in (*inside.values(), outside))
    assert len({*outside}.union(*inside.values())) == len(FILES) + 1
    assert {key(FILES[0], Path(".dejavu")), key(FILES[0], tmp_path / "moved" / ".dejavu")} == inside[FILES[0]]


FILES = ("cluster.yaml", "clusters/cluster.yaml", "clusters/grüße [a].yaml")


def test_what_is_done_with_a_new_plan_is_no_part_of_the_question(tmp_path: Path) -> None:
    """After another margin or action the watch said that there is no plan yet, and forgot the one that is there."""

    def key(**settings: object) -> str:
        workload = Workload.model_validate({"replan": settings})
        return Notes(tmp_path, workload, "cluster.yaml", "").key

    assert len({key(), key(action="plan"), key(margin="10%"), key(snapshot_every=5)}) == 1
    assert len({key(action="migrate", **one) for one in ({}, {"margin": 0.2}, {"improve": "joint"})}) == 1
    assert key() != key(action="migrate"), "its plans go one way, in whole sequences"
    assert key() == Notes(tmp_path, Workload(), "cluster.yaml", "").key


def test_half_written_decisions_are_left_out_and_the_next_is_read(tmp_path: Path) -> None:
    notes = Notes(tmp_path, Workload(), "cluster.yaml", "")
    decisions = [
        Decision(f"2026-01-0{k}T00:00:00+00:00", "gpt", "x × y", "", "f", None, 0.5, 0.03, "planned", "y", "r")
        for k in range(1, 4)
    ]
    notes.decided(decisions[0])
    path = tmp_path / "watch" / "decisions.jsonl"
    one = path.read_bytes()
    for stop in range(len(one)):
        path.write_bytes(one + one[:stop])
        assert list(Notes.decisions(tmp_path)) == decisions[:1]
        path.write_bytes(one[:stop])
        assert not list(Notes.decisions(tmp_path))
    for stop in range(0, len(one), 20):
        path.write_bytes(one + one[:stop])
        notes.decided(decisions[1])
        notes.decided(decisions[2])
        assert list(Notes.decisions(tmp_path)) == decisions
    for damaged in (b"{", b"", b"[]", b"3", b'{"question": 1}', b"\xff", one[:-20], b'{"a": 1}'):
        path.write_bytes(one + damaged + b"\n" + one)
        with pytest.raises(DejavuError, match=r"line 2 of .*decisions\.jsonl is no record of a decision"):
            list(Notes.decisions(tmp_path))


def test_damaged_notes_of_links_are_said(tmp_path: Path) -> None:
    notes = Notes(tmp_path, Workload(), "cluster.yaml", "")
    assert notes.links == {"usual": {}, "slow": {}}
    notes.tried({"a": {"b": 0.5}}, {"a": 4.0})
    assert notes.links == {"usual": {"a": {"b": 0.5}}, "slow": {"a": 4.0}}
    (path,) = (tmp_path / "watch").glob("*-links.json")
    whole = path.read_bytes()
    damages = [whole[:stop] for stop in range(len(whole.rstrip()))]
    kinds = [json.dumps({"usual": {"a": {"b": no}}, "slow": {}}).encode() for no in NO_NUMBERS]
    kinds += [json.dumps({"usual": {}, "slow": {"a": no}}).encode() for no in NO_NUMBERS]
    for damaged in (
        *damages,
        b"[]",
        b"3",
        b"{}",
        b'{"usual": {}}',
        b'{"usual": {"a": 1}, "slow": {}}',
        b"\xff",
        *kinds,
    ):
        path.write_bytes(damaged)
        with pytest.raises(DejavuError, match=r"-links\.json is no record of links .*; delete it"):
            _ = notes.links
