"""A problem as the flat arrays that the exact search's compiled loops read.

Letters as in `shared.suffix_table`: N options, L1 cuts, J levels of stages after a cut, A link classes, D device
vectors, G groups; C configurations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejavu.plans import Problem
from dejavu.plans.stage_costs import DenseCosts, Floats
from dejavu.search._base import TooLargeError
from dejavu.search.shared import suffix_table
from dejavu.search.shared.rules import Rules

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Options:
    """The stages worth considering, and what surrounds them.

    Attributes:
        first_L1, stop_N, group_N, configuration_N, seconds_N, busy_N, fits_N: see `shared.suffix_table.list_options`.
        need_J: microbatches in flight of a stage with j stages after it; the last level stands for all that follow.
            Where `max_stages` may bind there is a level for each number of stages, and no option meets the last.
        offset_G, block_G: how a group moves in the mixed radix vector of devices.
        class_G: configurations of one class have the same links to all others.
        transfer_L1AA, link_busy_L1AA: seconds across a cut between two classes, and (B − 1) times that.
        num_device_vectors: D.
        use_all_devices: as in the problem.
    """

    first_L1: Ints
    stop_N: Ints
    group_N: Ints
    configuration_N: Ints
    seconds_N: Floats
    busy_N: Floats
    fits_N: Ints
    need_J: Ints
    offset_G: Ints
    block_G: Ints
    class_G: Ints
    transfer_L1AA: Floats
    link_busy_L1AA: Floats
    num_device_vectors: int
    use_all_devices: bool

    @property
    def stages(self) -> suffix_table.Stages:
        return suffix_table.Stages(self.first_L1, self.stop_N, self.group_N, self.seconds_N, self.busy_N, self.fits_N)

    def rules(self, limit: float) -> Rules:
        """What plans keep to that are nowhere busier than the limit, in seconds."""
        return Rules(limit, self.need_J, self.transfer_L1AA, self.link_busy_L1AA)

    @property
    def num_classes(self) -> int:
        return int(self.transfer_L1AA.shape[1])

    @property
    def table_shape(self) -> tuple[int, int, int, int]:
        return len(self.first_L1), len(self.need_J), self.num_classes, self.num_device_vectors

    @classmethod
    def of(cls, problem: Problem) -> Options:
        """The options of a problem.

        Raises:
            TooLargeError: the schedule's memory rule depends on more than the stages after.
        """
        chosen = usable(problem)
        class_C, heads_A = link_classes(problem)
        transfer_L1AA = _transfers(problem, heads_A)
        order_C, first_G1, group_rows = _groups(problem, chosen, class_C)
        costs = problem.costs.dense()
        most = most_stages(problem, chosen)
        limit = most if problem.max_stages is None else min(most, problem.max_stages)
        need = needs_of(problem, limit)
        fits = np.minimum(costs.max_in_flight_CLL1, need.max())
        need_J = _levels(need, fits) if limit == most else np.append(need, need.max() + 1)
        first, stop, group, configuration, seconds, busy, kept_fits = suffix_table.list_options(
            costs.seconds_CLL1,
            _busy(costs, problem.num_microbatches),
            fits,
            order_C,
            first_G1,
            group_rows[:, 0].copy(),
            int(need_J.min()),
            not problem.use_all_devices,
        )
        stride_of, stride = {}, 1
        for name, count in problem.device_counts.items():
            stride_of[name] = (stride, stride * (count + 1))
            stride *= count + 1
        heads = [problem.configurations[c] for c in order_C[first_G1[:-1]]]
        return cls(
            first_L1=first,
            stop_N=stop,
            group_N=group,
            configuration_N=configuration,
            seconds_N=seconds,
            busy_N=busy,
            fits_N=kept_fits,
            need_J=need_J,
            offset_G=np.array([how.num_devices * stride_of[how.kind][0] for how in heads], dtype=np.int64),
            block_G=np.array([stride_of[how.kind][1] for how in heads], dtype=np.int64),
            class_G=group_rows[:, 1].copy(),
            transfer_L1AA=transfer_L1AA,
            link_busy_L1AA=(problem.num_microbatches - 1) * transfer_L1AA,
            num_device_vectors=stride,
            use_all_devices=problem.use_all_devices,
        )


def usable(problem: Problem) -> Ints:
    """The configurations that the cluster has devices for."""
    counts = problem.device_counts
    fit = (configuration.num_devices <= counts[configuration.kind] for configuration in problem.configurations)
    return np.flatnonzero(np.fromiter(fit, dtype=bool))


def _busy(costs: DenseCosts, num_microbatches: int) -> Floats:
    possible = np.isfinite(costs.seconds_CLL1)
    seconds = np.where(possible, costs.seconds_CLL1, 0.0)
    return np.where(possible, (num_microbatches - 1) * seconds + costs.per_step_seconds_CLL1, np.inf)


def check_number_of_options(problem: Problem, search: str, max_bytes: float) -> None:
    """Check that the stages of a problem can be listed in so much memory; those of costs given one by one are.

    Raises:
        TooLargeError: they cannot.
    """
    if isinstance(problem.costs, DenseCosts):
        return
    num_bytes = 8.0 * 8 * len(problem.configurations) * problem.num_layers * (problem.num_layers + 1)
    if num_bytes > max_bytes:
        raise TooLargeError(
            f"{search} search needs about {num_bytes:.2g} bytes to list the stages of {problem.num_layers} layers × "
            f"{len(problem.configurations)} configurations; it may take {max_bytes:.2g}; "
            "the coarse search takes so many layers"
        )


def link_classes(problem: Problem) -> tuple[Ints, Ints]:
    """The class of each configuration, those of one class having the same links to all; and one of each class."""
    latency, per_byte = problem.link_latency_seconds_CC, problem.link_seconds_per_byte_CC
    rows = np.concatenate([latency, latency.T, per_byte, per_byte.T], axis=1)
    _, heads, class_C = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return class_C.reshape(-1).astype(np.int64), heads


def _transfers(problem: Problem, heads: Ints) -> Floats:
    """[cut, a, b] seconds between two classes across each cut."""
    among = np.ix_(heads, heads)
    latency, per_byte = problem.link_latency_seconds_CC[among], problem.link_seconds_per_byte_CC[among]
    # The same operations in the same order as Problem.transfer_seconds, so that the floats agree.
    return np.ascontiguousarray(2.0 * (latency + per_byte * problem.cut_bytes_L1[:, None, None]))


def _groups(problem: Problem, chosen: Ints, class_C: Ints) -> tuple[Ints, Ints, Ints]:
    """Configurations sorted into groups of equal devices and links; for each group (family, link class)."""
    types = list(problem.device_counts)
    keys = {
        int(c): (
            types.index(problem.configurations[c].kind),
            int(class_C[c]),
            problem.configurations[c].num_devices,
        )
        for c in chosen
    }
    order = sorted(keys, key=lambda c: (keys[c], c))
    heads = [i for i, c in enumerate(order) if i == 0 or keys[c] != keys[order[i - 1]]]
    families = {family: n for n, family in enumerate(dict.fromkeys(keys[c][:2] for c in order))}
    rows = [(families[keys[order[i]][:2]], keys[order[i]][1]) for i in heads]
    return (
        np.array(order, dtype=np.int64),
        np.array([*heads, len(order)], dtype=np.int64),
        np.array(rows, dtype=np.int64).reshape(-1, 2),
    )


def most_stages(problem: Problem, chosen: Ints) -> int:
    """For how many stages there are layers and devices."""
    smallest: dict[str, int] = {}
    for c in chosen:
        configuration = problem.configurations[c]
        smallest[configuration.kind] = min(
            configuration.num_devices, smallest.get(configuration.kind, configuration.num_devices)
        )
    return min(problem.num_layers, sum(problem.device_counts[name] // taken for name, taken in smallest.items()))


def needs_of(problem: Problem, most: int) -> Ints:
    """Microbatches in flight by the number of stages after, for as many stages as there can be."""
    need = [problem.in_flight(0, after + 1) for after in range(most)]
    if any(problem.in_flight(stage, most) != need[most - 1 - stage] for stage in range(most)):
        raise TooLargeError(
            f"exact search knows schedules whose memory depends on the stages downstream alone; "
            f"{problem.schedule!r} is none"
        )
    return np.array(need or [1], dtype=np.int64)


def _levels(need: Ints, fits: Ints) -> Ints:
    """The needs that tell options apart; from some number of stages on, all ask for the same."""
    most = int(need.max())
    binding = fits[fits < most]
    tight = int(binding.max(initial=0))  # an option that fits more than this fits any number of stages
    level = np.where(need > tight, most, need)
    constant = len(level)
    while constant > 1 and level[constant - 2] == level[-1]:
        constant -= 1
    return level[:constant]
