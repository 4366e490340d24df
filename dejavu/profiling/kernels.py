"""Measure single kernels on a device that is present, in a process of its own, as `profiling.layers` does with layers.

A kernel is rebuilt from its record, with contiguous tensors of its sizes. Where the record is not enough (the shape of
a filter, the table of an embedding), the kernel is left to predictors: `can_measure` says which.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dejavu.foundation.errors import DejavuError
from dejavu.graphs.kernels import RECURRENT, base_name
from dejavu.profiles.kernel import Kernel
from dejavu.profiling.measuring import measured_here
from dejavu.runtime.process import claim_device, die_with_parent, go_first, named_parent
from dejavu.runtime.process.failures import what_failed
from dejavu.timing.spread import spread

if TYPE_CHECKING:
    from dejavu.profiles import Measurement

WARMUP_REPEATS = 3
LEAST_REPEATS = 3
MOST_REPEATS = 100
SECONDS_PER_KERNEL = 0.25
# A GPU waits until the host has launched all repeats: so many clock cycles for what launches take, and some to spare.
CYCLES_PER_SECOND = 2e9
SPARE = 2.0
EVENT_SECONDS = 10e-6  # to record two events
# Two events around one launch add some 3 us: around short kernels they are put around several, and the time is divided.
SECONDS_TOGETHER = 100e-6
MOST_TOGETHER = 32
MOST_LAUNCHES = 200  # in all, of up to four kernels: where some 1,000 wait, CUDA lets the host launch no further
LAUNCHES_OF_LOOK = 3
LEAST_SECONDS = 1e-9  # the clock's own resolution

aten = torch.ops.aten
Work = Callable[[], Any]

_UNARY = "relu gelu tanh sigmoid silu exp sqrt rsqrt neg abs sin cos log erf"
_BINARY = "add mul sub div maximum minimum"
_OF_GRADIENT: dict[str, Callable[..., Any]] = {  # of a gradient and one more tensor
    "gelu_backward": aten.gelu_backward,
    "tanh_backward": aten.tanh_backward,
    "sigmoid_backward": aten.sigmoid_backward,
    "silu_backward": aten.silu_backward,
    "threshold_backward": lambda gradient, x: aten.threshold_backward(gradient, x, 0),
}
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "logsumexp": torch.logsumexp,
}
_SOFTMAX = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
_SOFTMAX_BACKWARD = {
    "softmax_backward_data": aten._softmax_backward_data,
    "log_softmax_backward_data": aten._log_softmax_backward_data,
}


class OperatorError(DejavuError):
    """A kernel that could not be measured."""


def can_measure(kernel: Kernel) -> bool:
    """Return whether the kernel's record is enough to run it."""
    if kernel.is_indexed and kernel.family != "reduction":  # nothing says in which order its tensors lie
        return False
    return kernel.family in _BUILDERS and _work(kernel, torch.device("meta")) is not None


def measure_kernels(
    kernels: Sequence[Kernel], device_type: str, *, core: int = 0, progress: Callable[[str], None] = lambda name: None
) -> Iterator[Measurement]:
    """Measure each kernel that can be, in order; yield rows of the database, and call `progress` before each.

    Args:
        core: the index of the core or GPU of this machine.

    Raises:
        OperatorError: the measuring process failed.
    """
    known = [kernel for kernel in kernels if can_measure(kernel)]
    if not known:
        return
    with tempfile.TemporaryFile("w+") as job, tempfile.TemporaryFile("w+") as errors:
        json.dump({"core": core, "kernels": [kernel.to_json() for kernel in known]}, job)
        job.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-m", "dejavu.profiling.kernels"],
            stdin=job,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **named_parent()},
        )
        try:
            assert child.stdout is not None
            for kernel in known:
                progress(f"{kernel.family} {kernel.name} on {device_type}")
                line = child.stdout.readline()
                if not line:
                    break
                yield _row(kernel, device_type, json.loads(line))
            if child.wait():
                errors.seek(0)
                raise OperatorError(what_failed(f"measuring kernels on {device_type}", errors.read()))
        finally:
            child.kill()
            child.communicate()


