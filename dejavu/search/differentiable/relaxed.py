"""The relaxed problem: architecture parameters, a smoothed dynamic program over cuts, and its gradient.

Letters as in `rounding`; besides, R = restarts, K = blocks of layers between the K1 = K + 1 cut positions that the
relaxation knows (all, or some with equal work between), M = pairs of a stage between two of those cuts and a group, T =
device types,
F = expectations, see the columns below.
All costs are divided by the step time of a known plan, so that one set of constants does for seconds and microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dejavu.foundation.compiled import njit
from dejavu.plans.stage_costs import Floats
from dejavu.search.shared.options import Ints, Options
from dejavu.search.shared.suffix_table import Stages

# Fractions of the known step time, except where another unit is named.
_HOTTEST, _COLDEST = 2e-2, 3e-3  # temperature at the first and the last step
_SECONDS_PER_NAT = 3e-3  # what one nat of a block's softmax counts against the costs
_OVER_LIMIT_PRICE = 2.0  # seconds that a stage pays for each second above the restart's bottleneck
_FIRST_BILL = 0.8  # of all devices, before the first step
_BILL_SPREAD = 0.3  # standard deviation of its logarithm, of each device type
_LEAST_LIMIT, _MOST_LIMIT = 0.6, 0.95  # bottlenecks that restarts begin with
_FIRST_SHORTAGE_PRICE = 0.5  # of a stage whose memory holds none of its microbatches
_MULTIPLIER_STEP = 0.1  # what a bill grows by where twice the devices are taken, at the first step; none at the last
_PENALTY = 1.0  # of the augmented Lagrangian's squares, for each squared relative excess
_IMPOSSIBLE = 100.0  # energy where no stage is possible; finite, so that no gradient is nan
_BLUNTEST_NORM, _SHARPEST_NORM = 16.0, 64.0  # exponent of the norm that stands for the maximum: first and last step
_LONGEST_RATIO = 2.0  # of a stage's occupation to the bottleneck, where the norm is cut off: float32 ends at 1e38
_EVEN_SHARE = 0.25  # of the work, spread evenly over layers, when blocks are made
_LEAN = 3.0  # nats towards a given plan
_RESTARTS_ON_CPU, _RESTARTS_ON_GPU = 32, 256
_LOGIT_SPREAD = 1.0  # standard deviation of the parameters, in nats, before the first step
_LEARNING_RATE, _LIMIT_LEARNING_RATE = 0.1, 0.02  # Adam's, of the parameters in nats and the bottleneck's logarithm
_MEAN_DECAY, _SQUARE_DECAY = 0.9, 0.999  # Adam's
_TINY = 1e-18  # keeps roots and quotients of sums that may be zero finite, and their gradients too

_COST, _NORM, _SHORT, _STAGES, _DEVICES = range(5)  # columns of expectations; one for each device type from _DEVICES on


@dataclass(frozen=True, eq=False)
class Point:
    """Where restarts stand.

    Attributes:
        logits_RKG: the architecture parameters A; their softmax over groups is the probability that a block is in one.
        log_limit_R: logarithm of the bottleneck.
        bill_RT: multipliers of the device counts: what all devices of a type cost together.
        shortage_price_R: multiplier of the memory.
    """

    logits_RKG: Tensor
    log_limit_R: Tensor
    bill_RT: Tensor
    shortage_price_R: Tensor


@dataclass(frozen=True, eq=False)
class Relaxed:
    """What restarts have learnt, in the problem's own seconds.

    Attributes:
        price_RT: multipliers of the device counts, seconds for one device.
        limit_R: the smooth maximum over stages and links.
        prior_RLG: −log softmax of the parameters in seconds: what a layer pays for being in a group.
        loss_R: relaxed step time and what the constraints are violated by.
    """

    price_RT: Floats
    limit_R: Floats
    prior_RLG: Floats
    loss_R: Floats


@njit(cache=True, nogil=True)
def _stages_between(stages: Stages, need_J: Ints, limit: float, cuts_K1: Ints) -> tuple[Ints, Floats]:
    """Stages between the cuts: rows (start, stop, group), and for each level (seconds, busy, shortage of memory)."""
    first_L1, stop_N, group_N, seconds_N, busy_N, fits_N = stages
    place = np.full(len(first_L1), -1, np.int64)
    for k in range(len(cuts_K1)):
        place[cuts_K1[k]] = k
    rows = np.empty((len(stop_N), 3), np.int64)
    table = np.empty((len(stop_N), len(need_J), 3))
    m = 0
    for at in range(len(cuts_K1) - 1):
        i, after = first_L1[cuts_K1[at]], first_L1[cuts_K1[at] + 1]
        while i < after:
            stop, g = stop_N[i], group_N[i]
            front = i
            while i < after and stop_N[i] == stop and group_N[i] == g:
                i += 1
            # Stages that end between the relaxation's cuts, or that are all busier than the plan known takes.
            if place[stop] < 0 or busy_N[front:i].min() > limit:
                continue
            rows[m, 0], rows[m, 1], rows[m, 2] = at, place[stop], g
            for j in range(len(need_J)):
                # The fastest that fits; where none does, the one that lacks least, whose shortage is a penalty.
                chosen = front
                while chosen < i and fits_N[chosen] < need_J[j]:
                    chosen += 1
                if chosen == i:
                    chosen = front + np.argmax(fits_N[front:i])
                table[m, j, 0], table[m, j, 1] = seconds_N[chosen], busy_N[chosen]
                table[m, j, 2] = max(0.0, 1.0 - fits_N[chosen] / need_J[j])
            m += 1
    return rows[:m], table[:m]


def _even_cuts(options: Options, max_blocks: int) -> Ints:
    """Cut positions between which there is about equally much work, by layers' seconds where they are least."""
    L = len(options.first_L1) - 1
    start_N = np.repeat(np.arange(L), np.diff(options.first_L1))
    each_L = np.full(L, np.inf)
    np.minimum.at(each_L, start_N, options.seconds_N / (options.stop_N - start_N))
    upto_L1 = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(each_L), each_L, 0.0))])
    # A little for each layer, so that free ones do not all fall into one block.
    upto_L1 += np.linspace(0.0, _EVEN_SHARE * upto_L1[-1] + _TINY, L + 1)
    near = np.searchsorted(upto_L1, np.linspace(0.0, upto_L1[-1], min(L, max_blocks) + 1)[1:-1])
    return np.arange(L + 1) if max_blocks >= L else np.unique([0, *near, L]).astype(np.int64)


