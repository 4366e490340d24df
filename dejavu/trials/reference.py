"""Single-process losses to compare a pipeline's first losses with: trained once for each start, then remembered.

Shape suffix: L = layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dejavu.foundation.errors import OWN_CODE
from dejavu.foundation.hashing import stable_hash
from dejavu.foundation.processes.files import write_json
from dejavu.foundation.tracing import fake_tensors
from dejavu.foundation.tracing.dtypes import to_dtype_of_fake
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import DTYPES
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.shapes import boundaries
from dejavu.runtime.single import compared_steps, reference_losses
from dejavu.trials.spec import Keys
from dejavu.trials.worker import STATE
from dejavu.workload.data import dataset_of
from dejavu.workload.models import LayerBuilder, layers_of, model_of
from dejavu.workload.models.moe import Experts as ExpertsOfCapacity
from dejavu.workload.pretrained import fingerprint

SUFFIX = ".reference"  # unlike that of a trial's result
# Modules whose output for an example depends on the others of its microbatch, and what they do.
OF_ALL_EXAMPLES: dict[type[nn.Module], str] = {
    _BatchNorm: "has a batch norm",
    ExpertsOfCapacity: "gives the places of its experts to tokens",
}
# How the names of operators begin that draw random numbers.
_DRAWS = ("bernoulli", "native_dropout", "rand", "uniform", "normal", "exponential", "multinomial", "rrelu")


def remembered_reference(job: TrainingJob, folder: Path) -> list[float] | None:
    """Return single-process losses of the job's compared steps; trained only where `folder` does not have them.

    They follow from the workload, the draw and the state that the training starts from. A trial's state is named by a
    hash of these; any other starting state is trained from anew every time.

    Args:
        folder: of the trials, where their states are.

    Returns:
        None where the starting state is gone: a longer trial went on from it, or the training was begun elsewhere.
    """
    steps = compared_steps(job)
    start = Path(job.start_from) if job.start_from else None
    is_gone = start is not None and not start.exists()
    if not steps or (start is not None and (start.suffix != STATE or start.parent.resolve() != folder.resolve())):
        return None if is_gone else reference_losses(job)
    decides = [Keys().shared(job.workload), asdict(job.draw), start.stem if start else "", fingerprint(job.workload)]
    path = folder / f"{stable_hash(decides)}-{steps.start}-{steps.stop}{SUFFIX}"
    if (known := _read(path, len(steps))) is not None:
        return known
    if is_gone:
        return None
    losses = reference_losses(job)
    with suppress(OSError):  # a full disk: they are computed again the next time
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, losses)
    return losses


def what_replicas_do_apart(job: TrainingJob) -> str:
    """Say what is not the same of parts of a microbatch: the first such layer, or the model's loss; "": none is known.

    A stage's replicas each have a part of every microbatch, where one process has all of it: its losses are others.
    """
    return _what_parts_change(job, _parts_of_layers(job), "each replica's own examples")


def what_other_parts_change(before: TrainingJob, now: TrainingJob) -> str:
    """Say what is not the same where a step's examples are parted in another way; "": none is known.

    A training goes on so under a plan that has other numbers of microbatches, or of a stage's replicas.
    """
    whole = max(before, now, key=lambda job: job.workload.microbatch_size)
    if before.workload.microbatch_size != now.workload.microbatch_size:
        differ = [True] * len(layers_of(now.workload))
    else:
        differ = [a != b for a, b in zip(*map(_parts_of_layers, (before, now)), strict=True)]
    return _what_parts_change(whole, [2 if one else 1 for one in differ], "each part's own examples")


def _parts_of_layers(job: TrainingJob) -> list[int]:
    """Return for each layer into how many parts a microbatch is divided among its stage's replicas."""
    stages = job.binding.plan.stages
    return [stage.configuration.example_parts for stage in stages for _ in range(stage.start, stage.stop)]


def _what_parts_change(job: TrainingJob, parts_L: Sequence[int], of_whose: str) -> str:
    """Say which of the layers whose microbatches are divided depends on that, or that the loss does."""
    if max(parts_L) == 1:
        return ""
    pairs = list(zip(layers_of(job.workload), capture(job.workload).layers, strict=True))
    for (builder, layer), parts in zip(pairs, parts_L, strict=True):
        if parts == 1:
            continue
        with fake_tensors():
            modules = list(builder.build().modules())
        for kind, what in OF_ALL_EXAMPLES.items():
            if any(isinstance(module, kind) for module in modules):
                return f"Layer {builder.name!r} {what} of {of_whose}"
        if any(one._backward_hooks for module in modules for one in module.parameters(recurse=False)):
            return f"Layer {builder.name!r} has hooks of weights, which are given gradients of {of_whose}"
        if any(operator.kind.removeprefix("aten.").startswith(_DRAWS) for operator in layer.operators):
            return f"Layer {builder.name!r} draws random numbers for {of_whose}, as dropout does"
    if parts_L[-1] > 1 and not _is_mean_of_parts(job, parts_L[-1]):
        return f"The model's loss of a microbatch is not the mean of those of its {parts_L[-1]} parts"
    inputs = boundaries(job.workload)
    for position, parts in enumerate(parts_L):
        builder = pairs[position][0]
        if parts > 1 and _changes_buffers(builder, inputs[position], DTYPES[job.workload.dtype]):
            return f"Layer {builder.name!r} changes its buffers by {of_whose}"  # of a count it does not matter
    return ""


def _changes_buffers(builder: LayerBuilder, x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a layer's forward pass writes to a buffer, or gives it another tensor."""
    with fake_tensors(allow_non_fake_inputs=True):
        layer = builder.build()
        to_dtype_of_fake(layer, dtype)
        before = {name: (one, one._version) for name, one in layer.named_buffers()}
        layer(torch.empty(x.shape, dtype=x.dtype))
        after = {name: (one, one._version) for name, one in layer.named_buffers()}
        return any(one is not after[name][0] or version != after[name][1] for name, (one, version) in before.items())


def _is_mean_of_parts(job: TrainingJob, parts: int) -> bool:
    """Return whether the loss of the first step's first microbatch is the mean over parts of it, of random outputs.

    Also where it fails on such outputs, as one of probabilities may: nothing is known of it then.
    """
    workload, loss = job.workload, model_of(job.workload).loss
    _, targets = dataset_of(workload).batch(job.first_step, workload.microbatch_size, seed=workload.seed)
    outputs = torch.randn(capture(workload).layers[-1].output_shape, generator=torch.Generator().manual_seed(0))
    each = zip(outputs.tensor_split(parts), targets.tensor_split(parts), strict=True)
    try:
        mean = sum(loss(*part).item() * len(part[1]) for part in each) / len(targets)
        return math.isclose(mean, loss(outputs, targets).item(), rel_tol=1e-4)
    except OWN_CODE:
        return True


def _read(path: Path, count: int) -> list[float] | None:
    """Read the kept losses; None: there are none, or not enough."""
    try:
        losses = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    sound = isinstance(losses, list) and len(losses) == count and all(isinstance(loss, float) for loss in losses)
    return losses if sound else None
