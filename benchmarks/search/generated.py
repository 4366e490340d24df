"""Planner problems over clusters that nobody has: mixed devices, odd counts, links of every pair, memory that binds.

Every number follows from the seed. Costs come from formulas (work over speed, ring all-reduces, ZeRO's shards), so that
problems have the structure of real ones, any number of layers and devices, and no predictor in between.
Shape suffixes as in `dejavu.plans`; D = device types.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.models import BYTES, Model, blocks
from benchmarks.search.models import operators as model_operators
from dejavu.plans import Problem, StageConfiguration
from dejavu.plans.stage_costs import AdditiveCosts

Floats = NDArray[np.float64]

_NODE_SIZES = (1, 2, 3, 4, 6, 8)  # devices in a node
_LARGE_NODE_SIZES = (4, 8)
_STATE_TENSORS = 4.0  # weight, gradient and two moments


@dataclass(frozen=True, eq=False)
class Kind:
    """One type of device, the nodes that hold it, and the links inside and between them."""

    name: str
    count: int
    devices_per_node: int
    flops_per_second: float
    memory_bytes: float
    inside_bytes_per_second: float
    between_bytes_per_second: float


def heterogeneous(
    seed: int, *, num_types: int, num_devices: int, num_layers: int, num_microbatches: int = 32, schedule: str = "1f1b"
) -> Problem:
    """A model of blocks of several widths on `num_types` kinds of devices, `num_devices` in all.

    Devices have 55 to 95 % more memory than the least that the model would need if it were spread perfectly.
    """
    rng = np.random.default_rng(seed)
    counts = _counts(rng, num_types, num_devices)
    return _on_a_cluster(rng, counts, blocks(rng, num_layers), _NODE_SIZES, num_microbatches, schedule)


def operators(
    seed: int,
    *,
    num_operators: int,
    num_devices: int,
    num_types: int = 4,
    num_microbatches: int | None = None,
    schedule: str = "1f1b",
) -> Problem:
    """A transformer as its operators, twelve a block, on nodes of 4 or 8 devices.

    Matrix multiplications cost most, norms and sums little; a cut between blocks moves one tensor, one inside the
    attention or the MLP several times as much. Microbatches: one for every four devices, 32 at least.
    """
    rng = np.random.default_rng(seed)
    counts = _counts(rng, num_types, num_devices)
    B = max(32, num_devices // 4) if num_microbatches is None else num_microbatches
    return _on_a_cluster(rng, counts, model_operators(rng, num_operators), _LARGE_NODE_SIZES, B, schedule)


def _on_a_cluster(
    rng: np.random.Generator,
    counts: NDArray[np.int64],
    model: Model,
    node_sizes: tuple[int, ...],
    num_microbatches: int,
    schedule: str,
) -> Problem:
    num_types = len(counts)
    need = float(_STATE_TENSORS * BYTES * model.weights.sum() + model.kept_bytes.sum() * 2.0)
    shares = rng.uniform(0.5, 2.0, num_types)
    shares *= rng.uniform(1.55, 1.95) * need / float(shares @ counts)
    kinds = [
        Kind(
            name=f"kind-{d}",
            count=int(counts[d]),
            devices_per_node=int(rng.choice([n for n in node_sizes if n <= counts[d]] or [1])),
            flops_per_second=float(rng.uniform(20e12, 200e12)),
            memory_bytes=float(shares[d]),
            inside_bytes_per_second=float(rng.choice([12e9, 32e9, 150e9, 450e9])),
            between_bytes_per_second=float(rng.choice([1.25e9, 3.1e9, 12.5e9, 25e9])),
        )
        for d in range(num_types)
    ]
    links = rng.uniform(1e9, 25e9, (num_types, num_types))
    links = np.minimum(links, links.T)
    latency = rng.uniform(5e-6, 40e-6, (num_types, num_types))
    return _problem(kinds, links, np.maximum(latency, latency.T), model, num_microbatches, schedule)


def _counts(rng: np.random.Generator, num_types: int, num_devices: int) -> NDArray[np.int64]:
    """Devices of each type, odd where the total allows it, two at least."""
    while True:
        cuts = np.sort(rng.choice(np.arange(1, num_devices), num_types - 1, replace=False))
        counts = np.diff([0, *cuts, num_devices])
        if counts.min() >= max(2, num_devices // (4 * num_types)):
            return counts


def _configurations(kind: Kind) -> list[StageConfiguration]:
    """Parts of a node that divide it, and whole nodes; tensor parallel inside a node only."""
    each = kind.devices_per_node
    shapes = [(1, n) for n in range(1, each + 1) if each % n == 0]
    shapes += [(nodes, each) for nodes in range(2, min(kind.count // each, 4) + 1)]
    found = []
    for nodes, per_node in shapes:
        total = nodes * per_node
        for tensor in (t for t in range(1, per_node + 1) if per_node % t == 0):
            data = total // tensor
            for recompute, zero in product((False, True), (0, 1, 2) if data > 1 else (0,)):
                found.append(StageConfiguration(kind.name, nodes, per_node, data, tensor, recompute, zero))
    return found


def _problem(
    kinds: list[Kind],
    links: Floats,
    latency: Floats,
    model: Model,
    num_microbatches: int,
    schedule: str,
) -> Problem:
    configurations = [configuration for kind in kinds for configuration in _configurations(kind)]
    C, L = len(configurations), len(model.weights)
    place = {kind.name: d for d, kind in enumerate(kinds)}
    seconds, once, fixed, active = (np.empty((C, L)) for _ in range(4))
    once_latency, capacity = np.empty(C), np.empty(C)
    for c, configuration in enumerate(configurations):
        kind = kinds[place[configuration.device_type]]
        r, t = configuration.data_parallel, configuration.tensor_parallel
        passes = 4.0 / 3.0 if configuration.recompute else 1.0
        group_link = kind.between_bytes_per_second if configuration.num_nodes > 1 else kind.inside_bytes_per_second
        tensor_traffic = 4.0 * (t - 1) / t * model.reduced_bytes / r / kind.inside_bytes_per_second
        shard_traffic = 2.0 * (r - 1) / r * BYTES * model.weights / t / group_link
        seconds[c] = passes * model.flops / (r * t) / kind.flops_per_second + passes * tensor_traffic
        seconds[c] += 0.5 * shard_traffic if configuration.zero_level == 2 else 0.0
        state = BYTES * model.weights / t
        sharded = {0: _STATE_TENSORS, 1: 2.0 + 2.0 / r, 2: 1.0 + 3.0 / r}[configuration.zero_level]
        fixed[c] = sharded * state
        once[c] = shard_traffic + 3.0 * state / (r if configuration.zero_level else 1) / 1e12
        active[c] = (model.checkpoint_bytes if configuration.recompute else model.kept_bytes / t) / r
        once_latency[c] = 20e-6 * np.log2(r) if r > 1 else 0.0
        capacity[c] = kind.memory_bytes
    at = [place[configuration.device_type] for configuration in configurations]
    pairs = np.ix_(at, at)
    # Each of the more numerous replicas sends or receives its own part, over a link of its own.
    lanes = np.minimum.outer(*([[configuration.data_parallel for configuration in configurations]] * 2))
    return Problem(
        layers=tuple(f"layer {i}" for i in range(L)),
        configurations=tuple(configurations),
        device_counts={kind.name: kind.count for kind in kinds},
        costs=AdditiveCosts(
            seconds_CL=seconds,
            per_step_seconds_CL=once,
            per_step_latency_seconds_C=once_latency,
            fixed_bytes_CL=fixed,
            activation_bytes_CL=active,
            temporary_bytes_CL=np.full((C, L), 0.5 * model.kept_bytes.max()),
            capacity_bytes_C=capacity,
        ),
        cut_bytes_L1=np.concatenate([[0.0], model.output_bytes[:-1], [0.0]]),
        link_latency_seconds_CC=latency[pairs],
        link_seconds_per_byte_CC=1.0 / links[pairs] / lanes,
        schedule=schedule,
        num_microbatches=num_microbatches,
        max_stages=num_microbatches,
    )
