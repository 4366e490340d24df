"""What collectives cost: formulas of rings, the physics of links and cards, measured curves, what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dejavu.cluster import Cluster, Device, DeviceType, Link, NodeGroup
from dejavu.cost import CostError
from dejavu.cost.collectives import curves
from dejavu.cost.collectives.alpha_beta import (
    FAMILY,
    FITTED_LINKS,
    TERMS,
    Coefficients,
    GroupLayout,
    Links,
    bus_bytes_per_second,
    fit,
    shipped,
    terms,
)
from dejavu.cost.collectives.costs import CollectiveCosts
from dejavu.cost.collectives.curves import ALPHA_BETA, CORRECTED, CollectiveModel
from dejavu.cost.collectives.interpolation import CurvePoints, CurveProcess
from dejavu.cost.collectives.points import points_of, screened
from dejavu.cost.estimates import INTERPOLATED, MEASURED
from dejavu.foundation.errors import InputError
from dejavu.foundation.hashing import stable_hash
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.profiles.collective import COLLECTIVES, Collective

PROFILE = Path(__file__).resolve().parents[2] / "shared" / "data" / "alpa" / "prof_database.parquet"
FAST, SLOW = Link(150e9, 5e-6), Link(3e9, 20e-6)
SIZES = [float(2**power) for power in range(4, 33, 2)]
every_collective = pytest.mark.parametrize("name", COLLECTIVES)


def cluster_of(*groups: tuple[str, int, int], between: Link = SLOW, slow_pair: Link | None = None) -> Cluster:
    """Groups (name, nodes, devices per node) of one device type; the first and last are joined by `slow_pair`."""
    nodes = tuple(NodeGroup(name, count, (), (("V100", devices),), FAST) for name, count, devices in groups)
    names = [name for name, _, _ in groups]
    links = {(a, b): between for a in names for b in names if a <= b}
    if slow_pair:
        links[names[0], names[-1]] = slow_pair
    v100 = DeviceType("V100", "cuda", {"float16": 1e14}, 2**34, 9e11, 80, None, "cluster.yaml")
    return Cluster("test", nodes, {"V100": v100}, links)


def rows_of(collective: Collective, curve: dict[int, float], dtype: str = "float16") -> list[Measurement]:
    return [
        Measurement(
            kind="collective",
            subject=collective.subject,
            name=collective.name,
            device_type="V100",
            dtype=dtype,
            num_ranks=collective.num_ranks,
            size_bytes=size,
            seconds=seconds,
            repeats=5,
            host_fingerprint="here",
            torch_version="2.13.0",
            source="measured",
            how="a test",
            measured_at=datetime(2026, 11, 21, tzinfo=UTC),
            extra=collective.to_json(),
        )
        for size, seconds in curve.items()
    ]


def seconds(name: str, size: float, nodes: int, devices: int, groups: int = 1, between: Link = SLOW) -> float:
    """Without measurements, from the links alone; `groups` that span the same nodes share their links."""
    layout = GroupLayout(nodes * devices, nodes, groups if nodes > 1 else 0)
    return float(shipped()[name].seconds(name, [layout], np.array([float(size)]), Links(FAST, between))[0])


# The record


def test_subject_is_the_stable_hash_and_survives_json() -> None:
    collective = Collective(name="all_reduce", replica_groups=((0, 2), (1, 3)), mesh_nodes=2, devices_per_node=2)
    assert collective.subject == stable_hash(["all_reduce", [[0, 2], [1, 3]], 2, 2])
    assert Collective.from_json("all_reduce", collective.to_json()) == collective
    assert GroupLayout.of(collective) == GroupLayout(2, 2, sharing=2)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "broadcast"},
        {"replica_groups": ()},
        {"replica_groups": ((0, 1), (2,))},
        {"replica_groups": ((0, 1), (1, 2))},
        {"replica_groups": ((0, 9),)},
        {"mesh_nodes": 0},
        {"name": "send_recv", "replica_groups": ((0, 1, 2),)},
    ],
)
def test_wrong_collectives_are_refused(change: dict) -> None:
    good = {"name": "all_gather", "replica_groups": ((0, 1),), "mesh_nodes": 1, "devices_per_node": 4}
    with pytest.raises(ValueError, match=r"wanted|not on a mesh"):
        Collective(**(good | change))


# Cards


@every_collective
@pytest.mark.parametrize("each", [2, 4, 8])
def test_devices_with_cards_of_their_own_share_none(name: str, each: int) -> None:
    """Of whole nodes d cards are one of d times the bandwidth; of a device in each node they are one card."""
    if name == "send_recv":
        return
    free, size = Link(1e12, 0.0), np.array([1e9])
    own, one = Links(free, Link(1e9, 0.0), 1.0), Links(free, Link(1e9, 0.0))
    together = Links(free, Link(each * 1e9, 0.0))
    card = TERMS[FAMILY[name]].index("card_bytes")

    def card_seconds(layout: GroupLayout, links: Links) -> float:
        return float(terms(name, [layout], size, links)[0, card])

    for groups in (1, each):  # one over all devices of 4 nodes, or one for each device of a node
        ranks = 4 * each // groups
        layout = GroupLayout(ranks, 4, groups)
        assert card_seconds(layout, own) == pytest.approx(card_seconds(layout, together))
        assert card_seconds(layout, own) == pytest.approx(card_seconds(layout, one) / each)
    alone = GroupLayout(4, 4, 1)
    assert card_seconds(alone, own) == card_seconds(alone, one)
    half = Links(free, Link(1e9, 0.0), 0.5)
    assert card_seconds(GroupLayout(4 * each, 4, 1), half) == pytest.approx(
        2 * card_seconds(GroupLayout(4 * each, 4, 1), own)
    )


# Formulas


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ring_bytes_are_those_of_the_textbook(ranks: int) -> None:
    free = Links(Link(1e9, 0.0), Link(1e9, 0.0))
    wire = {"all_gather": (ranks - 1) / ranks, "reduce_scatter": (ranks - 1) / ranks, "send_recv": 1.0}
    wire |= {"all_reduce": 2 * (ranks - 1) / ranks, "all_to_all": (ranks - 1) / ranks**2}
    for name, factor in wire.items():
        if name == "send_recv" and ranks != 2:
            continue
        inside = TERMS[FAMILY[name]].index("inside_bytes")
        found = terms(name, [GroupLayout(ranks, 1, 0)], np.array([8e9]), free)[0, inside]
        assert found == pytest.approx(8 * factor)
        assert bus_bytes_per_second(name, ranks, 8e9, found) == pytest.approx(1e9)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather(nodes: int) -> None:
    size = 2.0**24  # bound by bandwidth, and still by rings
    parts = seconds("reduce_scatter", size, nodes, 1) + seconds("all_gather", size, nodes, 1)
    assert seconds("all_reduce", size, nodes, 1) == pytest.approx(parts, rel=0.35)


# Physics


@every_collective
def test_more_bytes_take_longer(name: str) -> None:
    for nodes, devices in [(1, 2), (2, 1)] if name == "send_recv" else [(1, 2), (1, 8), (2, 1), (2, 8), (16, 4)]:
        times = [seconds(name, size, nodes, devices) for size in SIZES]
        assert all(a <= b for a, b in pairwise(times))


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
def test_more_ranks_take_longer(name: str) -> None:
    for size in SIZES:
        inside = [seconds(name, size, 1, devices) for devices in (2, 4, 8)]
        across = [seconds(name, size, nodes, 8) for nodes in (1, 2, 4, 8, 16)]
        for times in (inside, across):
            assert all(a <= 1.001 * b for a, b in pairwise(times))


@every_collective
def test_sharing_a_card_never_helps(name: str) -> None:
    for size in SIZES:
        times = [seconds(name, size, 2, 1, groups) for groups in (1, 2, 4, 8)]
        assert times == sorted(times)
    assert seconds(name, 2.0**32, 2, 1, 8) > 6 * seconds(name, 2.0**32, 2, 1, 1)


@every_collective
def test_a_faster_network_helps(name: str) -> None:
    faster = Link(4 * SLOW.bytes_per_second, SLOW.latency_seconds / 4)
    for size in SIZES:
        assert seconds(name, size, 2, 1, between=faster) < seconds(name, size, 2, 1)


@every_collective
def test_one_rank_costs_nothing(name: str) -> None:
    cluster = cluster_of(("a", 1, 4))
    cost = CollectiveCosts(cluster, None).estimate(name, 1e6, [cluster.devices()[:1]])
    assert (cost.seconds, cost.low_seconds, cost.high_seconds) == (0.0, 0.0, 0.0)


def test_the_slowest_link_of_a_group_bounds_it() -> None:
    crawling = Link(SLOW.bytes_per_second / 10, SLOW.latency_seconds)
    cluster = cluster_of(("a", 1, 2), ("b", 1, 2), ("c", 1, 2), slow_pair=crawling)
    a, b, c = (devices[0] for devices in by_node(cluster))

    def cost(*devices: Device) -> float:
        return CollectiveCosts(cluster, None).estimate("all_gather", 1e9, [devices]).seconds

    assert cost(a, c) > 8 * cost(a, b)
    assert cost(a, b, c) > 8 * cost(a, b)
    assert cost(a, c) > 1e9 / 2 / crawling.bytes_per_second * 0.9


def test_actual_devices_cost_what_their_mesh_costs() -> None:
    cluster = cluster_of(("a", 2, 4))
    first, second = by_node(cluster)
    groups = [list(pair) for pair in zip(first, second, strict=True)]
    cost = CollectiveCosts(cluster, None).estimate("all_reduce", 1e8, groups)
    assert cost.source == ALPHA_BETA
    assert cost.low_seconds < cost.seconds < cost.high_seconds
    assert cost.seconds == pytest.approx(seconds("all_reduce", 1e8, 2, 1, groups=4))


def by_node(cluster: Cluster) -> list[list[Device]]:
    nodes: dict[str, list[Device]] = {}
    for device in cluster.devices():
        nodes.setdefault(device.host, []).append(device)
    return list(nodes.values())


# Fitting


@every_collective
def test_fit_finds_the_coefficients_again(name: str) -> None:
    layouts, sizes = grid(name)
    truth = replace(shipped()[name], values=tuple(1.5 * value for value in shipped()[name].values))
    times = truth.seconds(name, layouts, sizes, FITTED_LINKS)
    found = fit(name, layouts, sizes, times, FITTED_LINKS, shipped()[name])
    assert np.allclose(found.seconds(name, layouts, sizes, FITTED_LINKS), times, rtol=0.02)


def test_what_is_not_measured_keeps_its_coefficient() -> None:
    inside = [GroupLayout(ranks, 1, 0) for ranks in (2, 4, 8) for _ in SIZES]
    sizes = np.tile(SIZES, 3)
    prior = shipped()["all_gather"]
    times = 3 * prior.seconds("all_gather", inside, sizes, FITTED_LINKS)
    found = dict(zip(TERMS["ring"], fit("all_gather", inside, sizes, times, FITTED_LINKS, prior).values, strict=True))
    before = dict(zip(TERMS["ring"], prior.values, strict=True))
    assert found["card_bytes"] == pytest.approx(before["card_bytes"], rel=1e-3)
    assert found["inside_bytes"] == pytest.approx(3 * before["inside_bytes"], rel=0.05)


def grid(name: str) -> tuple[list[GroupLayout], np.ndarray]:
    shapes = [(2, 1, 0), (2, 2, 8), (2, 2, 1)]
    if name != "send_recv":
        shapes += [(4, 1, 0), (8, 1, 0), (4, 2, 4), (8, 2, 2), (16, 2, 1), (4, 4, 8), (32, 4, 1), (8, 4, 2)]
    return [GroupLayout(*shape) for shape in shapes for _ in SIZES], np.tile(SIZES, len(shapes))


# Measured curves


def curve_of(collective: Collective, seed: int, sizes: Sequence[float] = SIZES, noise: float = 0.02) -> dict:
    base = shipped()[collective.name].seconds(
        collective.name, [GroupLayout.of(collective)] * len(sizes), np.array(sizes), FITTED_LINKS
    )
    drawn = np.random.default_rng(seed).normal(0.3, noise, len(sizes))  # 35 % above the shipped model
    return {int(size): float(took) for size, took in zip(sizes, base * np.exp(drawn), strict=True)}


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Cluster, ProfileDatabase, dict[int, float]]:
    cluster = cluster_of(("a", 1, 8))
    database = ProfileDatabase(tmp_path / "profiles_db")
    curve: dict[int, float] = {}
    for ranks in (2, 8):
        collective = Collective(
            name="all_gather", replica_groups=(tuple(range(ranks)),), mesh_nodes=1, devices_per_node=8
        )
        curve = curve_of(collective, seed=ranks)
        database.append(rows_of(collective, curve))
    return cluster, database, curve


def test_measured_sizes_are_given_back(measured: tuple[Cluster, ProfileDatabase, dict[int, float]]) -> None:
    cluster, database, curve = measured
    costs = CollectiveCosts(cluster, database)
    rising = np.maximum.accumulate(list(curve.values()))
    for (size, took), highest in zip(curve.items(), rising, strict=True):
        found = costs.estimate("all_gather", size, [cluster.devices()])
        assert found.source == MEASURED
        if took == highest and all(later > took for other, later in curve.items() if other > size):
            assert found.seconds == pytest.approx(took)
        assert found.seconds == pytest.approx(took, rel=0.1)


def test_between_measured_sizes_is_between_their_times(
    measured: tuple[Cluster, ProfileDatabase, dict[int, float]],
) -> None:
    cluster, database, curve = measured
    costs = CollectiveCosts(cluster, database)
    asked = np.geomspace(min(curve), max(curve), 200)
    found = [costs.estimate("all_gather", float(size), [cluster.devices()]) for size in asked]
    times = [cost.seconds for cost in found]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))
    assert {cost.source for cost in found[1:-1]} == {INTERPOLATED}
    assert all(cost.low_seconds < cost.seconds < cost.high_seconds for cost in found)


def test_neighbours_correct_a_group_that_was_not_measured(
    measured: tuple[Cluster, ProfileDatabase, dict[int, float]],
) -> None:
    cluster, database, _ = measured
    found = CollectiveCosts(cluster, database).estimate("all_gather", 2.0**20, [cluster.devices()[:4]])
    assert found.source == CORRECTED
    truth = math.exp(0.3) * shipped()["all_gather"].seconds(
        "all_gather", [GroupLayout(4, 1, 0)], np.array([2.0**20]), FITTED_LINKS
    )
    assert found.seconds == pytest.approx(float(truth[0]), rel=0.1)


def test_leaving_out_is_what_refitting_gives() -> None:
    layouts, sizes = grid("all_gather")
    groups = np.repeat(np.arange(len(layouts) // len(SIZES)), len(SIZES))
    points = CurvePoints.of("all_gather", layouts, sizes, groups, np.zeros_like(groups))
    residuals = np.random.default_rng(0).normal(0.0, 0.1, len(points))
    blocks = np.arange(len(points)) % 7
    mean, deviation = CurveProcess(points, residuals).leave_out(blocks)
    out = blocks == 3
    rest = CurveProcess(points.take(np.flatnonzero(~out)), residuals[~out])
    expected_mean, expected_deviation = rest.predict(points.take(np.flatnonzero(out)))
    assert np.allclose(mean[out], expected_mean)
    assert np.allclose(deviation[out], expected_deviation)


def test_intervals_hold_nine_of_ten() -> None:
    layouts, sizes, names, dtypes, times = [], [], [], [], []
    for number, ranks in enumerate((2, 4, 8)):
        collective = Collective(
            name="all_gather", replica_groups=(tuple(range(ranks)),), mesh_nodes=1, devices_per_node=8
        )
        for size, took in curve_of(collective, number, [2.0 ** (power / 2) for power in range(8, 64)]).items():
            layouts.append(collective)
            names.append(collective.subject)
            dtypes.append("float16")
            sizes.append(float(size))
            times.append(took)
    points = screened(layouts, dtypes, np.array(sizes), np.array(times))
    even = np.arange(len(points)) % 2 == 0
    model = CollectiveModel.of("all_gather", points.take(np.flatnonzero(even)), FITTED_LINKS)
    rest = points.take(np.flatnonzero(~even))
    mean, deviation = model.predict(rest.layouts, rest.subjects, rest.dtypes, rest.sizes_bytes)
    inside = np.abs(np.log(rest.seconds) - mean) <= model.size_factor * deviation
    assert 0.8 <= inside.mean() <= 1.0


# Bad input


@every_collective
@pytest.mark.parametrize("size", [-1.0, math.nan, math.inf])
def test_sizes_that_are_none_are_refused(name: str, size: float) -> None:
    cluster = cluster_of(("a", 1, 2))
    with pytest.raises(CostError, match="wanted a finite number"):
        CollectiveCosts(cluster, None).estimate(name, size, [cluster.devices()])


def test_unknown_names_and_groups_are_refused() -> None:
    cluster = cluster_of(("a", 1, 4))
    a, b, c, _ = cluster.devices()
    costs = CollectiveCosts(cluster, None)
    with pytest.raises(CostError, match="broadcast"):
        costs.estimate("broadcast", 1.0, [[a, b]])
    with pytest.raises(CostError, match="two places"):
        costs.estimate("all_gather", 1.0, [[a, b], [b, c]])


def test_what_is_no_measurement_is_dropped_and_counted() -> None:
    pair = Collective(name="all_gather", replica_groups=((0, 1),), mesh_nodes=1, devices_per_node=2)
    alone = Collective(name="all_gather", replica_groups=((0,),), mesh_nodes=1, devices_per_node=2)
    sizes = [16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 0.0]
    times = [1e-4, math.inf, math.nan, -1.0, 1.1e-4, 2.2e-4, 1.0, 1e-5]  # 512: at 256's bandwidth; 1024: a wrong unit
    collectives = [pair] * 8 + [alone]
    points = screened(collectives, ["float16"] * 9, np.array([*sizes, 64.0]), np.array([*times, 1e-4]))
    assert sorted(points.sizes_bytes) == [16.0, 256.0]
    assert sum(points.dropped.values()) == 7
    assert set(points.dropped.values()) == {3, 2, 1}


def test_rows_without_groups_are_dropped_and_counted() -> None:
    pair = Collective(name="all_gather", replica_groups=((0, 1),), mesh_nodes=1, devices_per_node=2)
    good, bad = rows_of(pair, {64: 1e-4, 128: 1.1e-4})
    points = points_of([good, replace(bad, extra="{}")])
    assert len(points) == 1
    assert points.dropped == {"extra that names no collective": 1}


def test_no_coefficient_is_negative_and_bytes_cost_about_what_links_carry() -> None:
    assert set(shipped()) == set(COLLECTIVES)
    for name, found in shipped().items():
        assert all(value >= 0 for value in found.values)
        assert isinstance(found, Coefficients)
        values = dict(zip(TERMS[FAMILY[name]], found.values, strict=True))
        assert 0.9 < values["card_bytes"] < 1.5


# The benchmark


@pytest.mark.slow
@pytest.mark.skipif(not PROFILE.exists(), reason="the shared data are not here")
def test_left_out_sizes_and_meshes_are_predicted_better_than_by_the_baselines() -> None:
    from benchmarks.cost.collectives import run

    _, rows, summary = run(PROFILE)
    for found in summary["leave_size_out"].values():
        assert found["median_percent"] <= 1.7
        assert found["p90_percent"] <= 7.0
    for found in summary["leave_mesh_out_crossing_nodes"].values():
        assert found["median_percent"] <= 8.0
        assert found["p90_percent"] <= 20.0
    simple = {row["collective"]: row["median_percent"] for row in rows if row["method"] == "simple α–β"}
    assert all(
        found["median_percent"] < simple[name] for name, found in summary["leave_mesh_out_crossing_nodes"].items()
    )


def alpa_points(count: int = 6) -> pd.DataFrame:
    sizes = [2**k for k in range(10, 10 + count)]
    common = {"cluster": "default", "mesh_nodes": 1, "mesh_gpus_per_node": 2, "op": "all_reduce", "dtype": "f16"}
    common |= {"replica_groups": "((0, 1),)", "is_noop": False, "is_monotone_clamped": False, "failed": False}
    rows = [common | {"size_elements": size, "seconds": 1e-5 + size / 1e10, "flop": math.nan} for size in sizes]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"op": "broadcast"}, r"6 points were dropped \(not understood; the first: .* point 0: unknown operator"),
        ({"dtype": "fp16"}, r"6 points were dropped \(not understood; the first: .* unknown dtype 'fp16'"),
        ({"is_noop": True}, r"6 points were dropped \(nothing to do or send"),
        ({"failed": True}, r"6 points were dropped \(failed in Alpa"),
        ({"seconds": 0.0}, r"6 points were dropped \(failed: no finite time above 0"),
    ],
)
def test_a_profile_without_a_point_says_why(tmp_path: Path, change: dict[str, Any], wanted: str) -> None:
    """An empty table would say that nothing was wrong."""
    from benchmarks.cost.collectives import run

    path = tmp_path / "profile.parquet"
    alpa_points().assign(**change).to_parquet(path)
    with pytest.raises(InputError, match=rf"profile\.parquet has .*{wanted}"):
        run(path)
    alpa_points().to_parquet(path)
    assert run(path)[2]["points"] == {"all_reduce": 6}


@pytest.mark.parametrize("seed", range(3))
def test_rows_in_another_order_give_the_same_figures(tmp_path: Path, seed: int) -> None:
    """Intervals of one half of the groups are judged by the other half: the same halves."""
    from benchmarks.cost.collectives import run

    rng, path = np.random.default_rng(seed), tmp_path / "profile.parquet"
    groups = ["((0, 1, 2, 3),)", "((0, 1), (2, 3))", "((0, 2), (1, 3))"]
    meshes = [(nodes, 4 // nodes, text) for nodes in (1, 2, 4) for text in groups]
    frame = pd.concat(
        [
            alpa_points(8).assign(mesh_nodes=nodes, mesh_gpus_per_node=each, replica_groups=text, dtype=dtype)
            for nodes, each, text in meshes
            for dtype in ("f16", "f32")
        ],
        ignore_index=True,
    )
    frame["seconds"] *= np.exp(rng.normal(0.0, 0.3, len(frame)))
    frame.to_parquet(path)
    _, rows, summary = run(path)
    assert {row["left out"] for row in rows} == {"one size", "one mesh"}
    for _ in range(3):
        frame.sample(frac=1, random_state=int(rng.integers(1000))).to_parquet(path)
        assert run(path)[1:] == (rows, summary)


@pytest.mark.parametrize("crossing", [(), (2,), (4,), (2, 4)])
def test_a_mesh_is_left_out_where_another_tells_what_crossing_nodes_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crossing: tuple[int, ...]
) -> None:
    """So that no figure is of the shipped coefficients, which may have been fitted to these very points."""
    from benchmarks.cost.collectives import run

    frames = [
        alpa_points(8).assign(mesh_nodes=nodes, mesh_gpus_per_node=4 // nodes, replica_groups="((0, 1, 2, 3),)")
        for nodes in (1, *crossing)
    ]
    frame = pd.concat(frames, ignore_index=True)
    frame["seconds"] *= np.exp(np.random.default_rng(0).normal(0.0, 0.1, len(frame)))
    frame.to_parquet(tmp_path / "profile.parquet")
    _, rows, summary = run(tmp_path / "profile.parquet")
    left_out = [row for row in rows if row["left out"] == "one mesh"]
    assert bool(left_out) == (len(crossing) > 1) == bool(summary["leave_mesh_out_crossing_nodes"])
    said = {"all_reduce": f"{crossing[0]} × {4 // crossing[0]}"} if len(crossing) == 1 else {}
    assert summary["only_mesh_that_crosses_nodes"] == said
    others = {name: replace(one, values=tuple(2 * value for value in one.values)) for name, one in shipped().items()}
    monkeypatch.setattr(curves, "shipped", lambda: others)
    for row, other in zip(left_out, run(tmp_path / "profile.parquet")[1][-len(left_out) :], strict=bool(left_out)):
        assert other["median_percent"] == pytest.approx(row["median_percent"], rel=0.02)


@pytest.mark.parametrize("names", [["a", "b"], [1, 2], ["a", None], ["x", "y", "z"]], ids=str)
def test_clusters_of_one_file_are_left_out_of_apart(tmp_path: Path, names: list[Any]) -> None:
    """Each is predicted as if it had a file of its own; in any order of the rows."""
    from benchmarks.cost.collectives import run

    apart = [
        alpa_points().assign(cluster=name, seconds=lambda one, k=k: one["seconds"] * 2**k)
        for k, name in enumerate(names)
    ]
    whole = pd.concat(apart, ignore_index=True).sample(frac=1.0, random_state=0)
    whole.to_parquet(tmp_path / "profile.parquet")
    _, rows, summary = run(tmp_path / "profile.parquet")
    called = [f"all_reduce of {'no name' if name is None else name}" for name in names]
    assert summary["points"] == dict.fromkeys(sorted(called), 6)
    for name, frame in zip(called, apart, strict=True):
        frame.to_parquet(tmp_path / "one.parquet")
        own = run(tmp_path / "one.parquet")[1]
        wanted = [{**row, "collective": name} for row in own]
        assert [row for row in rows if row["collective"] == name] == wanted


@pytest.mark.parametrize("topology", ["a100_dgx", "a40_pairwise_nvlink", "h100_dgx", "h100_pairwise_nvlink"])
def test_vidurs_own_csv_says_what_its_parquet_says(tmp_path: Path, topology: str) -> None:
    from benchmarks.cost.collectives import run

    frame = pd.DataFrame({"size": [2**k for k in range(10, 18)], "num_workers": 2, "devices_per_node": 2})
    frame = frame.assign(collective="all_reduce", topology=topology, median_ms=0.02 + frame["size"] / 1e7)
    frame.to_parquet(tmp_path / "network.parquet")
    (tmp_path / topology).mkdir()
    own = frame.drop(columns="topology").rename(columns={"median_ms": "time_stats.all_reduce.median"})
    own.to_csv(tmp_path / topology / "all_reduce.csv", index=False)
    found, wanted = run(tmp_path / topology / "all_reduce.csv"), run(tmp_path / "network.parquet")
    assert found[1:] == wanted[1:]
    assert found[2]["points"] == {"all_reduce": 8}


@pytest.mark.parametrize("names", [("b200_dgx", "a40_pairwise_nvlink"), ("lab [x]", "lab"), ("Ångström 9", "a100_dgx")])
def test_networks_of_devices_that_nobody_knows_are_predicted_as_others(tmp_path: Path, names: tuple[str, str]) -> None:
    from benchmarks.cost.collectives import run

    def found(topologies: tuple[str, str]) -> list[dict[str, Any]]:
        frames = [
            pd.DataFrame({"size": [2**k for k in range(10, 18)], "num_workers": 2, "devices_per_node": 2}).assign(
                collective="all_reduce", topology=topology, median_ms=lambda one, k=k: 0.02 + k * one["size"] / 1e7
            )
            for k, topology in enumerate(topologies, start=1)
        ]
        pd.concat(frames).to_parquet(tmp_path / "network.parquet")
        _, rows, summary = run(tmp_path / "network.parquet")
        assert set(summary["points"].values()) == {8} and len(summary["points"]) == 2 and not summary["dropped_points"]
        return rows

    def without_names(rows: list[dict[str, Any]]) -> list[str]:
        return sorted(str({key: value for key, value in row.items() if key != "collective"}) for row in rows)

    assert without_names(found(names)) == without_names(found(("a100_dgx", "h100_dgx")))
