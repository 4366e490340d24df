"""How our docstrings are read for the API pages, where they are written in other ways than the parser expects.

`low, high: the interval` describes two fields at once; each of them gets the sentence. A module's table of its files
becomes a list.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

SHARED = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +\S.*)*)$", re.MULTILINE)
FILE = re.compile(r"^(?P<names>\w+\.py(?:, \w+\.py)*) +(?P<text>\S.*)$", re.MULTILINE)


class OurDocstrings(Extension):
    """Rewrites docstrings after they were loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = SHARED.sub(one_by_one, obj.docstring.value)
            obj.docstring.value = FILE.sub(r"- `\g<names>`: \g<text>", text)


def one_by_one(found: re.Match[str]) -> str:
    """`a, b: text` as a line for each."""
    return "\n".join(f"{found['indent']}{name}: {found['text']}" for name in found["names"].split(", "))
