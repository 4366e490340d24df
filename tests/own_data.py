"""Data of one's own, by whose names ranks and workers import this file: it is light, since each of them does."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Rows(Dataset[Any]):
    """Example n is four numbers n and the class n mod 3."""

    def __init__(self, count: int, first: int = 0, seconds: float = 0.0) -> None:
        self.count, self.first, self.seconds = count, first, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        time.sleep(self.seconds)
        number += self.first
        return np.full(4, number, np.float64), number % 3


class Flow(IterableDataset[Any]):
    """The same, one after the other."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(self.count):
            yield torch.full((4,), float(number)), torch.tensor(number % 3)


def rows(count: int = 50, seconds: float = 0.0) -> Rows:
    return Rows(count, seconds=seconds)


class Successors(Rows):
    """Example n is a single number, whose class is the next one."""

    def __getitem__(self, number: int) -> tuple[int, int]:  # type: ignore[override]
        return number % 8, (number + 1) % 8


def successors(count: int) -> Successors:
    return Successors(count)


class Masks(Rows):
    """A class for each number of an input."""

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[override]
        return super().__getitem__(number)[0], np.arange(4) % 3


def masks(count: int) -> Masks:
    return Masks(count)


class OfKind(Rows):
    """Inputs and targets of two types of numbers."""

    def __init__(self, count: int, inputs: str, targets: str, target: float) -> None:
        super().__init__(count)
        self.inputs, self.targets, self.target = inputs, targets, target

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[override]
        return np.full(4, number % 2).astype(self.inputs), np.array(self.target).astype(self.targets)


def of_kind(inputs: str = "float32", targets: str = "int64", target: float = 1) -> OfKind:
    return OfKind(50, inputs, targets, target)


class _Logged(Rows):
    def __init__(self, count: int, folder: str) -> None:
        super().__init__(count)
        self.folder = Path(folder)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        with (self.folder / f"{os.getpid()}.txt").open("a") as file:
            file.write(f"{number}\n")
        return super().__getitem__(number)


def logged(count: int, folder: str) -> Rows:
    """Each process writes down which examples it made, after the first one, which is for the shape."""
    return _Logged(count, folder)


def two(count: int = 50) -> tuple[Rows, Rows]:
    return Rows(count), Rows(10, first=1000)


def flow(count: int = 50) -> Flow:
    return Flow(count)


def number() -> int:
    return 5


def failing() -> Rows:
    raise RuntimeError("no such bucket")


class _Leaves(Rows):
    def __init__(self, bad: int, seconds: float) -> None:
        super().__init__(50, seconds=seconds)
        self.bad = bad

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        if number == self.bad:
            raise SystemExit(0)
        return super().__getitem__(number)


class _FlowLeaves(Flow):
    def __init__(self, bad: int, seconds: float) -> None:
        super().__init__(50)
        self.rows = _Leaves(bad, seconds)

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.rows.__getitem__, range(50))


def leaves(bad: int, seconds: float = 0.0) -> Rows:
    """Ends its process, as code does that was a script's: at an example, or at once."""
    if bad < 0:
        raise SystemExit(0)
    return _Leaves(bad, seconds)


def flow_leaves(bad: int, seconds: float = 0.0) -> Flow:
    return _FlowLeaves(bad, seconds)


class _Broken(Rows):
    def __getitem__(self, number: int) -> Any:
        good = super().__getitem__(number)
        return {1: good, 7: None, 8: (np.zeros(5), 1), 9: (good[0], 3), 10: (good[0], 0.5)}.get(number, good)


def broken() -> Rows:
    return _Broken(50)


class _Late(Rows):
    def __init__(self, count: int, bad: int) -> None:
        super().__init__(count)
        self.bad = bad

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        if number == self.bad:
            raise OSError("the bucket is gone")
        return super().__getitem__(number)


def late(count: int = 50, bad: int = -1) -> Rows:
    """All is well until an example is wanted."""
    return _Late(count, bad)


class _Random(Rows):
    def __getitem__(self, number: int) -> Any:
        return torch.rand(4), number % 3


def random_ones() -> Rows:
    return _Random(50)


def lonely() -> list[float]:
    return [1.0, 2.0]
