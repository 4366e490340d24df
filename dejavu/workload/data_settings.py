"""Where data come from that are a person's own: what a workload says of a file, a folder or a factory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dejavu.workload.record import AbsentError, GivenPath, Positive, Record, Whole


class SyntheticSettings(Record):
    """The shape of random examples; the workload's `sequence_length` says how many tokens one has.

    Attributes:
        num_classes: the vocabulary of tokens, or the classes of images.
        image_shape: channels, height and width of an image; None: examples are tokens.
    """

    num_classes: Whole = Field(ge=2, le=2**31)
    image_shape: tuple[Positive, Positive, Positive] | None = None


class TokensSettings(Record):
    """A file of tokens, which is mapped into memory and may be larger than that.

    Attributes:
        path: a `.npy` of one dimension, or a raw file of numbers one after the other (`.bin`).
        vocabulary: how many values a token may take.
        dtype: of the numbers in a raw file.
    """

    path: GivenPath
    vocabulary: Whole = Field(ge=2, le=2**31)
    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"


class TokenizerSettings(Record):
    """What makes tokens of a text; a path alone will do.

    Attributes:
        path: the `tokenizer.json` of Hugging Face's library tokenizers.
        field: which field of a JSON line has the text.
        end_token: separates documents; None: the tokenizer's own, if it has one of the usual name.
        vocabulary: how many values a token may take, where that is more than the tokenizer needs; None: what it needs.
    """

    path: GivenPath
    field: str = "text"
    end_token: str | None = None
    vocabulary: Whole | None = Field(None, ge=2, le=2**31)

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, given: Any) -> Any:
        return {"path": given} if isinstance(given, str | Path) else given

    @field_validator("path")
    @classmethod
    def _is_there(cls, path: Path) -> Path:
        if not path.is_file():
            raise AbsentError(f"there is no file {path}; wanted a tokenizer.json")
        return path


class ParquetSettings(Record):
    """Columns of a Parquet file, or of all of a folder: text, tokens, or numbers with their target.

    Attributes:
        path: a `.parquet` file, or a folder of them.
        text: the column with texts, which the workload's `tokenizer` makes tokens of.
        tokens: the column with lists of tokens, one for each document.
        vocabulary: how many values a token may take.
        end_token: the token between two documents of a column of tokens; None: none.
        features: columns of numbers, the model's input; or one column with lists of numbers, all as long.
        target: the column of classes.
    """

    path: GivenPath
    text: str | None = None
    tokens: str | None = None
    vocabulary: Whole | None = Field(None, ge=2, le=2**31)
    end_token: Whole | None = Field(None, ge=0)
    features: tuple[str, ...] = ()
    target: str | None = None

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if not self.path.exists():
            raise AbsentError(f"there is no file or folder {self.path}")
        if (self.text is not None) + (self.tokens is not None) + bool(self.features) != 1:
            raise ValueError("wanted one of text (a column), tokens (a column) and features (columns, with a target)")
        if bool(self.features) != (self.target is not None):
            raise ValueError("features and target belong together; wanted both, or neither")
        if (self.tokens is not None) != (self.vocabulary is not None):
            raise ValueError("tokens and vocabulary belong together; wanted both, or neither")
        if self.end_token is not None and (self.vocabulary is None or self.end_token >= self.vocabulary):
            raise ValueError(f"end_token {self.end_token} is not of the vocabulary; wanted a token of a tokens column")
        return self


class ImageFolderSettings(Record):
    """A folder of images, a folder in it for each class.

    Attributes:
        shape: channels (1 or 3), height and width, to which every image is brought.
    """

    path: GivenPath
    shape: tuple[Positive, Positive, Positive]

    @field_validator("path")
    @classmethod
    def _is_there(cls, path: Path) -> Path:
        if not path.is_dir():
            raise AbsentError(f"there is no folder {path}; wanted one with a folder for each class")
        return path

    @field_validator("shape")
    @classmethod
    def _is_grey_or_coloured(cls, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        if shape[0] not in (1, 3):
            raise ValueError(f"found {list(shape)}, wanted 1 or 3 channels before height and width")
        return shape


class ExamplesSettings(Record):
    """Examples of one's own, (input, target) by number or one after the other.

    Attributes:
        factory: `package.module:factory`, which returns a torch Dataset or IterableDataset, or two Datasets: one to
            train on and one to test on.
        options: passed to the factory.
        num_classes: how many values a target, or an input token, can take.
        shuffled: so many consecutive examples of an IterableDataset are shuffled among themselves; 1: none.
    """

    factory: str
    options: dict[str, Any] = Field({})
    num_classes: Whole = Field(ge=2, le=2**31)
    shuffled: Whole = Field(1024, ge=1)
