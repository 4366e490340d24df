"""Slower devices and links, seen in when passes ran: debounced, whatever the plan, and by clocks that differ."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import pytest

from dejavu.binding import Binding
from dejavu.migration import ClusterNow, DeviceSlowed, LinkSlowed
from dejavu.migration.replanning import best_on
from dejavu.migration.watching import DEBOUNCED_REPORTS, USUAL_REPORTS, Watching, link_changes
from dejavu.plans.schedule import Pass
from dejavu.runtime.process.pace import Paced
from dejavu.simulation.step import Message, StageSeconds, simulate
from dejavu.timing.clock import Timed
from dejavu.watching import links
from tests.changing import running_problem

HOSTS = ("h0", "h1", "h2")
RUNNING = running_problem([f"l{k}" for k in range(12)], HOSTS, 8)
NOW = ClusterNow(RUNNING.cluster)
CLOCKS = (5.0, 1e6, -300.0)  # of the hosts, in seconds
ENOUGH = 1 + USUAL_REPORTS + DEBOUNCED_REPORTS
WAYS = {"F": Pass.FORWARD, "B": Pass.BACKWARD}


def steps(
    binding: Binding,
    slow: Mapping[str, float] | None = None,
    message: float = 1e-3,
    first: int = 0,
    count: int = ENOUGH,
) -> Iterator[dict[int, Paced]]:
    """Reports of steps as simulated, with some noise on each device."""
    rng, plan = random.Random(0), binding.plan
    for step in range(first, first + count):
        rows = []
        for rank, stage in enumerate(plan.stages):
            host = binding.placements[rank].device.host
            factor = (slow or {}).get(host, 1.0) * rng.uniform(0.95, 1.05) * (stage.stop - stage.start)
            rows.append(StageSeconds(0.004 * factor, 0.006 * factor, 0.0))
        messages = [Message(message / 2, message / 2)] * len(plan.cuts)
        passes: dict[int, list[Timed]] = {rank: [] for rank in range(len(rows))}
        simulated = simulate(plan, rows, messages=messages)
        for event in simulated.events:
            if event.name[0] in WAYS:
                times = (event.start_seconds, event.stop_seconds)
                passes[event.rank].append(Timed(event.stage, WAYS[event.name[0]], int(event.name[1:]), *times))
        began = step * simulated.step_seconds
        yield {rank: Paced(step, CLOCKS[rank] + began, tuple(own)) for rank, own in passes.items()}


def after(watching: Watching, reports: Iterator[dict[int, Paced]]) -> None:
    for paced in reports:
        watching.see(paced)
        watching.see(paced)  # a report that was seen before says nothing new


def test_a_slower_device_is_said_once_all_reports_agree_and_so_is_its_recovery() -> None:
    binding = best_on(RUNNING, NOW).binding
    watching = Watching(RUNNING)
    watching.begin(binding)
    after(watching, steps(binding))
    assert watching.changes(NOW) == []
    watching.begin(binding)
    after(watching, steps(binding, {"h1": 2.0}, count=DEBOUNCED_REPORTS))
    assert watching.changes(NOW) == [], "one report too few: the first of an attempt does not count"
    watching.begin(binding)
    after(watching, steps(binding, {"h1": 2.0}))
    (change,) = watching.changes(NOW)
    assert isinstance(change, DeviceSlowed)
    assert (change.host, change.index, change.factor) == ("h1", 0, pytest.approx(2.0, rel=0.05))
    slowed = NOW.after(change)
    other = best_on(RUNNING, slowed).binding  # fewer layers there
    assert other.plan != binding.plan
    watching.begin(other)
    after(watching, steps(other, {"h1": 2.0}))
    assert watching.changes(slowed) == []
    watching.begin(other)
    after(watching, steps(other))
    assert watching.changes(slowed) == [DeviceSlowed("h1", 0, 1.0)]


def test_slow_steps_are_a_suspicion_and_hosts_try_whose_link_it_is() -> None:
    binding = best_on(RUNNING, NOW).binding
    watching = Watching(RUNNING)
    watching.begin(binding)
    after(watching, steps(binding))
    assert not watching.suspects_links
    watching.begin(binding)
    after(watching, steps(binding, count=1 + USUAL_REPORTS))
    after(watching, steps(binding, message=0.1, first=1 + USUAL_REPORTS))
    assert watching.suspects_links and watching.changes(NOW) == []
    watching.begin(binding)
    assert not watching.suspects_links
    usual = {a: {b: 0.02 for b in HOSTS if b != a} for a in HOSTS}
    assert link_changes(usual, usual, NOW) == []
    tried = {a: {b: 0.2 if "h1" in (a, b) else 0.03 for b in HOSTS if b != a} for a in HOSTS}
    (change,) = link_changes(usual, tried, NOW)
    assert change == LinkSlowed("h1", pytest.approx(10))  # type: ignore[arg-type]
    assert link_changes(usual, tried, NOW.after(change)) == []
    assert link_changes(usual, usual, NOW.after(change)) == [LinkSlowed("h1", 1.0)]
    silent = {a: heard for a, heard in tried.items() if a != "h1"}  # it does not answer in time
    assert link_changes(usual, silent, NOW) == [change]
    assert link_changes(usual, silent, NOW.after(change)) == []
    two = {a: {b: tried[a][b] for b in tried[a] if b != "h2"} for a in ("h0", "h1")}
    (either,) = link_changes(usual, two, NOW)
    assert either == LinkSlowed("h0", 10.0)
    assert link_changes(usual, two, NOW.after(LinkSlowed("h0", 10.0))) == [], "and not the other one next time"


def test_slow_links_that_become_slower_or_less_slow_are_said_once() -> None:
    """Whatever is known of them, what is known after a look is what the look found, to one digit and a factor of 2."""
    rng = random.Random(3)
    usual = {a: {b: rng.uniform(0.01, 0.03) for b in HOSTS if b != a} for a in HOSTS}

    def tried(factor: float) -> dict[str, dict[str, float]]:
        return {a: {b: usual[a][b] * (factor if "h1" in (a, b) else 1.0) for b in usual[a]} for a in HOSTS}

    now, said = NOW, 0
    for _ in range(200):
        factor, known = 10 ** rng.uniform(0, 4), now.link_slowness.get("h1", 1.0)
        changes = link_changes(usual, tried(factor), now)
        now = now.after(*changes)
        found = now.link_slowness.get("h1", 1.0)
        if factor < 1.69 or (known == 1 and factor < 2.99):
            assert found == 1
        elif factor > 3.01:
            assert factor / 2.01 < found < factor * 2.01
        if known != 1 and known / 1.99 < factor < known * 1.99 and factor > 1.71:
            assert not changes
        assert not link_changes(usual, tried(factor), now)
        said += found not in (1, known)
    assert said > 50


@pytest.mark.parametrize("known", [2.0, 4.0, 10.0, 100.0])
def test_a_slow_link_follows_what_is_measured(known: float) -> None:
    usual = {a: {b: 0.01 for b in HOSTS if b != a} for a in HOSTS}
    for factor in (known / 3, known / 2.2, known * 2.2, known * 10, known * 500):
        tried = {a: {b: 0.01 * (factor if "h1" in (a, b) else 1) for b in usual[a]} for a in HOSTS}
        (change,) = link_changes(usual, tried, NOW.after(LinkSlowed("h1", known)))
        assert change == LinkSlowed("h1", 1.0 if factor < 1.7 else float(f"{factor:.1g}"))


def test_how_slow_is_said_in_plain_digits() -> None:
    """Two of them, and of large factors all."""
    for k in range(400):
        factor = 1.01 * 10 ** (k / 80)
        for change in (LinkSlowed("h1", factor), DeviceSlowed("h1", 0, factor)):
            said = str(change).split(" takes ")[1].split(" × ")[0]
            assert "e" not in said
            assert float(said) == pytest.approx(factor, rel=0.051)


@pytest.mark.parametrize("waited", [(0.0, 0.0, 1e-4, 5e-4), (0.0, 0.0, 5e-4, 1e-4)])  # in the order of the calls
def test_waiting_for_a_core_at_either_end_is_no_slow_link(
    waited: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter(waited)
    monkeypatch.setattr(links, "waited_seconds", lambda *, all_threads: next(told))

    async def message() -> tuple[float, float]:
        worker = SimpleNamespace(ip="127.0.0.1")
        place = await links._offer(worker)
        try:
            return await links._message_seconds(*place)
        finally:
            await links._withdraw(worker)

    took, moved = asyncio.run(message())
    assert took - moved == pytest.approx(5e-4)
