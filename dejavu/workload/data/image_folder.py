"""A folder of images, a folder in it for each class; an image is decoded when a step wants it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from dejavu.foundation.errors import InputError
from dejavu.foundation.hashing import stable_hash
from dejavu.workload.data._base import Batch, ExampleShape, Part, Stored, split_rows
from dejavu.workload.data.prepared.kept import hash_of_files

FIELD = ("image_folder",)
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
MOST_HASHED_BYTES = 2**30  # read to tell whether images are still the same: about a second of a processor's time
_BRIGHTEST = 255.0  # a pixel's largest value
_MODES = {1: "L", 3: "RGB"}  # Pillow's names, by the number of channels


@dataclass(frozen=True)
class ImageFolder(Stored):
    """Images brought to one shape, scaled to 0–1; classes are the folders, in the order of their names.

    Attributes:
        size: channels, height, width.
    """

    path: Path
    size: tuple[int, int, int]

    @property
    def shape(self) -> ExampleShape:
        return ExampleShape(self.size, torch.float32, (), max(2, len(_found(self.path).classes)))

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(f"{_content_hash(self.path)} {self.size}".encode()).hexdigest()[:16]

    def parts(self) -> tuple[Part, Part]:
        train, test = split_rows(len(_found(self.path).files), self.held_out, self.split_seed)
        return Part.of_rows(train, self._take), Part.of_rows(test, self._take)

    def _take(self, rows: np.ndarray) -> Batch:
        found = _found(self.path)
        images = np.stack([_decoded(found.files[row], self.size) for row in rows])
        return torch.from_numpy(images), torch.from_numpy(found.labels[rows])


@dataclass(frozen=True, eq=False)
class _Found:
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: np.ndarray


@cache
def _content_hash(folder: Path) -> str:
    """Hash names and sizes of all images and, of as many as are read within the limit, evenly spread, the contents."""
    files = _found(folder).files
    sizes = [path.stat().st_size for path in files]
    every = math.ceil(sum(sizes) / MOST_HASHED_BYTES) or 1
    listed = [f"{path.relative_to(folder)} {size}" for path, size in zip(files, sizes, strict=True)]
    return stable_hash([listed, hash_of_files(files[::every])])


@cache
def _found(folder: Path) -> _Found:
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    files: list[Path] = []
    labels: list[int] = []
    for number, name in enumerate(classes):
        own = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        if not own:
            wanted = " ".join(sorted(SUFFIXES))
            raise InputError(f"{folder / name} has no image; wanted files that end in {wanted}", FIELD)
        files += own
        labels += [number] * len(own)
    if not files:
        raise InputError(f"{folder} has no folders; wanted one for each class, with its images", FIELD)
    return _Found(tuple(classes), tuple(files), np.array(labels, np.int64))


def _decoded(path: Path, size: tuple[int, int, int]) -> np.ndarray:
    """Return one image, (channels, height, width), float32.

    Raises:
        InputError: it cannot be read.
    """
    from PIL import Image  # only these data need it

    channels, height, width = size
    try:
        with Image.open(path) as opened:
            image = opened.convert(_MODES[channels]).resize((width, height), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's own, by format
        raise InputError(
            f"{path} cannot be read as an image: {str(error)[:120]}; wanted a whole image, or no such file", FIELD
        ) from error
    pixels = np.asarray(image, np.float32).reshape(height, width, channels) / np.float32(_BRIGHTEST)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