class Relaxation:
    """The relaxed problem of some options, and gradient steps on it.

    A plan's probability is that of a Gibbs distribution over all ways to cut and to spread: exp(−energy / temperature),
    its energy the sum over stages of seconds, transfers, device prices, what it exceeds the bottleneck and the memory
    by, and −log softmax(A) of each of its blocks. The smoothed dynamic program (log-sum-exp for min) runs from the last
    layer to the first, so it knows how many stages are expected downstream, which decides the memory, and carries the
    expectations of step time, devices and shortage along. Loss: expected Σ + a norm over stages for the maximum +
    the terms of an augmented Lagrangian.
    """

    def __init__(
        self,
        options: Options,
        counts_T: Ints,
        type_G: Ints,
        taken_G: Ints,
        step_seconds: float,
        max_blocks: int,
        device: str = "",
    ) -> None:
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._step_seconds, self._counts = step_seconds, counts_T
        self._cuts_K1 = _even_cuts(options, max_blocks)
        rows, table = _stages_between(options.stages, options.need_J, step_seconds, self._cuts_K1)
        table[:, :, :2] /= step_seconds
        after = np.concatenate([table[:, 1:], table[:, -1:]], axis=1)
        self._J, self._A, self._G = len(options.need_J), options.num_classes, len(options.class_G)
        # Row m · J + j: the values at level j, and what one more stage downstream adds.
        self._table = self._numbers(np.concatenate([table, after - table], axis=2).reshape(-1, 6))
        self._start, self._stop, self._group = (self._whole(rows[:, i]) for i in range(3))
        self._first_K1 = np.searchsorted(rows[:, 0], np.arange(len(self._cuts_K1)))
        self._last_stop_M = rows[:, 1]
        class_M = options.class_G[rows[:, 2]]
        self._class_M, self._class_MA = self._whole(class_M), self._numbers(np.eye(self._A)[class_M])
        self._after = self._whole(rows[:, 1] * self._A + class_M)
        devices_GT = np.zeros((self._G, len(counts_T)))
        devices_GT[np.arange(self._G), type_G] = taken_G
        self._devices_GT = self._numbers(devices_GT)
        self._counts_T = self._numbers(np.maximum(counts_T, 1))
        self._transfer_K1AA = self._numbers(options.transfer_L1AA[self._cuts_K1] / step_seconds)
        self._link_busy_K1AA = self._numbers(options.link_busy_L1AA[self._cuts_K1] / step_seconds)
        self._use_all = options.use_all_devices

    def _numbers(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=self._device)

    def _whole(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)

    def start(self, num_restarts: int | None, seed: int, value_T: Floats, lean_L: Ints | None = None) -> Point:
        """Random parameters, bottlenecks, and bills around what a device of each type is worth.

        Every second restart leans towards the groups that layers are in, where they are given; −1: none.
        """
        num_restarts = num_restarts or (_RESTARTS_ON_GPU if self._device.type == "cuda" else _RESTARTS_ON_CPU)
        rng = np.random.default_rng(seed)
        bill_RT = rng.lognormal(0.0, _BILL_SPREAD, (num_restarts, len(value_T))) * (value_T * self._counts)
        bill_RT *= _FIRST_BILL / bill_RT.sum(1, keepdims=True).clip(_TINY)
        log_limit_R = rng.uniform(np.log(_LEAST_LIMIT), np.log(_MOST_LIMIT), num_restarts)
        logits = rng.normal(0.0, _LOGIT_SPREAD, (num_restarts, len(self._cuts_K1) - 1, self._G))
        if lean_L is not None:
            block_group = lean_L[self._cuts_K1[:-1]]
            known = np.flatnonzero(block_group >= 0)
            logits[::2, known, block_group[known]] += _LEAN
        return Point(
            logits_RKG=self._numbers(logits),
            log_limit_R=self._numbers(log_limit_R),
            bill_RT=self._numbers(bill_RT),
            shortage_price_R=torch.full((num_restarts,), _FIRST_SHORTAGE_PRICE, device=self._device),
        )

    def descend(self, point: Point, num_steps: int, out_of_time: Callable[[], bool]) -> Relaxed:
        """Gradient steps on parameters and bottlenecks, multiplier steps on bills, while it cools."""
        logits, log_limit = point.logits_RKG.requires_grad_(), point.log_limit_R.requires_grad_()
        bill, shortage_price = point.bill_RT, point.shortage_price_R
        adams = _Adam(logits, _LEARNING_RATE), _Adam(log_limit, _LIMIT_LEARNING_RATE)
        for step in range(num_steps):
            if out_of_time():
                break
            part = step / num_steps
            now = Point(logits, log_limit, bill, shortage_price)
            cost, excess, short, _ = self._relaxed_step(now, part)
            pushed = self._allowed(bill + _PENALTY * excess)
            penalty = ((pushed**2 - bill**2) / (2 * _PENALTY)).sum(1)
            penalty = penalty + shortage_price * short + 0.5 * _PENALTY * short**2
            # Zeros, where no stage between the coarse cuts is within the known plan's step: nothing depends on logits.
            loss, learnt = (cost + penalty).sum(), (logits, log_limit)
            gradients = torch.autograd.grad(loss, learnt, materialize_grads=True)
            with torch.no_grad():
                for adam, gradient in zip(adams, gradients, strict=True):
                    adam.step(gradient)
                rate = _MULTIPLIER_STEP * (1 - part)
                bill = self._allowed(bill + rate * excess.clamp(max=1.0))
                shortage_price = shortage_price + rate * short.clamp(max=1.0)
        with torch.no_grad():
            now = Point(logits, log_limit, bill, shortage_price)
            cost, excess, short, most = self._relaxed_step(now, 1.0)
            violation = excess.abs() if self._use_all else torch.relu(excess)
            return self._result(now, most, cost + _PENALTY * (violation.sum(1) + short))

    def _allowed(self, bill: Tensor) -> Tensor:
        """A multiplier of an inequality is not negative; that devices must all be used is an equality."""
        return bill if self._use_all else torch.relu(bill)

    def _relaxed_step(self, point: Point, part: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Relaxed step time, relative excess of devices, shortage of memory, smooth maximum; `part` of the way down."""
        temperature = _HOTTEST * (_COLDEST / _HOTTEST) ** part
        norm = _BLUNTEST_NORM * (_SHARPEST_NORM / _BLUNTEST_NORM) ** part
        found = self.expectations(point, temperature, norm)
        most = point.log_limit_R.exp() * (found[:, _NORM] + _TINY) ** (1.0 / norm)
        return found[:, _COST] + most, found[:, _DEVICES:] / self._counts_T - 1.0, found[:, _SHORT], most

    def expectations(self, point: Point, temperature: float, norm: float) -> Tensor:
        """What each restart expects: Σ, Σ of (busy / limit)^norm, shortage, stages, devices of each type; R × F."""
        R, A = len(point.log_limit_R), self._A
        F = _DEVICES + len(self._counts_T)
        limit = point.log_limit_R.exp()[:, None]
        static_RM = self._static(point)
        last = len(self._cuts_K1) - 1
        rest = [torch.zeros(R, A, device=self._device)] * (last + 1)
        expected = [torch.zeros(R, A, F, device=self._device)] * (last + 1)
        for at in range(last - 1, -1, -1):
            lo, hi = int(self._first_K1[at]), int(self._first_K1[at + 1])
            if lo == hi:  # no stage between the coarse cuts starts here
                if at == 0:
                    return expected[0][:, 0] + _IMPOSSIBLE
                rest[at] = torch.full((R, A), _IMPOSSIBLE, device=self._device)
                continue
            far = int(self._last_stop_M[lo:hi].max())
            after = self._after[lo:hi] - (at + 1) * A
            rest_RM = torch.stack(rest[at + 1 : far + 1], 1).reshape(R, -1)[:, after]
            after_RMF = torch.stack(expected[at + 1 : far + 1], 1).reshape(R, -1, F)[:, after]
            seconds, busy, short = self._at_level(lo, hi, after_RMF[:, :, _STAGES])
            energy = seconds + static_RM[:, lo:hi] + rest_RM + point.shortage_price_R[:, None] * short
            energy = energy + _OVER_LIMIT_PRICE * torch.relu(busy - limit)
            power = (busy / limit).clamp(max=_LONGEST_RATIO) ** norm
            here = torch.stack([seconds, power, short, torch.ones_like(short)], 2)
            here = torch.cat([here, self._devices_GT[self._group[lo:hi]].expand(R, -1, -1)], 2) + after_RMF
            value_RA, mean_RAF = self._by_class(lo, hi, energy, here, temperature)
            if at == 0:
                share = torch.softmax(-value_RA / temperature, 1)
                return (share[:, :, None] * mean_RAF).sum(1)
            link = self._link_busy_K1AA[at]
            energy_RAA = value_RA[:, None, :] + self._transfer_K1AA[at]
            energy_RAA = energy_RAA + _OVER_LIMIT_PRICE * torch.relu(link - limit[:, :, None])
            rest[at] = -temperature * torch.logsumexp(-energy_RAA / temperature, 2)
            share = torch.softmax(-energy_RAA / temperature, 2)
            link_power = (link / limit[:, :, None]).clamp(max=_LONGEST_RATIO) ** norm
            extra = torch.stack([(share * self._transfer_K1AA[at]).sum(2), (share * link_power).sum(2)], 2)
            expected[at] = share @ mean_RAF + pad(extra, (0, F - 2))
        raise AssertionError("a problem has a layer")

    def _static(self, point: Point) -> Tensor:
        """What each stage costs whatever surrounds it: its devices, and its blocks' −log softmax; R × M."""
        prior = self._prior(point.logits_RKG)
        upto = pad(prior.cumsum(1), (0, 0, 1, 0)).flatten(1)
        blocks = upto[:, self._stop * self._G + self._group] - upto[:, self._start * self._G + self._group]
        return blocks + (point.bill_RT / self._counts_T @ self._devices_GT.T)[:, self._group]

    def _prior(self, logits_RKG: Tensor) -> Tensor:
        return -_SECONDS_PER_NAT * torch.log_softmax(logits_RKG, dim=2)

    def _at_level(self, lo: int, hi: int, stages_downstream_RM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Seconds, busy and shortage of rows lo to hi − 1, between two levels where the expected stages are."""
        level = stages_downstream_RM.clamp(max=self._J - 1)
        below = level.detach().floor()
        row = self._table[torch.arange(lo, hi, device=self._device) * self._J + below.long()]
        seconds, busy, short = (row[:, :, :3] + (level - below)[:, :, None] * row[:, :, 3:]).unbind(2)
        return seconds, busy, short

    def _by_class(
        self, lo: int, hi: int, energy_RM: Tensor, here_RMF: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Soft minimum of the energies of each link class, and the expectations under its softmax."""
        of_class, class_MA = self._class_M[lo:hi], self._class_MA[lo:hi]
        least = torch.full((len(energy_RM), self._A), _IMPOSSIBLE, device=self._device)
        of_row = of_class.expand(len(energy_RM), -1)
        least = least.scatter_reduce(1, of_row, energy_RM.detach(), "amin", include_self=False)  # also above impossible
        weight = torch.exp((least[:, of_class] - energy_RM) / temperature)
        mass = weight @ class_MA + (class_MA.sum(0) == 0)  # a class without stages weighs 1 at its impossible energy
        mean = torch.einsum("rmf,ma->raf", weight[:, :, None] * here_RMF, class_MA) / mass[:, :, None]
        return least - temperature * mass.log(), mean

    def _result(self, point: Point, most_R: Tensor, loss_R: Tensor) -> Relaxed:
        widths = np.diff(self._cuts_K1)
        prior = self._prior(point.logits_RKG).double().cpu().numpy() / widths[None, :, None]
        scale = self._step_seconds
        return Relaxed(
            price_RT=(point.bill_RT / self._counts_T).double().cpu().numpy() * scale,
            limit_R=most_R.double().cpu().numpy() * scale,
            prior_RLG=np.repeat(prior, widths, axis=1) * scale,
            loss_R=loss_R.double().cpu().numpy() * scale,
        )


class _Adam:
    """Adam (Kingma & Ba, ICLR 2015) of one tensor; torch.optim takes more than a second to load."""

    def __init__(self, values: Tensor, rate: float) -> None:
        self._values, self._rate, self._steps = values, rate, 0
        self._mean, self._square = torch.zeros_like(values), torch.zeros_like(values)

    def step(self, gradient: Tensor) -> None:
        self._steps += 1
        self._mean.lerp_(gradient, 1 - _MEAN_DECAY)
        self._square.lerp_(gradient**2, 1 - _SQUARE_DECAY)
        mean = self._mean / (1 - _MEAN_DECAY**self._steps)
        square = self._square / (1 - _SQUARE_DECAY**self._steps)
        self._values -= self._rate * mean / (square.sqrt() + _TINY)
