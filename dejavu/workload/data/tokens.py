"""Tokens that somebody else made of a text, in one file that is mapped into memory: it may be larger than that."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from dejavu.foundation.errors import InputError
from dejavu.workload.data._base import ExampleShape
from dejavu.workload.data._windows import Windows

FIELD = ("tokens",)
SAMPLES, SAMPLE_BYTES = 1024, 64 * 2**10  # of a file: what its hash is of, and what is looked at before a training


@dataclass(frozen=True)
class Tokens(Windows):
    """Windows of a sequence of tokens; the target is the same window one token later.

    The file is a `.npy` of one dimension, or a raw file of numbers, as nanoGPT's and Megatron's `.bin`.

    Attributes:
        vocabulary: how many values a token may take.
        dtype: of the numbers in a raw file.
    """

    path: Path
    vocabulary: int
    dtype: str = "uint16"
    unit = "tokens"

    @property
    def shape(self) -> ExampleShape:
        return ExampleShape((self.sequence_length,), torch.int64, (self.sequence_length,), self.vocabulary)

    @property
    def content_hash(self) -> str:
        return _mapped(self.path, self.dtype, self.vocabulary)[1]

    def sequence(self) -> np.ndarray:
        return _mapped(self.path, self.dtype, self.vocabulary)[0]

    @property
    def told(self) -> str:
        return str(self.path)

    def windows(self, sequence: np.ndarray, starts: np.ndarray) -> np.ndarray:
        found = super().windows(sequence, starts)
        if (worst := _first_outside(found, self.vocabulary)) is not None:
            row, place = worst
            raise _outside(self.path, int(starts[row] + place), int(found[row, place]), self.vocabulary)
        return found


@cache
def _mapped(path: Path, dtype: str, vocabulary: int) -> tuple[np.ndarray, str]:
    """Return the tokens and a hash of their number and of samples all over the file.

    Raises:
        InputError: the file cannot be mapped, or a sampled token is not of the vocabulary.
    """
    try:
        is_npy = path.suffix == ".npy"
        tokens = np.load(path, mmap_mode="r", allow_pickle=False) if is_npy else _raw(path, np.dtype(dtype))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {str(error)[:200]}", FIELD) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        found = f"{tokens.ndim} dimensions of {tokens.dtype}"
        raise InputError(f"{path} has {found}; wanted one dimension of whole numbers", FIELD)
    _expect_random_reads(tokens)
    length = SAMPLE_BYTES // tokens.dtype.itemsize
    hashed = hashlib.sha256(f"{len(tokens)} {tokens.dtype}".encode())
    for start in np.unique(np.linspace(0, max(0, len(tokens) - length), SAMPLES).astype(np.int64)):
        sample = tokens[start : start + length]
        if (place := _first_outside(sample, vocabulary)) is not None:
            raise _outside(path, int(start + place[0]), int(sample[place]), vocabulary)
        hashed.update(sample.tobytes())
    return tokens, hashed.hexdigest()[:16]


def _raw(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise ValueError(
            f"it has {size:,} bytes, which is no whole number of {dtype} tokens of {dtype.itemsize}: it is cut off, or "
            "of another dtype"
        )
    return np.memmap(path, dtype, mode="r")


def _expect_random_reads(tokens: np.ndarray) -> None:
    """Tell the kernel to read ahead of no page: a window of kilobytes would cost megabytes (8 MiB on some machines)."""
    mapped: mmap.mmap | None = getattr(tokens, "_mmap", None)
    if mapped is not None:
        mapped.madvise(mmap.MADV_RANDOM)


def _first_outside(tokens: np.ndarray, vocabulary: int) -> tuple[int, ...] | None:
    """Return the place of the first token that is not of the vocabulary; None: there is none."""
    if tokens.size == 0 or (int(tokens.max()) < vocabulary and int(tokens.min()) >= 0):
        return None
    outside = (tokens >= vocabulary) | (tokens < 0)
    return tuple(int(k) for k in np.unravel_index(int(outside.argmax()), tokens.shape))


def _outside(path: Path, place: int, token: int, vocabulary: int) -> InputError:
    return InputError(
        f"{path}: token {place:,} is {token:,}, and the vocabulary has 0 to {vocabulary - 1:,}; wanted the vocabulary "
        "of the tokenizer that made the file, and the dtype it was written with",
        FIELD,
    )
