"""What a slice of a sequence takes on a stage of a causal decoder, by the predictor of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dejavu.cluster import DeviceType
from dejavu.cost.kernels.learned import Learned, shipped
from dejavu.cost.kernels.sequence import OwnTokens, attending
from dejavu.foundation.errors import InputError
from dejavu.graphs.graph import Layer
from dejavu.graphs.kernels import kernel_of
from dejavu.plans.slicing import Floats
from dejavu.profiles.kernel import Kernel


def slice_seconds(
    layers: Sequence[Layer], device: DeviceType, num_tokens: int, num_units: int, learned: Learned | None = None
) -> Floats:
    """Return what slices take through these layers, forward and backward, as `best_slices` wants them.

    Everything but attention is of the slice's own tokens; attention is of its queries and all keys until its end.

    Args:
        layers: of one stage, captured for GPUs, whose attention is causal (nobody checks that it is).
        num_tokens: positions of the whole sequence; into `num_units` equal units.
        learned: the predictor; None: the one that is shipped.

    Returns:
        Seconds (L, L): [j − 1, i] of j units after a context of i; 0 where i + j > L.

    Raises:
        InputError: the tokens do not divide into units, a layer's attention is no kernel of its own, or the device does
            not compute in the layers' type.
    """
    if num_units < 1 or num_tokens % num_units:
        raise InputError(f"{num_tokens} tokens in {num_units} units; wanted equal units")
    alone, attention = _kernels(layers, num_tokens)
    places = [(j, i) for j in range(1, num_units + 1) for i in range(num_units - j + 1)]
    wanted = [part for j in range(1, num_units + 1) for part in _parts(alone, num_units, j)]
    wanted += [
        attending(kernel, j / num_units, (i + j) / num_units, is_causal=kernel.is_causal)
        for j, i in places
        for kernel in attention
    ]
    seconds_K = (learned or shipped()).predict(wanted, device).seconds_K
    if not np.isfinite(seconds_K).all():
        bad = wanted[int(np.flatnonzero(~np.isfinite(seconds_K))[0])]
        raise InputError(f"{bad.name} in {bad.dtype} has no time on {device.name}; wanted a type that it computes in")
    split = len(alone) * num_units
    own_L = seconds_K[:split].reshape(num_units, len(alone)).sum(axis=1)
    attention_P = seconds_K[split:].reshape(len(places), len(attention)).sum(axis=1)
    found = np.zeros((num_units, num_units))
    for (j, i), seconds in zip(places, attention_P, strict=True):
        found[j - 1, i] = own_L[j - 1] + seconds
    return found


def _kernels(layers: Sequence[Layer], num_tokens: int) -> tuple[list[tuple[Kernel, bool]], list[Kernel]]:
    """Return the kernels of a slice's own tokens, each with whether it holds weights, and those of attention."""
    alone, attention = list[tuple[Kernel, bool]](), list[Kernel]()
    for layer in layers:
        for operator in layer.operators:
            kernel = kernel_of(operator)
            if kernel is None:
                continue
            if kernel.family == "attention" and kernel.m == kernel.n == num_tokens:
                attention.append(kernel)
            elif kernel.family in ("attention", "softmax") or (kernel.family == "matmul" and kernel.batch > 1):
                raise InputError(
                    f"layer {layer.name} attends by {operator.kind} with {kernel.m} queries and {kernel.n} keys; "
                    f"wanted attention as one kernel of {num_tokens} positions: capture the model for GPUs"
                )
            else:
                alone.append((kernel, operator.parameter_bytes > 0))
    return alone, attention


def _parts(alone: Sequence[tuple[Kernel, bool]], num_units: int, units: int) -> list[Kernel]:
    """Return the kernels of so many units of the sequence."""
    if units == num_units:
        return [kernel for kernel, _ in alone]
    one = [(OwnTokens(num_units).part(kernel, holds_weights=holds), kernel) for kernel, holds in alone]
    return [_times(part, whole, units) for part, whole in one]


def _times(part: Kernel, whole: Kernel, units: int) -> Kernel:
    side = "k" if part.k != whole.k else "m"
    work = {name: getattr(part, name) * units for name in ("flops", "read_bytes", "written_bytes")}
    return replace(part, **{side: getattr(part, side) * units}, **work)
