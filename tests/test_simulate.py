"""The simulator against formulas that are known exactly, and against a slow player of the same rules."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from dejavu.foundation.errors import InputError
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.schedule import SCHEDULES, Pass, actions, allowed_microbatches
from dejavu.simulation import Event, Message, Simulation, StageSeconds, simulate, trace_rows
from dejavu.simulation.blocking import BlockingMessages, simulate_blocking
from tests.conftest import some

CORE = StageConfiguration("core")
LETTERS = {Pass.FORWARD: "F", Pass.BACKWARD: "B", Pass.BACKWARD_INPUT: "I", Pass.BACKWARD_WEIGHT: "W"}
SIZES = [(1, 1), (1, 5), (2, 2), (2, 7), (3, 6), (4, 8), (4, 16), (6, 12), (8, 8), (8, 19)]
GRID = [(name, S, B) for name in SCHEDULES for S, B in SIZES if S % SCHEDULES[name].stages_per_rank == 0]
# Two microbatches for each stage are enough for every schedule; what torch does not run is left out.
CASES = [case for case in GRID if allowed_microbatches(*case)]

every_case = pytest.mark.parametrize(("schedule", "num_stages", "num_microbatches"), CASES)


def plan_of(schedule: str, num_stages: int, num_microbatches: int) -> Plan:
    return Plan(tuple(Stage(s, s + 1, CORE) for s in range(num_stages)), schedule, num_microbatches)


@dataclass(frozen=True)
class Question:
    """What `simulate` is asked."""

    plan: Plan
    stages: tuple[StageSeconds, ...]
    messages: tuple[Message, ...]
    devices: tuple[Hashable, ...] | None = None
    links: tuple[tuple[Hashable, Hashable], ...] | None = None

    def simulated(self) -> Simulation:
        return simulate(self.plan, self.stages, messages=self.messages, devices=self.devices, links=self.links)


def random_question(seed: int, schedule: str, num_stages: int, num_microbatches: int) -> Question:
    """Uneven stages and messages, some parts nothing, ranks on shared devices and messages on shared links."""
    rng = np.random.default_rng([seed, num_stages, num_microbatches])

    def seconds(scale: float) -> float:
        return scale * float(rng.random()) * (rng.random() < 0.8)

    P = SCHEDULES[schedule].num_ranks(num_stages)
    stages = tuple(
        StageSeconds(
            seconds(1.0), seconds(2.0), seconds(1.0), 0.0, seconds(1.0), seconds(1.0), seconds(9.0), seconds(9.0)
        )
        for _ in range(num_stages)
    )
    messages = tuple(Message(seconds(0.5), seconds(1.0), seconds(0.3), seconds(0.3)) for _ in range(num_stages - 1))
    devices = tuple(f"core {k}" for k in rng.integers(0, max(1, P // 2), P))
    links = tuple((f"link {a}", f"link {b}") for a, b in rng.integers(0, max(1, num_stages // 2), (num_stages - 1, 2)))
    return Question(
        plan_of(schedule, num_stages, num_microbatches),
        stages,
        messages,
        devices if rng.random() < 0.6 else None,
        links if rng.random() < 0.6 else None,
    )


class SlowPlayer:
    """The same rules, one moment after the other, from the lists alone: objects, no arrays, no heap."""

    def __init__(self, question: Question) -> None:
        plan, S = question.plan, len(question.plan.stages)
        self.question = question
        self.rank_of = {s: rank for rank, own in enumerate(plan.ranks) for s in own}
        self.todo = [deque(order) for order in actions(plan.schedule, S, plan.num_microbatches)]
        for rank, own in enumerate(plan.ranks):
            self.todo[rank].extend((s, "optimizer", -1) for s in own)
        self.now = 0.0
        self.jobs: dict[Hashable, tuple[Hashable, float]] = {}  # activity -> resource, seconds left
        self.when: dict[tuple[int, str], tuple[float, float]] = {}
        self.arrived: set[tuple[int, str, int]] = set()  # cut, way, microbatch
        self.channels: dict[tuple[int, int], dict[str, Any]] = defaultdict(
            lambda: {"posted": deque(), "sending": None, "flying": deque(), "receiving": None}
        )

    def play(self) -> dict[tuple[int, str], tuple[float, float]]:
        while True:
            while self._start_something():
                pass
            if not self.jobs:
                assert not any(self.todo)
                return self.when
            count = Counter(resource for resource, _ in self.jobs.values())
            step = min(left * count[resource] for resource, left in self.jobs.values())
            self.now += step
            self.jobs = {j: (r, left - step / count[r]) for j, (r, left) in self.jobs.items()}

    def _done(self, activity: Hashable) -> bool:
        if activity in self.jobs and self.jobs[activity][1] <= 1e-12:
            del self.jobs[activity]
        return activity not in self.jobs

    def _start_something(self) -> bool:
        return any([*map(self._rank, range(len(self.todo))), *map(self._channel, list(self.channels))])

    def _device(self, rank: int) -> Hashable:
        return "device", rank if self.question.devices is None else self.question.devices[rank]

    def _rank(self, rank: int) -> bool:
        order = self.todo[rank]
        if not order or not self._done(("rank", rank)):
            return False
        stage, what, microbatch = order[0]
        name = what if what == "optimizer" else f"{LETTERS[Pass(what)]}{microbatch}"
        if (stage, name) in self.when:  # it has just ended
            self.when[stage, name] = (self.when[stage, name][0], self.now)
            order.popleft()
            self._post(stage, what, microbatch)
            return True
        if not self._input_is_there(stage, what, microbatch):
            return False
        self.when[stage, name] = (self.now, np.inf)
        times = self.question.stages[stage]
        seconds = {
            Pass.FORWARD: times.forward_seconds,
            Pass.BACKWARD: times.backward_seconds,
            Pass.BACKWARD_INPUT: times.backward_input_seconds,
            Pass.BACKWARD_WEIGHT: times.backward_weight_seconds,
            "optimizer": times.per_step_seconds,
        }[what]
        self.jobs["rank", rank] = (self._device(rank), seconds)
        return True

    def _input_is_there(self, stage: int, what: str, microbatch: int) -> bool:
        last = len(self.question.stages) - 1
        if what == Pass.FORWARD:
            return stage == 0 or (stage - 1, "there", microbatch) in self.arrived
        if what in (Pass.BACKWARD, Pass.BACKWARD_INPUT):
            forward = self.when.get((stage, f"F{microbatch}"), (0.0, np.inf))[1] < np.inf
            return forward and (stage == last or (stage, "back", microbatch) in self.arrived)
        if what == Pass.BACKWARD_WEIGHT:
            return self.when.get((stage, f"I{microbatch}"), (0.0, np.inf))[1] < np.inf
        return True

    def _post(self, stage: int, what: str, microbatch: int) -> None:
        forward, last = what == Pass.FORWARD, len(self.question.stages) - 1
        if what not in (Pass.FORWARD, Pass.BACKWARD, Pass.BACKWARD_INPUT) or stage == (last if forward else 0):
            return
        to = stage + 1 if forward else stage - 1
        message = (min(stage, to), "there" if forward else "back", microbatch)
        if self.rank_of[stage] == self.rank_of[to]:
            self.arrived.add(message)
        else:
            self.channels[self.rank_of[stage], self.rank_of[to]]["posted"].append(message)

    def _channel(self, ends: tuple[int, int]) -> bool:
        channel = self.channels[ends]
        return self._sending(ends, channel) or self._receiving(ends, channel)

    def _sending(self, ends: tuple[int, int], channel: dict[str, Any]) -> bool:
        if not self._done(("send", ends)):
            return False
        if channel["sending"] is None:
            if not channel["posted"]:
                return False
            channel["sending"] = (channel["posted"].popleft(), "sender")
            message, _ = channel["sending"]
            self.jobs["send", ends] = (self._device(ends[0]), self.question.messages[message[0]].sender_seconds)
            return True
        message, part = channel["sending"]
        if part == "sender":
            links = self.question.links
            link = ends if links is None else links[message[0]][message[1] == "back"]
            channel["sending"] = (message, "wire")
            self.jobs["send", ends] = (("link", link), self.question.messages[message[0]].wire_seconds)
        else:
            channel["flying"].append((message, self.now + self.question.messages[message[0]].latency_seconds))
            channel["sending"] = None
        return True

    def _receiving(self, ends: tuple[int, int], channel: dict[str, Any]) -> bool:
        if not self._done(("receive", ends)):
            return False
        if channel["receiving"] is None:
            if not channel["flying"]:
                return False
            message, lands = channel["flying"].popleft()
            channel["receiving"] = (message, "delay")
            self.jobs["receive", ends] = (("delay", ends), max(0.0, lands - self.now))
            return True
        message, part = channel["receiving"]
        if part == "delay":
            channel["receiving"] = (message, "receiver")
            self.jobs["receive", ends] = (self._device(ends[1]), self.question.messages[message[0]].receiver_seconds)
        else:
            self.arrived.add(message)
            channel["receiving"] = None
        return True


def by_name(simulated: Simulation) -> dict[tuple[int, str], Event]:
    return {(event.stage, event.name): event for event in simulated.events}


@every_case
@pytest.mark.parametrize("seed", some(range(3), [0]))
def test_equals_the_slow_player(seed: int, schedule: str, num_stages: int, num_microbatches: int) -> None:
    question = random_question(seed, schedule, num_stages, num_microbatches)
    wanted, found = SlowPlayer(question).play(), by_name(question.simulated())
    assert found.keys() == wanted.keys()
    for key, times in wanted.items():
        assert (found[key].start_seconds, found[key].stop_seconds) == pytest.approx(times, abs=1e-8), key


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_equal_stages_take_the_textbook_time(schedule: str, num_stages: int, num_microbatches: int) -> None:
    """(B + S − 1)(f + b), bubble (S − 1)/(B + S − 1): Huang et al., GPipe, 2019; 1F1B has the same."""
    simulated = simulate(plan_of(schedule, num_stages, num_microbatches), [StageSeconds(1.0, 2.0, 0.0)] * num_stages)
    slots = num_microbatches + num_stages - 1
    assert simulated.step_seconds == pytest.approx(3.0 * slots)
    assert simulated.bubble_fraction == pytest.approx((num_stages - 1) / slots)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_alone_never_waits_and_never_less(schedule: str) -> None:
    """Rounding makes no share of time that is below zero, which pages would show as -0.0 %."""
    random, count = np.random.default_rng(0), SCHEDULES[schedule].stages_per_rank
    for num_microbatches in (2, 4, 8) * 10:
        stages = [StageSeconds(*random.uniform(0.0, 1.0, 3).tolist()) for _ in range(count)]
        found = simulate(plan_of(schedule, count, num_microbatches), stages).bubble_fraction
        assert f"{found:.1%}" == "0.0%"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs"])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(schedule: str, rounds: int, num_ranks: int) -> None:
    """B (f + b) + (P − 1)(f + b)/v for a rank's f and b: Narayanan et al., SC 2021, section 2.2."""
    stage, B, v = StageSeconds(1.0, 2.0, 0.0), rounds * num_ranks, 2
    simulated = simulate(plan_of(schedule, v * num_ranks, B), [stage] * v * num_ranks)
    rank_seconds = v * (stage.forward_seconds + stage.backward_seconds)
    assert simulated.step_seconds == pytest.approx(B * rank_seconds + (num_ranks - 1) * rank_seconds / v)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["zbv", "dualpipe_v", "interleaved_zero_bubble"])
