"""From captured operators to kernels: the family of an ATen operator, and the shape of its product or rows."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

from dejavu.graphs.graph import Operator
from dejavu.profiles.kernel import CAUSAL, Kernel

# Base names of ATen operators: without `aten.`, the underscore of the in-place form, and `_backward`.
_ATTENTION = "scaled_dot_product flash_attention efficient_attention cudnn_attention fused_attention flex_attention"
_FAMILY_OF = {
    name: family
    for family, names in {
        "matmul": "mm addmm bmm baddbmm linear mv addmv matmul addmm_activation scaled_mm mkldnn_linear "
        "grouped_mm grouped_outer transformers.grouped_mm_fallback mkldnn_rnn_layer",
        "convolution": "convolution convolution_overrideable cudnn_convolution mkldnn_convolution thnn_conv2d",
        "softmax": "softmax log_softmax safe_softmax masked_softmax",
        "normalization": "native_layer_norm native_batch_norm native_batch_norm_legit native_group_norm "
        "native_batch_norm_legit_no_training native_batch_norm_legit_functional batch_norm_with_update "
        "cudnn_batch_norm miopen_batch_norm fused_rms_norm rms_norm batch_norm_elemt",
        "reduction": "sum mean var std var_mean std_mean amax amin max min argmax argmin any all prod norm "
        "linalg_vector_norm logsumexp cumsum cumprod avg_pool2d avg_pool3d max_pool2d_with_indices "
        "max_pool3d_with_indices adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d mse_loss "
        "foreach_norm topk sort nansum count_nonzero",
        "gather": "embedding embedding_dense embedding_bag index_select gather index take nll_loss nll_loss2d "
        "nll_loss_forward nll_loss2d_forward index_put index_add index_copy scatter scatter_add scatter_reduce "
        "unsafe_index unsafe_index_put index_fill masked_select",
        "copy": "clone copy to_copy cat stack contiguous constant_pad_nd fill zero zeros ones full zeros_like "
        "ones_like full_like new_zeros new_ones new_full arange scalar_tensor slice select repeat roll flip tril triu "
        "split_with_sizes_copy split_copy expand_copy permute_copy slice_scatter select_scatter as_strided_copy "
        "foreach_copy one_hot eye reflection_pad2d pixel_shuffle",
        "elementwise": "add sub rsub mul div neg exp exp2 expm1 log log2 log1p pow sqrt rsqrt reciprocal abs sign "
        "square tanh sigmoid log_sigmoid gelu silu mish relu leaky_relu hardtanh hardswish elu softplus threshold glu "
        "erf sin cos where masked_fill native_dropout bernoulli uniform normal normal_functional clamp clamp_min "
        "clamp_max maximum minimum eq ne lt le gt ge logical_not logical_and logical_or bitwise_not bitwise_and "
        "bitwise_or addcmul addcdiv lerp floor ceil round trunc remainder floor_divide isnan isinf fused_adam "
        "fused_adamw fused_sgd foreach_add foreach_sub foreach_mul foreach_div foreach_neg foreach_sqrt "
        "foreach_addcmul foreach_addcdiv foreach_lerp foreach_pow foreach_maximum foreach_zero fused_dropout rand "
        "rand_like randn randn_like randint masked_scale",
    }.items()
    for name in names.split()
}
_ENDINGS = ("_backward_data", "_backward", "_jvp")
_NO_WORK = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "detach", "alias"}
_NO_WORK |= {"view", "unsafe_view", "reshape_alias", "as_strided", "expand", "permute", "t", "transpose", "slice"}
_WRITES_ONLY = {
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "zero",
    "fill",
    "foreach_zero",
}
_READS_WHAT_IT_WRITES = {"embedding", "index_select", "gather", "index", "unsafe_index", "take"}  # not its whole table
_REORDERS = {"clone", "cat", "stack"}
_GROUPED = {"grouped_mm", "grouped_outer"}  # of rows, a matrix or rows of each group, and their ends
GROUPED = "grouped_mm_fallback"  # transformers' product of sorted rows, each with its own expert's factor
RECURRENT = "mkldnn_rnn_layer"  # a layer of an LSTM, all steps of it
_LEAST_TENSORS = {"matmul": 2, "attention": 3, "convolution": 2}  # tensors that say the product's shape


def _own_name(kind: str) -> str:
    """Drop the library of torch's operators, and of ours that stand for them."""
    return kind.removeprefix("aten.").removeprefix("dejavu.").strip("_")


@lru_cache(maxsize=1024)
def base_name(kind: str) -> str:
    """Map `aten._softmax_backward_data` and `aten.add_` to `softmax` and `add`; other libraries' names stay whole."""
    name = _own_name(kind)
    return next((name.removesuffix(ending) for ending in _ENDINGS if name.endswith(ending)), name)


