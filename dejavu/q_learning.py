"""The learner: double, duelling deep Q-learning with prioritized replay (parts of Rainbow, Hessel et al., AAAI 2018).

Letters: M = kept moves, A = moves, F = numbers of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_LEAST_PRIORITY = 1e-3  # so that no kept move is never drawn again


@dataclass(frozen=True)
class Settings:
    """Auto-MAP's numbers for pipelines; width, batch and the number of layers are ours.

    Attributes:
        num_steps: moves, each with one step of the optimizer.
        first_epsilon, last_epsilon: share of random moves, falling linearly over `epsilon_steps`.
        alpha, beta: how much priorities decide what is replayed, and how much of that is corrected.
        target_steps: between updates of the target network.
    """

    num_steps: int = 10_000
    epsilon_steps: int = 10_000
    first_epsilon: float = 1.0
    last_epsilon: float = 0.1
    discount: float = 0.6
    learning_rate: float = 1e-3
    alpha: float = 0.2
    beta: float = 0.6
    capacity: int = 2_000
    target_steps: int = 100
    batch_size: int = 32
    width: int = 128


class Duelling(nn.Module):
    """A state's value and each move's advantage over the mean (Wang et al., ICML 2016)."""

    def __init__(self, num_features: int, num_moves: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(num_features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value, self.advantage = nn.Linear(width, 1), nn.Linear(width, num_moves)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        hidden = self.body(states)
        advantage = self.advantage(hidden)
        values: torch.Tensor = self.value(hidden) + advantage - advantage.mean(1, keepdim=True)
        return values


class Replay:
    """The last moves, drawn in proportion to how wrong they were (Schaul et al., ICLR 2016)."""

    def __init__(self, settings: Settings, num_features: int, num_moves: int) -> None:
        M = settings.capacity
        self._settings, self._count = settings, 0
        self.state_MF, self.next_MF = (np.zeros((M, num_features), np.float32) for _ in range(2))
        self.allowed_MA = np.zeros((M, num_moves), bool)
        self.action_M, self.reward_M = np.zeros(M, np.int64), np.zeros(M, np.float32)
        self._priority_M = np.zeros(M)

    def __len__(self) -> int:
        return min(self._count, self._settings.capacity)

    def add(self, state: Floats, action: int, reward: float, after: Floats, allowed_A: Bools) -> None:
        m = self._count % self._settings.capacity
        self.state_MF[m], self.action_M[m], self.reward_M[m] = state, action, reward
        self.next_MF[m], self.allowed_MA[m] = after, allowed_A
        self._priority_M[m] = self._priority_M.max() or 1.0  # new ones soon
        self._count += 1

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return rows, and their weights in the loss."""
        weights_M = self._priority_M[: len(self)] ** self._settings.alpha
        share_M = weights_M / weights_M.sum()
        rows = rng.choice(len(self), self._settings.batch_size, p=share_M)
        correction = (len(self) * share_M[rows]) ** -self._settings.beta
        return rows, (correction / correction.max()).astype(np.float32)

    def learn(self, rows: np.ndarray, errors: np.ndarray) -> None:
        self._priority_M[rows] = np.abs(errors) + _LEAST_PRIORITY


class Learner:
    """A network, its slower copy, and what they learn from. Draws nothing from torch's global generator."""

    def __init__(self, settings: Settings, num_features: int, num_moves: int, seed: int) -> None:
        self.settings, self.rng, self.steps = settings, np.random.default_rng(seed), 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = Duelling(num_features, num_moves, settings.width)
            self._target = Duelling(num_features, num_moves, settings.width)
        self._target.load_state_dict(self.network.state_dict())
        self._optimizer = torch.optim.Adam(self.network.parameters(), settings.learning_rate)
        self.replay = Replay(settings, num_features, num_moves)

    @property
    def epsilon(self) -> float:
        s = self.settings
        done = min(self.steps / s.epsilon_steps, 1.0)
        return s.first_epsilon + done * (s.last_epsilon - s.first_epsilon)

    def choose(self, state: Floats, allowed_A: Bools, epsilon: float) -> int:
        """Return the move that the network holds best, or with this probability any."""
        if self.rng.random() < epsilon:
            return int(self.rng.choice(np.flatnonzero(allowed_A)))
        with torch.no_grad():
            values_A = self.network(torch.from_numpy(state)[None])[0].numpy()
        return int(np.where(allowed_A, values_A, -np.inf).argmax())

    def learn(self) -> None:
        """Take one step of the optimizer on moves that are drawn from the replay."""
        self.steps += 1
        if len(self.replay) < self.settings.batch_size:
            return
        rows, weights = self.replay.draw(self.rng)
        replay = self.replay
        values = self.network(torch.from_numpy(replay.state_MF[rows]))
        taken = values.gather(1, torch.from_numpy(replay.action_M[rows])[:, None])[:, 0]
        wanted = torch.from_numpy(replay.reward_M[rows]) + self.settings.discount * self._after(rows)
        errors = wanted - taken
        loss = (torch.from_numpy(weights) * nn.functional.smooth_l1_loss(taken, wanted, reduction="none")).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        replay.learn(rows, errors.detach().numpy())
        if self.steps % self.settings.target_steps == 0:
            self._target.load_state_dict(self.network.state_dict())

    @torch.no_grad()
    def _after(self, rows: np.ndarray) -> torch.Tensor:
        """Return what the slow network thinks of the move that the fast one would make (van Hasselt et al., 2016)."""
        states, allowed = torch.from_numpy(self.replay.next_MF[rows]), torch.from_numpy(self.replay.allowed_MA[rows])
        moves = self.network(states).masked_fill(~allowed, -torch.inf).argmax(1, keepdim=True)
        values = self._target(states).gather(1, moves)[:, 0]
        return torch.where(allowed.any(1), values, 0.0)
