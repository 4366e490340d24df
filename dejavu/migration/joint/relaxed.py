"""The strategy's variables A, relaxed: the expected step of layers that are drawn one by one, and its gradient.

Of eq. 3 to 6 of the paper: each row of A goes through a softmax, and between two measured training steps A takes
gradient steps on what a step is expected to take. Training's own loss does not depend on A (the same numbers come out
of every plan), so time is all that A descends on.

A loss and its gradient take time in proportion to layers × strategies, no more: slots are ranges of strategies, and
what neighbouring layers do together needs cumulative sums over slots only. The gradient is written out because a step
of some dozen layers is thirty small array operations, each of which would take autograd several times as long.

Letters as in `strategies`; M = sampled assignments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dejavu.migration.joint.strategies import Ints, Strategies
from dejavu.plans.stage_costs import Floats

LEAN = 1.0  # nats of the running plan's strategies before the first step
MOST_LOGIT = 5.0  # as in the paper's listing; further out hardly a gradient comes through the softmax
RATE = 0.1  # Adam's, nats
MEAN_DECAY, SQUARE_DECAY, TINY = 0.9, 0.999, 1e-18  # Adam's
# In steps of the running plan:
SHARPNESS = 0.03  # temperature of the smooth maximum over slots and links
FIRST_BACK_PRICE, LAST_BACK_PRICE = (
    0.05,
    2.0,
)  # for each layer that is expected on an earlier slot than the one before it
MEMORY_PRICE = 2.0  # for each share of a device's memory that is expected to lack
COOLING_STEPS = (
    200  # until the last price: at the first, layers are where they are cheap; at the last, in a pipeline's order
)
SAMPLED = 8  # neighbours in each step


def softmax(values: Floats, axis: int) -> Floats:
    """Return exp(values) over their sum along the axis."""
    found: Floats = np.exp(values - values.max(axis=axis, keepdims=True))
    found /= found.sum(axis=axis, keepdims=True)
    return found


@dataclass(frozen=True, eq=False)
class Objective:
    """What A descends on: the relaxed step, and the expected one among the running plan and its neighbours.

    The relaxed step takes layers as if they were drawn one by one; the neighbours are whole plans, at their price. All
    is in steps of the running plan.

    Attributes:
        slot_N, seconds_LN, once_LN, share_LN: see `Strategies`.
        link_LS: of a message at the cut before each layer, from each slot to the next one; the first row means nothing.
        first_S: of each slot's strategies.
        repeats: microbatches after the first.
        near_ML: an assignment, and some that are one cut away; `price_M`: what they cost.
    """

    slot_N: Ints
    seconds_LN: Floats
    once_LN: Floats
    share_LN: Floats
    link_LS: Floats
    first_S: Ints
    repeats: int
    near_ML: Ints
    price_M: Floats

    @classmethod
    def of(cls, strategies: Strategies, near: Sequence[Ints]) -> Objective:
        """Take the prices of strategies, and of these assignments."""
        s = strategies
        unit_seconds = s.price(s.running_L) or 1.0
        first_S = np.searchsorted(s.slot_N, np.arange(len(s.slots)))
        next_S = np.append(first_S[1:], first_S[-1])
        latency_S, per_byte_S = s.latency_NN[first_S, next_S], s.per_byte_NN[first_S, next_S]
        return cls(
            slot_N=s.slot_N,
            seconds_LN=s.seconds_LN / unit_seconds,
            once_LN=s.per_step_seconds_LN / unit_seconds,
            share_LN=s.share_LN,
            link_LS=2.0 * (latency_S + per_byte_S * s.cut_bytes_L1[:-1, None]) / unit_seconds,
            first_S=first_S,
            repeats=s.num_microbatches - 1,
            near_ML=np.stack(near),
            price_M=np.array([s.price(one) / unit_seconds for one in near]),
        )

    def relaxed(self, logits_LN: Floats, back_price: float) -> tuple[float, Floats]:
        """Return the relaxed step and its gradient: as `plans.price`, with expectations and a smooth maximum."""
        part_LN = softmax(logits_LN, 1)
        slot_LS = np.add.reduceat(part_LN, self.first_S, axis=1)
        later_LS = 1.0 - slot_LS.cumsum(1)  # the probability of a later slot
        seconds_S = self._of_slots(part_LN * self.seconds_LN)
        once_S = self._of_slots(part_LN * self.once_LN)
        over_S = self._of_slots(part_LN * self.share_LN) - 1.0
        link_S = (slot_LS[:-1] * later_LS[1:] * self.link_LS[1:]).sum(0)  # here, and the next layer later
        busy = np.concatenate([self.repeats * seconds_S + once_S, self.repeats * link_S])
        goes_back = float((slot_LS[1:] * later_LS[:-1]).sum())
        loss = float(seconds_S.sum() + link_S.sum() + back_price * goes_back + MEMORY_PRICE * over_S.clip(0).sum())
        loss += float(busy.max() + SHARPNESS * np.log(np.exp((busy - busy.max()) / SHARPNESS).sum()))

        weight = softmax(busy / SHARPNESS, 0)
        of_slot_S, of_link_S = weight[: len(link_S)], 1.0 + self.repeats * weight[len(link_S) :]
        d_part_LN = self.seconds_LN * (1.0 + self.repeats * of_slot_S)[self.slot_N]
        d_part_LN += self.once_LN * of_slot_S[self.slot_N]
        d_part_LN += self.share_LN * (MEMORY_PRICE * (over_S > 0))[self.slot_N]
        d_slot_LS, d_later_LS = np.zeros_like(slot_LS), np.zeros_like(slot_LS)
        price_LS = self.link_LS[1:] * of_link_S
        d_slot_LS[:-1] += later_LS[1:] * price_LS
        d_later_LS[1:] += slot_LS[:-1] * price_LS
        d_slot_LS[1:] += back_price * later_LS[:-1]
        d_later_LS[:-1] += back_price * slot_LS[1:]
        # A slot's probability takes from that of a later slot, seen from itself and from all slots after it.
        d_slot_LS -= d_later_LS[:, ::-1].cumsum(1)[:, ::-1]
        d_part_LN += d_slot_LS[:, self.slot_N]
        return loss, part_LN * (d_part_LN - (part_LN * d_part_LN).sum(1, keepdims=True))

    def nearby(self, logits_LN: Floats) -> tuple[float, Floats]:
        """Return what a plan takes that A draws from `near_ML` alone, and its gradient."""
        top_L1 = logits_LN.max(axis=1, keepdims=True)
        log_LN = logits_LN - top_L1 - np.log(np.exp(logits_LN - top_L1).sum(1, keepdims=True))
        layers_L = np.arange(len(logits_LN))
        chance_M = softmax(log_LN[layers_L, self.near_ML].sum(1), 0)
        expected = float(chance_M @ self.price_M)
        gradient_LN = np.zeros_like(logits_LN)
        # The gradient of a softmax over the rows adds up to 0, so the layers' own normalization has none.
        slope_M = chance_M * (self.price_M - expected)
        np.add.at(gradient_LN, (layers_L, self.near_ML), slope_M[:, None])
        return expected, gradient_LN

    def _of_slots(self, values_LN: Floats) -> Floats:
        found: Floats = np.add.reduceat(values_LN.sum(0), self.first_S)
        return found


class Variables:
    """A: the logits of every layer over the strategies, from the start of a plan on.

    Attributes:
        num_steps: gradient steps so far.
    """

    def __init__(self, strategies: Strategies, seed: int) -> None:
        self.logits_LN = np.zeros(strategies.shape)
        self.logits_LN[np.arange(strategies.shape[0]), strategies.running_L] = LEAN
        self._mean_LN, self._square_LN = np.zeros(strategies.shape), np.zeros(strategies.shape)
        self._rng = np.random.default_rng(seed)
        self.num_steps = 0

    def descend(self, strategies: Strategies, num_steps: int) -> None:
        """Take gradient steps at these prices, by Adam (Kingma & Ba, ICLR 2015)."""
        around_L = self.likeliest(strategies)
        near = list(strategies.neighbours(around_L))
        drawn = self._rng.permutation(len(near))[:SAMPLED]
        objective = Objective.of(strategies, [around_L, *(near[k] for k in drawn)])
        for _ in range(num_steps):
            part = min(self.num_steps / COOLING_STEPS, 1.0)
            _, gradient_LN = objective.relaxed(
                self.logits_LN, FIRST_BACK_PRICE * (LAST_BACK_PRICE / FIRST_BACK_PRICE) ** part
            )
            gradient_LN += objective.nearby(self.logits_LN)[1]
            self._step(gradient_LN)

    def _step(self, gradient_LN: Floats) -> None:
        self.num_steps += 1
        self._mean_LN += (1 - MEAN_DECAY) * (gradient_LN - self._mean_LN)
        self._square_LN += (1 - SQUARE_DECAY) * (gradient_LN**2 - self._square_LN)
        mean_LN = self._mean_LN / (1 - MEAN_DECAY**self.num_steps)
        square_LN = self._square_LN / (1 - SQUARE_DECAY**self.num_steps)
        self.logits_LN -= RATE * mean_LN / (np.sqrt(square_LN) + TINY)
        np.clip(self.logits_LN, -MOST_LOGIT, MOST_LOGIT, out=self.logits_LN)

    def likeliest(self, strategies: Strategies) -> Ints:
        """Return the likeliest assignment of which each slot has one run of layers, under one configuration.

        A program over layers and strategies: a layer keeps the strategy of the one before, or goes to a later slot.
        """
        log_LN = np.log(softmax(self.logits_LN, 1))
        L, N = log_LN.shape
        before_N = np.searchsorted(strategies.slot_N, strategies.slot_N)  # so many strategies are of earlier slots
        came_LN = np.zeros((L, N), dtype=np.int64)
        best_N, own = log_LN[0].copy(), np.arange(N)
        for layer in range(1, L):
            upto = np.maximum.accumulate(best_N)
            where = np.maximum.accumulate(np.where(best_N == upto, own, 0))
            earlier_N = np.where(before_N > 0, upto[before_N - 1], -np.inf)
            moves = earlier_N > best_N
            came_LN[layer] = np.where(moves, where[before_N - 1], own)
            best_N = np.where(moves, earlier_N, best_N) + log_LN[layer]
        found = np.empty(L, dtype=np.int64)
        found[-1] = int(best_N.argmax())
        for layer in range(L - 1, 0, -1):
            found[layer - 1] = came_LN[layer, found[layer]]
        return found
