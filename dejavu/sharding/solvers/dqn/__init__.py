"""Auto-MAP's agent for shardings: it decides one tensor dimension after another, and learns what that is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dejavu.q_learning import Learner, Settings
from dejavu.sharding.problem import Answer, ChoiceProblem, ShardingError
from dejavu.sharding.solvers.dqn.environment import Board, Game, Reward, best_game
from dejavu.sharding.solvers.elimination import Elimination
from dejavu.sharding.solvers.groups import Links, links_by_price

__all__ = ["OPERATORS", "Board", "Dqn", "Game", "Heard", "Learned", "best_game", "with_places"]

# Auto-MAP's numbers for operators: fewer random moves sooner than for pipelines, and a learning rate below 0.001.
OPERATORS = Settings(num_steps=2_000, epsilon_steps=2_000, learning_rate=5e-4)


class Heard(NamedTuple):
    """What an agent has reached after so many moves: the best game that it played, and the one without random moves."""

    moves: int
    best_score: float
    own_score: float


class Learned(NamedTuple):
    """What training ends with.

    Attributes:
        best: the game of the highest score that was played; `own`: the agent's, without random moves.
        seconds: the cheapest choice of a finished game under the reward `price`; inf under the published one.
    """

    best: Game
    own: Game
    chosen: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Dqn:
    """Plays one problem as a game and keeps the best game that it met; to be compared with, since it proves nothing.

    Double, duelling, prioritized deep Q-learning with Auto-MAP's numbers; linkage groups leave few dimensions to be
    asked for. Under the published reward, which counts dimensions and knows no price, the decided tensors of the best
    game are fixed and `finish` decides the rest; under `price` the cheapest finished game is the answer. Everything is
    drawn from the seed.

    Attributes:
        links: of the problem's edges, as `links_of` gives them; None: read off the prices.
        decided: the nodes that are decided, such as weights; None: all.
        every: after about so many moves `told` hears what is reached.
    """

    links: Links | None = None
    decided: tuple[int, ...] | None = None
    reward: Reward = "published"
    settings: Settings = OPERATORS
    finish: Elimination = field(default_factory=Elimination)
    every: int = 250
    told: Callable[[Heard], None] | None = field(default=None, compare=False)

    def run(self, problem: ChoiceProblem, *, seed: int = 0) -> Answer:
        """Return a choice, of which nothing is proved; a memory limit is left out of account.

        Raises:
            ShardingError: what the agent decided is not possible; that proves nothing.
        """
        learned = self.learn(problem, seed=seed)
        if self.reward == "price":
            if not np.isfinite(learned.seconds):
                raise ShardingError("no game ended with a choice that is possible; elimination proves whether any is")
            return Answer(learned.chosen, learned.seconds)
        found = self.finish.run(with_places(problem, learned.best.places()))
        return Answer(found.chosen, found.seconds)

    def learn(self, problem: ChoiceProblem, *, seed: int = 0) -> Learned:
        """Train an agent; return its best game and its own."""
        links = links_by_price(problem) if self.links is None else self.links
        decided = tuple(range(len(problem.seconds))) if self.decided is None else self.decided
        game = Game(Board.of(problem, links, decided), self.reward)
        game_end = game.copy()
        if game.is_over:
            return self._learned(problem, [game_end], game_end)
        learner = Learner(self.settings, game.num_features, 2, seed)
        best, cheapest, heard = None, game_end, 0
        while learner.steps < self.settings.num_steps:
            _play(game, learner)
            if best is None or game.score > best.score:
                best = game.copy()
            cheapest = game.copy() if not cheapest.is_over or game.seconds < cheapest.seconds else cheapest
            if self.told is not None and learner.steps - heard >= self.every:
                heard = learner.steps
                self.told(Heard(heard, best.score, _own(game, learner).score))
        own = _own(game, learner)
        best = own if best is None or own.score > best.score else best
        return self._learned(problem, [best, cheapest, own], own)

    def _learned(self, problem: ChoiceProblem, games: list[Game], own: Game) -> Learned:
        if self.reward != "price":
            return Learned(games[0], own, (), float("inf"))
        choices = [tuple(one.chosen_N.tolist()) for one in games]
        seconds = [problem.price(one) for one in choices]
        at = int(np.argmin(seconds))
        return Learned(games[0], own, choices[at], seconds[at])


def with_places(problem: ChoiceProblem, places: Mapping[int, int]) -> ChoiceProblem:
    """Return the problem in which these nodes have these options."""
    seconds = list(problem.seconds)
    for node, option in places.items():
        others = np.arange(len(seconds[node])) != option
        seconds[node] = np.where(others, np.inf, seconds[node])
    return ChoiceProblem(tuple(seconds), problem.edges, problem.bytes, problem.capacity_bytes)


def _play(game: Game, learner: Learner) -> None:
    """Play one game to its end, and learn from every move."""
    state = game.begin()
    while not game.is_over:
        action = learner.choose(state, game.allowed_A, learner.epsilon)
        reward = game.move(action)
        after = game.state
        learner.replay.add(state, action, reward, after, game.allowed_A)
        learner.learn()
        state = after


def _own(game: Game, learner: Learner) -> Game:
    """Return the game that the agent plays without random moves."""
    own = game.copy()
    state = own.begin()
    while not own.is_over:
        own.move(learner.choose(state, own.allowed_A, 0.0))
        state = own.state
    return own
