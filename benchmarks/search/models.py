"""Generated models for planner problems: as blocks, or as operators. Every number follows from the generator given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TOKENS_PER_MICROBATCH = 4096
_KEPT_TENSORS = 16.0  # activations that a block keeps, in tensors as large as its output
BYTES = 2.0  # of one number that is kept or sent
_WIDTHS = (1024.0, 1536.0, 2048.0, 3072.0)
_SEQUENCE = 1024.0  # tokens that attend to each other
_HEAD_WIDTH = 128.0
_FLOPS_PER_BYTE = 100.0  # how many operations a device does while it moves a byte: small operators cost their bytes


@dataclass(frozen=True, eq=False)
class Model:
    """What the layers ask for, whatever the device; every array has L entries.

    Attributes:
        weights: parameters.
        flops: of one microbatch, forward and backward.
        output_bytes: what crosses a cut after the layer, one microbatch.
        reduced_bytes: what tensor parallelism all-reduces, forward or backward.
        kept_bytes: activations of one microbatch kept for the backward pass.
        checkpoint_bytes: the same with recompute.
    """

    weights: Floats
    flops: Floats
    output_bytes: Floats
    reduced_bytes: Floats
    kept_bytes: Floats
    checkpoint_bytes: Floats


def _widths(rng: np.random.Generator, num_blocks: int) -> Floats:
    """Four stretches of blocks of one width each."""
    return np.repeat(rng.choice(_WIDTHS, 4), -(-num_blocks // 4))[:num_blocks]


def blocks(rng: np.random.Generator, num_layers: int) -> Model:
    """A transformer's blocks as layers; the first holds the embedding."""
    width = _widths(rng, num_layers)
    weights = 12.0 * width**2 * rng.uniform(0.9, 1.1, num_layers)
    weights[0] += 32_000 * width[0]
    flops = 6.0 * weights * _TOKENS_PER_MICROBATCH * rng.uniform(0.9, 1.3, num_layers)
    flops[0] = 0.1 * flops[0]
    outputs = BYTES * _TOKENS_PER_MICROBATCH * width
    kept = _KEPT_TENSORS * outputs * rng.uniform(0.8, 1.2, num_layers)
    return Model(weights, flops, outputs, 2.0 * outputs, kept, outputs)


def operators(rng: np.random.Generator, num_operators: int) -> Model:
    """A transformer's operators; columns below in units of the width h: weights h², outputs h, FLOP of scores h · s."""
    scores = _SEQUENCE / _HEAD_WIDTH  # a row of scores for each head, in units of h
    #         weights, output, crossing, reduced, attends (crossing: the output and what is used later, at least h)
    block = np.array(
        [
            (0.0, 1.0, 2.0, 0.0, 0.0),  # norm; the residual stream passes it by
            (3.0, 3.0, 4.0, 0.0, 0.0),  # queries, keys, values
            (0.0, scores, scores + 2.0, 0.0, 1.0),  # scores; the values wait
            (0.0, scores, scores + 2.0, 0.0, 0.0),  # softmax
            (0.0, 1.0, 2.0, 0.0, 1.0),  # weighted sum of the values
            (1.0, 1.0, 2.0, 1.0, 0.0),  # projection
            (0.0, 1.0, 1.0, 0.0, 0.0),  # sum with the residual
            (0.0, 1.0, 2.0, 0.0, 0.0),  # norm
            (4.0, 4.0, 5.0, 0.0, 0.0),  # up
            (0.0, 4.0, 5.0, 0.0, 0.0),  # activation function
            (4.0, 1.0, 2.0, 1.0, 0.0),  # down
            (0.0, 1.0, 1.0, 0.0, 0.0),  # sum with the residual
        ]
    )
    num_blocks = -(-num_operators // len(block))
    width = np.repeat(_widths(rng, num_blocks), len(block))[:num_operators]
    weights, output, crossing, reduced, attends = np.tile(block, (num_blocks, 1))[:num_operators].T
    tensor = BYTES * _TOKENS_PER_MICROBATCH * width
    weights = weights * width**2 * rng.uniform(0.9, 1.1, num_operators)
    products = 6.0 * (weights + attends * _SEQUENCE * width) * _TOKENS_PER_MICROBATCH
    flops = (products + 3.0 * _FLOPS_PER_BYTE * output * tensor) * rng.uniform(0.8, 1.3, num_operators)
    kept = output * tensor * rng.uniform(0.8, 1.2, num_operators)
    first_of_block = np.arange(num_operators) % len(block) == 0
    return Model(weights, flops, crossing * tensor, reduced * tensor, kept, np.where(first_of_block, tensor, 0.0))
