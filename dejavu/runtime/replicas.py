"""Collectives within one pipeline rank: meshes, sharded weights, gradient all-reduce, the global gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from dejavu.plans import Plan, StageConfiguration
from dejavu.runtime.layout import Layout
from dejavu.runtime.splits import as_a_whole, carry_out
from dejavu.runtime.state import local_of
from dejavu.workload.models import LayerBuilder, Split, TensorParallel, splits_loss
from dejavu.workload.models.modules.experts import GroupedLinear

# By what a layer declares, and how the devices share what lies between the sharded weights: whole, or by sequence.
_STYLES: dict[str, Callable[[Placement], ParallelStyle]] = {
    "columns": lambda outside: ColwiseParallel(input_layouts=outside),
    "rows": lambda outside: RowwiseParallel(output_layouts=outside),
    "gathered": lambda outside: ColwiseParallel(input_layouts=outside, output_layouts=Replicate()),
    "scores": lambda outside: ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1)),
    "shared": lambda outside: _Shared(outside),
    "summed": lambda outside: _Summed(outside),
    "positions": lambda outside: _OwnPositions(outside),
    "all positions": lambda outside: _AllPositions(outside),
}
_CLIP_EPSILON = 1e-6  # added to the norm, as torch's `clip_grads_with_norm_` does in one process
_SEQUENCE = 1  # the dimension of positions between the modules of a layer
_WHICH_EXPERTS = 0
_EXPERTS_DIMENSION = {"columns": 1, "rows": 2}  # of weights (E, out, in)


def meshes(layout: Layout, device: torch.device) -> tuple[DeviceMesh | None, ...]:
    """Make each pipeline rank's mesh (replica, shard), None for one device. Every rank of the world calls it."""
    return tuple(
        DeviceMesh(device.type, torch.from_numpy(grid), mesh_dim_names=("replica", "shard")) if grid.size > 1 else None
        for grid in layout.grids
    )


def spread(
    module: nn.Module,
    builders: Sequence[LayerBuilder],
    configuration: StageConfiguration,
    mesh: DeviceMesh,
    plan: Plan,
    *,
    computes_in: torch.dtype | None = None,
) -> None:
    """Shard the layers' weights in place: tensor-parallel as the model says, over the replicas as the ZeRO level says.

    Of a layer that says nothing the plan knows a split that was found, or it is whole on every device. Hooks of weights
    see whole gradients.

    Level 0 leaves replicas whole. All others are torch's FSDP2: 1 gathers weights once per step and reduces gradients
    at its end, 2 reduces them in every microbatch, 3 also frees each layer's weights and gathers them again. Weights
    of a single number stay whole, and their gradients are the stage's to sum. Hooks of weights see the gradients of
    what is gathered.

    Args:
        computes_in: what FSDP shards are float32 masters of the trained weights, which it gathers in this type, and
            whose gradients it adds up and reduces in float32; None: the weights as they are.
    """
    for layer, builder in zip(module.children(), builders, strict=True):
        if split := plan.split_of(builder.name, configuration.tensor_parallel):
            carry_out(
                layer, dict(split.weights), mesh["shard"], whole_sums=split.whole_sums, split_output=split.split_loss
            )
        elif configuration.tensor_parallel > 1 and builder.tensor_parallel and builder.tensor_parallel.weights:
            cuts = _of_loss(layer, builder.tensor_parallel, configuration.tensor_parallel)
            outside = Shard(_SEQUENCE) if configuration.sequence_parallel else Replicate()
            styles = {name: _style(layer, name, cut, _around(name, cuts, outside)) for name, cut in cuts}
            experts = builder.tensor_parallel.experts
            if configuration.expert_parallel and experts:
                grouped = [name for name in styles if isinstance(layer.get_submodule(name), GroupedLinear)]
                styles |= {name: _PartOfEach(_WHICH_EXPERTS) for name in grouped}
                styles |= {name: _Summed(outside, experts.count) for name, cut in cuts if cut == "summed"}
            hooks = _hooks(layer)
            parallelize_module(layer, mesh["shard"], styles)
            _hook_parts(layer, hooks)
    if configuration.shards_state:
        reduced_in = None if computes_in is None else torch.float32
        policy = MixedPrecisionPolicy(computes_in, reduced_in, cast_forward_inputs=False)
        hooked = [(layer, _hooks(layer)) for layer in module.children()]
        for one in (one for one in module.parameters() if not one.numel()):
            one.requires_grad_(False)  # there is nothing to train, and FSDP cannot reduce a gradient without a number
        if computes_in is not None:
            _widen(module)
        _in_rows(module)
        whole, frees = {*left_whole(module)}, configuration.zero_level == 3
        for part in (*module.children(), module):
            sharded = fully_shard(
                part, mesh=mesh["replica"], reshard_after_forward=frees, mp_policy=policy, ignored_params=whole
            )
            sharded.set_gradient_divide_factor(1.0)  # replicas hold parts of a microbatch: their gradients add up
            sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
        for layer, hooks in hooked:
            if hooks:
                layer.register_forward_pre_hook(_Rehooked(hooks))


