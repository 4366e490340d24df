"""Placement learnt by REINFORCE, as ColocRL does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dejavu.placement._base import Incumbent, Placer
from dejavu.placement.problem import Floats, Ints, PlacementProblem
from dejavu.placement.shared.chains import chains
from dejavu.placement.shared.orders import dispatch, upward_ranks
from dejavu.placement.shared.room import fits
from dejavu.placement.shared.timeline import empty_state

if TYPE_CHECKING:
    import torch

_OVERFULL = 10.0  # what does not fit is rewarded as if it took so many times what one device takes


@dataclass(frozen=True)
class PolicyGradient(Placer):
    """A recurrent network reads groups of operations in order and gives each a distribution over devices.

    ColocRL's idea: placements are drawn, simulated under list scheduling, and those that are faster than the average so
    far are made more probable; the reward is minus the square root of the seconds. Chains are placed as one, neighbours
    together where there are more than `most_groups`. To compare with: it takes hundreds of simulations to learn what
    list scheduling knows, and on most graphs it loses. Needs torch, which is imported when it runs.
    See [Mirhoseini et al., ICML 2017](https://arxiv.org/abs/1706.04972).

    Attributes:
        draws_per_step: placements of one gradient step.
    """

    name: ClassVar[str] = "policy_gradient"
    num_steps: int = 150
    draws_per_step: int = 16
    most_groups: int = 64
    width: int = 32
    learning_rate: float = 0.01
    entropy_weight: float = 0.01

    def _place(self, problem: PlacementProblem, best: Incumbent, seed: int) -> None:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tensors are small
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self._learn(problem, best)
        finally:
            torch.set_num_threads(threads)

    def _learn(self, problem: PlacementProblem, best: Incumbent) -> None:
        import torch

        block_G = blocks(problem, self.most_groups)
        features = torch.tensor(_features(problem, block_G), dtype=torch.float32)
        reader = torch.nn.LSTM(features.shape[1], self.width, batch_first=True, bidirectional=True)
        head = torch.nn.Linear(2 * self.width, problem.num_devices)
        optimizer = torch.optim.Adam([*reader.parameters(), *head.parameters()], lr=self.learning_rate)
        price = _Price(problem, best)
        baseline: float | None = None
        for _ in range(self.num_steps):
            logits: torch.Tensor = head(reader(features[None])[0][0])
            policy = torch.distributions.Categorical(logits=logits)
            drawn = policy.sample((self.draws_per_step,))
            rewards = torch.tensor([-(price.of(devices[block_G]) ** 0.5) for devices in drawn.numpy()])
            mean = float(rewards.mean())
            baseline = mean if baseline is None else 0.9 * baseline + 0.1 * mean
            advantage = (rewards - baseline) / max(abs(baseline), 1e-9)
            chosen = policy.log_prob(drawn).sum(dim=1)
            loss = -(advantage * chosen).mean() - self.entropy_weight * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if best.remaining_seconds < 0 or best.is_done:
                break
        price.of(logits.argmax(dim=1).numpy()[block_G])


class _Price:
    """Simulates drawn devices under list scheduling, in units of the time on the fastest device, and offers them."""

    def __init__(self, problem: PlacementProblem, best: Incumbent) -> None:
        self._problem, self._best, self._rank_N = problem, best, upward_ranks(problem)
        self._state, self._order_N = empty_state(problem.arrays), np.empty(len(problem.operations), dtype=np.int64)
        total_D = problem.seconds_GD.sum(axis=0)
        self._unit = float(total_D[np.isfinite(total_D)].min(initial=best.bound.seconds * problem.num_devices)) or 1.0

    def of(self, device_G: Ints) -> float:
        if not fits(self._problem, device_G):
            return _OVERFULL
        seconds = dispatch(self._problem.arrays, self._state, device_G, self._rank_N, self._order_N)
        if seconds < self._best.seconds:
            self._best.offer(device_G, self._order_N)
        return seconds / self._unit


def blocks(problem: PlacementProblem, most: int) -> Ints:
    """Return what each group is placed with: its chain, and chains that are neighbours in order if there are many."""
    order_N = np.array(problem.topological_N)
    block_G = np.full(problem.num_groups, -1, dtype=np.int64)
    first_of: dict[int, int] = {}
    chain_N = chains(problem)
    for n in order_N:
        number = first_of.setdefault(int(chain_N[n]), len(first_of))
        if block_G[problem.group_N[n]] < 0:
            block_G[problem.group_N[n]] = number
    _, block_G = np.unique(block_G, return_inverse=True)
    count = int(block_G.max()) + 1
    return np.asarray(block_G * min(most, count) // count, dtype=np.int64)


def _features(problem: PlacementProblem, block_G: Ints) -> Floats:
    """Return of each block: seconds, memory, bytes in and out, its urgency, its place; the largest of each is 1."""
    arrays, B = problem.arrays, int(block_G.max()) + 1
    block_N = block_G[problem.group_N]
    size_T = np.array([tensor.size_bytes for tensor in problem.tensors])
    columns = np.zeros((B, 6))
    np.add.at(columns[:, 0], block_N, np.where(np.isfinite(arrays.seconds_ND), arrays.seconds_ND, 0.0).mean(axis=1))
    np.add.at(columns[:, 1], block_G, arrays.memory_G)
    for t, n in enumerate(arrays.producer_T):
        columns[block_N[n], 3] += size_T[t]
        for reader in arrays.reader_R[arrays.first_reader_T1[t] : arrays.first_reader_T1[t + 1]]:
            columns[block_N[reader], 2] += size_T[t]
    np.maximum.at(columns[:, 4], block_N, upward_ranks(problem))
    columns[:, 5] = np.arange(B)
    return np.asarray(columns / np.maximum(columns.max(axis=0), 1e-30))
