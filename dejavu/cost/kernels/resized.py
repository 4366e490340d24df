"""Kernels of other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dejavu.profiles.kernel import Kernel


def resized(kernel: Kernel, sizes: Mapping[str, Any]) -> Kernel:
    """Return the kernel of other sizes, its work and traffic in proportion."""
    part = replace(kernel, **sizes)
    work, read, written = (of(part) / of(kernel) for of in (_products, _read_elements, _written_elements))
    return replace(
        part,
        flops=kernel.flops * work,
        read_bytes=kernel.read_bytes * read,
        written_bytes=kernel.written_bytes * written,
    )


def _products(kernel: Kernel) -> float:
    return float(kernel.batch) * kernel.m * kernel.n * kernel.k


def _read_elements(kernel: Kernel) -> float:
    if kernel.family != "matmul":
        return _products(kernel)
    return float(kernel.batch) * (kernel.m * kernel.k + kernel.k * kernel.n)


def _written_elements(kernel: Kernel) -> float:
    return float(kernel.batch) * kernel.m * kernel.n if kernel.family == "matmul" else _products(kernel)