def _widen(module: nn.Module) -> None:
    """Replace the weights that are trained by float32 masters."""
    trained = {one: nn.Parameter(one.detach().float()) for one in module.parameters() if one.requires_grad}
    for owner in module.modules():
        for name, weight in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if weight in trained:
                setattr(owner, name, trained[weight])


def _in_rows(module: nn.Module) -> None:
    """Lay out weights row by row where they are not, as a transposed one: FSDP takes no others."""
    for one in module.parameters():
        if not isinstance(one, DTensor):
            one.data = one.data.contiguous()


_Hook = Callable[[torch.Tensor], torch.Tensor | None]


def _hooks(layer: nn.Module) -> dict[str, list[_Hook]]:
    """Return the hooks of a layer's weights that FSDP shards, by their names; of a split layer some are the split's."""
    named = {name: list((one._backward_hooks or {}).values()) for name, one in layer.named_parameters() if one.dim()}
    return {name: hooks for name, hooks in named.items() if hooks}


def _hook_parts(layer: nn.Module, hooks: Mapping[str, Sequence[_Hook]]) -> None:
    """Hook what a declared split has made of a layer's weights; each hook is given the whole gradient."""
    for name, own in hooks.items():
        weight = layer.get_parameter(name)
        for hook in own if isinstance(weight, DTensor) else ():
            weight.register_hook(partial(as_a_whole, hook=hook))


class _Rehooked:
    """Before a layer's forward pass, hooks what FSDP has just gathered as its weights were: gradients go there.

    FSDP makes the weights that it gathers in the first pass, and keeps them.
    """

    def __init__(self, hooks: dict[str, list[_Hook]]) -> None:
        self._hooks, self._hooked = hooks, dict[str, nn.Parameter]()

    def __call__(self, layer: nn.Module, inputs: object) -> None:
        for name, hooks in self._hooks.items():
            gathered = layer.get_parameter(name)
            if self._hooked.get(name) is not gathered:
                self._hooked[name] = gathered
                for hook in hooks:
                    gathered.register_hook(hook)


