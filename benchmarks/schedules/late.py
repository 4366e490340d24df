"""What late gradients do to a loss: a deep perceptron on handwritten digits, by each schedule's version rule."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from dejavu.schedules import PIPELINE_SCHEDULES, simulate_schedule
from dejavu.schedules.training import Rates, train_by
from dejavu.simulation import StageSeconds

NUM_RANKS = NUM_MICROBATCHES = 8
BATCH, WIDTH, LAST_STEPS = 64, 32, 10
LEARNING_RATES = (0.03, 0.1)  # at 0.3 one process itself is unstable, and rounding decides
ONE_STEP = "1f1b"
# Which schedule, and which of PipeMare's corrections: learning rates (T1), weights of the backward pass (T2).
WAYS = {
    ONE_STEP: (ONE_STEP, False, False),
    "chimera": ("chimera", False, False),
    "pipedream": ("pipedream", False, False),
    "pipedream_2bw": ("pipedream_2bw", False, False),
    "ampnet": ("ampnet", False, False),
    "pipemare without corrections": ("pipemare", False, False),
    "pipemare, T1": ("pipemare", True, False),
    "pipemare, T2": ("pipemare", False, True),
    "pipemare": ("pipemare", True, True),
}


def late_rows(num_steps: int, num_seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way and learning rate: medians over seeds of the mean loss of the last steps."""
    for learning_rate in LEARNING_RATES:
        for way, (name, reschedules, corrects) in WAYS.items():
            schedule = PIPELINE_SCHEDULES[name]
            taus = schedule.theory(NUM_RANKS, NUM_MICROBATCHES).staleness_steps_P or ()
            # An update after each microbatch moves as far in a step as one update of all.
            updates = NUM_MICROBATCHES / schedule.microbatches_per_update(NUM_MICROBATCHES)
            rates = Rates(learning_rate / updates, num_steps // 4 if reschedules else 0, corrects, taus)
            runs = [_losses(name, rates, num_steps, seed) for seed in range(num_seeds)]
            ended = [statistics.fmean(losses[-LAST_STEPS:]) for losses in runs]
            finite = [loss for loss in ended if math.isfinite(loss)]
            stages = [StageSeconds(1.0, 2.0, 0.0)] * NUM_RANKS
            simulated = simulate_schedule(schedule, stages, NUM_MICROBATCHES)
            yield {
                "what": "training",
                "way": way,
                "learning_rate": learning_rate,
                "staleness_steps": simulated.staleness_steps,
                "final_loss": statistics.median(finite) if len(finite) == len(ended) else None,
                "diverged": len(ended) - len(finite),
                "seeds": num_seeds,
                "steps": num_steps,
            }


def _losses(name: str, rates: Rates, num_steps: int, seed: int) -> list[float]:
    stages, batches = perceptron(NUM_RANKS, seed), digits_batches(num_steps, seed)
    return train_by(PIPELINE_SCHEDULES[name], stages, batches, nn.functional.cross_entropy, rates, NUM_MICROBATCHES)


def perceptron(num_stages: int, seed: int) -> list[nn.Sequential]:
    """Draw a perceptron of so many stages, a layer each."""
    torch.manual_seed(seed)
    widths = [64, *[WIDTH] * (num_stages - 1), 10]
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    for layer in layers:
        nn.init.xavier_normal_(layer.weight, nn.init.calculate_gain("tanh"))  # torch's own start is flat at this depth
    return [nn.Sequential(layer, nn.Tanh()) for layer in layers[:-1]] + [nn.Sequential(layers[-1])]


def digits_batches(num_steps: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw handwritten digits for so many steps."""
    digits = load_digits()
    inputs = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    targets = torch.tensor(digits.target)
    drawn = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, len(inputs), (BATCH,), generator=drawn) for _ in range(num_steps)]
    return [(inputs[places], targets[places]) for places in rows]