def test_zero_bubble_waits_only_for_its_first_input(schedule: str, rounds: int, num_ranks: int) -> None:
    """With equal forward, input and weight parts (Qi et al., NeurIPS 2024): the last rank cannot begin before P − 1."""
    B = rounds * num_ranks
    simulated = simulate(plan_of(schedule, 2 * num_ranks, B), [StageSeconds(1.0, 2.0, 0.0)] * 2 * num_ranks)
    assert simulated.step_seconds == pytest.approx(6.0 * B + num_ranks - 1)


@every_case
def test_nothing_runs_before_its_input_and_no_rank_does_two_things(
    schedule: str, num_stages: int, num_microbatches: int
) -> None:
    question = random_question(7, schedule, num_stages, num_microbatches)
    simulated, plan = question.simulated(), question.plan
    when = by_name(simulated)
    ranks = {s: rank for rank, own in enumerate(plan.ranks) for s in own}

    def backward(s: int, m: int) -> Event:
        return when.get((s, f"B{m}")) or when[s, f"I{m}"]

    for m, s in itertools.product(range(num_microbatches), range(num_stages)):
        assert backward(s, m).start_seconds >= when[s, f"F{m}"].stop_seconds
        if (s, f"I{m}") in when:
            assert when[s, f"W{m}"].start_seconds >= when[s, f"I{m}"].stop_seconds
        if s + 1 < num_stages:
            message = question.messages[s] if ranks[s] != ranks[s + 1] else Message(0.0, 0.0)
            least = sum(vars(message).values()) - 1e-9
            assert when[s + 1, f"F{m}"].start_seconds - when[s, f"F{m}"].stop_seconds >= least
            assert backward(s, m).start_seconds - backward(s + 1, m).stop_seconds >= least
    for rank in range(len(plan.ranks)):
        own = sorted((e for e in simulated.events if e.rank == rank), key=lambda e: (e.start_seconds, e.stop_seconds))
        assert all(a.stop_seconds <= b.start_seconds for a, b in itertools.pairwise(own))
        assert [e.name for e in own[-len(plan.ranks[rank]) :]] == ["optimizer"] * len(plan.ranks[rank])
    each = Counter(event.name for event in simulated.events if event.name[0] in "FBW")
    assert sum(each.values()) == 2 * num_stages * num_microbatches


