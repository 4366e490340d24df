"""The zoo's GPT whose ranks take their time, without a core, while a file named `wait` is in the project's folder.

What happens to a training can then be tested in the midst of it, however fast or busy the machine is.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from dejavu.workload.data import ExampleShape
from dejavu.workload.models import LayerBuilder
from dejavu.workload.models.gpt import GPT

SECONDS = 0.2  # of each microbatch: a rank that does nothing at all would count as stuck


@dataclass(frozen=True)
class Patient(GPT):
    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        first, *others = super().layers(shape)

        def build() -> nn.Module:
            made = first.build()
            if "RANK" in os.environ:
                made.register_forward_pre_hook(lambda module, inputs: rest())
            return made

        return (replace(first, build=build, work=lambda: "embedding"), *others)


def rest() -> None:
    if Path(__file__).with_name("wait").exists():
        time.sleep(SECONDS)
