"""Which rank exchanges which examples with whom, over all small numbers of replicas and shards."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.pipeline.plans import by_hand, one_device
from dejavu.binding.binding import Placement
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


@pytest.mark.parametrize("first", DEGREES)
def test_a_binding_has_each_device_of_the_plan_once(first: tuple[int, int]) -> None:
    """In whatever order; of each placement that is missing, there twice, or nowhere in the plan, it is said."""
    binding = by_hand("1f1b", (0, 1, 2), [one_device(*first), one_device()], 4)
    placements = binding.placements

    def laid_out(*found: Placement) -> Layout:
        return Layout(replace(binding, placements=found), 12)

    turned = laid_out(*placements[::-1])
    assert [grid.shape for grid in turned.grids] == [first, (1, 1)]
    assert all(turned.grids[p.pipeline_rank][p.replica, p.shard] == n for n, p in enumerate(turned.binding.placements))
    for number, one in enumerate(placements):
        with pytest.raises(InputError, match=r"places \d+ of \d+ devices of rank \d"):
            laid_out(*placements[:number], *placements[number + 1 :])
        with pytest.raises(
            InputError, match=f"places device {number} of localhost and device {number} of localhost as"
        ):
            laid_out(*placements, one)
        for field in ("pipeline_rank", "replica", "shard"):
            nowhere = replace(one, **{field: 9})
            with pytest.raises(
                InputError, match=rf"places device {number} of localhost as replica .* of rank \d; wanted"
            ):
                laid_out(*placements, nowhere)
            with pytest.raises(InputError, match="the binding places"):
                laid_out(*placements[:number], nowhere, *placements[number + 1 :])


@pytest.mark.parametrize("splits", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("first", DEGREES)
@pytest.mark.parametrize("second", DEGREES)
def test_every_position_arrives_once_and_is_awaited(
    first: tuple[int, int], second: tuple[int, int], splits: tuple[bool, bool]
) -> None:
    length, ways = 8, [one_device(*first), one_device(*second)]
    ways = [
        replace(way, sequence_parallel=split and way.tensor_parallel > 1)
        for way, split in zip(ways, splits, strict=True)
    ]
    layout = Layout(by_hand("1f1b", (0, 1, 2), ways, 4), 4)
    for sender, receiver in ((0, 1), (1, 0)):
        sent, awaited = [], []
        for rank, place in enumerate(layout.binding.placements):
            (start, stop), parts = layout.rows(place), layout.num_parts(place.pipeline_rank)
            own, first_position = length // parts, place.shard * (length // parts) if parts > 1 else 0
            gives = place.pipeline_rank == sender
            found = layout.exchanges(place, receiver if gives else sender, length, sends=gives)
            cells = [
                (part.peer, row, position)
                for part in found
                for row in range(part.start, part.stop)
                for position in range(*(part.positions or (0, own)))
            ]
            listed = sent if gives else awaited
            for peer, row, position in cells:
                ends = (rank, peer) if gives else (peer, rank)
                listed.append((*ends, start + row, first_position + position))
            if not gives:
                assert sorted(cell[1:] for cell in cells) == list(itertools.product(range(stop - start), range(own)))
        assert sorted(sent) == sorted(awaited)


SHARING = [(4, 1, 2, False), (4, 1, 4, False), (2, 2, 2, True), (2, 2, 2, False), (3, 1, 1, False), (1, 2, 1, True)]


@pytest.mark.parametrize("length", [8, 12, 24])
@pytest.mark.parametrize("first", SHARING)
@pytest.mark.parametrize("second", SHARING)
def test_every_position_of_every_example_is_sent_to_each_that_needs_it(
    first: tuple[int, int, int, bool], second: tuple[int, int, int, bool], length: int
) -> None:
    """Also among replicas that share examples: whoever holds a cell is the only one that gives it to a taker.

    To one that has the same positions in the same order it is one message.
    """
    size = 6
    ways = [
        one_device(data, tensor, context_parallel=context, sequence_parallel=split)
        for data, tensor, context, split in (first, second)
    ]
    layout = Layout(by_hand("1f1b", (0, 1, 2), ways, 4), size)
    cells = {}  # what each rank has: examples × positions
    for rank, place in enumerate(layout.binding.placements):
        way, part = ways[place.pipeline_rank], place.replica % ways[place.pipeline_rank].context_parallel
        group, groups = place.replica // way.context_parallel, way.data_parallel // way.context_parallel
        parts = way.context_parallel
        two = parts > 1 and length // parts % 2 == 0  # chunks, one from each end
        chunk = length // parts // (1 + two)
        places = [*range(part * chunk, (part + 1) * chunk)]
        places += range((2 * parts - 1 - part) * chunk, (2 * parts - part) * chunk) if two else ()
        if way.sequence_parallel:
            share, parts = length // parts // way.tensor_parallel, parts * way.tensor_parallel
            places = places[place.shard * share : (place.shard + 1) * share]
        rows = range(group * size // groups, (group + 1) * size // groups)
        assert layout.rows(place) == (rows.start, rows.stop) and layout.num_parts(place.pipeline_rank) == parts
        cells[rank] = (rows, places)
    for sender in (0, 1):
        sent, awaited = [], []
        for rank, place in enumerate(layout.binding.placements):
            gives = place.pipeline_rank == sender
            rows, places = cells[rank]
            found = layout.exchanges(place, 1 - place.pipeline_rank, length, sends=gives)
            own = [
                (part.peer, rows[row], places[position])
                for part in found
                for row in range(part.start, part.stop)
                for position in range(*(part.positions or (0, len(places))))
            ]
            for peer, row, position in own:
                (sent if gives else awaited).append((*((rank, peer) if gives else (peer, rank)), row, position))
            if not gives:
                assert sorted(cell[1:] for cell in own) == sorted(itertools.product(rows, places))
            alike = [one for one in {part.peer for part in found} if cells[one][1] == places]
            assert all(sum(part.peer == one for part in found) == 1 for one in alike)
            if not gives:  # messages to one peer come in the order in which they went
                for peer in {part.peer for part in found}:
                    back = layout.exchanges(layout.binding.placements[peer], place.pipeline_rank, length, sends=True)
                    went = [cells[peer][1][slice(*one.positions)] for one in back if one.peer == rank and one.positions]
                    assert went == [
                        places[slice(*one.positions)] for one in found if one.peer == peer and one.positions
                    ]
        assert sorted(sent) == sorted(awaited)
        assert all(row in cells[giver][0] and position in cells[giver][1] for giver, _, row, position in sent)


def test_replicas_share_a_microbatch_without_gaps() -> None:
    layout = Layout(by_hand("1f1b", (0, 1), [one_device(3)], 1), 8)
    assert [layout.rows(place) for place in layout.binding.placements] == [(0, 2), (2, 5), (5, 8)]


def test_more_replicas_than_examples_are_refused() -> None:
    with pytest.raises(InputError, match="pipeline rank 0 has 3 replicas for microbatches of 2 examples"):
        Layout(by_hand("1f1b", (0, 1), [one_device(3)], 1), 2)
