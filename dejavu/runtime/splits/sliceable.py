"""Which trainings can go through their stages slice by slice (`slices`): of causal decoders, under whole passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.foundation.tracing import fake_tensors
from dejavu.foundation.tracing.dtypes import to_dtype_of_fake
from dejavu.graphs.capture import Form, work_of
from dejavu.graphs.graph import DTYPES
from dejavu.plans import Plan
from dejavu.plans.schedule import CHIMERA, SCHEDULES
from dejavu.runtime.shapes import boundaries
from dejavu.workload import AUTO, Workload
from dejavu.workload.models import layers_of
from dejavu.workload.settings import whole_backward_schedules
from dejavu.workload.slices import said, slice_lengths

_DROPOUTS = {getattr(torch.nn.functional, name) for name in ("dropout", "dropout1d", "dropout2d", "alpha_dropout")}


class _Watched(TorchFunctionMode):
    """Notes whether all attention is causal by torch's own word, without a mask of the layer's, and what drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.is_causal, self.drops = True, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            given |= dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            self.is_causal &= bool(given.get("is_causal")) and given.get("attn_mask") is None
            self.drops |= bool(given.get("dropout_p"))
        self.drops |= func in _DROPOUTS
        return func(*args, **(kwargs or {}))


def check_slices(workload: Workload, schedules: Sequence[str] = (), *, drops_nothing: bool = False) -> None:
    """Check that the model can be trained slice by slice, where that is wanted: that it is a causal decoder.

    Args:
        schedules: that are asked for beside the workload's own.
        drops_nothing: also that no layer drops out: a slice would draw other numbers than the whole sequence.

    Raises:
        InputError: it is not; the message names the model, the layer and what of it needs later positions.
    """
    if not slice_lengths(workload):
        return
    asked, model, builders = f"slices: {said(workload.slices)}", workload.model, layers_of(workload)
    for name in {workload.planned_schedule, *schedules} - {AUTO}:
        if name == CHIMERA:
            raise InputError(
                f"{asked}: chimera runs whole sequences; wanted another schedule, or no slices", ("slices",)
            )
        _check_schedule(asked, name)
    if workload.compile:
        raise InputError(
            f"{asked} replace torch's attention, and layers are compiled; wanted compile: false", ("slices",)
        )
    wanted = "wanted a causal decoder, such as gpt or llama, or no slices"
    for builder in builders:
        if builder.tensor_parallel is None or not builder.tensor_parallel.context:
            raise InputError(
                f"{asked} with model {model!r}: layer {builder.name!r} does not say that its "
                f"tokens meet in torch's attention alone; {wanted}",
                ("slices",),
            )
    last = builders[-1].tensor_parallel
    if last is None or not last.loss_by_position:
        raise InputError(
            f"{asked} with model {model!r}: its loss is no mean over all positions, each by "
            f"itself, so slices have no losses of their own; {wanted}",
            ("slices",),
        )
    for name in _not_causal(workload, drops_nothing=drops_nothing):
        raise InputError(
            f"{asked} with model {model!r}: layer {name!r} attends to later positions, or has "
            f"a mask of its own; {wanted}",
            ("slices",),
        )


def _not_causal(workload: Workload, *, drops_nothing: bool) -> tuple[str, ...]:
    """Return the layers whose attention is not causal; of layers that compute the same, the first is run.

    Args:
        drops_nothing: and those that drop out.
    """
    found, known = list[str](), set[Any]()
    for builder, meta in zip(layers_of(workload), boundaries(workload), strict=False):
        form = Form.of(meta)
        key = None if form is None else work_of(builder, form)
        if key is not None and key in known:
            continue
        known.add(key)
        with fake_tensors(allow_non_fake_inputs=True), _Watched() as watched:
            module = builder.build()
            to_dtype_of_fake(module, DTYPES[workload.dtype])
            module(torch.zeros(meta.shape, dtype=meta.dtype))
        if not watched.is_causal or (drops_nothing and watched.drops):
            found.append(builder.name)
    return tuple(found)


def check_stages_of_slices(workload: Workload, plan: Plan) -> None:
    """Check that a plan's stages can run slices, where that is wanted.

    Raises:
        InputError: one cannot; the message says what would do.
    """
    lengths = slice_lengths(workload)
    if plan.slices and plan.slices != lengths:
        raise InputError(
            f"the plan has sequences in slices of {list(plan.slices)} positions, and the workload says slices: "
            f"{said(workload.slices)}; wanted the same"
        )
    if not lengths:
        return
    asked = f"slices: {said(workload.slices)}"
    _check_schedule(asked, plan.schedule)
    for number, stage in enumerate(plan.stages):
        one = stage.configuration
        if one.sequence_parts > 1:
            raise InputError(
                f"{asked}: the devices of stage {number} have a part of the sequence each, and slices go through all "
                "devices of a stage; wanted context_parallel 1 and sequence_parallel false"
            )
        for builder in layers_of(workload)[stage.start : stage.stop]:
            if plan.split_of(builder.name, one.tensor_parallel):
                raise InputError(
                    f"{asked}: layer {builder.name!r} has a split that was found, which works on whole sequences; "
                    "wanted tensor_parallel 1"
                )


def _check_schedule(asked: str, name: str) -> None:
    if named(SCHEDULES, name).splits_backward:
        raise InputError(
            f"{asked}: schedule {name} runs the backward pass in two parts, and a slice's gradient of keys and values "
            f"is passed on in one; wanted one of {', '.join(whole_backward_schedules())}, or no slices",
            ("slices",),
        )
