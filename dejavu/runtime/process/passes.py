"""What is said of a pass that fails, or that gives what the next stage does not expect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dejavu.foundation.errors import OWN_CODE, DejavuError
from dejavu.graphs.layer_trace import failing_part


class PassError(DejavuError):
    """A pass of a stage failed, or gave what the next stage does not expect."""


@contextmanager
def naming_errors(what: str, layers: nn.Module) -> Iterator[None]:
    """Say of an error in a pass what it is and where: torch's own words are of the shapes that the pass had.

    Args:
        what: the pass, such as `the forward pass of stage 0 in step 5`.
    """
    try:
        yield
    except OWN_CODE as error:
        cause = error if error.__cause__ is None else error.__cause__
        part = failing_part(layers, cause).rstrip(",")
        raise PassError(f"{what}{part}: {type(cause).__name__}: {cause}") from error


def check_form(output: Any, wanted: tuple[tuple[int, ...], torch.dtype], what: str) -> None:
    """Check that the next stage, which made room for the message beforehand, can receive an output.

    Args:
        wanted: the shape and type that the output had in planning.
        what: whose output it is and in which step, such as `stage 0 (layers head) in step 5`.

    Raises:
        PassError: it is another. Sent, it would end the next stage's process, or be misread there.
    """
    found = (tuple(output.shape), output.dtype) if isinstance(output, torch.Tensor) else (type(output).__name__,)
    if found != wanted:
        raise PassError(
            f"{what} gives {' of '.join(map(str, found))}; wanted {' of '.join(map(str, wanted))}, as when it was "
            "planned: the form of a layer's output may depend on nothing but that of its input"
        )
