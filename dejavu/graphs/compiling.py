"""Layers whose kernels torch's compiler fuses (`compile: true`), and the time that takes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.foundation.user_cache import user_cache_folder

MOST_FORMS = 256  # of layers that share their code: torch's own limit is 8, beyond which it stops to compile silently

CACHE, TORCHS_OWN = "TORCHINDUCTOR_CACHE_DIR", "torchinductor_"  # a folder in /tmp, which does not outlive the machine


def check_compiler() -> None:
    """Check that there is what torch's compiler calls for CPU kernels.

    Raises:
        InputError: there is not.
    """
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([named] if named else ["g++", "clang++"])):
        raise InputError(
            f"compile is true, and {named or 'neither g++ nor clang++'} is not on the path; wanted a C++ compiler, or "
            "compile: false",
            ("compile",),
        )


def compile_layers(layers: nn.Module) -> None:
    """Let each layer's forward pass, and so its backward pass, run compiled from its first call on.

    What is around a layer stays as it is: its random stream, hooks (FSDP's, tensor parallelism's), recomputation, the
    names of weights. Layers of the same code and shapes are compiled once. Changes settings of this process's compiler:
    random numbers are drawn as without it, and it starts no processes, which a rank that is killed would leave behind.
    """
    if Path(os.environ.get(CACHE, TORCHS_OWN)).name.startswith(TORCHS_OWN):  # by torch
        os.environ[CACHE] = str(user_cache_folder() / "inductor")
    import torch._dynamo.config as tracing  # seconds
    import torch._inductor.config as generating

    tracing.recompile_limit = MOST_FORMS
    generating.compile_threads = 1
    generating.fallback_random = True
    for layer in layers.children():
        layer.forward = torch.compile(layer.forward, dynamic=False)


class CompileClock:
    """How long this process has compiled since it was made.

    Args:
        on_compiled: called after each piece of code: a backward pass is compiled when it first runs.
    """

    def __init__(self, on_compiled: Callable[[], None] = lambda: None) -> None:
        from torch._dynamo.callback import callback_handler  # seconds

        self.seconds, self._started, self._on_compiled = 0.0, 0.0, on_compiled
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def _begin(self, about: object) -> None:
        self._started = time.perf_counter()

    def _end(self, about: object) -> None:
        self.seconds += time.perf_counter() - self._started
        self._on_compiled()