def left_whole(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights that each replica has whole: FSDP shards none without dimensions, as a temperature."""
    return [one for one in module.parameters() if one.dim() == 0]


def _of_loss(layer: nn.Module, split: TensorParallel, degree: int) -> tuple[tuple[str, Split], ...]:
    """Return what the layer declares; scores are gathered where the loss is not computed of parts of the classes."""
    found = list[tuple[str, Split]]()
    for name, cut in split.weights or ():
        is_whole = cut == "scores" and not splits_loss(
            split, len(layer.get_submodule(name).get_parameter("weight")), degree
        )
        found.append((name, "gathered" if is_whole else cut))
    return tuple(found)


def _around(name: str, cuts: Sequence[tuple[str, str]], outside: Placement) -> Placement:
    """Return how a column-parallel module finds its input: whole inside a module that gathers it for several."""
    gathers = [other for other, cut in cuts if cut in ("shared", "all positions") and name.startswith(f"{other}.")]
    return Replicate() if gathers and dict(cuts)[name] == "columns" else outside


def _style(layer: nn.Module, name: str, cut: str, outside: Placement) -> ParallelStyle:
    if cut == "rows" and isinstance(layer.get_submodule(name), nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
    if isinstance(layer.get_submodule(name), GroupedLinear):
        return _PartOfEach(_EXPERTS_DIMENSION[cut])
    return _STYLES[cut](outside)


def split_by_sequence(module: nn.Module, configuration: StageConfiguration) -> list[nn.Parameter]:
    """Return the weights of which each device of a sequence-parallel group has the gradient of its positions alone.

    They are those that are not sharded: norms, tables of positions, routers.
    """
    if not configuration.sequence_parallel:
        return []
    return [one for one in module.parameters() if not (isinstance(one, DTensor) and "shard" in _names(one))]


def _names(tensor: DTensor) -> tuple[str, ...]:
    return tensor.device_mesh.mesh_dim_names or ()


class _PartOfEach(ParallelStyle):
    """Give each device a part of every expert's matrix, or some experts' whole ones (dimension 0).

    The module multiplies by what it has and says nothing to others.
    """

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.dimension = dimension

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = module.get_parameter("weight")
        module.weight = nn.Parameter(distribute_tensor(whole.detach(), device_mesh, [Shard(self.dimension)]))

        def with_own_part(part: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
            return inputs, {**options, "weight": local_of(part.get_parameter("weight"))}

        module.register_forward_pre_hook(with_own_part, with_kwargs=True)
        return module


class _Summed(ParallelStyle):
    """Sum over the devices what a module puts out, and going backward the gradients of what it receives.

    Its rows are tokens, in any order: where devices have positions of their own, it receives all and puts out these.

    Args:
        num_experts: of which each device has as many, whole, and is told which; 0: a part of each.
    """

    def __init__(self, outside: Placement, num_experts: int = 0) -> None:
        super().__init__()
        self.rows = Replicate() if outside.is_replicate() else Shard(0)
        self.num_experts = num_experts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        each = self.num_experts // device_mesh.size()
        first = each * device_mesh.get_local_rank()
        told = {"own": range(first, first + each)} if each else {}

        def receive(part: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
            whole = tuple(
                DTensor.from_local(x, device_mesh, [self.rows])
                .redistribute(placements=[Replicate()])
                .to_local(grad_placements=[Partial()] if x.is_floating_point() else None)
                for x in inputs
            )
            return whole, {**options, **told}

        def put_out(part: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            summed = DTensor.from_local(output, device_mesh, [Partial()]).redistribute(placements=[self.rows])
            return summed.to_local()

        module.register_forward_pre_hook(receive, with_kwargs=True)
        module.register_forward_hook(put_out)
        return module


class _OwnPositions(ParallelStyle):
    """Take of what a module gives for each position (…, T, W) this device's own."""

    def __init__(self, outside: Placement) -> None:
        super().__init__()
        self.is_whole = outside.is_replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(part: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            return output.chunk(device_mesh.size(), dim=-2)[device_mesh.get_local_rank()]

        if not self.is_whole:
            module.register_forward_hook(take)
        return module


class _Shared(ParallelStyle):
    """Hand what a module receives to several sharded ones inside: of each tensor the gradients add up, and are summed.

    A tensor that it receives twice is one. Devices that have positions of their own gather them.
    """

    def __init__(self, outside: Placement) -> None:
        super().__init__()
        self.outside = outside

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(part: nn.Module, inputs: tuple[Any, ...]) -> Any:
            whole = {id(x): _gathered(x, device_mesh, self.outside) for x in inputs}
            return tuple(whole[id(x)] for x in inputs)

        module.register_forward_pre_hook(gather)
        return module


def _gathered(x: torch.Tensor, mesh: DeviceMesh, outside: Placement) -> torch.Tensor:
    return DTensor.from_local(x, mesh, [outside], run_check=False).redistribute(placements=[Replicate()])


class _AllPositions(ParallelStyle):
    """Gather the positions of the first tensor that a module receives, whose gradient is summed and split again."""

    def __init__(self, outside: Placement) -> None:
        super().__init__()
        self.outside = outside

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(part: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if inputs:
                return (_gathered(inputs[0], device_mesh, self.outside), *inputs[1:]), options
            first = next(iter(options))
            return inputs, {**options, first: _gathered(options[first], device_mesh, self.outside)}

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


class WithGradients:
    """The weights of which some rank of a group had a gradient in a step so far: all ranks know the same ones.

    A layer may use a weight for some examples alone, so a replica may have no gradient of what another has one. Summed
    as they are, they would be messages of different lengths. One process has zeros from a weight's first gradient on.

    Args:
        weights: those of which no gradient is wanted are left out.
    """

    def __init__(self, weights: Iterable[Any], group: dist.ProcessGroup, device: torch.device) -> None:
        self._known, self._unknown = list[Any](), [one for one in weights if self.is_trained(one)]
        self._group, self._device = group, device

    @staticmethod
    def is_trained(weight: Any) -> bool:
        return bool(weight.requires_grad)

    def has_gradient(self, weight: Any) -> bool:
        return weight.grad is not None

    def give_zeros(self, weight: Any) -> None:
        weight.grad = torch.zeros_like(weight)

    def agree(self) -> None:
        """Give zeros to a weight that has no gradient, and has or had one on some rank; all of the group call it.

        Says nothing to the others once all weights had one.
        """
        if self._unknown:
            flags = torch.tensor([self.has_gradient(one) for one in self._unknown], dtype=torch.int32)
            somewhere = flags.to(self._device)
            dist.all_reduce(somewhere, dist.ReduceOp.MAX, group=self._group)
            pairs = list(zip(self._unknown, somewhere.tolist(), strict=True))
            self._known += [one for one, found in pairs if found]
            self._unknown = [one for one, found in pairs if not found]
        for one in self._known:
            if not self.has_gradient(one):
                self.give_zeros(one)


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, device: torch.device) -> None:
    """All-reduce the gradients, one message per dtype.

    Two ranks on CPUs send each other all of theirs: as many bytes as gloo's all-reduce sends, but at once.

    Args:
        device: of the rank. Gradients that are in the host's memory instead go through it one by one.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        local = local_of(parameter.grad)
        if local.device.type == device.type:
            by_dtype.setdefault(local.dtype, []).append(local)
        else:
            sent = local.to(device)
            dist.all_reduce(sent, group=group)
            local.copy_(sent)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        are_exchanged = device.type == "cpu" and group.size() == 2
        if are_exchanged:
            flat = _other_s(flat, group)
        else:
            dist.all_reduce(flat, group=group)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            (gradient.add_ if are_exchanged else gradient.copy_)(part.view_as(gradient))


def _other_s(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return what the other rank of two has, which receives what this one has."""
    found, other = torch.empty_like(own), dist.get_global_rank(group, 1 - group.rank())
    both = [dist.P2POp(dist.irecv, found, other, group), dist.P2POp(dist.isend, own, other, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return found


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    counted: Iterable[nn.Parameter],
    num_devices: int,
    most: float,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Clip the gradients of the whole model to a global norm of at most `most`; return the norm before.

    Every rank of its pipeline calls it. Gradients that several devices of a pipeline rank hold alike are counted once.

    Args:
        parameters: of this rank's stages.
        counted: those of them that count in the norm.
        num_devices: of this rank's pipeline rank.
        device: of the rank, wherever its gradients are.
        group: all ranks of the pipeline; None: all of the world.
    """
    gradients, in_norm = ([p.grad for p in some if p.grad is not None] for some in (parameters, counted))
    squares = torch.zeros((), dtype=torch.float64)
    for gradient in in_norm:
        squares += _square_sum(local_of(gradient)).cpu() * (parts_of(gradient) / num_devices)
    total = squares.to(device)
    dist.all_reduce(total, group=group)
    norm = float(total.sqrt())
    factor = most / (norm + _CLIP_EPSILON)
    if factor < 1:
        for gradient in gradients:
            local_of(gradient).mul_(factor)
    return norm


def _square_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Add up the squares of all numbers, row by row: plans count no copy of a gradient here, least of all in float64.

    Returns:
        In float64, as all of a model's are added to it.
    """
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(norms)
    return norm.double().square()


def parts_of(tensor: torch.Tensor) -> int:
    """Return into how many parts the devices of a pipeline rank have sharded it."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    count = 1
    for size, placement in sizes:
        count *= 1 if placement.is_replicate() else size
    return count
