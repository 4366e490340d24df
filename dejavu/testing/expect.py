"""What a case says where something is not as it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def expect(holds: object, problem: str) -> None:
    """Also under `python -O`, which leaves `assert` out.

    Raises:
        AssertionError: it does not hold.
    """
    if not holds:
        raise AssertionError(problem)


def expect_refusal(error: type[Exception], word: str, act: Callable[[], object], what: str) -> None:
    """Check that the act is refused with such an error, whose message has the word.

    Raises:
        AssertionError: it is done, or refused without the word. Another kind of error passes through.
    """
    try:
        act()
    except error as refusal:
        expect(word in str(refusal), f"{what}: it was refused with {str(refusal)!r}; wanted a message with {word!r}")
        return
    raise AssertionError(f"{what}: it was taken; wanted {error.__name__}")
