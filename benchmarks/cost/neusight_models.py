"""NeuSight's traced models as kernels: what a device runs for one forward, or forward and backward, of a whole model.

models.parquet holds the operators of a one-layer trace: prologue, one layer, epilogue. The layer's rows count
`num_layer` times. Forward kernels follow each row's own shapes. Backward kernels are what PyTorch's autograd launches
for the operator, in terms of kernels that have a model: NeuSight's own lists leave out reductions and masks.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dejavu.foundation.errors import InputError
from dejavu.importers.neusight.kernels import (
    DTYPE,
    ITEM_BYTES,
    NUM_READ,
    NeuSightError,
    bmm,
    kernel_of_operation,
    linear,
    row_wise,
)
from dejavu.profiles.kernel import Kernel

CONFIG = ("model", "mode", "seq", "batch", "option")
IN_FIRST_LAYER = re.compile(r"_(h|layer|layers)_0_")
# What can follow the layer's last module and is not the layer's any more.
AFTER_LAYER = ("VECln", "Linear", "BMM", "EMBEDDING", "output")
# Traced calls that launch nothing: shapes, views, constants, dropout without training, casts to the type it already is.
FREE = {
    *("size", "getitem", "getattr", "view", "permute", "transpose", "expand", "unsqueeze", "dim", "finfo", "split"),
    *("type", "output", "dropout", "float", "chunk", "squeeze", "arange", "tensor"),
}
MASK_BYTES = 1  # a boolean

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """The kernels of one pass over a model.

    Attributes:
        kernels: K of them, equal ones once for each place where they occur.
        count_K: how often each runs.
        backward_K: whether it belongs to the backward pass.
        as_traffic: names of traced calls without a kernel of their own, priced as the memory traffic of their shapes.
    """

    kernels: tuple[Kernel, ...]
    count_K: NDArray[np.float64]
    backward_K: NDArray[np.bool_]
    as_traffic: tuple[str, ...]


def programs(models: pd.DataFrame) -> dict[tuple[Any, ...], Program]:
    """By model, mode, sequence, batch and option; shapes do not depend on the device, so any device's rows serve.

    Traces of several devices may differ, as torch's versions do: the first device's by name is taken, in whatever order
    the rows are. Of rows that say the same operator (`idx`) of the same trace the first counts: a file may repeat its
    rows.

    Raises:
        InputError: what a row says of its operator cannot be read; the message names the model.
    """
    operators = models[(models["kind"].astype(str) == "op") & models["fw_ops"].notna()]
    found: dict[tuple[Any, ...], Program] = {}
    for key, rows in operators.groupby(list(CONFIG), observed=True):
        first = rows["device"].astype(str).min()
        trace = rows[rows["device"].astype(str) == first]
        trace = trace[~(trace["idx"].duplicated() & trace["idx"].notna())]
        try:
            found[key] = _program(trace.sort_values("idx"))
        except (ValueError, SyntaxError, TypeError, LookupError, NeuSightError) as error:
            what = ", ".join(f"{name} {value}" for name, value in zip(CONFIG, key, strict=True))
            raise InputError(f"an operator of {what} on {first} cannot be read: {error}") from error
    return found


def _program(rows: pd.DataFrame) -> Program:
    counts = _counts(rows)
    kernels: list[Kernel] = []
    count: list[float] = []
    backward: list[bool] = []
    traffic: set[str] = set()
    training = str(rows["mode"].iloc[0]) == "train"
    for row, times in zip(rows.to_dict("records"), counts, strict=True):
        passes = [(False, _forward(row, traffic))]
        if training:
            passes.append((True, _backward(row)))
        for is_backward, launched in passes:
            kernels += launched
            count += [times] * len(launched)
            backward += [is_backward] * len(launched)
    return Program(tuple(kernels), np.array(count), np.array(backward, dtype=bool), tuple(sorted(traffic)))


def _counts(rows: pd.DataFrame) -> NDArray[np.float64]:
    """How often each row runs: `num_layer` times inside the layer, once outside; 0 layers: all rows are there."""
    counts = np.ones(len(rows))
    inside = np.flatnonzero([bool(IN_FIRST_LAYER.search(str(name))) for name in rows["name"]])
    num_layers = float(rows["num_layer"].iloc[0])
    if len(inside) and not (math.isfinite(num_layers) and num_layers >= 0):
        raise ValueError(f"num_layer is {num_layers:g}; wanted how often its layer is there, a number from 0 on")
    if len(inside) and num_layers > 0:
        operations = rows["op"].astype(str).tolist()
        after = range(inside[-1] + 1, len(rows))
        stop = next((index for index in after if operations[index] in AFTER_LAYER), len(rows))
        counts[inside[0] : stop] = num_layers
    return counts


def _forward(row: dict[str, Any], traffic: set[str]) -> list[Kernel]:
    operation, inputs, output = _shapes(row)
    if operation == "misc":
        stem = re.sub(r"(_\d+)+$", "", str(row["name"])).rstrip("_")
        if not inputs or math.prod(output) <= 1 or stem in FREE or stem.endswith(("drop", "dropout")):
            return []
        traffic.add(stem)
        return [_traffic(inputs, output)]
    if operation in ("getitem", "output"):
        return []
    name = operation.removeprefix("VEC")
    if name in NUM_READ:  # a second operand is often one number or broadcast: read what is there
        return [_traffic(inputs, output, family="elementwise", name=name)]
    if operation == "dropout":
        return [_elementwise(math.prod(output), read=ITEM_BYTES, written=ITEM_BYTES + MASK_BYTES)]
    return [kernel_of_operation(entry) for entry in _entries(row["fw_ops"])]


def _backward(row: dict[str, Any]) -> list[Kernel]:
    operation, inputs, output = _shapes(row)
    elements = math.prod(output)
    accumulated = [kernel_of_operation(entry) for entry in _entries(row["acc_ops"])]
    forward = _entries(row["fw_ops"])
    gradient: list[Kernel] = []
    if operation == "Linear":
        m, k, n = forward[0][1]
        gradient = [
            linear(m, n, k),
            linear(n, m, k),
            _elementwise(m * n, read=ITEM_BYTES, written=0),
        ]  # x, weight, bias
    elif operation == "BMM":
        batch, m, k, n = forward[0][1]
        gradient = [bmm(batch, m, n, k), bmm(batch, k, m, n)]
    elif operation == "VECln":
        gradient = [_gradient_of_rows("ln", forward[0][1]), _elementwise(elements, read=2 * ITEM_BYTES, written=0)]
    elif operation == "VECsoftmax":
        gradient = [_unary(elements, operands=2), row_wise("softmax", *forward[0][1])]
    elif operation == "dropout":  # the mask becomes numbers, is scaled, and multiplies the gradient
        cast = _elementwise(elements, read=MASK_BYTES, written=ITEM_BYTES)
        gradient = [cast, _unary(elements), _unary(elements, operands=2)]
    elif operation == "VECadd":  # hands its gradient on; a residual's two gradients are added where it forked
        same = len(inputs) > 1 and math.prod(inputs[0]) == math.prod(inputs[1])
        gradient = [_unary(elements, operands=2)] if same else []
    elif operation == "VECmul":
        gradient = [_unary(elements, operands=2)] * 2
    elif operation in ("VECmulu", "VECdivu", "where", "VECdiv"):
        gradient = [_unary(elements)]
    elif operation == "VECpowu":
        gradient = [_unary(elements), _unary(elements, operands=2), _unary(elements)]
    elif operation in ("VECrelu", "VECgelu", "VECtanh"):
        gradient = [_unary(elements, operands=2)]
    elif operation == "EMBEDDING":
        rows_and_width = _entries(row["bw_ops"])
        gradient = (
            [_elementwise(math.prod(rows_and_width[0][1][0]), read=0, written=ITEM_BYTES)] if rows_and_width else []
        )
    return gradient + accumulated


def _shapes(row: dict[str, Any]) -> tuple[str, list[Shape], Shape]:
    inputs = [tuple(shape) for shape in ast.literal_eval(str(row["in_shapes"]))]
    return str(row["op"]), inputs, tuple(ast.literal_eval(str(row["out_shape"])))


def _entries(text: object) -> list[Any]:
    return ast.literal_eval(text) if isinstance(text, str) else []


def _elementwise(elements: int, *, read: float, written: float, name: str = "elementwise") -> Kernel:
    """`read` and `written` are bytes for each element."""
    return Kernel(
        family="elementwise",
        name=name,
        dtype=DTYPE,
        m=elements,
        flops=float(elements),
        read_bytes=float(read * elements),
        written_bytes=float(written * elements),
    )


def _unary(elements: int, operands: int = 1) -> Kernel:
    return _elementwise(elements, read=operands * ITEM_BYTES, written=ITEM_BYTES)


def _gradient_of_rows(operation: str, shape: Sequence[int]) -> Kernel:
    """Like the forward kernel, and reads the gradient too."""
    forward = row_wise(operation, *shape)
    return Kernel(**{**forward.__dict__, "read_bytes": forward.read_bytes + forward.written_bytes})


def _traffic(inputs: Sequence[Shape], output: Shape, family: str = "copy", name: str = "copy") -> Kernel:
    """Reads its inputs, no more of each than the output has, and writes its output."""
    elements = math.prod(output)
    read = sum(min(math.prod(shape), elements) for shape in inputs)
    return Kernel(
        family=family,
        name=name,
        dtype=DTYPE,
        m=elements,
        flops=float(elements) if family == "elementwise" else 0.0,
        read_bytes=float(ITEM_BYTES * read),
        written_bytes=float(ITEM_BYTES * elements),
    )
