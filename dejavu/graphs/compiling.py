"""Layers whose kernels torch's compiler fuses (`compile: true`), and the time that takes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.user_cache import user_cache_folder
from dejavu.graphs.in_parts.own_buffers import BuffersBefore, OwnBuffers, Run

MOST_FORMS = 256  # of layers that share their code: torch's own limit is 8, beyond which it stops to compile silently

CACHE, TORCHS_OWN = "TORCHINDUCTOR_CACHE_DIR", "torchinductor_"  # a folder in /tmp, which does not outlive the machine


class ChangedBufferError(DejavuError):
    """A compiled layer changes buffers in a way that torch's compiler may make wrong gradients of."""


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
    for name, layer in layers.named_children():
        layer.forward = _compiled(name, layer)


def _compiled(name: str, layer: nn.Module) -> Run:
    """Return a layer's compiled forward pass.

    Torch's compiler makes values again in the backward pass of a buffer that it has read before the forward pass
    changed it (pytorch/pytorch#197039): gradients are wrong without a word, or autograd refuses what it saved. So no
    buffer changes that its graphs are given: they copy it, and return the copy as the layer's new buffer. Which these
    are is seen in a pass that is not compiled, before the first.
    """
    plain: Run = layer.forward
    whole: Run = torch.compile(plain, dynamic=False)
    if next(layer.buffers(), None) is None:
        return whole
    own = OwnBuffers(layer)

    def renewing(x: torch.Tensor) -> torch.Tensor:
        own.renew()
        return plain(x)

    on_copies: Run = torch.compile(renewing, dynamic=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():  # no backward pass will read them
            return whole(x)
        if own.changed is None:
            devices = [x.device] if x.is_cuda else []
            with torch.no_grad(), torch.random.fork_rng(devices), BuffersBefore(layer), own.looking():
                plain(x)
            if own.changes_views:
                raise ChangedBufferError(
                    f"layer {name!r} changes buffers that are views of one another, of which what torch compiles may "
                    "have wrong gradients; wanted one buffer, or compile: false"
                )
        versions = [(buffer, one, one._version) for buffer, one in layer.named_buffers()]
        output = (on_copies if own.changed else whole)(x)
        for buffer, one, version in versions:
            if one._version != version:
                raise ChangedBufferError(
                    f"layer {name!r} changes its buffer {buffer!r} in this forward pass, and did not in its first, and "
                    "what torch compiled may have wrong gradients then; wanted a buffer that each pass in training "
                    "changes, or none does, or compile: false"
                )
        return output

    return forward


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
