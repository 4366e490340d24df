"""NeuSight's rows as our kernels: single kernels, and the operators of its traced models.

The columns and the operator lists are those of its published data (Lee et al., "Forecasting GPU performance for deep
learning training and inference", ASPLOS 2025). Everything there is float32 with TF32 off. Matrix products are M×N by
N×K: their N is the dimension that is summed over, our k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dejavu.foundation.errors import DejavuError
from dejavu.importers.cells import texts_of
from dejavu.profiles.kernel import Kernel

DTYPE = "float32"
ITEM_BYTES = 4  # float32

# Element-wise operations by tensors read; a name that ends in u has a scalar for its second operand.
NUM_READ = {
    **dict.fromkeys(("add", "mul", "div", "pow"), 2),
    **dict.fromkeys(("addu", "mulu", "divu", "powu", "relu", "gelu", "tanh"), 1),
}
# Operations on rows: (family, name, floating point operations for each element: softmax subtracts the maximum,
# exponentiates, sums, divides; layer norm: mean, difference, square, mean, scale, shift).
ROW_WISE = {"softmax": ("softmax", "softmax", 5), "ln": ("normalization", "layer_norm", 6)}
# The operations of kernels.parquet, and the columns that say each one's size.
SIZE_COLUMNS = {
    "bmm": ("B", "M", "N", "K"),
    "linear": ("M", "N", "K"),
    "conv": ("B", "cin", "cout", "ksize", "insize", "stride", "pad"),
    **dict.fromkeys((*NUM_READ, *ROW_WISE), ("B", "H")),
}


class NeuSightError(DejavuError):
    """A row that is none of NeuSight's kernels; the message names it, the value found and the value wanted."""


def bmm(batch: int, m: int, reduced: int, n: int) -> Kernel:
    kernel = Kernel(
        family="matmul", name="bmm", dtype=DTYPE, batch=batch, m=m, n=n, k=reduced, flops=2.0 * batch * m * n * reduced
    )
    return _moving(kernel, read=batch * reduced * (m + n), written=batch * m * n)


def linear(m: int, reduced: int, n: int) -> Kernel:
    """Make the kernel of a product with a weight (n × reduced), and a bias of n added."""
    kernel = Kernel(family="matmul", name="linear", dtype=DTYPE, m=m, n=n, k=reduced, flops=2.0 * m * n * reduced)
    return _moving(kernel, read=reduced * (m + n) + n, written=m * n)


def convolution(images: int, cin: int, cout: int, ksize: int, insize: int, stride: int, pad: int) -> Kernel:
    """Make the kernel of a convolution with square images and filters, as all of NeuSight's are.

    Raises:
        NeuSightError: the filter is larger than the padded image.
    """
    m, k = images * outsize(insize, ksize, stride, pad) ** 2, cin * ksize**2
    kernel = Kernel(family="convolution", name="conv2d", dtype=DTYPE, m=m, n=cout, k=k, flops=2.0 * m * cout * k)
    return _moving(kernel, read=images * cin * insize**2 + k * cout, written=m * cout)


def outsize(insize: int, ksize: int, stride: int, pad: int) -> int:
    """Return the width of a convolution's output.

    Raises:
        NeuSightError: there is none: the filter is larger than the padded image.
    """
    padded = insize + 2 * pad
    if ksize > padded:
        raise NeuSightError(f"ksize of 'conv' is {ksize}; wanted at most {padded}, which is insize + 2 × pad")
    return (padded - ksize) // stride + 1


def row_wise(operation: str, rows: int, width: int) -> Kernel:
    """Make the kernel of an element-wise operation, softmax or layer norm over `rows` of `width` elements."""
    elements = rows * width
    if operation in ROW_WISE:
        family, name, flops = ROW_WISE[operation]
        parameters = 2 * width if family == "normalization" else 0
        kernel = Kernel(family=family, name=name, dtype=DTYPE, m=rows, n=width, flops=float(flops * elements))
        return _moving(kernel, read=elements + parameters, written=elements)
    kernel = Kernel(family="elementwise", name=operation, dtype=DTYPE, m=elements, flops=float(elements))
    return _moving(kernel, read=elements * NUM_READ[operation], written=elements)