@every_case
def test_the_step_is_between_the_bounds(schedule: str, num_stages: int, num_microbatches: int) -> None:
    question = replace(random_question(8, schedule, num_stages, num_microbatches), devices=None, links=None)
    halves = [replace(s, backward_input_seconds=None, backward_weight_seconds=None) for s in question.stages]
    simulated, ranks = replace(question, stages=tuple(halves)).simulated(), question.plan.ranks
    work = [num_microbatches * (s.forward_seconds + s.backward_seconds) + s.per_step_seconds for s in halves]
    within = {s for own in ranks for s in own if s + 1 in own}
    messages = 2 * sum(sum(vars(m).values()) for s, m in enumerate(question.messages) if s not in within)
    waited_for = 0.5 if SCHEDULES[schedule].splits_backward else 1.0  # nobody waits for a weight part
    path = messages + sum(s.forward_seconds + waited_for * s.backward_seconds for s in halves)
    assert simulated.step_seconds >= path - 1e-9
    assert simulated.step_seconds >= max(sum(work[s] for s in own) for own in ranks) - 1e-9
    assert simulated.step_seconds <= sum(work) + num_microbatches * messages + 1e-9


@every_case
def test_scaling_all_times_scales_the_step(schedule: str, num_stages: int, num_microbatches: int) -> None:
    question = random_question(9, schedule, num_stages, num_microbatches)

    def scaled(row: Any) -> Any:
        return type(row)(*(value if value in ((), None) else 3.7 * value for value in vars(row).values()))

    larger = replace(
        question, stages=tuple(map(scaled, question.stages)), messages=tuple(map(scaled, question.messages))
    )
    assert larger.simulated().step_seconds == pytest.approx(3.7 * question.simulated().step_seconds)


