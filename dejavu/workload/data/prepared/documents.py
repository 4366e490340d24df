"""Documents as one sequence of tokens, made once by a tokenizer's file and mapped from then on."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dejavu.foundation.errors import InputError
from dejavu.workload.data._base import ExampleShape
from dejavu.workload.data._windows import Windows
from dejavu.workload.data.prepared.kept import Kept, Said, files_of, hash_of_files, kept
from dejavu.workload.data.prepared.reading import PARQUET, TEXTS, Piece, column, texts
from dejavu.workload.data_settings import TokenizerSettings

FORM = 1  # of the kept files: another form, another number
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")
AT_ONCE = 2**22  # characters that are given to the tokenizer together


@dataclass(frozen=True)
class Documents(Windows):
    """Windows of the tokens of all documents, one after the other, with the end token after each.

    Attributes:
        path: a file or folder of texts (`.txt`, `.md`, `.py`, `.jsonl`) or of `.parquet`.
        tokenizer: None: the column has tokens already.
        column: of a Parquet file; None: they are texts.
        vocabulary, end_token: of a column of tokens; otherwise they are the tokenizer's.
    """

    path: Path
    tokenizer: TokenizerSettings | None = None
    column: str | None = None
    vocabulary: int | None = None
    end_token: int | None = None
    unit = "tokens"

    @property
    def shape(self) -> ExampleShape:
        vocabulary = int(self._kept.about["vocabulary"])
        return ExampleShape((self.sequence_length,), torch.int64, (self.sequence_length,), vocabulary)

    @property
    def content_hash(self) -> str:
        return self._kept.folder.name

    @property
    def told(self) -> str:
        return str(self.path)

    @property
    def where(self) -> tuple[str, ...]:
        return ("text",) if self.column is None else ("parquet",)

    def sequence(self) -> np.ndarray:
        found = self._kept
        if not found.about["count"]:
            return np.zeros(0, np.uint16)
        return np.memmap(found.folder / "tokens.bin", found.about["dtype"], mode="r")

    @cached_property
    def _kept(self) -> Kept:
        files = files_of(self.path, TEXTS if self.column is None else PARQUET, self.where)
        settings = self.tokenizer.model_dump(mode="json", exclude={"path"}) if self.tokenizer else None
        made_by = hash_of_files([self.tokenizer.path]) if self.tokenizer else None
        try:
            content = [hash_of_files(files), *(file.suffix for file in files)]
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error}", self.where) from error
        key = [FORM, content, made_by, settings, self.column, self.vocabulary, self.end_token]
        return kept(key, self.where, lambda folder: self._write(folder, files))

    def _write(self, folder: Path, files: list[Path]) -> dict[str, Any]:
        encoder = _encoder(self.tokenizer) if self.tokenizer else None
        vocabulary, end = (encoder.vocabulary, encoder.end) if encoder else (self.vocabulary, self.end_token)
        assert vocabulary is not None  # checked by the workload
        dtype = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
        field = self.tokenizer.field if self.tokenizer else ""
        pieces = (
            texts(files, field, self.where)
            if self.column is None
            else column(files, self.column, self.where, of_tokens=encoder is None)
        )
        said, count = Said(f"tokens of {self.path}", sum(file.stat().st_size for file in files)), 0
        with (folder / "tokens.bin").open("wb") as out:
            for some in _together(pieces):
                rows = encoder.encode([one.content for one in some]) if encoder else [one.content for one in some]
                for piece, row in zip(some, rows, strict=True):
                    found = np.asarray(row, np.int64)
                    if found.size and (found.max() >= vocabulary or found.min() < 0):
                        worst = found[(found >= vocabulary) | (found < 0)][0]
                        raise InputError(
                            f"{piece.where}: a token is {worst:,}, and the vocabulary has 0 to {vocabulary - 1:,}; "
                            "wanted the vocabulary of the tokenizer that made the tokens",
                            self.where,
                        )
                    if piece.ends and end is not None:
                        found = np.append(found, end)
                    out.write(found.astype(dtype).tobytes())
                    count += len(found)
                said(some[-1].done_bytes, f"{count:,} tokens")
        return {"vocabulary": vocabulary, "dtype": dtype.name, "count": count}


def _together(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Return pieces in lists of a few million characters, so that several are encoded at once."""
    some: list[Piece] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += len(piece.content)
        if size >= AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


class _Encoder(NamedTuple):
    tokenizer: Any
    vocabulary: int
    end: int | None

    def encode(self, some: list[str]) -> list[list[int]]:
        return [one.ids for one in self.tokenizer.encode_batch_fast(some, add_special_tokens=False)]


def _encoder(settings: TokenizerSettings) -> _Encoder:
    """Load a tokenizer's file.

    Raises:
        InputError: the library is missing, it is no such file, or its vocabulary does not fit what is said of it.
    """
    field, path = ("tokenizer",), settings.path
    if importlib.util.find_spec("tokenizers") is None:
        raise InputError(f"{path} needs the package tokenizers: pip install 'pipe-dejavu[data]'", field)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other
        raise InputError(
            f"{path} cannot be read as a tokenizer: {str(error)[:120]}; wanted a tokenizer.json, as Hugging Face's "
            "library tokenizers writes it",
            field,
        ) from error
    words = tokenizer.get_vocab(with_added_tokens=True)
    if not words:
        raise InputError(f"{path} has no tokens; wanted a trained tokenizer", field)
    word, largest = max(words.items(), key=lambda one: one[1])
    vocabulary = settings.vocabulary or largest + 1
    if largest >= vocabulary:
        raise InputError(
            f"vocabulary is {vocabulary:,}, but {path} has the token {word!r} with the number {largest:,}; "
            f"wanted at least {largest + 1:,}",
            field,
        )
    if settings.end_token is not None and settings.end_token not in words:
        near = [name for name in USUAL_ENDS if name in words]
        has = f"; it has {', '.join(near)}" if near else ""
        raise InputError(f"{path} has no token {settings.end_token!r} to end documents with{has}", field)
    ends = [settings.end_token] if settings.end_token else [name for name in USUAL_ENDS if name in words]
    return _Encoder(tokenizer, vocabulary, words[ends[0]] if ends else None)