def _row(kernel: Kernel, device_type: str, figures: dict[str, Any]) -> Measurement:
    return measured_here(
        kind="operator",
        subject=kernel.subject,
        name=f"{kernel.family} {kernel.name}",
        device_type=device_type,
        dtype=kernel.dtype,
        flops=kernel.flops,
        how="one kernel again and again in a process of its own, one thread; tensors as the kernel left them in caches",
        extra=kernel.to_json(),
        **figures,
    )


def _main() -> None:
    """Run the measuring process: print one line of JSON for each kernel."""
    die_with_parent(signal.SIGKILL)
    job = json.load(sys.stdin)
    device = claim_device(job["core"])
    if device.type == "cpu":
        go_first()
    for text in job["kernels"]:
        kernel = Kernel.from_json(text)
        torch.backends.cuda.matmul.allow_tf32 = kernel.dtype == "tfloat32"
        work = _work(kernel, device)
        assert work is not None
        print(json.dumps(spread(time_work(work, device))), flush=True)


def time_work(work: Work, device: torch.device) -> list[float]:
    """Return seconds of every repeat: CPU time on a CPU; on a GPU its own, whatever the host needs to launch it."""
    for _ in range(WARMUP_REPEATS):
        work()
    if device.type == "cuda":
        return _time_on_gpu(work)
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < LEAST_REPEATS or (
        len(seconds) < MOST_REPEATS and time.perf_counter() - started < SECONDS_PER_KERNEL
    ):
        before = time.process_time()  # of this pinned process only: without other programs' share of the core
        work()
        seconds.append(max(time.process_time() - before, LEAST_SECONDS))
    return seconds


