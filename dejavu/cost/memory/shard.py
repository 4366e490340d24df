"""What one of a stage's tensor-parallel devices holds of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dejavu.cost.kernels.experts import most_rows
from dejavu.cost.kernels.sequence import OwnTokens, attended_bytes, keys_and_values_bytes
from dejavu.cost.kernels.sharding import degree_of, gathers_scores, split_loss
from dejavu.graphs.graph import FoundSplit, Layer
from dejavu.graphs.split_loss import BEGINS, SplitLoss
from dejavu.plans import StageConfiguration


@dataclass(frozen=True)
class Shard:
    """What one of a stage's tensor-parallel devices holds of a layer.

    Of what a layer needs, the sharded products' inputs stay whole on each device, gathered or not. So do norms'
    inputs and what crosses the cuts, unless the devices split the sequence (Korthikanti et al., MLSys 2023, section
    4.2, where the products' inputs are split as well, and gathered again going backward).

    Attributes:
        degree: into how many parts this layer is sharded.
        by_sequence: the devices split the sequence outside the products.
        by_expert: of experts the device has some whole, and as many rows as their router may send there.
        found: how the layer is split, where that was found.
        context_parallel: into how many replicas that share examples split the sequence, through all layers.
        gathered_bytes: keys and values of all positions, which such a device keeps in place of its part.
        attended_bytes: what comes out of its causal attention, which it keeps twice: as two chunks, and whole.
        has_loss: such a device gathers the layer's output, and computes the loss of all.
        loss: what the device does for the loss of its own classes' scores, by direction; None: nothing such.
        has_all_scores: the scores of all classes are gathered, and the loss is computed by each device.
    """

    degree: int = 1
    by_sequence: bool = False
    by_expert: bool = False
    found: FoundSplit | None = None
    context_parallel: int = 1
    gathered_bytes: float = 0.0
    attended_bytes: float = 0.0
    has_loss: bool = False
    loss: Mapping[str, SplitLoss] | None = None
    has_all_scores: bool = False

    @classmethod
    def of(cls, layer: Layer, configuration: StageConfiguration, *, has_loss: bool = False) -> Shard:
        degree, parts = configuration.tensor_parallel, configuration.context_parallel
        own_degree = degree_of(layer, degree)
        tokens = OwnTokens(parts, has_loss)
        loss = {way: one for way in BEGINS if (one := split_loss(layer, way, degree, tokens)) is not None}
        return cls(
            own_degree,
            configuration.sequence_parallel,
            configuration.expert_parallel,
            layer.found_split(degree),
            parts,
            sum(keys_and_values_bytes(layer)) / own_degree if parts > 1 else 0.0,
            attended_bytes(layer) / own_degree / parts if parts > 1 else 0.0,
            has_loss and parts > 1,
            loss or None,
            gathers_scores(layer, degree),
        )

    def output_bytes(self, layer: Layer) -> float:
        """Return the device's part of the layer's output; of scores its own classes', if the loss takes them."""
        is_split = self.by_sequence and layer.tensor_parallel is not None and bool(layer.tensor_parallel.forward_sums)
        degree = self.found.degree if self.found else self.degree
        whole = layer.footprint.output_bytes / (degree if is_split or self.loss else 1)
        return whole / self.context_parallel + (whole if self.has_loss else 0.0)

    def more_bytes(self, direction: str) -> float:
        """Return what a split loss has at once, beyond a part of what the whole one has."""
        if not self.loss or direction not in self.loss or self.found:  # what was found has it in its share
            return 0.0
        return self.loss[direction].more_bytes(direction)

    def input_bytes(self, layer: Layer) -> float:
        """Return the device's part of the layer's input, where it is counted as whole on each shard."""
        return layer.footprint.input_bytes / self.context_parallel

    def more_gradients_bytes(self, layer: Layer) -> float:
        """Return what is whole on each device of the gradients that wait: those of results that were summed."""
        split = layer.tensor_parallel
        if split is None or self.degree == 1 or self.found:
            return 0.0
        return sum(split.forward_sums) * layer.output_bytes * (1 - 1 / self.degree)

    def part(self, layer: Layer, own_bytes: float) -> float:
        """Return the device's part of what the layer has allocated of its own; where the loss is, all of it."""
        return self._of_tokens(layer, own_bytes) / (1 if self.has_loss else self.context_parallel)

    def _of_tokens(self, layer: Layer, own_bytes: float) -> float:
        if self.found:
            return own_bytes * max(self.found.held_share, self.found.peak_share)
        if self.has_all_scores:  # what follows the gather, the loss, is on each: an upper bound
            return own_bytes
        whole = min(own_bytes, self._whole_bytes(layer))
        return whole + (own_bytes - whole) * self._part_of_rows(layer)

    def _part_of_rows(self, layer: Layer) -> float:
        """Return the most that the device gets of a layer's rows: where it holds whole experts, no equal part."""
        experts = layer.tensor_parallel.experts if layer.tensor_parallel else None
        return most_rows(experts, self.degree) if experts and self.by_expert else 1 / self.degree

    def _whole_bytes(self, layer: Layer) -> float:
        split = layer.tensor_parallel
        if split is None or self.degree == 1:
            return 0.0
        inputs = sum(split.backward_sums)  # each gets its gradient by a sum
        normalized = 0.0 if self.by_sequence else sum(split.forward_sums[:-1])  # the last sum is the output
        choices = split.experts.choices or 0 if split.experts else 0  # a token's results, before they are summed
        rows = choices * (1 if self.by_expert else 2)  # and what experts of which each has a part receive
        return (inputs + normalized + rows) * layer.output_bytes


ALONE = Shard()