@every_case
def test_in_flight_and_bytes_are_those_of_the_lists(schedule: str, num_stages: int, num_microbatches: int) -> None:
    question, rng = random_question(10, schedule, num_stages, num_microbatches), np.random.default_rng(num_stages)
    besides = ("passing_bytes", "stepping_bytes", "retained_bytes", "waiting_bytes")
    stages = tuple(
        replace(stage, **{name: float(20 * rng.random()) for name in besides if rng.random() < 0.8})
        for stage in question.stages
    )
    question = replace(question, stages=stages)
    simulated, plan = question.simulated(), question.plan
    most, peak = [0] * num_stages, []
    for rank, order in enumerate(actions(schedule, num_stages, num_microbatches)):
        held: Counter[int] = Counter()
        own = [question.stages[s] for s in plan.ranks[rank]]
        always = sum(stage.fixed_bytes for stage in own)
        fixed = always + max(stage.passing_bytes for stage in own)  # a rank runs one pass at a time
        sizes, now = [fixed], fixed
        for stage, direction, _ in order:
            held[stage] += {Pass.FORWARD: 1, Pass.BACKWARD_INPUT: 0}.get(direction, -1)
            most[stage] = max(most[stage], held[stage])
            one = question.stages[stage]
            each = one.activation_bytes
            retained, waiting = (each if part is None else part for part in (one.retained_bytes, one.waiting_bytes))
            for change in {
                Pass.FORWARD: [each],
                Pass.BACKWARD: [-each],
                Pass.BACKWARD_INPUT: [retained - each, waiting - retained],
                Pass.BACKWARD_WEIGHT: [-waiting],
            }[direction]:
                now += change
                sizes += [now] * (change != 0.0)
        peak.append(max(*sizes, fixed, always + sum(stage.stepping_bytes for stage in own)))
        seconds, found = simulated.held_bytes(rank)
        assert found == pytest.approx(sizes[1:])
        assert (np.diff(seconds) >= 0).all()
        assert found.size == 0 or found[-1] == pytest.approx(fixed)
    assert simulated.in_flight == tuple(most)
    assert simulated.peak_bytes == pytest.approx(peak)
    rule = [SCHEDULES[schedule].in_flight(s, num_stages, num_microbatches) for s in range(num_stages)]
    assert all(a <= b for a, b in zip(most, rule, strict=True))
    if SCHEDULES[schedule].stages_per_rank == 1:
        assert most == rule


