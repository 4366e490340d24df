"""A search's input. Arrays and records only: nothing here knows where a cost comes from.

Shape suffixes: L = layers, L1 = L + 1 cut positions (0 and L are the ends), C = stage configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dejavu.foundation.registry import named
from dejavu.plans.plan import StageConfiguration
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.stage_costs import AdditiveCosts, DenseCosts, Floats, PlanError


@dataclass(frozen=True, eq=False)
class Problem:
    """A search's input: layers, stage configurations, costs and links.

    Attributes:
        layers: the L names, for messages and plans.
        configurations: the C ways in which a stage may be spread.
        device_counts: how many devices of each type, or of each island, the cluster has.
        costs: of any stage under any configuration.
        cut_bytes_L1: what crosses a cut before layer k, one microbatch, forward; the gradient that returns is as large.
        link_latency_seconds_CC, link_seconds_per_byte_CC: between neighbouring stages of two configurations.
        schedule: its name; it decides how many microbatches a stage holds.
        num_microbatches: B, in one step (gradient accumulation steps); where sequences come in slices, a slice counts
            as one, and costs and bytes at cuts are of the mean one.
        use_all_devices: every device must be used (Alpa's rule); otherwise devices may stay idle.
        max_stages: no plan may have more stages; None: as many as there are layers.
        num_slices: into how many slices each sequence is cut; memory is counted by whole microbatches all the same,
            since a stage has all slices of one in flight, or none.
        measured_links: (type of device, another's) -> latency and seconds per byte between two of a node, in one run of
            the schedule, where that was measured; for links that a cluster file only assumes.
    """

    layers: tuple[str, ...]
    configurations: tuple[StageConfiguration, ...]
    device_counts: Mapping[str, int]
    costs: AdditiveCosts | DenseCosts
    cut_bytes_L1: Floats
    link_latency_seconds_CC: Floats
    link_seconds_per_byte_CC: Floats
    schedule: str
    num_microbatches: int
    use_all_devices: bool = False
    max_stages: int | None = None
    num_slices: int = 1
    measured_links: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        L, C = len(self.layers), len(self.configurations)
        if not L or not C:
            raise PlanError(f"a problem needs layers and configurations; found {L} and {C}")
        if self.costs.num_layers != L or self.costs.num_configurations != C:
            raise PlanError(
                f"costs are for {self.costs.num_configurations} configurations × {self.costs.num_layers} layers; "
                f"wanted {C} × {L}"
            )
        if self.num_microbatches < 1:
            raise PlanError(f"num_microbatches is {self.num_microbatches}; wanted ≥ 1")
        if self.num_slices < 1 or self.num_microbatches % self.num_slices:
            raise PlanError(
                f"num_microbatches is {self.num_microbatches}, counted by slices, of which each has {self.num_slices}; "
                "wanted a multiple"
            )
        if self.max_stages is not None and self.max_stages < 1:
            raise PlanError(f"max_stages is {self.max_stages}; wanted ≥ 1, or None for no bound")
        if named(SCHEDULES, self.schedule).stages_per_rank > 1:
            raise PlanError(
                f"a search prices one stage on each pipeline rank; {self.schedule} runs several: "
                f"wanted {named(SCHEDULES, self.schedule).searched_as}"
            )
        for name, shape in (
            ("cut_bytes_L1", (L + 1,)),
            ("link_latency_seconds_CC", (C, C)),
            ("link_seconds_per_byte_CC", (C, C)),
        ):
            table = getattr(self, name)
            if table.shape != shape:
                raise PlanError(f"{name} has shape {table.shape}; wanted {shape}")
            if not np.isfinite(table).all() or (table < 0).any():
                raise PlanError(f"{name} holds a value that is negative or not finite")
        for configuration in self.configurations:
            if configuration.kind not in self.device_counts:
                raise PlanError(
                    f"configuration {configuration} asks for {configuration.kind!r}; "
                    f"the cluster has {', '.join(self.device_counts)}"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def most_stages(self) -> int:
        """The most stages that a plan can have, whatever the devices: one per layer, at most `max_stages`."""
        return self.num_layers if self.max_stages is None else min(self.num_layers, self.max_stages)

    @cached_property
    def _index(self) -> dict[StageConfiguration, int]:
        return {configuration: c for c, configuration in enumerate(self.configurations)}

    def index(self, configuration: StageConfiguration) -> int:
        """Return the index of this configuration among the C."""
        if configuration not in self._index:
            raise PlanError(f"configuration {configuration} is none of the problem's")
        return self._index[configuration]

    def transfer_seconds(self, cut: int, c: int, next_c: int) -> float:
        """Return the seconds of the activation forward and its gradient back across a cut, one microbatch."""
        return 2.0 * float(
            self.link_latency_seconds_CC[c, next_c] + self.link_seconds_per_byte_CC[c, next_c] * self.cut_bytes_L1[cut]
        )

    @property
    def whole_microbatches(self) -> int:
        """The number of microbatches, whatever the slices."""
        return self.num_microbatches // self.num_slices

    def in_flight(self, stage: int, num_stages: int) -> int:
        """Return how many whole microbatches a stage holds at once."""
        return named(SCHEDULES, self.schedule).in_flight(stage, num_stages, self.whole_microbatches)
