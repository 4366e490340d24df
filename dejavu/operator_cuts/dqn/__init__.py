"""Auto-MAP's way: an agent learns to cut, on the problem itself or beforehand on arrays drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dejavu.operator_cuts._base import Answer, Best, Cutter, NoneFound
from dejavu.operator_cuts.dqn.environment import Game, num_features
from dejavu.operator_cuts.generated import Draw, generated_arrays
from dejavu.operator_cuts.problem import CutPlan, CutProblem
from dejavu.q_learning import Learner, Settings

__all__ = ["Dqn", "DqnOffline", "Settings", "greedy_plan", "play", "train_offline"]

ONLINE, OFFLINE = Settings(), Settings(num_steps=20_000)
INTERACTIONS = 100  # plans that an agent trained beforehand may price


@dataclass(frozen=True)
class Dqn(Cutter):
    """Learns by playing the problem; keeps the best plan that it met. Proves nothing.

    Attributes:
        every: after so many moves `told` hears the moves, the best step, and that of the plan without random moves.
    """

    name: ClassVar[str] = "dqn"
    settings: Settings = ONLINE
    every: int = 250
    told: Callable[[int, float, float], None] | None = field(default=None, compare=False)

    def run(self, problem: CutProblem, *, seed: int = 0) -> Answer:
        best = Best(problem)
        best.offer(CutPlan())
        game = Game(problem, best, self.settings.discount)
        if game.num_moves and problem.most_stages > 1:
            learner = Learner(self.settings, num_features(len(problem.arrays)), game.num_moves, seed)
            while learner.steps < self.settings.num_steps:
                play(game, learner, learns=True)
                if self.told is not None and learner.steps % self.every < problem.most_stages - 1:
                    self.told(learner.steps, best.step_seconds, greedy_plan(problem, learner).step_seconds)
        return _answer(best, self.name)


@dataclass(frozen=True)
class DqnOffline(Cutter):
    """Learns on arrays drawn at random, each game on others; then prices few plans of the problem itself.

    Attributes:
        interactions: plans of the problem that may be priced.
        epsilon: share of random moves meanwhile; the first game has none.
    """

    name: ClassVar[str] = "dqn_offline"
    draw: Draw = "uniform"
    settings: Settings = OFFLINE
    interactions: int = INTERACTIONS
    epsilon: float = 0.1

    def run(self, problem: CutProblem, *, seed: int = 0) -> Answer:
        return self.infer(problem, train_offline(problem, self.draw, self.settings, seed))

    def infer(self, problem: CutProblem, learner: Learner | None) -> Answer:
        """Answer with an agent that was trained for as many points, and for these servers and device cuts."""
        best = Best(problem)
        best.offer(CutPlan())
        if learner is not None:
            best = greedy_plan(problem, learner)
            game = Game(problem, best)
            while best.num_priced < self.interactions:
                play(game, learner, learns=False, epsilon=self.epsilon)
        return _answer(best, self.name)


def train_offline(problem: CutProblem, draw: Draw, settings: Settings, seed: int) -> Learner | None:
    """Train an agent on generated arrays, of as many points and for the same servers and device cuts as the problem's.

    None where there is nothing to choose.
    """
    game = Game(problem, Best(problem))
    if not game.num_moves or problem.most_stages < 2:
        return None
    learner = Learner(settings, num_features(len(problem.arrays)), game.num_moves, seed)
    while learner.steps < settings.num_steps:
        arrays = generated_arrays(draw, len(problem.arrays), int(learner.rng.integers(2**31)))
        other = replace(problem, arrays=arrays)
        play(Game(other, Best(other), settings.discount), learner, learns=True)
    return learner


def play(game: Game, learner: Learner, *, learns: bool, epsilon: float | None = None) -> None:
    """Play one game, to the last allowed cut."""
    state, allowed_A = game.begin(), game.allowed_A
    while allowed_A.any():
        action = learner.choose(state, allowed_A, learner.epsilon if epsilon is None else epsilon)
        reward = game.move(action)
        after, allowed_after_A = game.state, game.allowed_A
        if learns:
            learner.replay.add(state, action, reward, after, allowed_after_A)
            learner.learn()
        state, allowed_A = after, allowed_after_A


def greedy_plan(problem: CutProblem, learner: Learner) -> Best:
    """Play one game without random moves; return the best of its plans."""
    best = Best(problem)
    best.offer(CutPlan())
    play(Game(problem, best), learner, learns=False, epsilon=0.0)
    return best


def _answer(best: Best, member: str) -> Answer:
    if best.step_seconds == float("inf"):
        return NoneFound(member, best.cpu_seconds)
    return best.found(member, 0.0)
