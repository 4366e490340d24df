"""What every data set owes: a step's batch that depends on its number alone, in the shape that is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from dejavu.testing.expect import expect
from dejavu.workload.data import Dataset


def check_data_set(data: Dataset) -> None:
    """Hold a data set to every case of this file.

        check_data_set(MyImages(folder))

    Raises:
        AssertionError: it breaks one of them.
    """
    for case in CASES:
        case(data)


def a_batch_depends_on_its_step_and_seed_alone(data: Dataset) -> None:
    """So that a resumed training sees what it would have seen."""
    three, four = (data.batch(step, 4, seed=1)[0] for step in (3, 4))
    expect(torch.equal(three, data.batch(3, 4, seed=1)[0]), f"{data}: step 3 again has another batch")
    expect(not torch.equal(three, four), f"{data}: steps 3 and 4 have the same batch")
    expect(not torch.equal(three, data.batch(3, 4, seed=2)[0]), f"{data}: two seeds have the same batch")


def examples_have_the_shape_that_is_said(data: Dataset) -> None:
    """Inputs and targets; classes are below their number."""
    inputs, targets = data.batch(0, 5, seed=0)
    said, found = data.shape, (tuple(inputs.shape), inputs.dtype, tuple(targets.shape))
    wanted = ((5, *said.input_shape), said.input_dtype, (5, *said.target_shape))
    expect(found == wanted, f"{data}: five examples are {found}; wanted {wanted}")
    expect(int(targets.min()) >= 0 and int(targets.max()) < said.num_classes, f"{data}: classes beyond its number")


def a_part_of_a_batch_is_that_part(data: Dataset) -> None:
    """A rank asks only for its own examples."""
    rows = np.array([4, 0, 3])
    whole, part = data.batch(3, 5, seed=1), data.part_of_batch(3, 5, rows, seed=1)
    same = all(torch.equal(one[rows], other) for one, other in zip(whole, part, strict=True))
    expect(same, f"{data}: examples 4, 0 and 3 of step 3 are others when they are asked for alone")


def what_is_held_out_changes_the_fingerprint(data: Dataset) -> None:
    """What was learned with all examples is not taken for what is learned without some."""
    part = replace(data, held_out=0.25)
    expect(data.fingerprint == replace(data).fingerprint, f"{data}: its fingerprint changes by itself")
    expect(part.fingerprint != replace(data, held_out=0.0).fingerprint, f"{data}: held_out does not show")
    tested, _ = part.test_batch(3, seed=0)
    expect(len(tested) <= 3, f"{data}: {len(tested)} examples to test on; wanted at most 3")


CASES: tuple[Callable[[Dataset], None], ...] = (
    a_batch_depends_on_its_step_and_seed_alone,
    examples_have_the_shape_that_is_said,
    a_part_of_a_batch_is_that_part,
    what_is_held_out_changes_the_fingerprint,
)
