"""The one training loop, used by trials, the single-process reference and every rank of a pipeline."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dejavu.foundation.tracing.dtypes import to_dtype
from dejavu.graphs.autocast import autocast
from dejavu.graphs.graph import DTYPES
from dejavu.graphs.in_parts.own_buffers import BuffersBefore, OwnBuffers
from dejavu.graphs.in_parts.running_again import run_again_once
from dejavu.graphs.in_parts.split_backward import own_tensor
from dejavu.graphs.offload import offloading, weights_to_host
from dejavu.init import Draw, draw_layer
from dejavu.plans import Offload
from dejavu.runtime.batches import Reader
from dejavu.runtime.batches.held_out import evaluating
from dejavu.runtime.gradients.scaling import LossScale
from dejavu.runtime.gradients.tied import TiedGradients, without_copies
from dejavu.runtime.job import Waited
from dejavu.runtime.optimizer import set_learning_rate
from dejavu.runtime.state import USED, Remembers
from dejavu.workload import Workload
from dejavu.workload.models import LayerBuilder, layers_of, model_of
from dejavu.workload.models.ties import ties_of

if TYPE_CHECKING:
    from dejavu.runtime.splits.sequence import SequencePart
    from dejavu.runtime.splits.slices import SlicedSequence

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ON_DEVICE = Offload()


class Executor(Protocol):
    """Runs a batch forward and backward and leaves the mean gradient in `.grad`.

    Attributes:
        loss_scale: what the loss is multiplied by before the backward pass, and with it the gradients.
        frees_gradients: each step makes them anew, as FSDP does of shards; else they are kept, and set to zero.
    """

    loss_scale: float
    frees_gradients: bool

    @property
    def rows(self) -> np.ndarray | None:
        """Which of a batch's examples it wants, by their places; None: all."""

    def __call__(self, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        """Return the batch's mean loss, or None on a rank that does not have it; given are its `rows` alone."""

    def clip_gradients(self, most: float) -> None:
        """Clip the gradients of the whole model to this global norm."""


class Layers(nn.Sequential):
    """A consecutive range of the model's layers, named as in the whole model.

    What a layer draws at random (dropout) depends only on the workload's seed, the step, the microbatch, the layer, and
    of several replicas the first example that is its own: it is the same under any cuts and after every restart. A
    layer that draws is given its input in the order of its dimensions, as messages have it. With
    `recompute` each layer keeps its input only, and runs again before its backward pass (activation checkpointing).
    With `offload` weights are in the host's memory, or what layers save waits there, but for the model's last layer,
    whose output the pipeline holds until its backward pass.

    Attributes:
        step, microbatch, first_example: of the next forward pass; the executor sets them.
        sequence: the part of it that this device has, or the slices in which it comes; None: it has all, at once.
        besides: what goes with weights into checkpoints; None: nothing.
        in_parts: its backward passes run in two parts.
        computes_in: the type of the trained weights in passes, where the module holds float32 masters, sharded over
            replicas (ZeRO); None: it holds the weights themselves.
        fixed: of the whole model's layers the first ones, to which no gradient comes back: they compute without. In one
            process autograd itself leaves their weights alone; between stages it would be told that they have zeros.
    """

    def __init__(
        self,
        layers: OrderedDict[str, nn.Module],
        workload: Workload,
        start: int,
        *,
        recompute: bool = False,
        offload: Offload = ON_DEVICE,
    ) -> None:
        super().__init__(layers)
        self.start, self.recompute = start, recompute
        self._last = len(layers_of(workload)) - 1
        self._is_last = start + len(layers) > self._last
        self.offload = offload
        self.seed, self.autocast = workload.seed, workload.autocast
        self.step = self.microbatch = self.first_example = 0
        self.sequence: SequencePart | SlicedSequence | None = None
        self.besides: Remembers | None = None
        self.in_parts = False
        self.computes_in: torch.dtype | None = None
        self.fixed = 0
        self._own_buffers = dict[int, OwnBuffers]()  # of each layer, by its position
        self._draws = dict[int, bool]()  # whether a layer does, seen in its first pass in training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, part = f"{self.seed} {self.step} {self.microbatch} {self.first_example}", self.sequence
        if part is not None and part.index:
            key += f" {part.index}"
        if part is not None and self.start == 0:
            x = part.own(x)
        stream = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
        with autocast(x.device, self.autocast) as passed_on:
            for position, layer in enumerate(self, self.start):
                _seed(stream + position, x.device)
                if self._draws.get(position, True):  # in the order of memory, which is another after a message
                    x = x.contiguous()
                before = _random_state(x.device) if self.training and position not in self._draws else None
                with (
                    torch.set_grad_enabled(torch.is_grad_enabled() and position >= self.fixed),
                    self._placed(layer, x, position) as placed,
                ):
                    runs = placed if part is None else part.runs(placed, self.microbatch, position)
                    run = partial(self._own_buffers.setdefault(position, OwnBuffers(layer)).run, runs)
                    x = passed_on(_recomputed(run, x, layer, in_parts=self.in_parts) if self.recompute else run(x))
                if before is not None:
                    self._draws[position] = _random_state(x.device) != before
        if part is not None and self._is_last:
            x = part.whole(x)
        return own_tensor(x)

    def _placed(
        self, layer: nn.Module, x: torch.Tensor, position: int
    ) -> AbstractContextManager[Callable[[torch.Tensor], torch.Tensor]]:
        """Return a context with the layer's forward pass, in which what `offload` says is in the host's memory."""
        activations = self.offload.activations is not None and position < self._last
        weights = self.offload.parameters is not None
        if not activations and not weights:
            return nullcontext(layer)
        return offloading(layer, x, activations=activations, weights=weights, in_parts=self.in_parts)


def _recomputed(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, layer: nn.Module, *, in_parts: bool
) -> torch.Tensor:
    """Run a layer's forward pass, which keeps its input alone and runs again before its backward pass."""
    if not torch.is_grad_enabled():
        return run(x)
    before, stops = BuffersBefore(layer), not _draws_slopes(layer)
    if in_parts:
        return run_again_once(run, x, again=before, stops_early=stops)
    with set_checkpoint_early_stop(stops):
        return checkpoint(run, x, use_reentrant=False, context_fn=lambda: (nullcontext(), before))  # type: ignore[no-any-return]


_DRAWS = "_draws_slopes"  # of a layer's attributes: whether it has a randomized leaky ReLU


def _draws_slopes(layer: nn.Module) -> bool:
    """Return whether a layer has a randomized leaky ReLU, as a module or in a traced graph.

    Autograd saves its slopes before it draws them, so torch's checkpoint, which stops running a layer again where the
    last tensor is saved, would stop before they are there.
    """
    if _DRAWS not in vars(layer):
        graphs = [part.graph for part in layer.modules() if isinstance(part, fx.GraphModule)]
        is_traced = any("rrelu" in str(node.target) for graph in graphs for node in graph.nodes)
        vars(layer)[_DRAWS] = is_traced or any(isinstance(part, nn.RReLU) for part in layer.modules())
    return bool(vars(layer)[_DRAWS])


def _seed(seed: int, device: torch.device) -> None:
    """Seed only this device: torch's own `manual_seed` asks every kind of device, which takes ten times as long."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _random_state(device: torch.device) -> tuple[bytes, int]:
    """Return where the random numbers of the host and of the device are."""
    host = torch.default_generator.get_state().numpy().tobytes()
    return host, torch.cuda.default_generators[device.index].get_offset() if device.type == "cuda" else 0


def build_layers(
    workload: Workload,
    draw: Draw,
    device: torch.device,
    start: int = 0,
    stop: int | None = None,
    *,
    recompute: bool = False,
    offload: Offload = ON_DEVICE,
) -> Layers:
    """Build layers `start` to `stop` (not included) with drawn weights, where `offload` says."""
    builders = layers_of(workload)
    drawn = OrderedDict(
        (builder.name, draw_layer(builder, draw, position=position, depth=len(builders)))
        for position, builder in enumerate(builders[start:stop], start)
    )
    tie_weights(drawn, builders, draw)
    layers = Layers(drawn, workload, start, recompute=recompute, offload=offload)
    to_dtype(layers, DTYPES[workload.dtype])
    if offload.parameters is None:
        return layers.to(device)
    weights_to_host(layers, device)
    return layers


def tie_weights(layers: Mapping[str, nn.Module], builders: Sequence[LayerBuilder], draw: Draw) -> None:
    """Give a tied weight its owner's values; an owner that is not among these layers is drawn for it."""
    for tie in ties_of(builders):
        copy = tie.copy.of(layers)
        if copy is None:
            continue
        at, known = tie.owner.position, dict(layers)
        if tie.owner.layer not in known:
            known[tie.owner.layer] = draw_layer(builders[at], draw, position=at, depth=len(builders))
        owner = tie.owner.of(known)
        assert owner is not None
        with torch.no_grad():
            copy.copy_(owner)


class WholeModel:
    """The executor of a single process: microbatches one after the other (gradient accumulation)."""

    rows = None  # all
    frees_gradients = False

    def __init__(self, module: Layers, workload: Workload) -> None:
        self.module, self.loss, self.num_microbatches = module, model_of(workload).loss, workload.microbatches_in_a_step
        self.loss_scale = 1.0
        self.ties = ties_of(layers_of(workload))
        self._tied = TiedGradients(self.ties, dict(module.named_children()), (), None)

    def __call__(self, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        losses = []
        pairs = zip(inputs.chunk(self.num_microbatches), targets.chunk(self.num_microbatches), strict=True)
        self.module.step = step
        for self.module.microbatch, (x, y) in enumerate(pairs):
            loss = self.loss(self.module(x), y)
            (loss * (self.loss_scale / self.num_microbatches)).backward()
            losses.append(loss.item())
        self._tied.sum_gradients()
        return sum(losses) / len(losses)

    def clip_gradients(self, most: float) -> None:
        nn.utils.clip_grads_with_norm_(self.module.parameters(), most, torch.tensor(self.gradient_norm()))

    def gradient_norm(self) -> float:
        """Return the norm of all gradients, a tied weight's once."""
        counted = without_copies(self.module, self.ties)
        return nn.utils.get_total_norm([p.grad for p in counted if p.grad is not None]).item()

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the mean loss of a batch, forward only."""
        pairs = zip(inputs.chunk(self.num_microbatches), targets.chunk(self.num_microbatches), strict=True)
        with evaluating([self.module]):
            losses = [self.loss(self.module(x), y).item() for x, y in pairs]
        return sum(losses) / len(losses)


def train(
    executor: Executor,
    optimizer: torch.optim.Optimizer,
    workload: Workload,
    steps: Sequence[int],
    *,
    device: torch.device,
    on_step: Callable[[int, float | None, float, float], None],
    on_gradients: Callable[[int], None] = lambda step: None,
    on_overflow: Callable[[int], None] = lambda step: None,
) -> Waited | None:
    """Train these steps; data and learning rate depend on a step's number alone. Return how long they waited for data.

    Args:
        on_step: (step, loss or None, step seconds, optimizer seconds), after each step; may raise to stop. On a CPU
            the optimizer's are CPU seconds: waiting for other ranks' gradients, which clipping needs, does not count.
        on_gradients: (step), when the step's gradients are complete, and neither clipped nor used.
        on_overflow: (step), in place of that where they overflowed in float16, on whatever rank: it is left out.
    """
    dtype = DTYPES[workload.dtype]
    scale = LossScale(optimizer, device) if workload.autocast == "float16" else None
    busy = time.thread_time if device.type == "cpu" else time.perf_counter
    reader = Reader(workload, steps, executor.rows)
    for step, inputs, targets in reader:
        inputs = inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=executor.frees_gradients)
        executor.loss_scale = 1.0 if scale is None else scale.scale
        loss = executor(step, inputs, targets.to(device))
        _complete_gradients(optimizer)
        are_usable = scale is None or scale.unscale(step)
        (on_gradients if are_usable else on_overflow)(step)
        computed = busy()
        if are_usable and workload.optimizer.clip_norm is not None:
            executor.clip_gradients(workload.optimizer.clip_norm)
        set_learning_rate(optimizer, workload, step)
        if are_usable:
            optimizer.step()
        if device.type == "cuda":  # the step's last kernels belong to its time, and to the optimizer's
            torch.cuda.synchronize(device)
        step_seconds, once_seconds = time.perf_counter() - started, busy() - computed
        reader.stepped()
        on_step(step, loss, step_seconds, once_seconds)
    return reader.waited


def _complete_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give zeros to a weight without a gradient that had one before, of which the optimizer has a state.

    A training that goes on from a saved state knows of no gradients before it; undisturbed, it would have kept theirs,
    set to zero. SGD without momentum has no state, and yet decays weights: it gets one that says that they had one.
    """
    for group in optimizer.param_groups:
        decays_alone = group["weight_decay"] and not group.get("momentum", True)
        for weight in group["params"]:
            has_state = bool(optimizer.state.get(weight))
            if weight.grad is None and has_state:
                weight.grad = torch.zeros_like(weight)
            elif weight.grad is not None and not has_state and decays_alone:
                optimizer.state[weight][USED] = torch.ones(())
