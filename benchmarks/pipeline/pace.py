"""How fast this machine is just now: a fixed piece of work on every core at once.

A machine that others share may be a quarter slower within minutes. Costs that were measured at another pace than the
training that they foretell are corrected by the ratio of the two; what is left is the simulation's own error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import mean, median

import torch
from torch import nn

from dejavu.runtime.process import claim_device, rank_environment

REPEATS = 40  # some milliseconds each
WARMUP_REPEATS = 3


def own_pace_seconds() -> float:
    """What the work takes on this core now: matrix products, a convolution, norms, forward and backward; median."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))
    image = nn.Sequential(nn.Conv2d(48, 48, 3, padding=1), nn.GroupNorm(1, 48), nn.ReLU())
    tokens, pixels = torch.randn(256, 192, requires_grad=True), torch.randn(2, 48, 28, 28, requires_grad=True)
    seconds = []
    for _ in range(WARMUP_REPEATS + REPEATS):
        began = time.perf_counter()
        (wide(tokens).sum() + image(pixels).sum()).backward()
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARMUP_REPEATS:])


def pace_seconds() -> float:
    """The mean over all cores, busy at once."""
    environment = {**rank_environment(), "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", __spec__.name]
    cores = range(len(os.sched_getaffinity(0)))
    asked = [subprocess.Popen([*words, str(core)], stdout=subprocess.PIPE, env=environment) for core in cores]
    return mean(float(process.communicate()[0]) for process in asked)


if __name__ == "__main__":
    claim_device(int(sys.argv[1]))
    own_pace_seconds()  # until the others have started, too
    print(own_pace_seconds())
