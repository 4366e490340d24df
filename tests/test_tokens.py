"""Files of tokens: windows as of a text, whatever the size; and what is wrong with a file is one sentence."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dejavu.foundation.errors import InputError
from dejavu.workload import TokensSettings, Workload
from dejavu.workload.data import Text, Tokens, dataset_of

CONTENT = np.random.default_rng(1).integers(0, 256, 5000)


def raw(path: Path, dtype: str) -> Path:
    path.write_bytes(CONTENT.astype(dtype).tobytes())
    return path


def npy(path: Path, dtype: str) -> Path:
    np.save(path, CONTENT.astype(dtype))
    return path.with_name(path.name + ".npy")


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("write", [raw, npy])
@pytest.mark.parametrize("held_out", [0.0, 0.3])
def test_tokens_are_trained_on_as_the_bytes_of_a_text(
    write: Callable[[Path, str], Path], dtype: str, held_out: float, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_bytes(CONTENT.astype(np.uint8).tobytes())
    text = Text(tmp_path / "text.txt", sequence_length=16, held_out=held_out, split_seed=3)
    path = write(tmp_path / "tokens", dtype)
    settings = TokensSettings(path=path, vocabulary=256, dtype=dtype)  # type: ignore[arg-type]
    fields = {"data": "tokens", "tokens": settings, "sequence_length": 16, "held_out": held_out, "seed": 3}
    tokens = dataset_of(Workload(**fields))
    for step in (0, 7, 10_000):
        assert all(map(torch.equal, tokens.batch(step, 9, seed=3), text.batch(step, 9, seed=3)))
    if held_out:
        assert all(map(torch.equal, tokens.test_batch(20, seed=3), text.test_batch(20, seed=3)))


def test_a_file_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    """Half a terabyte, with holes."""
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(2**39)
    tracemalloc.start()
    try:
        tokens = Tokens(path=tmp_path / "large.bin", vocabulary=32000, sequence_length=512)
        inputs, targets = tokens.batch(3, 64, seed=0)
        assert tokens.fingerprint
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert inputs.shape == targets.shape == (64, 512)
    assert peak_bytes < 64 * 2**20


def test_a_hash_tells_files_apart_and_not_their_names(tmp_path: Path) -> None:
    other = CONTENT.copy()
    other[2500] += 1
    np.save(tmp_path / "other", other.astype(np.uint16))
    paths = [npy(tmp_path / "a", "uint16"), npy(tmp_path / "b", "uint16"), tmp_path / "other.npy"]
    first, second, third = (Tokens(path=path, vocabulary=300).fingerprint for path in paths)
    assert first == second != third


def _two_dimensions(path: Path) -> None:
    np.save(path.with_suffix(""), np.zeros((4, 5), np.uint16))


def _fractions(path: Path) -> None:
    np.save(path.with_suffix(""), np.zeros(400))


def _pickle(path: Path) -> None:
    np.save(path.with_suffix(""), np.array([{}] * 400), allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("t.bin", lambda path: path.write_bytes(b"abc"), "has 3 bytes, which is no whole number of uint16 tokens of 2"),
        ("t.bin", lambda path: path.write_bytes(b""), "it is cut off"),
        ("t.bin", lambda path: raw(path, "uint16"), "wanted the vocabulary of the tokenizer that made the file"),
        ("t.bin", lambda path: path.write_bytes(bytes(8)), "has 4 tokens; wanted more than the sequence_length of 16"),
        ("t.npy", _two_dimensions, "has 2 dimensions of uint16; wanted one dimension of whole numbers"),
        ("t.npy", _fractions, "1 dimensions of float64; wanted"),
        ("t.npy", _pickle, "cannot be read: .*Python objects"),
        ("t.npy", lambda path: path.write_bytes(b"not one"), "cannot be read"),
        ("t.npy", lambda path: (npy(path.with_suffix(""), "uint16"), os.truncate(path, 900)), "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(name: str, spoil: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    spoil(path)
    with pytest.raises(InputError, match=said) as found:
        Tokens(path=path, vocabulary=100, sequence_length=16).batch(0, 4, seed=0)
    assert str(path) in str(found.value)


def test_a_token_outside_the_vocabulary_is_found_where_it_is_read(tmp_path: Path) -> None:
    """Also where no sample was taken: the file is of a thousand times as many tokens."""
    tokens = np.zeros(200 * 2**20, np.uint16)
    place = 63 * 2**20 + 12345
    tokens[place] = 500
    tokens.tofile(tmp_path / "t.bin")
    data = Tokens(path=tmp_path / "t.bin", vocabulary=100, sequence_length=64)
    with pytest.raises(InputError, match=f"token {place:,} is 500, and the vocabulary has 0 to 99"):
        data.windows(data.sequence(), np.array([0, place - 10]))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": "tokens"}, "the key tokens is missing; wanted the file, as"),
        ({"data": "tokens", "tokens": {"path": "no.bin", "vocabulary": 9}}, "there is no file no.bin"),
        ({"data": "digits", "tokens": {"path": "no.bin", "vocabulary": 9}}, "tokens is given, but data is 'digits'"),
        ({"data": "tokens", "tokens": {"path": "no.bin", "vocabulary": 1}}, "greater than or equal to 2"),
    ],
)
def test_workloads_that_cannot_be_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Workload(**fields)
