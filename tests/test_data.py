"""Data: the parts to train on and to test on, and CIFAR-10's files."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dejavu.foundation.errors import InputError
from dejavu.workload import Workload
from dejavu.workload.data import Cifar10, Dataset, Digits, Synthetic, Text, dataset_of
from dejavu.workload.data import cifar10 as cifar10_files
from dejavu.workload.data import text as text_files
from dejavu.workload.data._base import Stored

WINDOW = 16  # bytes of an example of text
SHARES = [0.0, 0.1, 0.35, 0.9]
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


def write_cifar10(folder: Path, num_train: tuple[int, ...] = (7, 12, 5), num_test: int = 9) -> np.ndarray:
    """Files in the binary form, and their records in order, the test's last."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    records = random.integers(0, 256, (sum(num_train) + num_test, 3073), dtype=np.uint8)
    records[:, 0] = random.integers(0, 10, len(records))
    names = [f"data_batch_{i + 1}.bin" for i in range(len(num_train))] + ["test_batch.bin"]
    for name, part in zip(names, np.split(records, np.cumsum(num_train)), strict=True):
        (folder / name).write_bytes(part.tobytes())
    return records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_cifar10(folder / "cifar10")
    (folder / "text.txt").write_bytes(np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8).tobytes())
    return folder


def make(name: str, folder: Path, **split: Any) -> Dataset:
    kinds: dict[str, Callable[..., Dataset]] = {
        "digits": Digits,
        "cifar10": partial(Cifar10, folder / "cifar10"),
        "text": partial(Text, folder / "text.txt", sequence_length=WINDOW),
        "tokens": partial(Synthetic, 50, 24),
        "images": partial(Synthetic, 10, 1, (3, 8, 8)),
    }
    return kinds[name](**split)


every_data = pytest.mark.parametrize("name", ["digits", "cifar10", "text", "tokens", "images"])
every_stored_data = pytest.mark.parametrize("name", ["digits", "cifar10", "text"])


def places(name: str, dataset: Dataset, folder: Path) -> tuple[set[int], set[int]]:
    """Which rows, or which bytes of the text, are in any example to train on, and in any to test on."""
    assert isinstance(dataset, Stored)
    examples = [part.take(np.arange(part.num_examples)) for part in dataset.parts()]
    if name != "text":
        everything = replace(dataset, held_out=0.0).parts()[0]
        images, _ = everything.take(np.arange(everything.num_examples))
        row_of = {image.numpy().tobytes(): row for row, image in enumerate(images)}
        train, test = ({row_of[image.numpy().tobytes()] for image in inputs} for inputs, _ in examples)
        return train, test
    text = (folder / "text.txt").read_bytes()
    start_of = {text[start : start + WINDOW]: start for start in range(len(text) - WINDOW)}
    assert len(start_of) == len(text) - WINDOW  # each window says where it is from
    parts = []
    for inputs, targets in examples:
        starts = [start_of[bytes(window.tolist())] for window in inputs]
        assert all(
            bytes(window.tolist()) == text[start + 1 : start + 1 + WINDOW]
            for window, start in zip(targets, starts, strict=True)
        )
        parts.append({place for start in starts for place in range(start, start + WINDOW + 1)})
    return parts[0], parts[1]


@every_stored_data
@pytest.mark.parametrize("share", SHARES[1:])
@pytest.mark.parametrize("seed", [0, 5])
def test_the_parts_are_disjoint_and_together_everything(name: str, share: float, seed: int, folder: Path) -> None:
    train, test = places(name, make(name, folder, held_out=share, split_seed=seed), folder)
    num_places = {"digits": 1797, "cifar10": 24, "text": 5000}[name]
    assert train | test == set(range(num_places))
    assert not train & test
    assert len(test) == pytest.approx(share * num_places, abs=0.02 * num_places + 1)


@every_stored_data
def test_steps_and_tests_keep_to_their_parts(name: str, folder: Path) -> None:
    dataset = make(name, folder, held_out=0.3, split_seed=2)
    assert isinstance(dataset, Stored)
    drawn = dataset.batch(4, 300, seed=1), dataset.test_batch(300, seed=1)
    for part, (inputs, _) in zip(dataset.parts(), drawn, strict=True):
        known = {example.numpy().tobytes() for example in part.take(np.arange(part.num_examples))[0]}
        assert {example.numpy().tobytes() for example in inputs} <= known


@every_data
@pytest.mark.parametrize("share", SHARES)
def test_the_same_batch_wherever_it_is_asked(name: str, share: float, folder: Path) -> None:
    one, other = (make(name, folder, held_out=share, split_seed=3) for _ in range(2))
    other.batch(1, 5, seed=9)
    pairs = [(one.batch(7, 6, seed=1), other.batch(7, 6, seed=1))]
    if share or name == "cifar10":
        pairs.append((one.test_batch(4, seed=1), other.test_batch(4, seed=1)))
        assert not torch.equal(one.test_batch(4, seed=1)[0], one.test_batch(4, seed=2)[0])
    for (inputs, targets), (same_inputs, same_targets) in pairs:
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(targets, same_targets)
        assert (inputs.dtype, inputs.shape[1:]) == (one.shape.input_dtype, one.shape.input_shape)
        assert targets.shape[1:] == one.shape.target_shape
    assert one.fingerprint == other.fingerprint


