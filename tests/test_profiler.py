"""The profiler measures what is missing, keeps what it has when it is stopped, and continues from there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejavu.cluster import Cluster, load_cluster
from dejavu.foundation.errors import InputError
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph
from dejavu.profiles import Measurement, ProfileDatabase, host_fingerprint
from dejavu.profiles.collective import COLLECTIVES, Collective
from dejavu.profiles.kernel import Kernel
from dejavu.profiling import profiler as campaign
from dejavu.profiling.collectives import SIZES_BYTES, collective_of, measure_collectives, whole_bytes
from dejavu.profiling.layers import measure_layers
from dejavu.profiling.links import measure_link
from dejavu.profiling.measuring import least_samples, measured_here
from dejavu.profiling.profiler import Profiler
from dejavu.workload import Workload
from flows.inputs import at_microbatches
from tests.conftest import draws

pytestmark = pytest.mark.integration


@pytest.fixture
def here(tmp_path: Path) -> Cluster:
    (tmp_path / "cluster.yaml").write_text("nodes: auto\n")
    return load_cluster(tmp_path / "cluster.yaml")


@pytest.fixture
def graph(tiny: Workload) -> Graph:
    return capture(tiny)


@pytest.fixture
def database(tmp_path: Path) -> ProfileDatabase:
    return ProfileDatabase(tmp_path / "profiles_db")


@pytest.fixture
def never_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other work disturbed stays as it is: it would be measured again in the first quiet moment."""
    monkeypatch.setattr(campaign, "are_quiet", lambda num_cores, least_sample_seconds: False)


@pytest.mark.usefixtures("never_quiet")
@pytest.mark.slow
def test_an_interrupted_campaign_keeps_what_it_has_and_goes_on(
    graph: Graph, tiny: Workload, here: Cluster, database: ProfileDatabase
) -> None:
    first = Profiler(graph, tiny, here, database)
    seen: list[tuple[int, int]] = []

    def stop_at_the_second(name: str, done: int, total: int) -> None:
        seen.append((done, total))
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(["layers"], stop_at_the_second)
    assert seen == [(0, 3), (1, 3)]  # embedding, block and head
    assert database.read().num_rows == 3  # forward, backward and optimizer of the first
    after = first.run(["layers"], lambda name, done, total: seen.append((done, total)))
    assert (after.num_new, after.num_known) == (2, 1) and seen[2:] == [(0, 2), (1, 2)]
    again = first.run(["layers"])
    assert (again.num_new, again.num_known, again.not_here) == (0, 3, ())


