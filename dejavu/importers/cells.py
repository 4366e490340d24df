"""Cells of a source's table: numbers, or the text that was found in place of one.

A cell of another type makes text, or objects, of a whole column; here each cell is read for itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

_FLAGS = {"true": 1.0, "false": 0.0}
MOST = 2**40  # of a size or a count; more is no such thing


def numbers_of(values: pd.Series) -> NDArray[np.float64]:
    """Return each cell as a number, also where it is the text of one; NaN where it is missing or none."""
    numbers: NDArray[np.float64] = pd.to_numeric(values, errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    return numbers


def texts_of(values: pd.Series) -> NDArray[np.object_]:
    """Return each cell as text; empty where it is missing."""
    texts = np.full(len(values), "", dtype=object)
    texts[:] = ["" if missing else str(value) for value, missing in zip(values, values.isna(), strict=True)]
    return texts


def cells_of(values: pd.Series) -> NDArray[np.object_]:
    """Return each cell as a number; one that is none as its text, or as None where it is missing."""
    cells = numbers_of(values).astype(object)
    unread = np.isnan(cells.astype(float))
    cells[unread] = [text or None for text in texts_of(values[unread])]
    return cells


def flag_texts(what: str, values: pd.Series, problems: NDArray[np.object_], wanted: str = "a number") -> None:
    """Record in `problems` the cells that are neither numbers nor missing; a row keeps a problem that it has."""
    rows = np.flatnonzero(np.isnan(numbers_of(values)))
    for row, text in zip(rows, texts_of(values.iloc[rows]), strict=True):
        if text and problems[row] is None:
            problems[row] = f"{what} is {text[:80]!r}; wanted {wanted}"


def flags_of(values: pd.Series) -> NDArray[np.float64]:
    """Return 1 for each cell that is true, 0 for one that is false, also as a text or number; NaN where it is neither.

    A missing cell is NaN, too.
    """
    numbers = numbers_of(values).copy()
    numbers[(numbers != 0) & (numbers != 1)] = np.nan
    for row in np.flatnonzero(np.isnan(numbers)):
        numbers[row] = _FLAGS.get(str(values.iloc[row]).strip().casefold(), np.nan)
    return numbers


def not_flags(what: str, values: pd.Series) -> dict[int, str]:
    """Return, by its place in the column, what each cell says that is neither true nor false."""
    rows = np.flatnonzero(np.isnan(flags_of(values)))
    texts = texts_of(values.iloc[rows])
    return {
        int(row): f"{what} is {repr(text[:80]) if text else 'missing'}; wanted true or false"
        for row, text in zip(rows, texts, strict=True)
    }


def not_whole(what: str, values: pd.Series, least: int = 1) -> dict[int, str]:
    """Return what `whole` says of each cell that is no such number, by its place in the column."""
    numbers = numbers_of(values)
    rows = np.flatnonzero(~((numbers >= least) & (numbers < MOST) & (numbers == np.floor(numbers))))
    return {
        int(row): _no_whole(what, cell, least, MOST)
        for row, cell in zip(rows, cells_of(values.iloc[rows]), strict=True)
    }


def whole(what: str, value: Any, least: int = 1, most: int = MOST) -> int:
    """Return the whole number that a cell holds.

    Raises:
        ValueError: it is none, below `least`, or `most` or above.
    """
    if isinstance(value, int | float) and least <= value < most and value == int(value):
        return int(value)
    raise ValueError(_no_whole(what, value, least, most))


def _no_whole(what: str, value: Any, least: int, most: int) -> str:
    if not isinstance(value, int | float):
        found = "missing" if value is None else repr(value[:80])
        return f"{what} is {found}; wanted a whole number, {least} or more"
    range_ = f"below {most:,}" if value >= most else f"{least} or more"
    return f"{what} is {value:.12g}; wanted a whole number, {range_}"
