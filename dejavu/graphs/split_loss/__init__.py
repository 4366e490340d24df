"""What each device does for the loss where it has the scores of its own classes: torch's `loss_parallel`, as it runs.

Torch puts together of small operators what is one kernel on one device, so a device's part takes more passes over its
scores than a part of the whole's kernels would. A test holds the table against what torch runs.

Letters: N targets, C own classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dejavu.graphs.graph import Operator
from dejavu.graphs.kernels import kernel_of
from dejavu.profiles.kernel import Kernel

# Operators of a whole `cross_entropy` of class indices, in whose place the loss is computed of parts.
BEGINS = {"forward": "aten._log_softmax", "backward": "aten.nll_loss_backward"}
CROSS_ENTROPY = {*BEGINS.values(), "aten.nll_loss_forward", "aten._log_softmax_backward_data"}

# Tensors: p (N, C) and r (N, 1) of the scores' type, P and R in float32; i (N) of int64, b (N) of bool, s one number.
_SHIFT = (("amax", "P", "R"), ("sub", "PR", "P"), ("exp", "P", "P"), ("sum", "P", "R"), ("log", "R", "R"))
_OWN_TARGETS = (
    *(("ne", "i", "b"), ("where", "bi", "i"), ("lt", "i", "b"), ("ge", "i", "b"), ("__or__", "bb", "b")),
    *(("clone", "i", "i"), ("sub", "i", "i"), ("index_put", "ib", "i")),
)
_OPERATORS = {
    "forward": (
        *(*_SHIFT, ("sub", "PR", "P")),
        *(*_OWN_TARGETS, ("gather", "pi", "r"), ("index_put", "rb", "r")),
        *(("neg", "r", "r"), ("ne", "i", "b"), ("where", "br", "r")),
        *(("ne", "i", "b"), ("sum", "b", "s"), ("sum", "r", "s"), ("div", "ss", "s")),
    ),
    "backward": (
        *(("div", "ss", "s"), *_OWN_TARGETS, ("zeros_like", "p", "p")),
        *(("sub", "r", "r"), ("arange", "", "i"), ("index_put", "iir", "r")),  # writes one score of each target
        *(("ne", "i", "b"), ("where", "br", "r")),
        *(("exp", "p", "p"), ("add", "pp", "p"), ("mul", "pr", "p")),
    ),
}
_HALF = (("_to_copy", "p", "P"), ("_to_copy", "P", "p"))  # what is not in float32 is computed in it


class SplitLoss(NamedTuple):
    """The loss of one microbatch on one of several devices.

    Attributes:
        num_targets: N; those that count.
        own_classes: C, the most that a device has.
        dtype: of the scores; torch's name.
    """

    num_targets: int
    own_classes: int
    dtype: str

    @classmethod
    def of(cls, whole: Operator, degree: int, parts: float = 1) -> SplitLoss:
        """Return the part of a whole loss, given the operator with which it begins (`BEGINS`).

        Args:
            parts: of the targets, of which devices have one each, besides.
        """
        targets, classes = whole.output_shapes[0]
        return cls(math.ceil(targets / parts), -(-classes // degree), whole.dtype)

    @property
    def _is_wide(self) -> bool:
        return self.dtype == "float32"

    def kernels(self, direction: str) -> Iterator[Kernel]:
        """Yield a device's kernels, in no order."""
        rows = [*_OPERATORS[direction], *(() if self._is_wide or direction == "backward" else _HALF)]
        for name, read, written in rows:
            found = kernel_of(self._operator(name, direction, read, written))
            if found is not None:
                yield found

    def moves(self, direction: str) -> tuple[tuple[str, float], ...]:
        """Return the collectives: the scores' maxima and the sums of their exponentials, and the targets' scores."""
        if direction == "backward":
            return ()
        sizes = (torch.float32.itemsize, torch.float32.itemsize, getattr(torch, self.dtype).itemsize)
        return tuple(("all_reduce", float(self.num_targets * size)) for size in sizes)

    def more_bytes(self, direction: str) -> float:
        """Return what is there at once beyond a part of what the whole loss has: copies in float32, and sums of two."""
        copies = 1 if self._is_wide or direction == "backward" else 3
        each = getattr(torch, self.dtype).itemsize if direction == "backward" else torch.float32.itemsize
        return float(copies * each * self.num_targets * self.own_classes)

    def _operator(self, name: str, direction: str, read: str, written: str) -> Operator:
        made = written[0]
        return Operator(
            kind=f"aten.{name}",
            direction=direction,
            input_shapes=tuple(self._shape(letter) for letter in read),
            output_shapes=tuple(self._shape(letter) for letter in written),
            dtype=str(self._type(made)).removeprefix("torch."),
            flops=0.0,
            read_bytes=sum(self._bytes(letter) for letter in read),
            written_bytes=self._bytes(made),
        )

    def _shape(self, letter: str) -> tuple[int, ...]:
        n = self.num_targets
        return {"p": (n, self.own_classes), "r": (n, 1), "s": ()}.get(letter.lower(), (n,))

    def _type(self, letter: str) -> torch.dtype:
        own = torch.float32 if letter.isupper() else getattr(torch, self.dtype)
        return {"i": torch.int64, "b": torch.bool}.get(letter, own)

    def _bytes(self, letter: str) -> int:
        return int(torch.Size(self._shape(letter)).numel()) * self._type(letter).itemsize