@every_data
def test_fingerprints_tell_splits_apart(name: str, folder: Path) -> None:
    without = make(name, folder).fingerprint
    assert make(name, folder, split_seed=8).fingerprint == without
    splits = [make(name, folder, held_out=share, split_seed=seed) for share in (0.2, 0.3) for seed in (0, 1)]
    assert len({without, *(dataset.fingerprint for dataset in splits)}) == 5


@every_stored_data
def test_other_seeds_hold_out_other_examples(name: str, folder: Path) -> None:
    parts = [places(name, make(name, folder, held_out=0.3, split_seed=seed), folder)[1] for seed in range(4)]
    assert len({frozenset(part) for part in parts}) == 4


def test_without_a_held_out_share_steps_are_as_ever(folder: Path) -> None:
    """Rows and windows drawn from all, by (seed, step) alone: results that were kept stay right."""
    from sklearn.datasets import load_digits

    for seed, step in ((0, 0), (3, 11)):
        pixels, labels = load_digits(return_X_y=True)
        rows = np.random.default_rng((seed, step)).integers(0, len(pixels), size=20)
        inputs, targets = Digits(split_seed=4).batch(step, 20, seed=seed)
        assert np.array_equal(inputs.numpy(), (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)[rows])
        assert np.array_equal(targets.numpy(), labels[rows])
        text = (folder / "text.txt").read_bytes()
        starts = np.random.default_rng((seed, step)).integers(0, len(text) - WINDOW, size=20)
        inputs, targets = Text(folder / "text.txt", sequence_length=WINDOW, split_seed=4).batch(step, 20, seed=seed)
        assert [bytes(window) for window in inputs.tolist()] == [text[at : at + WINDOW] for at in starts]
        assert [bytes(window) for window in targets.tolist()] == [text[at + 1 : at + 1 + WINDOW] for at in starts]
    for random_examples in (Synthetic(50, 24), Synthetic(10, 1, (3, 8, 8))):
        held_out = make("tokens" if random_examples.image_shape is None else "images", folder, held_out=0.5)
        assert torch.equal(random_examples.batch(2, 4, seed=1)[0], held_out.batch(2, 4, seed=1)[0])
        assert not torch.equal(held_out.batch(0, 4, seed=1)[0], held_out.test_batch(4, seed=1)[0])


@every_data
def test_no_example_is_tested_on_twice(name: str, folder: Path) -> None:
    dataset = make(name, folder, held_out=0.5)
    inputs, targets = dataset.test_batch(10_000, seed=0)
    assert len(inputs) == len(targets)
    if isinstance(dataset, Stored):
        assert len(inputs) == dataset.parts()[1].num_examples < 10_000
        assert len(inputs.unique(dim=0)) == len(inputs)
    else:
        assert len(inputs) == 10_000


def test_a_workload_says_what_is_held_out(folder: Path) -> None:
    for fields in ({"data": "digits"}, {"text": folder / "text.txt", "sequence_length": WINDOW}):
        held_out = dataset_of(Workload(**fields, held_out=0.25, seed=6))
        assert (held_out.held_out, held_out.split_seed) == (0.25, 6)
        assert dataset_of(Workload(**fields, seed=6)).fingerprint == dataset_of(Workload(**fields)).fingerprint


@pytest.mark.parametrize("subfolder", [".", "cifar-10-batches-bin"])
def test_cifar10_is_read_record_by_record(subfolder: str, tmp_path: Path) -> None:
    records = write_cifar10(tmp_path / subfolder)
    dataset = dataset_of(Workload(data="cifar10", images=tmp_path))
    assert (dataset.shape.input_shape, dataset.shape.num_classes) == ((3, 32, 32), 10)
    assert isinstance(dataset, Stored)
    for part, own in zip(dataset.parts(), np.split(records, [24]), strict=True):
        assert part.num_examples == len(own)
        rows = np.random.default_rng(2).permutation(len(own))
        images, labels = part.take(rows)
        assert labels.tolist() == own[rows, 0].tolist()
        pixels = torch.from_numpy(own[rows, 1:].reshape(-1, 3, 32, 32)) / 255.0  # all red, then green, then blue
        assert images.dtype == torch.float32
        assert torch.allclose(images, (pixels - MEAN) / DEVIATION, atol=1e-6)
    drawn = np.random.default_rng((5, 3)).integers(0, 24, size=8)
    assert dataset.batch(3, 8, seed=5)[1].tolist() == records[drawn, 0].tolist()


