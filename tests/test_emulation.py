"""Emulated clusters: slower cores, hosts apart, nothing left behind, and a reason where they are not permitted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pipeline import emulation, gain
from benchmarks.pipeline.emulation import Emulation, EmulationError, apart, enter, own_group, slowed, take_seat
from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import train_in_turn
from dejavu.binding import Binding
from dejavu.cluster import Device
from tests.conftest import TINY
from tests.launching import DRAW, TOLERANCE, largest_difference
from tests.waiting import PATIENCE_SECONDS

SHARE = 0.25
HOSTS = ("alpha", "beta")
BURN_SECONDS = 0.3
BURN = f"""
import time
input()
while time.process_time() < {BURN_SECONDS}:
    pass
"""


@pytest.fixture
def quota() -> Iterator[Path]:
    try:
        with slowed("test", SHARE) as group:
            yield group
    except EmulationError as error:
        pytest.skip(str(error))


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    try:
        with apart(HOSTS, 400e6) as names:
            yield names
    except EmulationError as error:
        pytest.skip(str(error))


def left_behind() -> list[str]:
    """Namespaces and control groups by this process's name."""
    shown = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()
    groups = [path.name for root in (emulation.CPU_V1, emulation.CPU_V2) if root.is_dir() for path in root.iterdir()]
    return [name for name in (*shown, *groups) if name.startswith(emulation.own_name(""))]


def statistics(group: Path) -> dict[str, int]:
    rows = (line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return {name: int(value) for name, value in rows}


def test_a_quota_gives_its_share_of_a_core(quota: Path) -> None:
    """By the periods that passed while the process wanted to run, however busy the machine is."""
    child = subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, text=True)
    enter(quota, child.pid)
    child.communicate("\n", timeout=PATIENCE_SECONDS)
    found = statistics(quota)
    period_seconds = emulation.PERIOD_MICROSECONDS / 1e6
    assert found["nr_throttled"] > 0
    assert BURN_SECONDS / (found["nr_periods"] * period_seconds) < 1.2 * SHARE


def test_a_rank_is_as_fast_as_the_device_of_its_place(quota: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Device("slow", "here", "localhost", 1, 1)
    quick, home = replace(slow, index=0), own_group()
    site = Emulation({("localhost", 1): quota})
    assert (site.quota(slow), site.quota(quick)) == (quota, home)
    for name, value in site.environment("localhost").items():
        monkeypatch.setenv(name, value)
    try:
        for device, group in ((slow, quota), (quick, home), (slow, quota)):
            take_seat(device)
            assert own_group() == group
    finally:
        enter(home)


def test_a_link_sends_at_its_rate_at_most(namespaces: dict[str, str]) -> None:
    for name in namespaces.values():
        shown = subprocess.run(["tc", "-n", name, "qdisc", "show", "dev", "cable"], capture_output=True, text=True)
        assert "tbf" in shown.stdout and "rate 400Mbit" in shown.stdout


@pytest.mark.integration
@pytest.mark.slow
def test_ranks_on_two_hosts_train_one_job_after_another(namespaces: dict[str, str]) -> None:
    """The second has its ranks the other way round, the third fewer."""
    jobs = [
        job_of(
            TINY, on_hosts(by_hand("1f1b", bounds, [one_device()] * len(hosts), TINY.num_microbatches), hosts), 4, DRAW
        )
        for bounds, hosts in (((0, 2, 5), HOSTS), ((0, 1, 5), HOSTS[::-1]), ((0, 5), HOSTS[1:]))
    ]
    workload = TINY.model_copy(update={"num_steps": 4})
    for trained in train_in_turn(jobs, PATIENCE_SECONDS, Emulation(namespaces=namespaces)):
        assert largest_difference(workload, trained.losses) < TOLERANCE


def on_hosts(binding: Binding, hosts: tuple[str, ...]) -> Binding:
    places = [
        replace(place, device=replace(place.device, host=host, index=0))
        for place, host in zip(binding.placements, hosts, strict=True)
    ]
    return replace(binding, placements=tuple(places))


def test_nothing_is_left_behind() -> None:
    for context in (slowed("test", SHARE), apart(HOSTS, 400e6)):
        try:
            with context, pytest.raises(ZeroDivisionError):
                assert left_behind()
                raise ZeroDivisionError
        except EmulationError as error:
            pytest.skip(str(error))
    assert not left_behind()


def test_what_is_not_permitted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EmulationError, match="is not permitted here"), apart(HOSTS, -1.0):
        pass
    assert not left_behind()
    monkeypatch.setattr(emulation, "CPU_V1", tmp_path / "absent")
    monkeypatch.setattr(emulation, "CPU_V2", tmp_path / "absent")
    with pytest.raises(EmulationError, match="a CPU quota is not permitted here"), slowed("test", SHARE):
        pass
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmulationError, match="no command 'ip' here"), apart(HOSTS, 1e6):
        pass


def test_a_setting_that_is_not_permitted_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refused(passes: object) -> Iterator[gain.Site]:
        raise EmulationError("not here")
        yield

    monkeypatch.setattr(gain, "measure_passes", lambda device_type: iter(()))
    monkeypatch.setitem(gain.SITES, "1:2", refused)
    _, rows, summary = gain.table(settings=("1:2",))
    assert rows == [{"setting": "1:2", "competitor": "skipped: not here"}]
    assert json.loads(json.dumps(summary))["gain_over_even_split"] == {"1:2": None}


def test_another_order_of_devices_keeps_the_stages() -> None:
    binding = by_hand("1f1b", (0, 2, 3, 5), [one_device()] * 3, 4)
    devices = tuple(Device(f"kind {k}", "here", "localhost", 0, k) for k in range(3))
    found = gain.reordered(binding, devices)
    orders = gain.anyhow(found, 10)
    assert len(set(orders)) == len(orders) == 6 and found in orders
    for order in orders:
        assert order.plan.cuts == binding.plan.cuts
        kinds = [stage.configuration.device_type for stage in order.plan.stages]
        assert kinds == [place.device.type_name for place in order.placements]