def memory(shapes: Sequence[Sequence[int]]) -> Kernel:
    """Make the kernel of NeuSight's MEM: tensors read, and the last written, without arithmetic."""
    *read, written = [math.prod(shape) for shape in shapes]
    return _moving(Kernel(family="copy", name="copy", dtype=DTYPE, m=written), read=sum(read), written=written)


def _moving(kernel: Kernel, *, read: int, written: int) -> Kernel:
    """Return the kernel with its traffic, given in elements."""
    return replace(kernel, read_bytes=float(ITEM_BYTES * read), written_bytes=float(ITEM_BYTES * written))


_OF_ROW: dict[str, Callable[..., Kernel]] = {"bmm": bmm, "linear": linear, "conv": convolution}


def kernels_of(frame: pd.DataFrame) -> list[Kernel]:
    """Return the kernel of each row of kernels.parquet, in order; further columns are ignored.

    Equal rows share one `Kernel`.

    Raises:
        NeuSightError: an operation that is unknown, a column that is missing, a size that is no whole number ≥ 1, or
            a convolution without an output.
    """
    if "op" not in frame.columns:
        raise NeuSightError(f"no column 'op' among {', '.join(map(str, frame.columns))}")
    operations = texts_of(frame["op"])
    unknown = sorted(set(operations) - set(SIZE_COLUMNS))
    if unknown:
        raise NeuSightError(f"unknown operations {', '.join(unknown)}; wanted some of {', '.join(SIZE_COLUMNS)}")
    kernels = np.empty(len(frame), dtype=object)
    for operation in np.unique(operations):
        positions = np.flatnonzero(operations == operation)
        sizes = _sizes(frame, operation, positions)
        distinct, inverse = np.unique(sizes, axis=0, return_inverse=True)
        made = np.empty(len(distinct), dtype=object)
        made[:] = [_kernel(operation, size) for size in distinct.tolist()]
        kernels[positions] = made[inverse.ravel()]
    return kernels.tolist()


def _kernel(operation: str, size: Sequence[int]) -> Kernel:
    make = _OF_ROW.get(operation)
    return make(*size) if make else row_wise(operation, *size)


def _sizes(frame: pd.DataFrame, operation: str, positions: NDArray[np.intp]) -> NDArray[np.int64]:
    columns = SIZE_COLUMNS[operation]
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise NeuSightError(f"no column {missing[0]!r}, which {operation!r} needs: {', '.join(columns)}")
    values = np.column_stack(
        [pd.to_numeric(frame[column].iloc[positions]).to_numpy(dtype=float, na_value=np.nan) for column in columns]
    )
    least = np.array([0.0 if column == "pad" else 1.0 for column in columns])
    bad = np.argwhere(~((values >= least) & (values == np.floor(values))))
    if len(bad):
        row, column = bad[0]
        raise NeuSightError(
            f"row {frame.index[positions[row]]}: {columns[column]} of {operation!r} is {values[row, column]}; "
            f"wanted a whole number ≥ {least[column]:.0f}"
        )
    return values.astype(np.int64)


def kernel_of_operation(entry: Sequence[Any]) -> Kernel:
    """Return the kernel of an entry of fw_ops, bw_ops or acc_ops in models.parquet, as `['BMM', (80, 1024, 64, 1024)]`.

    Raises:
        NeuSightError: it is unknown.
    """
    try:
        operation, shape = entry
        if operation == "BMM":
            return bmm(*shape)
        if operation == "Linear":
            return linear(*shape)
        if operation == "MEM":
            return memory(shape)
        if operation.removeprefix("VEC") in (*NUM_READ, *ROW_WISE):
            return row_wise(operation.removeprefix("VEC"), *shape)
    except (TypeError, ValueError, AttributeError):
        pass
    known = ("BMM", "Linear", "MEM", *(f"VEC{name}" for name in (*NUM_READ, *ROW_WISE)))
    raise NeuSightError(f"unknown operation {entry!r}; wanted [name, shape] with a name among {', '.join(known)}")
