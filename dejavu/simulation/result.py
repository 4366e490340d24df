"""What simulating one step found: times, bytes, the critical path, a trace. Arrays inside, records on demand.

Shape suffixes as in `_action_table` and `_loop`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dejavu.simulation._action_table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    NOTHING,
    PER_STEP,
    ActionTable,
    Integers,
)
from dejavu.simulation._loop import ARRIVED, LEFT, STARTED, TAKEN, Floats

LETTERS = "FBIW"  # by pass; as torch and the papers on zero bubble write them
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Event:
    """One action or message as it was simulated or measured.

    Attributes:
        stage: that runs the action, or sends the message.
        name: pass and microbatch, such as `F3` (forward), `B3` (backward), `I3` and `W3` (its input and weight parts),
            or `optimizer`; a message is named as the action whose result it carries.
        rank: the pipeline rank of the stage.
        to_rank: of a message: the rank that it goes to.
    """

    stage: int
    name: str
    start_seconds: float
    stop_seconds: float
    rank: int
    to_rank: int | None = None

    @property
    def seconds(self) -> float:
        return self.stop_seconds - self.start_seconds


@dataclass(frozen=True, eq=False)
class Simulation:
    """One step, simulated.

    Attributes:
        listing: the order of the actions.
        start_A, stop_A: each action's time, in seconds.
        times_M4: of each message, in seconds: sending began, it left the wire, receiving began, it was there; nan for
            what stays on its rank.
        in_flight_bytes_S3: that a stage holds for each microbatch in flight, or for each mean slice of one: before its
            backward, during the first of its two parts, and between these.
        fixed_bytes_P: that a rank holds all the time while passes run; one pass at a time, of any of its stages.
        stepping_bytes_P: that it holds while its optimizer steps, when no microbatch is in flight.
    """

    action_table: ActionTable
    start_A: Floats
    stop_A: Floats
    times_M4: Floats
    in_flight_bytes_S3: Floats
    fixed_bytes_P: Floats
    stepping_bytes_P: Floats

    @property
    def step_seconds(self) -> float:
        """When the last rank is done."""
        return float(self.stop_A.max())

    @property
    def num_actions(self) -> int:
        """How many passes, and per-step works of stages."""
        return len(self.action_table.stage_A)

    @property
    def num_ranks(self) -> int:
        return len(self.action_table.first_P1) - 1

    @property
    def bubble_fraction(self) -> float:
        """Share of the pipeline ranks' time in which they run nothing; slowed by others on its device, a rank runs."""
        total = self.num_ranks * self.step_seconds
        return max(0.0, 1.0 - float((self.stop_A - self.start_A).sum()) / total) if total > 0 else 0.0

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most microbatches that each stage held: from the start of a forward to the end of its whole backward.

        Whole ones, where their sequences come in slices: of these a stage holds all, or none, where it holds most.
        """
        order = self.action_table
        most = []
        for stage, rank in enumerate(order.rank_S):
            own = slice(order.first_P1[rank], order.first_P1[rank + 1])
            held = int(np.cumsum(_held(order.pass_A[own]) * (order.stage_A[own] == stage)).max())
            most.append(-(-held // order.num_slices))
        return tuple(most)

    def held_bytes(self, rank: int) -> tuple[Floats, Floats]:
        """What the rank holds for its passes from which second on: (seconds, bytes); before the first, its fixed bytes.

        Raises:
            IndexError: there is no such rank.
        """
        first_P1 = self.action_table.first_P1
        own = slice(2 * first_P1[rank], 2 * first_P1[rank + 1])
        when, change, held = (array[own] for array in self._in_flight)
        changed = change != 0
        return when[changed], self.fixed_bytes_P[rank] + held[changed]

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most that each rank held."""
        held_P = np.maximum.reduceat(self._in_flight[2], 2 * self.action_table.first_P1[:-1])
        most_P = np.maximum(self.fixed_bytes_P + np.maximum(held_P, 0.0), self.stepping_bytes_P)
        return tuple(most_P.tolist())

    @cached_property
    def _in_flight(self) -> tuple[Floats, Floats, Floats]:
        """At the start and the end of each action in turn: when, how many bytes more its rank holds, and how many."""
        order = self.action_table
        pass_A, (each_A, retained_A, waiting_A) = order.pass_A, self.in_flight_bytes_S3[order.stage_A].T
        is_first, nothing_A = pass_A == BACKWARD_INPUT, np.zeros(self.num_actions)
        begins_A = np.select([pass_A == FORWARD, is_first], [each_A, retained_A - each_A], nothing_A)
        ended = [pass_A == BACKWARD, is_first, pass_A == BACKWARD_WEIGHT]
        ends_A = np.select(ended, [-each_A, waiting_A - retained_A, -waiting_A], nothing_A)
        change = np.stack([begins_A, ends_A], axis=1).ravel()
        # A rank has given everything back with its last action, so the next one's sum begins at nothing.
        return np.stack([self.start_A, self.stop_A], axis=1).ravel(), change, np.cumsum(change)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every action, in the order in which they end."""
        order = np.lexsort((self.action_table.stage_A, self.stop_A))
        return tuple(self._action(int(i), self.start_A[i], self.stop_A[i]) for i in order)

    @cached_property
    def messages(self) -> tuple[Event, ...]:
        """Every message between ranks while it occupies its channel (its delay and its receiving come after)."""
        order = np.argsort(self.times_M4[:, LEFT], kind="stable")
        order = order[np.isfinite(self.times_M4[order, LEFT])]
        return tuple(self._message(int(m), *self.times_M4[m, [STARTED, LEFT]]) for m in order)

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """Actions and messages, each begun when the one before it ended, from 0 to `step_seconds`.

        Walked back from the action that ends last, always to what it waited for: its rank's action before, or its
        message; a message to the action that sent it, or to the message before it where that held it up. Where two
        ranks hold the same layers, what they do once follows the last pass of the later one.
        """
        return tuple(self._walk_back())[::-1]

    def to_trace(self) -> dict[str, Any]:
        """Chrome's trace format, for Perfetto or chrome://tracing; a row for each rank, and one for each channel."""
        sent = [message for message in self.messages if message.seconds > 0]
        return {"traceEvents": trace_rows([*self.events, *sent], 0, "simulated"), "displayTimeUnit": "ms"}

    def _walk_back(self) -> Iterator[Event]:
        order, times = self.action_table, self.times_M4
        i = int(self.stop_A.argmax())
        while True:
            yield self._action(i, self.start_A[i], self.stop_A[i])
            rank = order.rank_S[order.stage_A[i]]
            start, first = self.start_A[i], order.first_P1[rank]
            if start == 0.0:
                return
            if i > first and self.stop_A[i - 1] == start:
                i -= 1
                continue
            if order.input_A[i] == NOTHING:  # what a rank does once waited for the rank that holds the same layers
                other = self.num_ranks - 1 - rank
                i = int(np.flatnonzero(order.pass_A[: order.first_P1[other + 1]] != PER_STEP)[-1])
                continue
            m, until = int(order.input_A[i]), start
            while self._follows(m):  # received after the message before it
                yield self._message(m, times[m, TAKEN], until)
                m, until = int(self._before_M[m]), times[m, TAKEN]
            while self.stop_A[self._sender_M[m]] < times[m, STARTED]:  # sent after the message before it
                yield self._message(m, times[m, STARTED], until)
                m, until = int(self._before_M[m]), times[m, STARTED]
            yield self._message(m, times[m, STARTED], until)
            i = int(self._sender_M[m])

    def _follows(self, m: int) -> bool:
        """Whether receiving it began when the message before it on its channel was there."""
        before = self._before_M[m]
        return bool(before != NOTHING and self.times_M4[before, ARRIVED] == self.times_M4[m, TAKEN])

    @cached_property
    def _sender_M(self) -> Integers:
        """The action that sends a message."""
        senders = np.full(len(self.times_M4), NOTHING)
        sends = np.flatnonzero(self.action_table.output_A != NOTHING)
        senders[self.action_table.output_A[sends]] = sends
        return senders

    @cached_property
    def _before_M(self) -> Integers:
        """The message before it on its channel."""
        order = self.action_table
        before = np.full(len(self.times_M4), NOTHING)
        before[order.queue_M[1:]] = order.queue_M[:-1]
        before[order.queue_M[order.first_C1[:-1]]] = NOTHING
        return before

    def _action(self, i: int, start: float, stop: float) -> Event:
        stage = int(self.action_table.stage_A[i])
        return Event(stage, self._name(i), float(start), float(stop), int(self.action_table.rank_S[stage]))

    def _message(self, m: int, start: float, stop: float) -> Event:
        i = int(self._sender_M[m])
        stage, channel = (
            int(self.action_table.stage_A[i]),
            self.action_table.channel_K[m // self.action_table.num_microbatches],
        )
        rank, to_rank = int(self.action_table.from_C[channel]), int(self.action_table.to_C[channel])
        return Event(stage, self._name(i), float(start), float(stop), rank, to_rank)

    def _name(self, i: int) -> str:
        code = self.action_table.pass_A[i]
        return OPTIMIZER if code == PER_STEP else f"{LETTERS[code]}{self.action_table.microbatch_A[i]}"


def trace_rows(events: Iterable[Event], pid: int, category: str) -> list[dict[str, Any]]:
    """Rows of a Chrome trace: one process, in it a row for each pipeline rank and one for each pair that messages go.

    Traces of the same shape stand beside each other: one process each, as 0 simulated and 1 measured.
    """
    events = list(events)
    lanes = sorted({(event.to_rank is not None, event.rank, event.to_rank or 0) for event in events})
    names = [f"rank {rank} to rank {to_rank}" if sent else f"rank {rank}" for sent, rank, to_rank in lanes]
    number = {lane: tid for tid, lane in enumerate(lanes)}
    rows: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": category}}]
    rows += [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        for tid, name in enumerate(names)
    ]
    rows += [
        {
            "name": event.name,
            "cat": category,
            "ph": "X",
            "pid": pid,
            "tid": number[event.to_rank is not None, event.rank, event.to_rank or 0],
            "ts": event.start_seconds * 1e6,
            "dur": event.seconds * 1e6,
            "args": {"stage": event.stage},
        }
        for event in events
    ]
    return rows


def _held(pass_A: Integers) -> Integers:
    """How an action changes the number of microbatches that its stage holds."""
    released = (pass_A == BACKWARD) | (pass_A == BACKWARD_WEIGHT)
    change: Integers = (pass_A == FORWARD).astype(np.int64) - released
    return change
