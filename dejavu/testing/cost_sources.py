"""What every cost source owes: a sound number or none, the same for the same question."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from dejavu.cluster import DeviceType, catalogue
from dejavu.cost import Evidence
from dejavu.cost.estimates import PASSES, CostSource
from dejavu.cost.sources.measured import subject_of
from dejavu.cost.sources.predicted import Predicted
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph, Layer
from dejavu.profiles import Measurement, ProfileDatabase
from dejavu.testing.expect import expect
from dejavu.workload import OptimizerSettings, Workload

MEASURED_ON, NOT_MEASURED_ON = "T4", "A100-SXM4-80GB"
MEASURED_SIZES, BETWEEN = (2, 8), 4  # microbatches
SLOWER = 1.1  # than predicted: what was "measured"

Make = Callable[[Evidence], CostSource]
Question = tuple[Layer, str, Graph, DeviceType]


def check_cost_source(make: Make, folder: Path) -> None:
    """Hold a cost source to every case of this file.

        check_cost_source(lambda known: Mine(known.database), tmp_path)

    Args:
        make: what stands in `SOURCES`.
        folder: where a database of measurements can be written.

    Raises:
        AssertionError: it breaks one of them.
    """
    known = evidence(folder)
    for case in CASES:
        case(make, known)


def evidence(folder: Path) -> Evidence:
    """A small GPT's layers as if measured on one type of device, at a smaller and at a larger microbatch."""
    known = Evidence(ProfileDatabase(folder / "profiles_db"), OptimizerSettings())
    predicted, device = Predicted(known.database, known.optimizer), catalogue()[MEASURED_ON]
    rows = [
        _measured(layer, direction, graph, SLOWER * estimate.seconds)
        for graph in map(graph_at, MEASURED_SIZES)
        for layer in {layer.signature: layer for layer in graph.layers}.values()
        for direction in PASSES
        if (estimate := predicted.estimate(layer, direction, graph, device))
    ]
    known.database.append(rows)
    return known


def _measured(layer: Layer, direction: str, graph: Graph, seconds: float) -> Measurement:
    return Measurement(
        kind="layer",
        name=layer.name,
        subject=subject_of(layer.signature, direction, OptimizerSettings()),
        device_type=MEASURED_ON,
        dtype=graph.dtype,
        direction=direction,
        microbatch_size=graph.microbatch_size,
        seconds=seconds,
        repeats=9,
        extra=json.dumps({"family": layer.family}),
        host_fingerprint="none",
        torch_version="none",
        source="measured",
        how="made up by dejavu.testing",
        measured_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


@cache
def graph_at(microbatch_size: int) -> Graph:
    """A GPT of five layers."""
    options = {"num_blocks": 3, "width": 32, "num_heads": 2}
    data = {"data": "synthetic", "synthetic": {"num_classes": 50}, "sequence_length": 32}
    return capture(Workload(model_options=options, **data, batch_size=2 * microbatch_size, num_microbatches=2))


def questions() -> Iterator[Question]:
    """Every pass of every layer, measured, between two measurements, and on a device that nobody measured."""
    for size in (*MEASURED_SIZES, BETWEEN):
        for name in (MEASURED_ON, NOT_MEASURED_ON):
            for layer in graph_at(size).layers:
                yield from ((layer, direction, graph_at(size), catalogue()[name]) for direction in PASSES)


def a_number_is_finite_with_an_interval_around_it_and_a_source(make: Make, known: Evidence) -> None:
    """Or there is none: a cost that is not known is None, never zero or infinite."""
    source = make(known)
    for layer, direction, graph, device in questions():
        found = source.estimate(layer, direction, graph, device)
        if found is None:
            continue
        told = f"{source}: the {direction} pass of {layer.name!r} on {device.name}"
        interval = (found.low_seconds, found.seconds, found.high_seconds)
        expect(all(map(math.isfinite, interval)) and interval[0] >= 0, f"{told} takes {interval}; wanted numbers ≥ 0")
        expect(list(interval) == sorted(interval), f"{told} takes {interval}; wanted low ≤ seconds ≤ high")
        expect(found.source, f"{told} comes from nowhere; wanted the source's name")


def the_same_question_has_the_same_answer(make: Make, known: Evidence) -> None:
    """Asked again, in another order, or of a new source."""
    source, other = make(known), make(Evidence(known.database, known.optimizer))
    asked = list(questions())
    answers = [source.estimate(*question) for question in asked]
    again = [source.estimate(*question) for question in reversed(asked)][::-1]
    anew = [other.estimate(*question) for question in asked]
    for question, one, two, three in zip(asked, answers, again, anew, strict=True):
        told = f"{source}: the {question[1]} pass of {question[0].name!r}"
        expect(one == two == three, f"{told} takes {one}, asked again {two}, asked anew {three}")


def a_layer_costs_what_it_does_not_what_it_is_called(make: Make, known: Evidence) -> None:
    """Two layers of one signature are priced once by the planner."""
    source = make(known)
    for layer, direction, graph, device in questions():
        one = source.estimate(layer, direction, graph, device)
        two = source.estimate(replace(layer, name="another name"), direction, graph, device)
        expect(one == two, f"{source}: {layer.name!r} takes {one}, under another name {two}")


def what_it_fell_back_on_is_told_by_kind_device_and_share(make: Make, known: Evidence) -> None:
    """For a person to look at."""
    source = make(known)
    for name in (MEASURED_ON, NOT_MEASURED_ON):
        for fallback in source.fallbacks(graph_at(BETWEEN), catalogue()[name]):
            expect(fallback.device_type == name, f"{source}: {fallback} is told of {name}")
            expect(0 <= fallback.share <= 1, f"{source}: {fallback} has the share {fallback.share}; wanted 0 to 1")
            expect(fallback.num_operators > 0, f"{source}: {fallback} is of no operator")


CASES: tuple[Callable[[Make, Evidence], None], ...] = (
    a_number_is_finite_with_an_interval_around_it_and_a_source,
    the_same_question_has_the_same_answer,
    a_layer_costs_what_it_does_not_what_it_is_called,
    what_it_fell_back_on_is_told_by_kind_device_and_share,
)