def test_a_size_that_its_neighbours_contradict_is_measured_again_at_once(
    graph: Graph, tiny: Workload, here: Cluster, database: ProfileDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: other work may have delayed it, and no figure of it may stand if it was."""
    if min(here.device_counts.values()) < 2:
        pytest.skip("links are measured between two devices")
    rows = list(measure_link(next(iter(here.device_counts))))
    late = 100 * max(row.seconds for row in rows)
    slow = replace(rows[0], seconds=late, seconds_low=late, seconds_high=late)
    series = [[slow, *rows[1:]], rows]
    monkeypatch.setattr(campaign, "measure_link", lambda device_type, least_sample_seconds: iter(series.pop(0)))
    Profiler(graph, tiny, here, database).run(["transfers"])
    assert not series and not database.check()
    assert {row.seconds for row in database.latest(kind="transfer")} == {row.seconds for row in rows}


@pytest.mark.slow
def test_what_was_disturbed_is_measured_again_when_it_is_quiet(
    graph: Graph, tiny: Workload, here: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signatures = list(dict.fromkeys(layer.signature for layer in graph.layers))
    (device_type,) = here.device_counts
    rows = list(measure_layers(tiny, graph, signatures, device_type))
    database = ProfileDatabase(tmp_path / "profiles_db")
    database.append([replace(row, disturbed_share=1.0) for row in rows])
    quiet = False

    def are_quiet(num_cores: int, least_sample_seconds: float) -> bool:
        assert num_cores >= 1 and least_sample_seconds == min(row.seconds for row in rows if row.kind == "probe")
        return quiet

    monkeypatch.setattr(campaign, "are_quiet", are_quiet)
    busy = Profiler(graph, tiny, here, database).run(["layers"])
    assert (busy.num_new, busy.num_known, busy.num_disturbed) == (0, 3, 3)
    assert "3 in all were taken while other work ran" in str(busy)
    assert str(busy).startswith("déjà vu: 3 measurements reused, 0 measured now; ")
    quiet = True
    again = Profiler(graph, tiny, here, database).run(["layers"])
    assert (again.num_new, again.num_known) == (3, 0)
    newest = max(row.measured_at for row in rows)
    assert all(row.measured_at > newest for row in database.latest(kind="layer"))


def test_the_fastest_look_at_a_core_is_known_by_the_kind_of_host(database: ProfileDatabase) -> None:
    database = replace(database, with_shipped=False)
    assert least_samples(database) == {}
    row = measured_here(
        kind="probe", subject="loop", name="loop", device_type="core", dtype="int64", seconds=1.0, repeats=1, how="test"
    )
    looks = {"here": [3e-4, 2e-4, 4e-4], "there": [1e-4]}
    database.append(
        [replace(row, host_fingerprint=host, seconds=seconds) for host, some in looks.items() for seconds in some]
    )
    assert least_samples(database) == {host: min(some) for host, some in looks.items()}


@pytest.mark.usefixtures("never_quiet")
def test_operators_are_measured_once(graph: Graph, tiny: Workload, here: Cluster, database: ProfileDatabase) -> None:
    first = Profiler(graph, tiny, here, database).run(["operators"])
    rows = database.read(kind="operator").to_pylist()
    assert first.num_new == len(rows) > 20 and first.num_known == 0
    for row in rows:
        kernel = Kernel.from_json(row["extra"])
        assert (row["subject"], row["dtype"], row["flops"]) == (kernel.subject, kernel.dtype, kernel.flops)
        assert row["host_fingerprint"] == host_fingerprint()
    second = Profiler(graph, tiny, here, database).run(["operators"])
    assert (second.num_new, second.num_known) == (0, first.num_new)


@pytest.mark.usefixtures("never_quiet")
@pytest.mark.parametrize("num_devices", [2, 3, 6])
def test_collectives_of_which_sizes_are_missing_are_measured_again(
    num_devices: int, graph: Graph, tiny: Workload, here: Cluster, database: ProfileDatabase, monkeypatch: Any
) -> None:
    """However many sizes an interrupted campaign had kept."""

    def measured(
        names: Sequence[str], num_ranks: int, device_type: str, progress: Any, least_sample_seconds: float
    ) -> Iterator[Measurement]:
        for name in names:
            whole = collective_of(name, num_ranks, num_ranks)
            for size in SIZES_BYTES:
                progress(name)
                yield measured_here(
                    kind="collective",
                    subject=whole.subject,
                    name=name,
                    device_type=device_type,
                    dtype="float32",
                    num_ranks=whole.num_ranks,
                    size_bytes=whole_bytes(size, num_ranks),
                    seconds=1e-5 + size / 1e9,
                    repeats=1,
                    how="test",
                    extra=whole.to_json(),
                )

    monkeypatch.setattr(campaign, "measure_collectives", measured)
    (device_type,) = here.device_counts
    profiler = Profiler(graph, tiny, here, database)
    total = profiler._collectives(device_type, num_devices).num_missing
    random = np.random.default_rng(num_devices)
    known = 0
    while known < total:
        task = profiler._collectives(device_type, num_devices)
        assert (task.num_missing, task.num_known) == (total - known, known)
        rows = list(task.measure(lambda name: None))
        assert len(rows) == task.num_missing
        kept = int(random.integers(1, len(rows) + 1))  # the campaign was interrupted after so many
        database.append(rows[:kept])
        known += kept - kept % len(SIZES_BYTES)
    assert profiler._collectives(device_type, num_devices).num_missing == 0
    assert {row.size_bytes for row in database.latest(kind="collective", num_ranks=2)} == {*SIZES_BYTES}


@pytest.mark.parametrize("says", ["", "x" * 99 + "\n"], ids=["silent", "talkative"])
def test_ranks_may_print_many_warnings(says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds: nobody reads them before the ranks have ended."""
    figures = {
        "name": "all_reduce",
        "size_bytes": 4096,
        "collective": json.loads(collective_of("all_reduce", 2, 2).to_json()),
    }
    figures |= {"seconds": 1e-5, "repeats": 1}
    ranks = tmp_path / "python"
    lines = [
        f"#!{sys.executable}",
        "import sys",
        f"sys.stderr.write({says!r} * 5000)",
        f"print({json.dumps(figures)!r})",
    ]
    ranks.write_text("\n".join([*lines, "sys.exit(len(sys.argv) < 3)"]) + "\n")
    ranks.chmod(0o755)
    monkeypatch.setattr("dejavu.profiling.collectives.sys.executable", str(ranks))
    (row,) = measure_collectives(["all_reduce"], 2, "core", sizes_bytes=[4096])
    assert (row.name, row.size_bytes, row.seconds) == ("all_reduce", 4096, 1e-5)


@draws([2], [3], "counts")  # of three ranks on two cores one always waits, and each size takes as long as a size may
def test_collectives_are_measured_over_any_ranks(counts: tuple[int, ...]) -> None:
    for num_ranks in counts:
        sizes = (4096, 65536) if num_ranks == 2 else (65536,)
        names = [name for name in COLLECTIVES if name != "send_recv" or num_ranks == 2]
        rows = list(measure_collectives(names, num_ranks, "core", sizes_bytes=sizes))
        assert [row.name for row in rows] == [name for name in names for _ in sizes]
        for row in rows:
            row.check()
            collective = Collective.from_json(row.name, str(row.extra))
            assert collective == collective_of(row.name, num_ranks, num_ranks)
            assert row.num_ranks == (2 if row.name == "send_recv" else num_ranks)
            assert row.size_bytes is not None and row.size_bytes % (4 * num_ranks) == 0
            assert abs(row.size_bytes - 65536 if row.size_bytes > 5000 else row.size_bytes - 4096) < 4 * num_ranks


def test_an_unknown_kind_is_an_error(graph: Graph, tiny: Workload, here: Cluster, database: ProfileDatabase) -> None:
    with pytest.raises(InputError, match="unknown kind of measurement 'layer'; did you mean 'layers'"):
        Profiler(graph, tiny, here, database).run(["layer"])


def test_microbatch_sizes_are_read_strictly(tiny: Workload) -> None:
    assert [one.microbatch_size for one in at_microbatches(tiny, "4,1,16")] == [1, 4, 16]
    assert at_microbatches(tiny, "") == [tiny]
    for wrong in ("0", "1,,2", "a", "-1", "1.5"):
        with pytest.raises(InputError, match="is no microbatch size; wanted whole numbers"):
            at_microbatches(tiny, wrong)
