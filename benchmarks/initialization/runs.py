"""One training of a task until its targets are reached; a plain function that a Dask worker runs."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.initialization.tasks import TASKS
from dejavu.init import Draw
from dejavu.runtime.optimizer import make_optimizer
from dejavu.runtime.state import read_trial, restore_state
from dejavu.runtime.training import Layers, WholeModel, build_layers, train
from dejavu.trials import TrialResult
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import model_of

AVERAGED_STEPS = 10  # of the running training loss: one batch is noise
TESTED_EVERY_STEPS = 10
NUM_TESTED = 256  # held-out examples


@dataclass(frozen=True)
class Start:
    """Where a training begins: at a draw, or where a trial stopped."""

    draw: Draw
    losses: tuple[float, ...] = ()
    state: str = ""

    @classmethod
    def of(cls, winner: TrialResult) -> Start:
        return cls(winner.draw, winner.losses, winner.state)


@dataclass(frozen=True)
class Run:
    """What came of it.

    Attributes:
        losses: of each training step, the trial's own included.
        most_steps: after which it would have stopped.
        train_steps, test_steps: until the targets; None: not within `most_steps`.
        test_loss: at the end of the run.
    """

    losses: tuple[float, ...]
    most_steps: int
    train_steps: int | None
    test_steps: int | None
    test_loss: float


class _Stop(Exception):
    pass


def workload_of(task: str, seed: int) -> Workload:
    """The task with data order and split of this seed, and no trials but those that a search is compared by."""
    workload = TASKS[task].workload
    return workload.model_copy(update={"seed": seed, "trials": workload.trials.model_copy(update={"default_draws": 0})})


def train_to_target(task: str, seed: int, start: Start, to_the_end: bool, most_steps: int) -> dict[str, Any]:
    """Train until both targets are reached, or to the last step; a `Run` as plain values."""
    torch.set_num_threads(1)
    workload, goal, cpu = workload_of(task, seed), TASKS[task], torch.device("cpu")
    module = build_layers(workload, start.draw, cpu)
    optimizer = make_optimizer(workload.optimizer, module.parameters())
    if start.state:
        restore_state(module, optimizer, read_trial(Path(start.state), {name for name, _ in module.named_children()}))
    losses = list(start.losses)
    recent = deque(losses[-AVERAGED_STEPS:], AVERAGED_STEPS)
    reached: dict[str, int | None] = {"train": _first_reached(losses, goal.train_loss), "test": None}

    def on_step(step: int, loss: float | None, seconds: float, per_step_seconds: float) -> None:
        assert loss is not None
        losses.append(loss)
        recent.append(loss)
        done = step + 1
        if reached["train"] is None and len(recent) == AVERAGED_STEPS and sum(recent) / len(recent) <= goal.train_loss:
            reached["train"] = done
        if reached["test"] is None and done % TESTED_EVERY_STEPS == 0 and test(module, workload) <= goal.test_loss:
            reached["test"] = done
        if not to_the_end and None not in reached.values():
            raise _Stop
        if loss != loss:  # it will not come back
            raise _Stop

    try:
        executor = WholeModel(module, workload)
        train(executor, optimizer, workload, range(len(losses), most_steps), device=cpu, on_step=on_step)
    except _Stop:
        pass
    return asdict(Run(tuple(losses), most_steps, reached["train"], reached["test"], test(module, workload)))


def _first_reached(losses: list[float], target: float) -> int | None:
    windows = ((k, losses[k - AVERAGED_STEPS : k]) for k in range(AVERAGED_STEPS, len(losses) + 1))
    return next((k for k, window in windows if sum(window) / AVERAGED_STEPS <= target), None)


def test(module: Layers, workload: Workload) -> float:
    """Mean loss of held-out examples."""
    inputs, targets = dataset_of(workload).test_batch(NUM_TESTED, seed=workload.seed)
    with torch.no_grad():
        return float(model_of(workload).loss(module(inputs), targets))
