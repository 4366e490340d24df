"""What is sent beside computing: replicas' gathers of weights, scatters and sums of gradients; maybe parts of products.

On GPUs collectives have streams of their own, so what is sent for one layer goes while another one computes. On CPUs
the cores that compute also carry the messages; there nothing is taken to be hidden.

Shape suffix: L = layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dejavu.plans.stage_costs import Floats

# Kernels beside collectives take so much longer on the mean of GPT and Llama models on A100, H100, MI210 and MI250
# ("Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning", arXiv 2507.03114).
SLOWED = 0.189
# The most that one sum of gradients carries, as of torch's DistributedDataParallel (its `bucket_cap_mb`).
BUCKET_BYTES = 25 * 2**20


class StepLine(NamedTuple):
    """A collective that replicas run once a step, as a line over the bytes of a layer's weights on one device.

    Attributes:
        is_before: it comes before the first forward pass (weights are gathered), not after the last backward pass.
        hides: it may go layer by layer beside that pass.
    """

    latency_seconds: float
    seconds_per_byte: float
    is_before: bool = False
    hides: bool = True


def side_by_side(computed_L: Floats, sent_L: Floats, *, overlaps: bool) -> Floats:
    """Return the seconds of each layer's pass with what its replicas send for it.

    A layer's weights come while the layer before computes, and its gradients go while the next one does. What computes
    meanwhile takes longer, by `SLOWED`. Layers are taken to be like their neighbours, which makes the seconds a sum
    over layers.
    """
    if not overlaps:
        return computed_L + sent_L
    return np.maximum(computed_L, sent_L) + SLOWED * np.minimum(computed_L, sent_L)


def beside_products(sent_L: Floats, products_L: Floats, in_parts_L: Floats, num_parts: int) -> Floats:
    """Return what a pass of layers takes longer for messages sent part by part beside products that make or need them.

    So do NVIDIA's Transformer Engine (`ub_tp_comm_overlap`) and torch's asynchronous tensor parallelism; this project's
    own ranks don't. A product is computed in as many parts as there are devices, one after the other; beside one of
    them nothing is sent (Wang et al., ASPLOS 2023, as recalled). All messages of a layer go beside all of its products,
    or after them where that is faster.

    Args:
        sent_L: seconds of the messages, alone.
        products_L: seconds of the products, alone and whole.
        in_parts_L: seconds of the products, alone, in parts.
    """
    in_parts_L = np.maximum(in_parts_L, products_L)
    alone_L = in_parts_L / num_parts
    together_L = alone_L + side_by_side(in_parts_L - alone_L, sent_L, overlaps=True)
    return np.minimum(together_L - products_L, sent_L)


def once_a_step(
    lines: Sequence[StepLine], weights_L: Floats, forward_L: Floats, backward_L: Floats, *, overlaps: bool
) -> tuple[float, Floats]:
    """Return what such collectives add to a step: seconds besides layers, and seconds of each layer.

    Of the pass of one microbatch beside which a collective goes, what is longer than the pass stays, and what it slows
    down. The last message of a stage has no pass beside it.

    Args:
        weights_L: bytes of each layer's weights on one device.
        forward_L, backward_L: seconds of one microbatch's passes.
    """
    constant, found_L = 0.0, np.zeros(len(weights_L))
    typical = float(weights_L.mean())
    for line in lines:
        sent_L = line.seconds_per_byte * weights_L
        computed_L = forward_L if line.is_before else backward_L
        hides = overlaps and line.hides
        found_L = found_L + side_by_side(computed_L, sent_L, overlaps=hides) - computed_L
        constant += line.latency_seconds
        if hides:
            constant += line.seconds_per_byte * min(typical, BUCKET_BYTES)
    return constant, found_L