@every_case
@pytest.mark.parametrize("seed", range(3))
def test_the_critical_path_adds_up(seed: int, schedule: str, num_stages: int, num_microbatches: int) -> None:
    question = random_question(20 + seed, schedule, num_stages, num_microbatches)
    simulated = question.simulated()
    path = simulated.critical_path
    assert path[0].start_seconds == 0.0
    assert path[-1].stop_seconds == simulated.step_seconds
    assert all(a.stop_seconds == b.start_seconds for a, b in itertools.pairwise(path))
    assert sum(event.seconds for event in path) == pytest.approx(simulated.step_seconds)
    assert {event for event in path if event.to_rank is None} <= set(simulated.events)


@every_case
def test_what_is_on_the_critical_path_decides(schedule: str, num_stages: int, num_microbatches: int) -> None:
    """Nothing shared: with its longest action a second longer, the path is so too, and so is the step."""
    question = random_question(30, schedule, num_stages, num_microbatches)
    alone = tuple(replace(message, sender_seconds=0.0, receiver_seconds=0.0) for message in question.messages)
    question = replace(question, messages=alone, devices=None, links=None)
    simulated = question.simulated()
    longest = max((e for e in simulated.critical_path if e.to_rank is None), key=lambda event: event.seconds)
    part = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight", "o": "per_step"}
    slower = {f"{part[longest.name[0]]}_seconds": longest.seconds + 1.0}
    stages = list(question.stages)
    stages[longest.stage] = replace(stages[longest.stage], **slower)
    assert replace(question, stages=tuple(stages)).simulated().step_seconds >= simulated.step_seconds + 1.0 - 1e-9


def test_two_on_one_device_take_twice_as_long() -> None:
    """In its steady state GPipe keeps both ranks computing; alone, the first forward and the last backward are not."""
    plan, stages = plan_of("gpipe", 2, 50), [StageSeconds(1.0, 2.0, 0.0)] * 2
    alone = simulate(plan, stages).step_seconds
    shared = simulate(plan, stages, devices=["core", "core"])
    assert alone == pytest.approx(3 * 51)
    assert shared.step_seconds == pytest.approx(2 * 50 * 3)  # all the work, one device
    assert simulate(plan, stages, devices=["a", "b"]).step_seconds == alone


