"""Which devices of their nodes stages may take: whatever is drawn of them can be placed, and it is said what is not."""

from __future__ import annotations

import numpy as np
import pytest

from dejavu.binding import bind
from dejavu.cluster import Cluster
from dejavu.cluster.islands import Island
from dejavu.cluster.meshes import Part, parts_of, widths_left_out
from dejavu.plans import Plan, Problem, Stage, StageConfiguration
from dejavu.plans.stage_costs import AdditiveCosts
from tests.conftest import spread
from tests.test_problem import NAME, cluster_of

CLUSTERS = {
    "powers": cluster_of((4, 8)),
    "twelve": cluster_of((3, 12)),
    "six": cluster_of((2, 6)),
    "three": cluster_of((5, 3)),
    "alone": cluster_of((7, 1)),
    "unequal": cluster_of((2, 8), (3, 4), (1, 12)),
    "odd": cluster_of((2, 6), (3, 9)),
    "one less": cluster_of((3, 8), (1, 7)),
    "one more": cluster_of((1, 8), (1, 1)),
    "one of seven": cluster_of((1, 7)),
    "sevens": cluster_of((3, 7)),
    "fours and eights": cluster_of((4, 8), (4, 4)),
}


def free_problem(stages: list[Stage], cluster: Cluster) -> Problem:
    """Nothing costs anything, so that only room decides."""
    hows = tuple(dict.fromkeys(stage.configuration for stage in stages))
    C, L = len(hows), len(stages)
    free = {name: np.zeros((C, L)) for name in ("seconds", "per_step_seconds", "fixed_bytes", "activation_bytes")}
    costs = AdditiveCosts(
        **{f"{name}_CL": table for name, table in free.items()},
        per_step_latency_seconds_C=np.zeros(C),
        temporary_bytes_CL=np.zeros((C, L)),
        capacity_bytes_C=np.ones(C),
    )
    names, links = tuple(map(str, range(L))), np.zeros((C, C))
    return Problem(names, hows, cluster.device_counts, costs, np.zeros(L + 1), links, links, "gpipe", 64)


def any_stages(part: Part, rng: np.random.Generator) -> list[Stage]:
    """Stages drawn at random until the part's devices are used up."""
    share, stages = part[Island(NAME)], list[Stage]()
    left = share.num_devices
    while fitting := [(n, d) for n, d in share.meshes if n * d <= left]:
        nodes, each = fitting[rng.integers(len(fitting))]
        stages.append(Stage(len(stages), len(stages) + 1, StageConfiguration(NAME, nodes, each, nodes * each)))
        left -= nodes * each
    return stages


@pytest.mark.parametrize("cluster", spread(CLUSTERS.values(), 6), ids=CLUSTERS)
def test_any_stages_of_a_part_are_placed(cluster: Cluster) -> None:
    """Drawn until the part's devices are used up: no block gets devices of two nodes, and no device is given twice."""
    rng = np.random.default_rng(1)
    for part in parts_of(cluster):
        assert (1, 1) in part[Island(NAME)].meshes
        assert all(
            nodes * each <= part[Island(NAME)].num_devices <= cluster.num_devices
            for nodes, each in part[Island(NAME)].meshes
        )
        for _ in range(30):
            stages = any_stages(part, rng)
            binding = bind(free_problem(stages, cluster), Plan(tuple(stages), "gpipe", 64), cluster)
            for s, stage in enumerate(stages):
                rows = [row for row in binding.placements if row.pipeline_rank == s]
                devices, each = [row.device for row in rows], stage.configuration.devices_per_node
                assert len(set(devices)) == stage.configuration.num_devices
                blocks = [devices[k : k + each] for k in range(0, len(devices), each)]
                assert all(len({(one.group, one.node_index) for one in block}) == 1 for block in blocks)
            everything = [row.device for row in binding.placements]
            assert len(set(everything)) == len(everything)


NODES = [(k,) for k in range(1, 17)] + [
    *((8, 1), (8, 4), (4, 3), (7, 7), (16, 8), (8, 8, 8, 7), (3, 3, 3), (6, 6), (12, 12, 12), (8, 4, 4, 4, 4), (1, 1)),
]


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_stages_may_take_powers_of_two_or_it_is_said(nodes: tuple[int, ...]) -> None:
    """Of all devices together, but where nodes alike are none; then every width that is considered is named."""
    cluster = cluster_of(*((1, count) for count in nodes))
    parts = parts_of(cluster)
    shares = [part[Island(NAME)] for part in parts]
    assert shares[0].num_devices == sum(nodes)
    assert [share.num_devices for share in shares] == sorted((share.num_devices for share in shares), reverse=True)
    said, powers = widths_left_out(parts, cluster), {2**k for k in range(5) if 2**k <= max(nodes)}
    assert bool(said) == (len(shares) > 1 or not powers <= set(shares[0].widths))
    numbers = {int(word.strip(",")) for word in said.split() if word.strip(",").isdigit()}
    assert not said or numbers >= {width for share in shares for width in share.widths}
    if len(nodes) == 1 or nodes in ((8, 1), (8, 4), (16, 8), (8, 8, 8, 7), (1, 1)):
        assert not said, "all devices can be taken in any powers of two"


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_no_part_could_have_a_device_more(nodes: tuple[int, ...]) -> None:
    """With one more there are stages that cannot be placed, of which all but the last are as wide as can be."""
    cluster = cluster_of(*((1, count) for count in nodes))
    for share in (part[Island(NAME)] for part in parts_of(cluster)):
        if share.num_devices == sum(nodes):
            continue
        taken = share.num_devices + 1
        room = {width: sum(count // width for count in nodes) for width in share.widths}
        assert any(taken // width > room[width] for width in share.widths)


def test_meshes_of_known_clusters() -> None:
    def of(name: str) -> list[tuple[tuple[tuple[int, int], ...], int]]:
        return [(part[Island(NAME)].meshes, part[Island(NAME)].num_devices) for part in parts_of(CLUSTERS[name])]

    assert of("powers") == [(((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (3, 8), (4, 8)), 32)]
    assert of("twelve") == [
        (((1, 1), (1, 2), (1, 4), (1, 12), (2, 12), (3, 12)), 36),
        (((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (3, 8)), 31),
    ]
    assert of("six") == [
        (((1, 1), (1, 2), (1, 6), (2, 6)), 12),
        (((1, 1), (1, 2), (1, 4), (2, 4)), 11),
    ]
    in_fours, in_eights = of("unequal")
    assert in_fours == (((1, 1), (1, 2), *((blocks, 4) for blocks in range(1, 11))), 40)
    assert in_eights == (((1, 1), (1, 2), (1, 4), (1, 8), (3, 4), (2, 8), (5, 4), (3, 8), (7, 4)), 31)
    (one_less,) = of("one less")
    assert one_less[1] == 31 and set(one_less[0]) >= {(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (3, 8), (31, 1)}
