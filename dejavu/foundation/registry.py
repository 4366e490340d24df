"""Families of parts that stand in for each other, and the one way from the name that a person writes to the member."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from dejavu.foundation.errors import InputError

Member = TypeVar("Member")


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known word that is most like this one, case aside; empty: none is."""
    folded = {name.casefold(): name for name in reversed(list(known))}
    return [folded[near] for near in difflib.get_close_matches(word.casefold(), folded, n=1)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing if no known word is like it."""
    return _question(nearest(word, known))


def _question(near: list[str]) -> str:
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


class Family(dict[str, Member]):
    """The members of a family by the name that a person writes: a dict, and what an unknown name is answered.

    To add a member of your own: `SEARCHES["mine"] = Mine`, before the name is used; all commands and flows of the
    process know it then.

    Attributes:
        what: the word for one member, as in `unknown search 'exat'`.
        field: which entry of a workload holds the name, for an error to say line and column; empty: none does.
        also: what else may stand in a name's place.
        wanted: what is said to be wanted, in the place of names that are too many to be listed.
        near: the known names that somebody may have meant.
    """

    def __init__(
        self,
        what: str,
        members: Mapping[str, Member],
        *,
        field: tuple[str | int, ...] = (),
        also: tuple[str, ...] = (),
        wanted: str = "",
        near: Callable[[str, Iterable[str]], list[str]] = nearest,
    ) -> None:
        super().__init__(members)
        self.what, self.field, self.also, self.wanted, self.near = what, field, also, wanted, near

    def unknown(self, name: str, *also: str) -> str:
        """What is said of a name that is none of the members', nor of `also`."""
        name, known = name[:80], (*also, *self, *self.also)
        wanted = self.wanted or f"one of {', '.join(known)}"
        return f"unknown {self.what} {name!r}{_question(self.near(name, known)) or f'; wanted {wanted}'}"


def named(family: Family[Member], name: str) -> Member:
    """The member that a person named.

    Raises:
        InputError: there is none of that name; the message has the likest name, or all of them.
    """
    try:
        return family[name]
    except KeyError:
        raise InputError(family.unknown(name), family.field) from None