def test_two_channels_on_one_link_take_twice_as_long() -> None:
    """Three ranks, messages that take far longer than computing: each link is busy all the time."""
    plan, stages, B = plan_of("gpipe", 3, 200), [StageSeconds(1e-6, 1e-6, 0.0)] * 3, 200
    messages = [Message(latency_seconds=0.0, wire_seconds=1.0)] * 2
    own = simulate(plan, stages, messages=messages).step_seconds
    shared = simulate(plan, stages, messages=messages, links=[("there", "back"), ("there", "back")]).step_seconds
    assert own == pytest.approx(2 * (B + 1), rel=1e-3)
    assert shared == pytest.approx(2 * 2 * B, rel=1e-3)


def test_copying_takes_computing_time_and_delay_does_not() -> None:
    plan, stages, B = plan_of("1f1b", 2, 100), [StageSeconds(1.0, 2.0, 0.0)] * 2, 100
    free = simulate(plan, stages).step_seconds
    copied = simulate(plan, stages, messages=[Message(0.0, 0.0, sender_seconds=0.1, receiver_seconds=0.2)]).step_seconds
    assert copied - free >= 0.3 * (B - 2)  # each rank sends once and receives once for each microbatch
    delayed = simulate(plan_of("gpipe", 2, B), stages, messages=[Message(5.0, 0.0)]).step_seconds
    assert delayed == pytest.approx(free + 2 * 5.0)


def test_messages_of_a_channel_come_one_after_the_other() -> None:
    """Transfers that are longer than computing bound GPipe's steady state: one message each way a microbatch."""
    B = 30
    simulated = simulate(plan_of("gpipe", 2, B), [StageSeconds(1.0, 1.0, 0.0, transfer_seconds=4.0)] * 2)
    assert simulated.step_seconds == pytest.approx(2 * (1.0 + 4.0 * B + 1.0))
    assert sum(event.to_rank is not None for event in simulated.critical_path) == 2 * B


def test_playing_tells_what_the_formula_hides() -> None:
    """1F1B waits for messages in its steady state, GPipe for the slowest forward and the slowest backward each."""
    B = 16
    waits = simulate(plan_of("1f1b", 2, B), [StageSeconds(1 / 3, 2 / 3, 0.0, 0.5)] * 2)
    assert waits.step_seconds > 1.3 * (2 * 1.0 + 2 * 0.5 + (B - 1) * 1.0)
    uneven = simulate(plan_of("gpipe", 2, B), [StageSeconds(0.8, 0.2, 0.0), StageSeconds(0.2, 0.8, 0.0)])
    assert uneven.step_seconds == pytest.approx((B * 0.8 + 0.2) * 2)


