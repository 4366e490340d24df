"""Memory where the backward pass runs in two parts: never less than torch's allocator handed out, and not much more."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cost._memory_rank import allocator_peak_bytes
from benchmarks.cost.memory import planned_costs
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import DTYPES
from dejavu.graphs.in_parts.split_backward import backward_input, backward_weight
from dejavu.init import Draw
from dejavu.plans import StageConfiguration
from dejavu.plans.stage_costs import rank_bytes
from dejavu.runtime.training import build_layers
from dejavu.workload import OptimizerSettings, Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import model_of
from tests.conftest import some
from tests.test_memory import WORKLOADS

SGD = OptimizerSettings(name="sgd", momentum=0.0)  # no state
both_ways = pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])


@pytest.mark.parametrize("depth", some([1, 3], [3]))
@both_ways
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_plans_count_what_waits_between_the_parts(workload: Workload, recompute: bool, depth: int) -> None:
    """All layers but the first as a stage: several forward passes, then their first parts, then their second ones."""
    workload = workload.model_copy(update={"optimizer": SGD})
    graph = capture(workload)
    first, L = graph.layers[0], len(graph.layers)
    _, targets = dataset_of(workload).batch(0, workload.batch_size, seed=0)
    targets = targets.chunk(6)[:depth]
    xs = [torch.randn(first.output_shape).to(DTYPES[workload.dtype]).requires_grad_() for _ in range(depth)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # some kernels keep a copy for each thread

    def work() -> None:
        module = build_layers(workload, Draw(), torch.device("cpu"), 1, L, recompute=recompute)
        module.in_parts, loss = True, model_of(workload).loss
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        losses = [loss(module(x), target) for x, target in zip(xs, targets, strict=True)]
        waiting = [backward_input([losses.pop(0)], None, [x], module.parameters())[1] for x in xs]
        while waiting:
            backward_weight(module.parameters(), waiting.pop(0))

    try:
        real = allocator_peak_bytes(work)
    finally:
        torch.set_num_threads(threads)
    costs = planned_costs(workload, graph, StageConfiguration("core", recompute=recompute))
    needed = costs.stage_bytes(1, L, 0)
    passes = [(depth - k - 1) * needed.each + needed.retained + k * needed.waiting for k in range(depth)]
    needed = needed._replace(passing=needed.in_parts)
    planned = rank_bytes([needed], max(*passes, depth * needed.waiting))
    planned -= float(costs.message_bytes_CL1[0, 1] + costs.message_bytes_CL1[0, L])  # nobody sends or receives
    planned += xs[0].nbytes + 4 * depth  # but the stage makes its input's gradient, and there are losses
    exact = 1.0 if workload.dtype == "float32" else 0.98  # blocks of 16-bit products are counted to a percent
    assert exact * real <= planned <= 1.35 * real, f"planned {planned / real:.3f} of what was handed out"
