"""One step of 1F1B whose messages block: a rank sends and receives in its own turn, and computes nothing meanwhile.

Torch's runtime sends beside computing (`simulate`). DeepSpeed's pipeline engine, and so Megatron-DeepSpeed, does not: a
step is a list of instructions for each rank (`TrainSchedule`, deepspeed/runtime/pipe/schedule.py), and a message is one
of them at both of its ends. On slow links that decides: an inner rank waits for four messages of every microbatch. It
also runs fewer microbatches than stages, which torch's 1F1B rejects.

Shape suffixes: S = stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from dejavu.foundation.errors import InputError
from dejavu.simulation.result import OPTIMIZER, Event
from dejavu.simulation.step import StageSeconds, check_rows


class Sending(Enum):
    """What a rank that sends waits for.

    RENDEZVOUS: until the other is there, then for the message: what fits no buffer, as NCCL and MPI send large ones.
    EAGER: for the message only, which lies in a buffer until it is received.
    """

    RENDEZVOUS = "rendezvous"
    EAGER = "eager"


class _What(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    SEND_ACTIVATION = "send activation"
    RECEIVE_ACTIVATION = "receive activation"
    SEND_GRADIENT = "send gradient"
    RECEIVE_GRADIENT = "receive gradient"


class _Instruction(NamedTuple):
    what: _What
    microbatch: int


# What the rank at a message's other end does, and where it stands: the next stage, or the one before.
_OTHER_END = {
    _What.SEND_ACTIVATION: (_What.RECEIVE_ACTIVATION, 1),
    _What.RECEIVE_ACTIVATION: (_What.SEND_ACTIVATION, -1),
    _What.SEND_GRADIENT: (_What.RECEIVE_GRADIENT, -1),
    _What.RECEIVE_GRADIENT: (_What.SEND_GRADIENT, 1),
}
_SENDS = (_What.SEND_ACTIVATION, _What.SEND_GRADIENT)
_ACTIVATIONS = (_What.SEND_ACTIVATION, _What.RECEIVE_ACTIVATION)
_COMPUTES = (_What.FORWARD, _What.BACKWARD)


@dataclass(frozen=True)
class BlockingMessages:
    """What a microbatch's messages across one cut take, both ends together.

    Attributes:
        activation_seconds, gradient_seconds: forward, and backward.
    """

    activation_seconds: float
    gradient_seconds: float


@dataclass(frozen=True)
class BlockedStep:
    """One step with blocking messages, simulated.

    Attributes:
        passes_stop_seconds_S: when each stage is done with its last microbatch.
        stop_seconds_S: when it is done with its per-step work too.
        events, messages: passes and per-step work; messages while they hold both ends, or the sender if it is eager.
    """

    passes_stop_seconds_S: tuple[float, ...]
    stop_seconds_S: tuple[float, ...]
    events: tuple[Event, ...]
    messages: tuple[Event, ...]

    @property
    def step_seconds(self) -> float:
        """When the last stage is done."""
        return max(self.stop_seconds_S)

    @property
    def num_actions(self) -> int:
        """How many passes, and per-step works of stages."""
        return len(self.events)

    @property
    def bubble_fraction(self) -> float:
        """Share of the stages' time in which they run nothing."""
        total = len(self.stop_seconds_S) * self.step_seconds
        return 1.0 - sum(event.seconds for event in self.events) / total if total > 0 else 0.0


def simulate_blocking(
    stages: Sequence[StageSeconds],
    messages: Sequence[BlockingMessages],
    num_microbatches: int,
    *,
    sending: Sending = Sending.RENDEZVOUS,
    is_synchronized: bool = False,
) -> BlockedStep:
    """Simulate one step of 1F1B with messages that block, each stage on devices of its own.

    Args:
        messages: across each cut.
        num_microbatches: any number of them, also fewer than stages.
        is_synchronized: stages begin their per-step work together, when the last is done with its passes.

    Raises:
        InputError: not one row of messages for each cut, no microbatch, or a time that is negative or not finite.
    """
    S = len(stages)
    if not S or len(messages) != S - 1 or num_microbatches < 1:
        raise InputError(
            f"{S} stages, messages across {len(messages)} cuts, {num_microbatches} microbatches; "
            f"wanted a stage or more, messages across each of the cuts between them, a microbatch or more"
        )
    check_rows("stage", stages)
    check_rows("messages across cut", messages)
    walk = _Walk(stages, messages, [_program(s, S, num_microbatches) for s in range(S)], sending)
    walk.run()
    begin = [max(walk.now_S)] * S if is_synchronized else walk.now_S
    stops = [start + stage.per_step_seconds for start, stage in zip(begin, stages, strict=True)]
    ends = [Event(s, OPTIMIZER, begin[s], stops[s], s) for s in range(S)]
    return BlockedStep(tuple(walk.now_S), tuple(stops), (*walk.events, *ends), tuple(walk.messages))