def test_what_cifar10_is_tested_on(tmp_path: Path) -> None:
    """Its own test images; a share that is held out comes from the others; without either there is none."""
    records = write_cifar10(tmp_path)
    assert sorted(Cifar10(tmp_path).test_batch(99, seed=0)[1].tolist()) == sorted(records[24:, 0].tolist())
    fingerprint = Cifar10(tmp_path).fingerprint
    (tmp_path / "test_batch.bin").unlink()
    cifar10_files._read.cache_clear()
    assert Cifar10(tmp_path).fingerprint != fingerprint
    assert len(Cifar10(tmp_path, held_out=0.25).test_batch(99, seed=0)[0]) == 6
    with pytest.raises(InputError, match="held_out is 0 and the data have no test part"):
        Cifar10(tmp_path).test_batch(4, seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": "cifar10"}, "data is 'cifar10', but the key images is missing; wanted the folder"),
        (
            {"data": "digits", "images": "."},
            "images is given, but data is 'digits'; wanted data: cifar10",
        ),
        ({"data": "cifar10", "images": "no/such/folder"}, "there is no folder no/such/folder"),
        ({"held_out": 1.0}, "less than 1"),
        ({"held_out": -0.1}, "greater than or equal to 0"),
        ({"held_out": float("nan")}, "held_out"),
    ],
)
def test_workloads_that_cannot_be_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Workload(**fields)


def cut(folder: Path) -> None:
    write_cifar10(folder)
    path = folder / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-10])


def emptied(folder: Path) -> None:
    write_cifar10(folder)
    (folder / "test_batch.bin").write_bytes(b"")


def mislabelled(folder: Path) -> None:
    write_cifar10(folder)
    path = folder / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[4 * 3073] = 10
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: None, r"has no data_batch_\*\.bin; wanted the files of CIFAR-10's binary version"),
        (cut, "data_batch_2.bin has 36,866 bytes; wanted a multiple of 3,073"),
        (emptied, "test_batch.bin has 0 bytes; wanted a multiple"),
        (mislabelled, r"data_batch_2\.bin: the label of record 4 \(counted from 0\) is 10; wanted 0 to 9"),
    ],
)
def test_files_that_are_not_cifar10_are_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    spoil(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        dataset_of(Workload(data="cifar10", images=tmp_path)).batch(0, 1, seed=0)
    assert caught.value.field == ("images",)


@pytest.mark.parametrize("name", ["digits", "text", "tokens", "images"])
def test_testing_needs_a_held_out_share(name: str, folder: Path) -> None:
    with pytest.raises(InputError, match="held_out is 0") as caught:
        make(name, folder, split_seed=1).test_batch(4, seed=0)
    assert caught.value.field == ("held_out",)


@every_stored_data
@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_a_part_without_examples_is_refused(name: str, share: float, folder: Path) -> None:
    """Before anything is trained, whichever part it is."""
    dataset = make(name, folder, held_out=share)
    empty = "0 to test on" if share < 0.5 else "leaves 0 examples to train on"
    for ask in (partial(dataset.batch, 0, 1), partial(dataset.test_batch, 1)):
        with pytest.raises(InputError, match=f"held_out .*{empty}") as caught:
            ask(seed=0)
        assert caught.value.field == ("held_out",)


def test_blocks_shorter_than_a_window_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(bytes(range(200)))  # blocks of 3 bytes
    with pytest.raises(InputError, match=r"held_out 0\.1 leaves .* and 0 to test on"):
        Text(path, sequence_length=64, held_out=0.1).batch(0, 1, seed=0)
    path.write_bytes(b"")
    text_files._read.cache_clear()
    with pytest.raises(InputError, match="no text was found"):
        Text(path, sequence_length=64, held_out=0.1).batch(0, 1, seed=0)


def test_a_large_text_is_read_no_further_than_it_is_used(tmp_path: Path) -> None:
    """A file of a terabyte (with holes: it takes no room) is checked as quickly as one of 8 MiB, and is the same."""
    large, small = tmp_path / "large.txt", tmp_path / "small.txt"
    content = bytes(range(32, 127)) * (9 * 2**20 // 95)
    large.write_bytes(content)
    with large.open("r+b") as file:
        file.truncate(2**40)
    small.write_bytes(content[: 8 * 2**20])
    tracemalloc.start()
    try:
        hashes = {dataset_of(Workload(text=path)).fingerprint for path in (large, small)}
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(hashes) == 1
    assert peak_bytes < 64 * 2**20


def test_a_text_that_never_ends_or_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "nothing.txt").touch()
    for path, message in (
        (Path("/dev/zero"), "/dev/zero is neither a file nor a folder"),
        (tmp_path / "pipe", "is neither a file nor a folder"),
        (tmp_path / "empty", "no text was found in .*; wanted a file, or a folder with .txt, .md or .py files"),
        (tmp_path / "nothing.txt", "no text was found in .*; wanted a file that is not empty"),
        (tmp_path / "short.txt", "has 9 bytes; wanted more than the sequence_length of 128"),
    ):
        with pytest.raises(InputError, match=message):
            dataset_of(Workload(text=path)).batch(0, 1, seed=0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "package.py").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("a" * 1000)
    dataset_of(Workload(text=tmp_path / "folder")).batch(0, 1, seed=0)
    with pytest.raises(InputError, match="the text of Python's standard library has"):
        dataset_of(Workload(sequence_length=999_999_999)).batch(0, 1, seed=0)