def test_a_rank_does_all_its_stages_last_work_in_turn() -> None:
    stages = [StageSeconds(1.0, 2.0, per_step_seconds=float(10 + s)) for s in range(4)]
    simulated = by_name(simulate(plan_of("zbv", 4, 4), stages))
    for first, second in ((0, 3), (1, 2)):
        assert simulated[first, "optimizer"].seconds == pytest.approx(10 + first)
        assert simulated[second, "optimizer"].start_seconds == simulated[first, "optimizer"].stop_seconds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_trace_is_chrome_s(schedule: str) -> None:
    simulated = simulate(plan_of(schedule, 4, 8), [StageSeconds(1.0, 2.0, 0.5, 0.1)] * 4)
    rows = json.loads(json.dumps(simulated.to_trace()))["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    bars = [row for row in rows if row["ph"] == "X"]
    assert all(row["dur"] > 0 and row["ts"] >= 0 and row["cat"] == "simulated" for row in bars)
    ranks = SCHEDULES[schedule].num_ranks(4)
    assert [names[tid] for tid in range(ranks)] == [f"rank {rank}" for rank in range(ranks)]
    assert len([row for row in bars if row["tid"] < ranks]) == len(simulated.events)
    assert len([row for row in bars if row["tid"] >= ranks]) == len(simulated.messages)
    for tid in names:  # bars of a row stand one after the other
        own = sorted((row["ts"], row["ts"] + row["dur"]) for row in bars if row["tid"] == tid)
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(own))
    measured = trace_rows(simulated.events, 1, "measured")
    assert {(row["pid"], row.get("cat", "measured")) for row in measured} == {(1, "measured")}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"stages": 1}, "stages has 1 rows for 2 stages on 2 pipeline ranks; wanted 2"),
        ({"messages": [Message(0.0, 0.0)] * 2}, "messages has 2 rows.*wanted 1"),
        ({"devices": [0]}, "devices has 1 rows.*wanted 2"),
        ({"links": []}, "links has 0 rows.*wanted 1"),
        ({"messages": [Message(0.0, float("nan"))]}, "wire_seconds of message across cut 0 is nan"),
        ({"messages": [Message(-1.0, 0.0)]}, "latency_seconds of message across cut 0 is -1.0; wanted a finite"),
    ],
)
def test_what_does_not_fit_is_refused(asked: dict[str, Any], said: str) -> None:
    stages: Sequence[StageSeconds] = [StageSeconds(1.0, 2.0, 0.0)] * asked.pop("stages", 2)
    with pytest.raises(InputError, match=said):
        simulate(plan_of("1f1b", 2, 2), stages, **asked)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_every_number_of_a_stage_is_checked(wrong: float) -> None:
    right = StageSeconds(1.0, 2.0, 0.5, 0.1, 1.0, 1.0, 8.0, 9.0, 7.0, 6.0, 9.0, 8.5, ((1.0, 2.0), (1.0, 2.0)))
    sliced = replace(plan_of("1f1b", 2, 2), slices=(4, 4))
    assert simulate(sliced, [right, right]).step_seconds > 0
    assert simulate_blocking([right, right], [BlockingMessages(0.0, 0.0)], 2).step_seconds > 0
    for field, value in vars(right).items():
        numbers = [((1.0, wrong), (1.0, 2.0)), ((1.0, 2.0), (wrong, 2.0))] if isinstance(value, tuple) else [wrong]
        for number in numbers:
            stages = [right, replace(right, **{field: number})]
            said = f"{field} of stage 1 is {wrong}; wanted a finite number"
            with pytest.raises(InputError, match=said):
                simulate(sliced, stages)
            with pytest.raises(InputError, match=said):
                simulate_blocking(stages, [BlockingMessages(0.0, 0.0)], 2)


def test_fewer_microbatches_than_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="2 microbatches for 3 stages"):
        simulate(plan_of("1f1b", 3, 2), [StageSeconds(1.0, 2.0, 0.0)] * 3)


@every_case
def test_torch_s_lists_hold_every_action_once(schedule: str, num_stages: int, num_microbatches: int) -> None:
    """Every forward, and every backward either whole or in its two parts, by the rank that runs the stage."""
    plan = plan_of(schedule, num_stages, num_microbatches)
    for own, order in zip(plan.ranks, actions(schedule, num_stages, num_microbatches), strict=True):
        assert len(order) == len(set(order))
        for first, second in (
            ({Pass.FORWARD}, set()),
            ({Pass.BACKWARD, Pass.BACKWARD_INPUT}, set()),
            ({Pass.BACKWARD}, {Pass.BACKWARD_WEIGHT}),
        ):
            found = [(a.stage, a.microbatch) for a in order if a.direction in first | second]
            assert sorted(found) == sorted(itertools.product(own, range(num_microbatches)))
            for stage in own:  # each stage takes microbatches in order; looped BFS goes back the way it came
                microbatches = [m for s, m in found if s == stage]
                backwards = schedule == "looped_bfs" and Pass.FORWARD not in first
                assert microbatches == sorted(microbatches, reverse=backwards)
