"""A cache of traced layers in the user's cache folder: a model of the zoo is captured once per machine.

A layer's trace follows from its class and plain arguments, the form of its input, the dtype, the kind of devices, for
the last layer the loss; and from the code: of this package and of torch, on this kind of processor, under torch's
switches. All of that is the key. For layers that are neither this package's nor torch's it is unknown which code they
run, so they are traced anew.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dejavu.cluster.records import Kind
from dejavu.foundation import user_cache
from dejavu.graphs.capture import End, Form, Traced, plain_arguments
from dejavu.graphs.graph import Layer, Operator
from dejavu.graphs.liveness import Footprint, InParts, Moment
from dejavu.workload.models import LayerBuilder

_PACKAGE = Path(__file__).resolve().parents[1]
_ROOMS = ("graphs", "workload", "foundation", "cluster")  # what traces, what is traced, and what these import
_ZOO, _TORCH = "dejavu.workload.models.", "torch.nn."
_FOLDER = "layers"


class KeptInUserCache:
    """`dejavu.graphs.capture.KeptLayers` on disk."""

    def load(self, builder: LayerBuilder, inputs: Form, dtype: str, kind: Kind, end: End | None) -> Traced | None:
        key = _key_of(builder, inputs, dtype, kind, end)
        payload = None if key is None else user_cache.load(_FOLDER, key)
        return None if payload is None else _read(payload)

    def save(self, builder: LayerBuilder, inputs: Form, dtype: str, kind: Kind, end: End | None, found: Traced) -> None:
        key = _key_of(builder, inputs, dtype, kind, end)
        if key is not None:
            user_cache.save(_FOLDER, key, _written(found))


def _key_of(builder: LayerBuilder, inputs: Form, dtype: str, kind: Kind, end: End | None) -> Any:
    """Return all that the trace depends on; None for what is neither the zoo's own nor torch's."""
    known = plain_arguments(builder)
    if known is None or not known[0].__module__.startswith((_ZOO, _TORCH)):
        return None
    layer, arguments, named = known
    key = {
        "layer": [layer.__module__, layer.__qualname__, arguments, named],
        "inputs": inputs,
        "dtype": dtype,
        "kind": kind,
        "code": _code(),
        "switches": _switches(),
    }
    if end is not None:
        model = type(end.model)
        # A user's loss, or a user's model with the zoo's loss: it may depend on code that is not in the key.
        if not model.__module__.startswith(_ZOO) or not model.loss.__module__.startswith(_ZOO):
            return None
        key["end"] = [model.__module__, model.__qualname__, repr(end.model), end.target]
    return key


@cache
def _code() -> list[str]:
    """Hash the code that traces, and that is traced."""
    texts = [*_PACKAGE.glob("*.py"), *(path for room in _ROOMS for path in (_PACKAGE / room).rglob("*.py"))]
    return [
        user_cache.text_hash(texts),
        str(torch.__version__),
        str(torch.version.git_version),
        sys.version,
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
    ]


def _switches() -> list[Any]:
    """Return torch's settings that change which code it runs."""
    backend = torch.backends
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        backend.mkldnn.enabled,
        backend.cuda.flash_sdp_enabled(),
        backend.cuda.mem_efficient_sdp_enabled(),
        backend.cuda.math_sdp_enabled(),
        backend.cuda.cudnn_sdp_enabled(),
        str(torch.get_default_device()),
    ]


def _written(found: Traced) -> bytes:
    layer, output = found
    prints = [layer.footprint, layer.recompute_footprint]
    content = {
        "layer": {
            **{name: getattr(layer, name) for name in _PLAIN},
            "operators": [list(vars(operator).values()) for operator in layer.operators],
            "footprints": [asdict(one) | {way: _moments(getattr(one, way)) for way in _WAYS} for one in prints],
        },
        "output": output,
    }
    return json.dumps(content).encode()


_PLAIN = (
    "name", "signature", "parameter_bytes", "activation_bytes", "output_bytes", "output_shape", "num_recomputed",
    "frozen_bytes", "has_backward",
)  # fmt: skip
_WAYS = ("forward", "backward")


def _moments(moments: tuple[Moment, ...]) -> list[tuple[int, list[str]]]:
    return [(moment.own_bytes, sorted(moment.alive)) for moment in moments]


def _read(payload: bytes) -> Traced:
    content = json.loads(payload)
    row = content["layer"]
    alive, alive_recomputed = (_footprint(one) for one in row["footprints"])
    layer = Layer(
        **{name: row[name] for name in _PLAIN if name != "output_shape"},
        output_shape=tuple(row["output_shape"]),
        operators=tuple(_operator(*fields) for fields in row["operators"]),
        footprint=alive,
        recompute_footprint=alive_recomputed,
    )
    shape, stride, dtype, requires_grad = content["output"]
    return layer, Form(tuple(shape), tuple(stride), dtype, requires_grad)


def _operator(kind: str, direction: str, inputs: list[list[int]], outputs: list[list[int]], *rest: Any) -> Operator:
    return Operator(kind, direction, tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), *rest)


def _footprint(row: dict[str, Any]) -> Footprint:
    ways = {way: tuple(Moment(size, frozenset(alive)) for size, alive in row[way]) for way in _WAYS}
    return Footprint(**{**row, **ways, "in_parts": InParts(*row["in_parts"])})