def _time_on_gpu(work: Work) -> list[float]:
    """Time repeats that follow each other without a gap, as in a training that keeps its GPU busy.

    A host takes 5 to 25 us to launch a kernel. Were the GPU idle meanwhile, that time would be taken for the kernel's.
    A repeat is one launch of a long kernel; of a short one it is the mean of so many as make `SECONDS_TOGETHER`.
    """
    torch.cuda.synchronize()
    before = time.perf_counter()
    work()
    launch_seconds = max(time.perf_counter() - before, LEAST_SECONDS)
    (once,) = _repeats_on_gpu(work, 1, LAUNCHES_OF_LOOK, launch_seconds)
    together = max(1, min(MOST_TOGETHER, round(SECONDS_TOGETHER / once)))
    most = min(MOST_REPEATS, MOST_LAUNCHES // together)
    repeats = max(LEAST_REPEATS, min(most, int(SECONDS_PER_KERNEL / (together * max(once, launch_seconds)))))
    return _repeats_on_gpu(work, repeats, together, launch_seconds)


def _repeats_on_gpu(work: Work, repeats: int, together: int, launch_seconds: float) -> list[float]:
    """Return the mean seconds of a launch in each repeat, which is so many launches between two events."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    launching_seconds = repeats * (together * launch_seconds + EVENT_SECONDS)
    torch.cuda._sleep(int(SPARE * CYCLES_PER_SECOND * launching_seconds))
    for start, stop in events:
        start.record()
        for _ in range(together):
            work()
        stop.record()
    torch.cuda.synchronize()
    return [max(start.elapsed_time(stop) / 1e3 / together, LEAST_SECONDS) for start, stop in events]


def _work(kernel: Kernel, device: torch.device) -> Work | None:
    """Return a function that runs the kernel once; None where its record is not enough. `meta` allocates nothing."""
    dtype = getattr(torch, "float32" if kernel.dtype == "tfloat32" else kernel.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None

    def tensor(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=dtype, device=device)

    return _BUILDERS[kernel.family](kernel, tensor)


def _matmul(kernel: Kernel, tensor: Callable[..., torch.Tensor]) -> Work | None:
    if base_name(kernel.name) == RECURRENT:  # its products wait for one another
        return None
    a, b = tensor(kernel.batch, kernel.m, kernel.k), tensor(kernel.batch, kernel.k, kernel.n)
    if kernel.batch > 1:
        return lambda: torch.bmm(a, b)
    if kernel.name in ("addmm", "linear"):
        bias = tensor(kernel.n)
        return lambda: torch.addmm(bias, a[0], b[0])
    return lambda: torch.mm(a[0], b[0])


def _attention(kernel: Kernel, tensor: Callable[..., torch.Tensor]) -> Work | None:
    query = tensor(1, kernel.batch, kernel.m, kernel.k)
    key, value = (tensor(1, kernel.batch, kernel.n, kernel.k) for _ in range(2))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=kernel.is_causal)
    if not kernel.is_backward:
        return lambda: attend(query, key, value)
    inputs = [each.requires_grad_() for each in (query, key, value)]
    output = attend(query, key, value)
    arriving = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, inputs, arriving, retain_graph=True)


def _softmax(kernel: Kernel, tensor: Callable[..., torch.Tensor]) -> Work | None:
    x = tensor(kernel.m, kernel.n)
    if kernel.name in _SOFTMAX:
        forward = _SOFTMAX[kernel.name]
        return lambda: forward(x, -1)
    if kernel.name in _SOFTMAX_BACKWARD:
        backward, gradient = _SOFTMAX_BACKWARD[kernel.name], tensor(kernel.m, kernel.n)
        return lambda: backward(gradient, x, -1, x.dtype)
    return None


def _normalization(kernel: Kernel, tensor: Callable[..., torch.Tensor]) -> Work | None:
    x, weight, bias = tensor(kernel.m, kernel.n), tensor(kernel.n), tensor(kernel.n)
    if kernel.name in ("native_layer_norm", "layer_norm"):
        return lambda: aten.native_layer_norm(x, [kernel.n], weight, bias, 1e-5)
    if kernel.name == "native_layer_norm_backward":
        # On GPUs means and scales of 16-bit rows are float32: as the forward pass gives them.
        _, mean, scale = aten.native_layer_norm(x, [kernel.n], weight, bias, 1e-5)
        gradient, every = tensor(kernel.m, kernel.n), [True, True, True]
        return lambda: aten.native_layer_norm_backward(gradient, x, [kernel.n], mean, scale, weight, bias, every)
    return None


def _reduction(kernel: Kernel, tensor: Callable[..., torch.Tensor]) -> Work | None:
    reduce = _REDUCTIONS.get(kernel.name)
    x, dim = (tensor(kernel.n, kernel.m), 0) if kernel.is_indexed else (tensor(kernel.m, kernel.n), -1)
    return None if reduce is None else lambda: reduce(x, dim)


def _elementwise(kernel: Kernel, tensor: Callable[..., torch.Tensor]) -> Work | None:
    x = tensor(kernel.m)
    if kernel.name in _UNARY.split():
        function = getattr(torch.nn.functional if kernel.name in ("relu", "gelu", "silu") else torch, kernel.name)
        return lambda: function(x)
    if kernel.name in _OF_GRADIENT:
        backward, gradient = _OF_GRADIENT[kernel.name], tensor(kernel.m)
        return lambda: backward(gradient, x)
    if kernel.name not in _BINARY.split():
        return None
    function = getattr(torch, kernel.name)
    others = round(kernel.read_bytes / x.element_size()) - kernel.m  # elements of the second operand, if it has any
    if others <= 1:
        return (lambda: function(x, 2.0)) if kernel.name in ("add", "mul", "sub", "div") else None
    if kernel.m % others:
        return None
    rows, other = x.view(-1, others), tensor(others)
    return lambda: function(rows, other)


def _copy(kernel: Kernel, tensor: Callable[..., torch.Tensor]) -> Work | None:
    x = tensor(kernel.m)
    if kernel.name == "clone":
        return lambda: x.clone()
    if kernel.name in ("zeros", "zeros_like", "new_zeros"):
        return lambda: torch.zeros_like(x)
    return None


_BUILDERS: dict[str, Callable[[Kernel, Callable[..., torch.Tensor]], Work | None]] = {
    "matmul": _matmul,
    "attention": _attention,
    "softmax": _softmax,
    "normalization": _normalization,
    "reduction": _reduction,
    "elementwise": _elementwise,
    "copy": _copy,
}


if __name__ == "__main__":
    _main()
