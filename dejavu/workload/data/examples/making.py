"""From `package.module:factory` to examples whose shape is known."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from dejavu.foundation.errors import OWN_CODE, InputError
from dejavu.workload.code import imported_code
from dejavu.workload.data._base import Batch, Dataset, ExampleShape
from dejavu.workload.data_settings import ExamplesSettings

FIELD = ("examples",)


def examples_of(settings: ExamplesSettings) -> Dataset:
    """Return the examples that the factory makes.

    Raises:
        InputError: it cannot be imported, fails, or returns something else.
    """
    from dejavu.workload.data.examples.by_number import Examples
    from dejavu.workload.data.examples.one_after_the_other import Stream

    made = known(settings).made
    return Stream(settings) if isinstance(made, IterableDataset) else Examples(settings, made)


class Known(NamedTuple):
    """What a factory returned, and the shape of its first example.

    Attributes:
        made: an IterableDataset; or a Dataset to train on, and perhaps another to test on.
    """

    made: Any
    shape: ExampleShape


def known(settings: ExamplesSettings) -> Known:
    """Return what the factory makes, once in a process.

    Raises:
        InputError: it cannot be imported, fails, or returns something else; or its first example is no pair.
    """
    return _known(settings.model_dump_json())


@lru_cache(maxsize=8)
def _known(text: str) -> Known:
    settings = ExamplesSettings.model_validate_json(text)
    made, name = made_by(settings), settings.factory
    is_stream = isinstance(made, IterableDataset)
    parts = made if isinstance(made, tuple) else (made,)
    by_number = all(hasattr(one, "__getitem__") and hasattr(one, "__len__") for one in parts)
    if not is_stream and not (1 <= len(parts) <= 2 and by_number):
        raise InputError(
            f"{name} returns {_described(made)}; wanted a Dataset with a length, an IterableDataset, or two Datasets, "
            "one to train on and one to test on",
            FIELD,
        )
    if not is_stream and not all(len(one) for one in parts):
        raise InputError(f"{name} has no examples; wanted at least one", FIELD)
    try:
        with drawing_nothing(name):
            first = first_of(made_by(settings), name) if is_stream else parts[0][0]
    except InputError:
        raise
    except OWN_CODE as error:
        raise InputError(f"the first example of {name} fails: {type(error).__name__}: {error}", FIELD) from error
    found, target = as_pair(first, what := f"the first example of {name}")
    _check_classes(what, "target", target, settings.num_classes)
    if not found.is_floating_point():
        _check_classes(what, "input", found, settings.num_classes)
    shape = ExampleShape(tuple(found.shape), found.dtype, tuple(target.shape), settings.num_classes)
    return Known(made if is_stream else parts, shape)


def made_by(settings: ExamplesSettings) -> Any:
    """Call the factory.

    Raises:
        InputError: it cannot be imported, or fails.
    """
    module, _, name = settings.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except OWN_CODE as error:  # of what runs when the file is read
        said = f"{type(error).__name__}: {error}"
        raise InputError(
            f"examples {settings.factory!r} cannot be imported: {said}; wanted package.module:factory", FIELD
        ) from error
    try:
        return factory(**settings.options)
    except OWN_CODE as error:
        what = f"examples {settings.factory!r} fails with options {settings.options}"
        raise InputError(f"{what}: {type(error).__name__}: {error}", FIELD) from error


@contextmanager
def drawing_nothing(factory: str) -> Iterator[None]:
    """Watch that an example is made without the process's own random numbers.

    A step's batch is to depend on its number alone, and examples are made beside the step before, whose dropout draws
    from the same numbers.

    Raises:
        InputError: it draws from them.
    """
    before = _random_states()
    yield
    for name, then, now in zip(("torch", "numpy", "random"), before, _random_states(), strict=True):
        if then != now:
            raise InputError(
                f"{factory}: making an example draws from the random numbers of {name} that the whole process shares; "
                "wanted an example that depends on its number alone, with a generator that is seeded by it",
                FIELD,
            )


def _random_states() -> tuple[bytes, str, str]:
    return bytes(torch.random.get_rng_state().numpy()), str(np.random.get_state()), str(random.getstate())


def code_of(settings: ExamplesSettings) -> str:
    """Return what stands for the factory's file, and those that it imports: they decide the examples."""
    return imported_code(settings.factory.partition(":")[0])


def as_pair(example: Any, what: str) -> Batch:
    """Return an example as two tensors: floats in float32, whole numbers and truth values in int64.

    Args:
        what: which one it is, for people.

    Raises:
        InputError: it is no pair of numbers.
    """
    try:
        found, target = example
        return _tensor(found, what), _tensor(target, what)
    except InputError:
        raise
    except OWN_CODE as error:
        raise InputError(
            f"{what} is {_described(example)}; wanted (input, target), each a tensor, an array or a number", FIELD
        ) from error


def _tensor(value: Any, what: str) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    if tensor.is_complex():
        raise InputError(f"{what} has complex numbers, {tensor.dtype}; wanted real ones", FIELD)
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)


def stacked(examples: Sequence[tuple[str, Any]], shape: ExampleShape) -> Batch:
    """Return examples as a batch.

    Args:
        examples: what each is called, for people, and the example.

    Raises:
        InputError: one has another shape than the first, or a class beyond `num_classes`.
    """
    pairs = [(what, as_pair(example, what)) for what, example in examples]
    for what, (found, target) in pairs:
        if (tuple(found.shape), found.dtype, tuple(target.shape)) != (
            shape.input_shape,
            shape.input_dtype,
            shape.target_shape,
        ):
            raise InputError(
                f"{what} is {tuple(found.shape)} of {found.dtype} with a target {tuple(target.shape)}; wanted "
                f"{shape.input_shape} of {shape.input_dtype} with {shape.target_shape}, as the first",
                FIELD,
            )
        _check_classes(what, "target", target, shape.num_classes)
        if not found.is_floating_point():
            _check_classes(what, "input", found, shape.num_classes)
    return torch.stack([pair[0] for _, pair in pairs]), torch.stack([pair[1] for _, pair in pairs])


def _check_classes(what: str, of: str, values: torch.Tensor, num_classes: int) -> None:
    if values.is_floating_point():
        raise InputError(f"{what}: its {of} is of {values.dtype}; wanted whole numbers", FIELD)
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < num_classes:
        worst = int(values.max()) if int(values.max()) >= num_classes else int(values.min())
        raise InputError(f"{what}: its {of} has {worst:,}; wanted 0 to {num_classes - 1:,}, as num_classes says", FIELD)


def first_of(examples: Iterable[Any], factory: str) -> Any:
    """Return the first example.

    Raises:
        InputError: there is none.
    """
    for example in examples:
        return example
    raise InputError(f"{factory} has no examples; wanted at least one", FIELD)


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(type(one).__name__ for one in value[:4]) or 'nothing'}"
    kind = type(value).__name__
    return f"a {kind} without a length" if isinstance(value, TorchDataset) else f"a {kind}"