@lru_cache(maxsize=1024)  # of operators' names, of which a model has dozens
def family_of(kind: str) -> str | None:
    """Return the family of an ATen operator; None where no table here has it."""
    name = base_name(kind)
    return "attention" if any(word in name for word in _ATTENTION.split()) else _FAMILY_OF.get(name)


def without_family(operators: Iterable[Operator]) -> tuple[str, ...]:
    """List the kinds among these that no table here has, which are priced by their bytes alone."""
    kinds = {operator.kind for operator in operators if kernel_of(operator) is not None}
    return tuple(sorted(kind for kind in kinds if family_of(kind) is None))


def kernel_of(operator: Operator) -> Kernel | None:
    """Return the kernel of a captured operator; None where it does no work.

    Backward of a convolution is one kernel of `batch` = 2 products as large as forward's: to inputs and to weights.
    Causal attention on a GPU computes half of the scores, and its kernel's name says so; on a CPU, where kernels are
    measured and not told so, all are counted.
    An operator in no table counts as element-wise; `without_family` lists it.
    """
    name, family = base_name(operator.kind), family_of(operator.kind)
    if (name in _NO_WORK and not operator.kind.endswith("backward")) or not operator.output_shapes:
        return None
    if len(operator.input_shapes) < _LEAST_TENSORS.get(family or "", 0):
        family = None  # an overload that is not known here
    shape = _PRODUCTS[family](operator) if family in _PRODUCTS else _rows(operator, name, family)
    flops, own_name = operator.flops, _own_name(operator.kind)
    if family == "attention" and operator.is_causal and shape["m"] == shape["n"] and "for_cpu" not in own_name:
        own_name, flops = own_name + CAUSAL, flops / 2
    read_bytes, written_bytes = float(_read_bytes(operator, name)), float(operator.written_bytes)
    if name == "safe_softmax":  # and then, in kernels of their own: what is −∞, whole rows of that, and zeros for these
        flags = prod(operator.output_shapes[0])
        read_bytes, written_bytes = 3 * read_bytes + flags, 2 * written_bytes + flags
    return Kernel(
        family=family or "elementwise",
        name=own_name,
        dtype=operator.dtype,
        flops=flops,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        is_indexed=_is_indexed(operator, name, family),
        has_bias=family == "convolution" and _has_bias(operator),
        **shape,
    )


def _is_indexed(operator: Operator, name: str, family: str | None) -> bool:
    """Return whether a kernel works out where each element lies; torch passes over whole tensors of one shape without.

    A clone of what lies in order would be none: what is left copies into another order. Two tensors are joined along
    an inner dimension. Sums over all but the last dimension add rows to each other.
    """
    shapes = {shape for shape in (*operator.input_shapes, *operator.output_shapes) if prod(shape) > 1}
    if family == "elementwise":
        return len(shapes) > 1
    if family == "copy":
        return name in _REORDERS
    if name == "sum" and operator.input_shapes:
        given, result = operator.input_shapes[0], operator.output_shapes[0]
        return len(given) > 1 and given[-1] > 1 and result[-1:] == given[-1:]
    return False


def _has_bias(operator: Operator) -> bool:
    if operator.kind.endswith("backward"):
        return any(len(shape) == 1 for shape in operator.output_shapes)
    return len(operator.input_shapes) > 2


