"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import codecs
import io
import json
import sys
from typing import TYPE_CHECKING, Any

from dejavu.foundation.processes.files import finite

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 240


def console() -> Console:
    """Return a console that never cuts a line off where nobody sees it: in a file or a pipe lines are long."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)


def json_text(content: Any) -> str:
    """Return indented JSON, with null for numbers that are not finite."""
    return json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False)


def print_in_any_locale() -> None:
    """Print `?` for what the terminal's encoding lacks, such as `✔` in ISO 8859: it is no reason to lose an answer."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and (out.errors == "strict" or codecs.lookup(out.encoding).name != "utf-8"):
        out.reconfigure(errors="replace")
