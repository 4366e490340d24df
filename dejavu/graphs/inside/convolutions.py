"""What a convolution holds inside: copies of what it reads and writes, in oneDNN's blocked layout.

Read off the CPU allocator's events of torch 2.13: over sixteen shapes on a CPU with AVX-512 (2026-11-21), over
thirty-seven on one with AVX2 (2026-11-23), and with strides and transposed on one with AVX-512 (2026-11-29).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dejavu.cluster.records import Kind
from dejavu.graphs.inside.sizes import size_of


@dataclass(frozen=True)
class _Blocked:
    """How oneDNN lays out what it convolves, by the vectors of the CPU.

    Attributes:
        channels: they are rounded up to a multiple of it.
        plain_images: of so many channels, images stay as they are for the weight's gradient.
        multiplies: kernels of one pixel and stride 1 are matrix products, and nothing is copied.
        unrolled_width: of outputs of this width or less the weight's gradient is a product with the unrolled image.
    """

    channels: int
    plain_images: tuple[int, ...]
    multiplies: bool
    unrolled_width: int


# By what torch says that the CPU can do. Other CPUs, and GPUs, count as the first.
_WIDE = _Blocked(16, (1, 2, 3), multiplies=False, unrolled_width=0)
_NARROW = _Blocked(8, (3,), multiplies=True, unrolled_width=2)
_UNROLLED_WEIGHTS, _UNROLLED_PADDING = 4, 64  # what such a product takes: weights, and numbers beside the image's
# What kernels take for blocks of their products that make the gradient of an image read with strides, or a larger image
# of a small one: the most over five hundred shapes was 123,000.
_BLOCKS_BYTES = 131_072
_SMALL = 20_480  # numbers of a single image that ATen convolves without oneDNN (Convolution.cpp, `use_mkldnn`)
_UNEVEN = 8  # of groups whose channels are no multiple of it oneDNN unrolls the image


def forward_bytes(args: Any, result: torch.Tensor, kind: Kind) -> int:
    """Count the most beyond arguments and result: copies of input, weight and output, until the last is copied back.

    A transposed convolution sums into a result of its own, which is there twice more as it is copied.
    """
    image, weight, bias, stride, padding, _, is_transposed = args[:7]
    blocked = _narrow_or_wide(kind)
    if not is_transposed and blocked.multiplies and _is_product(weight, stride, padding):
        return 0
    least = 1 if is_transposed or _is_pixel(weight) else blocked.channels
    copied = _rounded(result, blocked) + (_rounded(image, blocked) if image.shape[1] >= least else 0)
    copied += _rounded(weight, blocked, 0, 1) + _bias_bytes(bias, weight, blocked)
    if is_transposed:
        again = _rounded(result, blocked) + _BLOCKS_BYTES - size_of(result)
        return max(copied + again, 2 * size_of(result))
    if _is_pixel(weight) and max(stride) > 1:
        copied += _taken_bytes(image, result, blocked)
    return max(copied - size_of(result), _rounded(result, blocked), _unrolled_bytes(image, weight, result))


def backward_bytes(args: Any, result: Any, kind: Kind) -> int:
    """Count it for the input's gradient, made from copies, and, with that held, the weight's from copies again.

    With strides the input's gradient is there three times before the weight's is made.
    """
    gradient: torch.Tensor = args[0]
    image, weight, bias_shape, stride, padding = args[1:6]
    weight_bytes = size_of(weight)
    is_transposed, blocked = args[7], _narrow_or_wide(kind)
    if not is_transposed and blocked.multiplies and _is_product(weight, stride, padding):
        return 0
    copied = _rounded(weight, blocked, 0, 1)
    bias: int = weight.shape[0] * weight.element_size()
    for_weight = copied + _rounded(gradient, blocked) + _bias_bytes(bias_shape, weight, blocked)
    if _is_pixel(weight) or image.shape[1] not in blocked.plain_images:
        for_weight += _rounded(image, blocked)
    if _is_pixel(weight) and max(stride) > 1:
        for_weight += _taken_bytes(image, gradient, blocked)
    if gradient.shape[-1] <= blocked.unrolled_width:
        unrolled = weight[0].numel() * gradient[0, 0].numel() + _UNROLLED_PADDING
        for_weight = copied + _UNROLLED_WEIGHTS * copied + unrolled * weight.element_size()
    for_input = copied + _rounded(gradient, blocked) + _rounded(image, blocked) - size_of(image)
    if not is_transposed and max(stride) > 1:
        for_input = max(for_input + _BLOCKS_BYTES, 2 * size_of(image))
    for_input = for_input - weight_bytes if result[0] is not None else 0
    unrolled = 2 * (_unrolled_bytes(image, weight, gradient) + weight_bytes)
    return max(for_weight - weight_bytes, for_input, copied + bias, unrolled)


def _narrow_or_wide(kind: Kind) -> _Blocked:
    """Return the layout on this machine's CPU, where its cores are the devices."""
    return _NARROW if kind == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2" else _WIDE


def _is_product(weight: torch.Tensor, stride: Any, padding: Any) -> bool:
    return _is_pixel(weight) and set(stride) == {1} and not any(padding)


def _is_pixel(weight: torch.Tensor) -> bool:
    return all(size == 1 for size in weight.shape[2:])


def _unrolled_bytes(image: torch.Tensor, weight: torch.Tensor, pixels: torch.Tensor) -> int:
    """Return one unrolled image, where it is convolved as a product: a small one, and one of uneven groups; else 0."""
    groups = max(image.shape[1] // max(weight.shape[1], 1), 1)
    is_uneven = groups > 1 and (weight.shape[1] % _UNEVEN or weight.shape[0] // groups % _UNEVEN)
    if not is_uneven and (image.shape[0] > 1 or image.numel() > _SMALL):
        return 0
    return weight[0].numel() * pixels[0, 0].numel() * weight.element_size()


def _bias_bytes(bias: Any, weight: torch.Tensor, blocked: _Blocked) -> int:
    """Return a copy of the bias: its channels in whole blocks, and two more; none where these fill their blocks."""
    channels = weight.shape[0]
    if bias is None or channels % blocked.channels == 0:
        return 0
    return (-(-channels // blocked.channels) + 2) * blocked.channels * weight.element_size()


def _taken_bytes(image: torch.Tensor, pixels: torch.Tensor, blocked: _Blocked) -> int:
    """Return one image's pixels that a kernel of one pixel with strides reads, side by side, and a block more."""
    one_image = _rounded(image, blocked) // image.shape[0] // max(image[0, 0].numel(), 1)
    return one_image * (pixels[0, 0].numel() + blocked.channels)


def _rounded(tensor: torch.Tensor, blocked: _Blocked, *dimensions: int) -> int:
    """Return the tensor's bytes with its channels (dimension 1 if none is given) rounded up to whole blocks."""
    size = size_of(tensor)
    for dimension in dimensions or (1,):
        channels = tensor.shape[dimension]
        size = size // channels * -(-channels // blocked.channels) * blocked.channels
    return size