def _matmul(operator: Operator) -> dict[str, int]:
    """Read the sizes of the factors: the last two tensors, but in `linear` and `scaled_mm` the first two."""
    name = base_name(operator.kind)
    if name in _GROUPED:
        return _grouped(operator)
    if name.endswith(GROUPED):
        return _grouped_in_transformers(operator)
    if name == RECURRENT:
        return _recurrent(operator)
    first = name in ("linear", "mkldnn_linear", "scaled_mm")
    left, right = operator.input_shapes[:2] if first else operator.input_shapes[-2:]
    k = left[-1] if left else 1
    size = prod(operator.output_shapes[0])
    batch = prod(left[:-2]) if len(right) > 2 else 1
    m = max(prod(left[:-1]) // max(batch, 1), 1)
    return {"batch": max(batch, 1), "m": m, "n": max(size // max(m * batch, 1), 1), "k": max(k, 1)}


def _grouped(operator: Operator) -> dict[str, int]:
    """Read the sizes of one group's product: rows are spread evenly over the groups."""
    left, right = operator.input_shapes[:2]
    rows, groups = left[0], operator.input_shapes[2][0]
    each = -(-rows // max(groups, 1))
    if len(right) == 3:
        return {"batch": max(groups, 1), "m": max(each, 1), "n": max(right[2], 1), "k": max(right[1], 1)}
    return {"batch": max(groups, 1), "m": max(left[1], 1), "n": max(right[1], 1), "k": max(each, 1)}


def _grouped_in_transformers(operator: Operator) -> dict[str, int]:
    """Read a product whose rows are of several factors, backward of two: evenly many rows of each."""
    rows, factors = operator.input_shapes[:2]
    count = max(factors[0], 1)
    products = 2 if operator.kind.endswith("backward") else 1
    return {"batch": products * count, "m": max(rows[0] // count, 1), "n": factors[2], "k": max(rows[1], 1)}


def _recurrent(operator: Operator) -> dict[str, int]:
    """Read an LSTM's product of each step, backward of two: all gates of what comes in and of the state before."""
    (steps, sequences, inputs), (gates, states) = operator.input_shapes[0], operator.input_shapes[2]
    products = 2 if operator.kind.endswith("backward") else 1
    return {"batch": max(products * steps, 1), "m": max(sequences, 1), "n": max(gates, 1), "k": inputs + states}


def _convolution(operator: Operator) -> dict[str, int]:
    backward = operator.kind.endswith("backward")
    images, weight = operator.input_shapes[1:3] if backward else operator.input_shapes[:2]
    pixels = operator.input_shapes[0] if backward else operator.output_shapes[0]
    wanted = sum(shape in (images, weight) for shape in operator.output_shapes) if backward else 1
    if _is_transposed(images, weight, pixels):  # a product at each pixel that comes in; then its results are added
        groups = max(pixels[1] // max(weight[1], 1), 1)
        n, k, pixels = prod(weight[1:]), max(images[1] // groups, 1), images
    else:
        groups = max(images[1] // max(weight[1], 1), 1)
        n, k = max(pixels[1] // groups, 1), prod(weight[1:])
    return {
        "batch": groups * max(wanted, 1),
        "m": max(prod(pixels) // max(pixels[1], 1), 1),
        "n": n,
        "k": k,
    }


def _is_transposed(images: tuple[int, ...], weight: tuple[int, ...], pixels: tuple[int, ...]) -> bool:
    """Return whether a convolution is a transposed one, whose weight has the channels that come in first.

    Where as many go out, it is taken for one that makes images larger by its stride: by half and more.
    """
    if images[1] != pixels[1]:
        return weight[0] == images[1]
    return 2 * prod(pixels[2:]) > 3 * prod(images[2:])


def _attention(operator: Operator) -> dict[str, int]:
    backward = "backward" in operator.kind
    query, key = operator.input_shapes[1:3] if backward else operator.input_shapes[:2]
    if "scaled_dot_product" not in operator.kind:  # the routines below it have sequence before heads
        query, key = ((*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in (query, key))
    return {"batch": max(prod(query[:-2]), 1), "m": query[-2], "n": key[-2], "k": query[-1]}


_PRODUCTS = {"matmul": _matmul, "convolution": _convolution, "attention": _attention}


def _rows(operator: Operator, name: str, family: str | None) -> dict[str, int]:
    """Return m rows of n elements where a family works by rows, else m elements."""
    tensors: list[tuple[int, ...]] = [*operator.input_shapes, *operator.output_shapes]
    size = max(prod(shape) for shape in tensors)
    if family == "softmax":
        rows = size // max(tensors[0][-1] if tensors[0] else 1, 1)
    elif family == "reduction":
        rows = min(prod(operator.output_shapes[0]), size)
    elif family == "normalization":  # one row for each mean: after forward's result, before backward's weights
        means = operator.input_shapes[2:3] if "backward" in operator.kind else operator.output_shapes[1:2]
        rows = prod(means[0]) if means and 0 not in means[0] else size // max(tensors[0][-1], 1)
    elif family == "gather":  # what is fetched or written, not the table
        fetched = [*operator.output_shapes, *operator.input_shapes[1:2]]
        return {"m": max(1, max(prod(shape) for shape in fetched))}
    else:
        return {"m": max(size, 1)}
    return {"m": max(rows, 1), "n": max(size // max(rows, 1), 1)}


def _read_bytes(operator: Operator, name: str) -> int:
    """Return what it really reads: a look-up reads the rows it writes and its indices, a fill reads nothing."""
    if name in _WRITES_ONLY:
        return 0
    if name in _READS_WHAT_IT_WRITES and "backward" not in operator.kind:
        return operator.written_bytes + 8 * sum(prod(shape) for shape in operator.input_shapes[1:])
    if name.startswith("nll_loss"):  # one score and one index of each row; backward it writes the rest as zeros
        targets = operator.input_shapes[1:][:2][-1 if "backward" in operator.kind else 0]
        return 16 * prod(targets)
    return operator.read_bytes
