"""Which rank exchanges which examples with whom, over all small numbers of replicas and shards."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.pipeline.plans import by_hand, one_device
from dejavu.foundation.errors import InputError
from dejavu.runtime.layout import Layout

DEGREES = list(itertools.product((1, 2, 3), (1, 2, 4)))


@pytest.mark.parametrize("microbatch_size", [3, 4, 7])
@pytest.mark.parametrize("first", DEGREES)
@pytest.mark.parametrize("second", DEGREES)
def test_every_example_arrives_once_and_is_awaited(
    first: tuple[int, int], second: tuple[int, int], microbatch_size: int
) -> None:
    layout = Layout(by_hand("1f1b", (0, 1, 2), [one_device(*first), one_device(*second)], 4), microbatch_size)
    placements = layout.binding.placements
    for sender, receiver in ((0, 1), (1, 0)):
        sent, awaited = set(), set()
        for rank, place in enumerate(placements):
            start, stop = layout.rows(place)
            assert 0 <= start < stop <= microbatch_size
            if place.pipeline_rank == sender:
                parts = layout.exchanges(place, receiver, sends=True)
                sent |= {(rank, part.peer, start + i) for part in parts for i in range(part.start, part.stop)}
            else:
                parts = layout.exchanges(place, sender, sends=False)
                awaited |= {(part.peer, rank, start + i) for part in parts for i in range(part.start, part.stop)}
                assert sorted(i for part in parts for i in range(part.start, part.stop)) == list(range(stop - start))
        assert sent == awaited


def test_replicas_share_a_microbatch_without_gaps() -> None:
    layout = Layout(by_hand("1f1b", (0, 1), [one_device(3)], 1), 8)
    assert [layout.rows(place) for place in layout.binding.placements] == [(0, 2), (2, 5), (5, 8)]


def test_more_replicas_than_examples_are_refused() -> None:
    with pytest.raises(InputError, match="pipeline rank 0 has 3 replicas for microbatches of 2 examples"):
        Layout(by_hand("1f1b", (0, 1), [one_device(3)], 1), 2)
