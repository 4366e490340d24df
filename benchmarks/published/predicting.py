"""Published trainings by this project's own prices: their plan, as it was, simulated; nothing is searched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.published.trainings import GIB, Training
from dejavu.graphs.attention import written_out
from dejavu.graphs.capture import capture
from dejavu.graphs.graph import Graph, Layer
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest
from dejavu.planning.prices import Prices
from dejavu.planning.schedules import fits
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.simulation import StageSeconds, simulate_plan, stages_of
from dejavu.workload import OptimizerSettings, TrialSettings, Workload

SCHEDULE_OF = {1: "1f1b", 2: "interleaved_1f1b", 4: "interleaved_1f1b_4"}  # by stages on each pipeline rank
DROPOUT = 0.1  # of attention in Megatron-LM's scripts
MICROBATCH_SIZES = (1, 2, 4, 8)  # tried where the source does not say


@dataclass(frozen=True)
class Prediction:
    """What is predicted of one training.

    Attributes:
        microbatch_size: of one replica.
        memory_gib: of the fullest device.
        fits: whether every device has the memory.
        bubble_fraction: of the step, in which a device waits.
    """

    microbatch_size: int
    recompute: bool
    step_seconds: float
    tokens_per_second: float
    memory_gib: float
    fits: bool
    bubble_fraction: float


def predict(training: Training, *, hides_sums: bool = False) -> list[Prediction]:
    """Return the prediction; two where the source recomputes in part: without, and with all recomputed.

    Where the source does not say the microbatch's size, the fastest of those that fit is taken.

    Args:
        hides_sums: gradients are summed beside computing also where the source's were not, as plans are priced.
    """
    ways = {"none": (False,), "full": (True,), "selective": (False, True)}[training.recompute]
    found = []
    for recompute in ways:
        sizes = [training.microbatch_size] if training.microbatch_size else list(_sizes(training))
        tried = [_predict(training, size, recompute=recompute, hides_sums=hides_sums) for size in sizes]
        fitting = [one for one in tried if one.fits] or tried[:1]
        found.append(max(fitting, key=lambda one: one.tokens_per_second))
    return found


def workload_of(training: Training, num_microbatches: int) -> Workload:
    """Return what was trained, in 16 bits with master weights."""
    size = training.batch_size // num_microbatches
    return training.model.workload(size, num_microbatches, dtype="bfloat16").model_copy(
        update={"optimizer": OptimizerSettings(master_weights=True), "trials": TrialSettings(count=0)}
    )


def _sizes(training: Training) -> Iterator[int]:
    """As many examples of a replica as divide its batch and leave enough microbatches for the pipeline."""
    each = training.batch_size // training.example_parts
    for size in MICROBATCH_SIZES:
        if each % size == 0 and (each // size) % training.pipeline_parallel == 0:
            yield size


def _predict(training: Training, microbatch_size: int, *, recompute: bool, hides_sums: bool) -> Prediction:
    plan = plan_of(training, microbatch_size, recompute=recompute)
    cluster, count = training.cluster(), plan.num_microbatches
    workload = workload_of(training, count)
    request = PlanRequest(
        workload.model_copy(update={"schedule": plan.schedule}),
        cluster,
        parallelism=Parallelism(only=(plan.stages[0].configuration,)),
        schedules=(plan.schedule,),
        microbatches=(count,),
    )
    graph_at = partial(as_it_was, request, training) if training.attention != "fused" else None
    prices = Prices(request, graph_at=graph_at, sends_beside_products=training.beside_products)
    priced = prices.priced(count)
    rows = stages_of(priced, plan)
    if not training.overlaps_sums and not hides_sums:
        rows = [_summed_at_the_end(prices, row, stage, count) for row, stage in zip(rows, plan.stages, strict=True)]
    simulated = simulate_plan(priced, plan, stages=rows)
    tokens = training.batch_size * training.model.sequence_length / simulated.step_seconds / training.num_devices
    return Prediction(
        microbatch_size,
        recompute,
        simulated.step_seconds,
        tokens,
        max(simulated.peak_bytes) / GIB,
        fits(priced, plan, simulated),
        simulated.bubble_fraction,
    )


def _summed_at_the_end(prices: Prices, row: StageSeconds, stage: Stage, num_microbatches: int) -> StageSeconds:
    size = prices.request.workload.run_size // num_microbatches
    hidden = prices.sum_seconds(stage, size, at_the_end=True) - prices.sum_seconds(stage, size)
    return replace(row, per_step_seconds=row.per_step_seconds + hidden)


def as_it_was(request: PlanRequest, training: Training, microbatch_size: int) -> Graph:
    """Capture the model with attention as its source had it, and where it was written out all of a block run again."""
    workload = request.workload
    one = workload.model_copy(update={"num_microbatches": workload.run_size // microbatch_size})
    if training.attention == "first":
        return _twice_attending(capture(one, request.cluster.kind))
    with written_out(DROPOUT):
        graph = capture(one, request.cluster.kind)
    return replace(graph, layers=tuple(replace(layer, num_recomputed=None) for layer in graph.layers))


def _twice_attending(graph: Graph) -> Graph:
    """Price causal attention as if all scores were computed: FlashAttention took twice the time of its second version.

    Dao, FlashAttention-2 (2023), abstract: "around 2×".
    """

    def changed(layer: Layer) -> Layer:
        return replace(layer, operators=tuple(replace(one, is_causal=False) for one in layer.operators))

    return replace(graph, layers=tuple(changed(layer) for layer in graph.layers))


def plan_of(training: Training, microbatch_size: int, *, recompute: bool) -> Plan:
    """Return the source's plan: as many blocks in each stage, the embedding in the first and the head in the last.

    Where blocks do not go into equal parts, and do with embedding and head counted as one each, they are so counted, as
    Llama 3's authors did.
    """
    per_node = dict(training.cluster().groups[0].devices)[training.device.name]
    devices = training.num_devices // training.pipeline_parallel
    nodes = max(devices // per_node, 1)
    way = StageConfiguration(
        training.device.name,
        nodes,
        devices // nodes,
        training.data_parallel,
        training.tensor_parallel,
        recompute,
        training.zero_level if training.data_parallel > 1 else 0,
        training.sequence_parallel,
        context_parallel=training.context_parallel,
    )
    num_stages, blocks = training.pipeline_parallel * training.chunks, training.model.options["num_blocks"]
    both = blocks % num_stages != 0 and (blocks + 2) % num_stages == 0
    inner = ((blocks + 2) * s // num_stages if both else 1 + blocks * s // num_stages for s in range(1, num_stages))
    cuts = [0, *inner, blocks + 2]
    stages = tuple(Stage(a, b, way) for a, b in itertools.pairwise(cuts))
    count = training.batch_size // (training.example_parts * microbatch_size)
    return Plan(stages, SCHEDULE_OF[training.chunks], count)
