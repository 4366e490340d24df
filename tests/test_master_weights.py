"""Float32 masters of bfloat16 weights: what torch itself does to float32 weights, and what rounding would lose."""

from __future__ import annotations

import copy

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from dejavu.cost.sources.predicted import optimizer_kernels
from dejavu.runtime.optimizer import MASTER, make_optimizer
from dejavu.workload import OptimizerSettings, Workload

SETTINGS = [
    OptimizerSettings(master_weights=True, learning_rate=1e-2, weight_decay=0.1),
    OptimizerSettings(name="sgd", master_weights=True, learning_rate=0.1, momentum=0.9),
    OptimizerSettings(name="sgd", master_weights=True, learning_rate=0.1, weight_decay=0.0),
]
every_optimizer = pytest.mark.parametrize("settings", SETTINGS, ids=["adamw", "momentum", "sgd"])


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(torch.bfloat16)


@every_optimizer
@pytest.mark.parametrize("seed", range(3))
def test_masters_go_where_torch_s_own_float32_weights_go(settings: OptimizerSettings, seed: int) -> None:
    """With the gradients of the rounded weights, added up over microbatches in float32."""
    module = network(seed)
    optimizer = make_optimizer(settings, module.parameters())
    masters = [parameter.detach().float().requires_grad_() for parameter in module.parameters()]
    plain = make_optimizer(settings.model_copy(update={"master_weights": False}), map(nn.Parameter, masters))
    (group,) = plain.param_groups
    for _ in range(5):
        optimizer.zero_grad(set_to_none=False)
        sums = [torch.zeros_like(master) for master in masters]
        for _ in range(3):
            x = torch.randn(4, 6, dtype=torch.bfloat16)
            module(x).square().sum().backward()
            twin = copy.deepcopy(module)
            for parameter in twin.parameters():
                parameter.grad_dtype = torch.bfloat16
                parameter.grad = None
            twin(x).square().sum().backward()
            for total, parameter in zip(sums, twin.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad.float()
        for total, parameter, master in zip(sums, module.parameters(), group["params"], strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, total)
            master.grad = total
        optimizer.step()
        plain.step()
        for parameter, master in zip(module.parameters(), group["params"], strict=True):
            assert torch.equal(optimizer.state[parameter][MASTER], master)
            assert torch.equal(parameter.detach(), master.detach().bfloat16())


@every_optimizer
def test_steps_too_small_for_a_weight_add_up_in_its_master(settings: OptimizerSettings) -> None:
    small = settings.model_copy(update={"learning_rate": 1e-4, "weight_decay": 0.0})
    ends = {}
    for masters in (False, True):
        weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = make_optimizer(small.model_copy(update={"master_weights": masters}), [weight])
        for _ in range(200):
            optimizer.zero_grad(set_to_none=False)
            weight.sum().backward()
            optimizer.step()
        ends[masters] = weight.detach().float()
    assert torch.equal(ends[False], torch.ones(3))
    assert (ends[True] < 0.985).all()


def test_only_bfloat16_weights_have_masters() -> None:
    with pytest.raises(ValidationError, match=r"dtype is 'float32'.* wanted dtype: bfloat16, or no master_weights"):
        Workload(optimizer=OptimizerSettings(master_weights=True))
    assert Workload(dtype="bfloat16", optimizer=OptimizerSettings(master_weights=True)).optimizer.master_weights


def test_the_optimizer_s_traffic_is_of_float32_and_one_copy() -> None:
    """As much as of float32 weights of as many elements, plus reading each master and writing its weight."""
    count = 1000
    half, whole = OptimizerSettings(master_weights=True), OptimizerSettings()
    kernels = optimizer_kernels(2 * count, half, "bfloat16")
    plain = optimizer_kernels(4 * count, whole, "float32")
    assert {kernel.m for kernel in kernels} == {count}
    traffic = [sum(k.read_bytes + k.written_bytes for k in some) for some in (kernels, plain)]
    assert traffic[0] - traffic[1] == (4 + 2) * count
    assert half.kind != whole.kind  # what was measured of the one says nothing of the other