class _Walk:
    """Where every rank is in its list, and when."""

    def __init__(
        self,
        stages: Sequence[StageSeconds],
        messages: Sequence[BlockingMessages],
        programs: Sequence[tuple[_Instruction, ...]],
        sending: Sending,
    ) -> None:
        self._stages, self._cuts, self._programs, self._sending = stages, messages, programs, sending
        self._place_S = [0] * len(stages)
        self._arrived: dict[tuple[int, _Instruction], float] = {}  # by receiver: eager messages that are there
        self.now_S = [0.0] * len(stages)
        self.events: list[Event] = []
        self.messages: list[Event] = []

    def run(self) -> None:
        """Step every rank as far as it comes, until all are done: neighbours' lists match, so one always can."""
        ready = list(range(len(self._stages)))
        while ready:
            s = ready.pop()
            while self._place_S[s] < len(self._programs[s]) and self._step(s):
                ready += [other for other in (s - 1, s + 1) if 0 <= other < len(self._stages)]

    def _step(self, s: int) -> bool:
        """Do the rank's next instruction; False where it waits for another rank."""
        instruction = self._programs[s][self._place_S[s]]
        if instruction.what in _COMPUTES:
            self._compute(s, instruction)
        elif self._sending is Sending.RENDEZVOUS:
            return self._meet(s, instruction)
        elif instruction.what in _SENDS:
            self._send(s, instruction)
        else:
            return self._receive(s, instruction)
        return True

    def _compute(self, s: int, instruction: _Instruction) -> None:
        stage, start = self._stages[s], self.now_S[s]
        is_forward = instruction.what is _What.FORWARD
        self.now_S[s] += stage.forward_seconds if is_forward else stage.backward_seconds
        self._place_S[s] += 1
        self.events.append(Event(s, f"{instruction.what.value}{instruction.microbatch}", start, self.now_S[s], s))

    def _meet(self, s: int, instruction: _Instruction) -> bool:
        """Both ends begin when the later one is there, and go on when the message has passed."""
        what, step = _OTHER_END[instruction.what]
        other, wanted = s + step, _Instruction(what, instruction.microbatch)
        place = self._place_S[other]
        if place == len(self._programs[other]) or self._programs[other][place] != wanted:
            return False
        start = max(self.now_S[s], self.now_S[other])
        sender = s if instruction.what in _SENDS else other
        self.now_S[s] = self.now_S[other] = self._message(sender, s + other - sender, instruction, start)
        self._place_S[s] += 1
        self._place_S[other] += 1
        return True

    def _send(self, s: int, instruction: _Instruction) -> None:
        what, step = _OTHER_END[instruction.what]
        self.now_S[s] = self._message(s, s + step, instruction, self.now_S[s])
        self._arrived[s + step, _Instruction(what, instruction.microbatch)] = self.now_S[s]
        self._place_S[s] += 1

    def _receive(self, s: int, instruction: _Instruction) -> bool:
        if (s, instruction) not in self._arrived:
            return False
        self.now_S[s] = max(self.now_S[s], self._arrived.pop((s, instruction)))
        self._place_S[s] += 1
        return True

    def _message(self, sender: int, receiver: int, instruction: _Instruction, start: float) -> float:
        cut, is_activation = self._cuts[min(sender, receiver)], instruction.what in _ACTIVATIONS
        stop = start + (cut.activation_seconds if is_activation else cut.gradient_seconds)
        name = f"{'F' if is_activation else 'B'}{instruction.microbatch}"
        self.messages.append(Event(sender, name, start, stop, sender, receiver))
        return stop


@lru_cache(maxsize=256)
def _program(stage: int, num_stages: int, num_microbatches: int) -> tuple[_Instruction, ...]:
    """A rank's instructions: what DeepSpeed's `TrainSchedule` lists, without loading and optimizer."""
    return tuple(_instructions(stage, num_stages, num_microbatches))


def _instructions(stage: int, num_stages: int, num_microbatches: int) -> Iterator[_Instruction]:
    """Time goes in slots, forwards and backwards in turn, so that a stage's neighbours do the other of the two.

    Forward m of stage s is slot s + 2 m, its backward slot 2 S − 1 − s + 2 m. What a slot made is sent in the next one,
    after (backward slots) or before (forward slots) what that one needs is received, so that neighbours agree.
    """
    before, after = stage > 0, stage < num_stages - 1

    def there(microbatch: int) -> bool:
        return 0 <= microbatch < num_microbatches

    made = -1  # the microbatch of the slot before
    for slot in range(2 * (num_microbatches + num_stages - 1)):
        is_forward = (slot - stage) % 2 == 0
        microbatch = (slot - (stage if is_forward else 2 * num_stages - 1 - stage)) // 2
        if is_forward:
            if before and there(made):
                yield _Instruction(_What.SEND_GRADIENT, made)
            if before and there(microbatch):
                yield _Instruction(_What.RECEIVE_ACTIVATION, microbatch)
        else:
            if after and there(microbatch):
                yield _Instruction(_What.RECEIVE_GRADIENT, microbatch)
            if after and there(made):
                yield _Instruction(_What.SEND_ACTIVATION, made)
        if there(microbatch):
            yield _Instruction(_What.FORWARD if is_forward else _What.BACKWARD, microbatch)
        made = microbatch
