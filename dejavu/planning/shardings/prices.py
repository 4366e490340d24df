"""What operators and moves cost on a mesh of a cluster's devices: the kernel predictor, and our collectives."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from dejavu.cluster import Cluster
from dejavu.cost.collectives.inside_stages import StageCollectives
from dejavu.cost.memory.layers import ForEachByte
from dejavu.cost.sources.predicted import Predicted
from dejavu.foundation.errors import InputError
from dejavu.profiles import ProfileDatabase
from dejavu.profiles.kernel import Kernel
from dejavu.sharding.assembly import ShardingPrices
from dejavu.sharding.problem import Floats
from dejavu.workload import Workload


def prices_on(
    cluster: Cluster, device_type: str, mesh: tuple[int, ...], workload: Workload, database: ProfileDatabase
) -> ShardingPrices:
    """Return the prices on a mesh of one type of device.

    Args:
        mesh: (devices,) of one node, or (nodes, devices of each).

    Raises:
        InputError: the mesh has more than two dimensions, or the cluster has fewer such devices.
    """
    if not 1 <= len(mesh) <= 2 or min(mesh) < 1:
        raise InputError(f"a mesh of {mesh}; wanted (devices,) of a node, or (nodes, devices of each)")
    there = cluster.device_counts.get(device_type, 0)
    if prod(mesh) > there:
        raise InputError(f"a mesh of {' × '.join(map(str, mesh))} × {device_type}; the cluster has {there}")
    device = cluster.device_types[device_type]
    predicted = Predicted(database, workload.optimizer)
    collectives = StageCollectives(cluster, database, workload.dtype)
    nodes, each = (1, *mesh)[-2:]
    along = [  # for each dimension of the mesh, which devices move tensors among each other
        tuple(tuple(range(node * each, (node + 1) * each)) for node in range(nodes)),
        tuple(tuple(range(place, nodes * each, each)) for place in range(each)),
    ]
    groups = [along[0]] if len(mesh) == 1 else [along[1], along[0]]

    def kernels(asked: Sequence[Kernel]) -> Floats:
        return predicted.prices(asked, device).seconds_K

    def moves(name: str, dimension: int, size_bytes: float) -> float:
        return collectives.seconds(device_type, name, groups[dimension], (nodes, each), size_bytes)

    each_byte = ForEachByte.of(workload.optimizer)
    return ShardingPrices(
        mesh=mesh,
        kernels=kernels,
        moves=moves,
        passes_in_a_step=workload.microbatches_in_a_step,
        bytes_for_each=1.0 + each_byte.gradient_bytes + each_byte.optimizer_bytes,
    )
