"""What one Megatron iteration takes: kernels, tensor-parallel sums, the pipeline's price, gradients and the optimizer.

A device is given kernels by a host that needs time for each, so a pass of a layer is a flow shop of two machines; the
tensor-parallel sums, for which the last rank is waited, come on top. The pipeline is `plans.price`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.megatron import formulas as megatron
from benchmarks.megatron.a100_network import A100Network
from benchmarks.megatron.formulas import HALF_BYTES, MegatronIteration
from dejavu.cluster import DeviceType, catalogue
from dejavu.cost.kernels.roofline import MATRIX_UNITS, SCALAR_UNITS, KernelRoofline
from dejavu.plans import Plan, Problem, Stage, StageConfiguration, price
from dejavu.plans.stage_costs import AdditiveCosts
from dejavu.profiles.collective import Collective
from dejavu.profiles.kernel import Kernel

# What the host needs to issue one operator of PyTorch: the latency of the smallest kernels on an A100, which does not
# fall with their size (medians of NeuSight's training split, Lee et al., ASPLOS 2025; read 2026-11-21).
HOST_SECONDS = {
    "matmul": 54e-6,
    "normalization": 46e-6,
    "softmax": 33e-6,
    "elementwise": 29e-6,
    "reduction": 29e-6,
    "gather": 29e-6,
    "copy": 29e-6,
}
BATCHED_PRODUCT_HOST_SECONDS = 31e-6
SUM_HOST_SECONDS = 29e-6  # a tensor-parallel sum is one operator more
# The one number that was fitted on iteration times (mean absolute percentage error over the 1,440 of vTrain's A100
# node, Bang et al., MICRO 2024; 2026-11-21): Megatron's host needs 1 / 0.66 of the times above, for what surrounds each
# operator. Each of twelve random halves gave 0.66.
A100_HOST_EFFICIENCY = 0.66
# Products whose rows are no multiple of 16 bytes miss the tensor cores: an A100's other half-precision units do 78
# TFLOP/s, four times its float32 (NVIDIA A100 whitepaper, table 3).
ALIGNED_ELEMENTS = 8
UNALIGNED_RATIO = 4.0  # of the float32 peak
DEVICES_PER_NODE = 8
# The roofline's float32 times hold the host's part of a launch, which is priced here for all kernels alike.
DEVICE_TIME = KernelRoofline(scalar_units=replace(SCALAR_UNITS, launch_seconds=MATRIX_UNITS.launch_seconds))


class KernelPredictor(Protocol):
    def seconds(self, kernels: Sequence[Kernel], device: DeviceType) -> NDArray[np.float64]: ...


class Network(Protocol):
    def seconds(self, collective: Collective, size_bytes: float) -> float: ...


@dataclass(frozen=True)
class Remembering:
    """Asks a predictor once for the same kernels on the same device: files of iterations repeat them."""

    predictor: KernelPredictor
    known: dict[tuple[str, tuple[Kernel, ...]], NDArray[np.float64]] = field(default_factory=dict, repr=False)

    def seconds(self, kernels: Sequence[Kernel], device: DeviceType) -> NDArray[np.float64]:
        key = (device.name, tuple(kernels))
        if key not in self.known:
            self.known[key] = np.asarray(self.predictor.seconds(kernels, device), dtype=float)
        return self.known[key]


@dataclass(frozen=True)
class IterationPrice:
    """Where the time of an iteration goes.

    Attributes:
        seconds: of the whole iteration.
        layer_seconds: one layer, one microbatch, forward and backward, its tensor-parallel sums included.
        host_bound: whether the host needs longer than the device for a layer's forward, and for its backward pass.
        embedding_seconds, head_seconds: one microbatch, forward and backward.
        hop_seconds: one microbatch across a cut, there and back.
        per_step_seconds: the busiest stage's sum of gradients and optimizer step.
        bubble_fraction: share of the stages' time spent waiting.
    """

    seconds: float
    layer_seconds: float
    host_bound: tuple[bool, bool]
    embedding_seconds: float
    head_seconds: float
    hop_seconds: float
    per_step_seconds: float
    bubble_fraction: float


@dataclass(frozen=True)
class IterationPricer:
    """Prices Megatron iterations on equal devices in equal nodes; every part can be exchanged.

    Ranks count tensor-parallel first, then data-parallel, then pipeline, as Megatron numbers them.
    """

    device: DeviceType = field(default_factory=lambda: catalogue()["A100-SXM4-80GB"])
    kernels: KernelPredictor = field(default_factory=lambda: Remembering(DEVICE_TIME))
    network: Network = field(default_factory=A100Network)
    host_efficiency: float = A100_HOST_EFFICIENCY
    devices_per_node: int = DEVICES_PER_NODE

    def price(self, it: MegatronIteration) -> IterationPrice:
        """Raises CostError where a kernel or a collective has no law."""
        tensor_sum = self.network.seconds(self._collective(it, "all_reduce", _tensor_groups(it)), it.hidden_bytes)
        forward, forward_by_host = self._pass(it, (megatron.attention_forward, megatron.mlp_forward), 2, tensor_sum)
        backward, backward_by_host = self._pass(it, (megatron.mlp_backward, megatron.attention_backward), 2, tensor_sum)
        layer = forward + backward + (forward if it.recompute else 0.0)
        embedding = sum(
            self._pass(it, (part,), 0, 0.0)[0] for part in (megatron.embedding_forward, megatron.embedding_backward)
        )
        head = sum(self._pass(it, (part,), 0, 0.0)[0] for part in (megatron.head_forward, megatron.head_backward))

        stages = np.full(it.pipeline_parallel, layer * it.num_layers / it.pipeline_parallel)
        stages[0] += embedding
        stages[-1] += head
        once, hop = self._per_step_seconds(it), self._hop_seconds(it)
        problem, plan = _pipeline(it, self.device, stages, once, hop)
        priced = price(problem, plan)
        # Interleaved chunks shorten fill and drain by their number (Narayanan et al., SC 2021, section 2.2.2).
        fill = stages.sum() - stages.max() + sum(priced.transfer_seconds)
        return IterationPrice(
            seconds=float(priced.step_seconds - (1.0 - 1.0 / it.model_chunks) * fill),
            layer_seconds=layer,
            host_bound=(forward_by_host, backward_by_host),
            embedding_seconds=embedding,
            head_seconds=head,
            hop_seconds=2 * hop,
            per_step_seconds=float(once.max()),
            bubble_fraction=priced.bubble_fraction,
        )

    def _pass(
        self,
        it: MegatronIteration,
        parts: Sequence[Callable[[MegatronIteration], tuple[Kernel, ...]]],
        num_sums: int,
        tensor_sum_seconds: float,
    ) -> tuple[float, bool]:
        """Seconds of one pass of one microbatch, and whether the host needs longer than the device.

        A kernel starts when the host has issued it and the one before it has ended; the queue is empty at first. So the
        pass ends after max over k of (host's time up to kernel k + device's time from k on) (Johnson, 1954).
        """
        kernels = [kernel for part in parts for kernel in part(it)]
        num_sums = num_sums if it.tensor_parallel > 1 else 0
        on_device = self._device_seconds(it, kernels)
        by_host = np.array([_host_seconds(kernel) for kernel in kernels])
        by_host[-1] += num_sums * SUM_HOST_SECONDS
        by_host /= self.host_efficiency
        left = np.cumsum(on_device[::-1])[::-1]
        seconds = float(np.max(np.cumsum(by_host) + left)) + num_sums * tensor_sum_seconds
        return seconds, bool(by_host.sum() > on_device.sum())

    def _device_seconds(self, it: MegatronIteration, kernels: Sequence[Kernel]) -> NDArray[np.float64]:
        seconds = self.kernels.seconds(kernels, self.device)
        shard = it.padded_vocabulary_size // it.tensor_parallel
        if shard % ALIGNED_ELEMENTS:
            rate = UNALIGNED_RATIO * self.device.peak_flops_per_second["float32"]
            floor = [kernel.flops / rate if kernel.name.startswith("logits") else 0.0 for kernel in kernels]
            seconds = np.maximum(seconds, floor)
        return seconds

    def _per_step_seconds(self, it: MegatronIteration) -> NDArray[np.float64]:
        """By stage: the replicas' sum of half-precision gradients, the tied embedding's sum, and the optimizer."""
        groups = self._collective(it, "all_reduce", _data_groups(it))
        parameters = np.full(it.pipeline_parallel, it.layer_parameters * it.num_layers // it.pipeline_parallel)
        words = it.embedding_parameters
        parameters[0] += words
        if it.pipeline_parallel > 1:
            parameters[-1] += words
        once = np.array(
            [
                self.network.seconds(groups, HALF_BYTES * int(count))
                + np.sum(self.kernels.seconds(megatron.optimizer_step(it, int(count)), self.device))
                for count in parameters
            ]
        )
        if it.pipeline_parallel > 1:
            tied = self._collective(it, "all_reduce", _ends(it))
            once[[0, -1]] += self.network.seconds(tied, HALF_BYTES * words)
        return once

    def _hop_seconds(self, it: MegatronIteration) -> float:
        """One way between neighbouring stages, of the slowest pair; each tensor-parallel rank sends its part."""
        if it.pipeline_parallel == 1:
            return 0.0
        width = it.tensor_parallel * it.data_parallel
        stage_seconds = (
            self.network.seconds(
                self._collective(it, "send_recv", tuple((s * width + r, (s + 1) * width + r) for r in range(width))),
                it.hidden_bytes / it.tensor_parallel,
            )
            for s in range(it.pipeline_parallel - 1)
        )
        return max(stage_seconds)

    def _collective(self, it: MegatronIteration, name: str, groups: tuple[tuple[int, ...], ...]) -> Collective:
        per_node = min(self.devices_per_node, it.num_devices)
        return Collective(
            name=name,
            replica_groups=groups,
            mesh_nodes=ceil(it.num_devices / per_node),
            devices_per_node=per_node,
        )


def _host_seconds(kernel: Kernel) -> float:
    if kernel.family == "matmul" and kernel.batch > 1:
        return BATCHED_PRODUCT_HOST_SECONDS
    return HOST_SECONDS[kernel.family]


def _tensor_groups(it: MegatronIteration) -> tuple[tuple[int, ...], ...]:
    t = it.tensor_parallel
    return tuple(tuple(range(first, first + t)) for first in range(0, it.num_devices, t))


def _data_groups(it: MegatronIteration) -> tuple[tuple[int, ...], ...]:
    t, width = it.tensor_parallel, it.tensor_parallel * it.data_parallel
    return tuple(
        tuple(range(stage + r, stage + width, t)) for stage in range(0, it.num_devices, width) for r in range(t)
    )


def _ends(it: MegatronIteration) -> tuple[tuple[int, ...], ...]:
    """First and last stage, which both hold the words."""
    width = it.tensor_parallel * it.data_parallel
    return tuple((r, (it.pipeline_parallel - 1) * width + r) for r in range(width))


def _pipeline(
    it: MegatronIteration,
    device: DeviceType,
    stages: NDArray[np.float64],
    once: NDArray[np.float64],
    hop_seconds: float,
) -> tuple[Problem, Plan]:
    """The question that `plans.price` answers: each stage is one layer of it, and memory is not asked."""
    S, width = len(stages), it.tensor_parallel * it.data_parallel
    configuration = StageConfiguration(
        device.name, devices_per_node=width, data_parallel=it.data_parallel, tensor_parallel=it.tensor_parallel
    )
    nothing = np.zeros((1, S))
    problem = Problem(
        layers=tuple(f"stage {s}" for s in range(S)),
        configurations=(configuration,),
        device_counts={device.name: it.num_devices},
        costs=AdditiveCosts(
            seconds_CL=stages[None, :],
            per_step_seconds_CL=once[None, :],
            per_step_latency_seconds_C=np.zeros(1),
            fixed_bytes_CL=nothing,
            activation_bytes_CL=nothing,
            temporary_bytes_CL=nothing,
            capacity_bytes_C=np.array([float(device.memory_bytes)]),
        ),
        cut_bytes_L1=np.zeros(S + 1),
        link_latency_seconds_CC=np.array([[hop_seconds]]),
        link_seconds_per_byte_CC=np.zeros((1, 1)),
        schedule="1f1b",
        num_microbatches=it.num_microbatches,
    )
    return problem, Plan(tuple(Stage(s, s + 1, configuration) for s in range(S)), "1f1b", it.num_microbatches)
