"""Cut a module that is no chain of children, where its traced graph has one tensor at a boundary between its modules.

`torch.export` gives the forward pass as a list of operators, each with the module and the line that it is from. What
depends on neither the input nor weights (masks, rotary tables, the number of examples) is computed in every layer that
reads it; of all else exactly one tensor may cross a cut.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from dejavu.workload.models.user.children import layer_name
from dejavu.workload.models.user.operators import describe, is_assertion, root_of, written_by

INPUT = "x"  # of a layer's graph
TWO = 2  # ends of a tied weight
MOST_NOTES = 3  # boundaries that cannot be cut
LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Piece:
    """One layer of a traced module.

    Attributes:
        graph: from `INPUT` to one tensor; it reads weights by their names in the whole module.
        evaluation: the same, of the module in evaluation.
        tensors: names of the weights and buffers that it reads, and of those that no layer reads; with all names of a
            weight that has several.
        constants: tensors and graphs that tracing made, by the names that the graphs read them by.
        tied: weights that an earlier layer has, too, as `LayerBuilder.tied` has them.
    """

    name: str
    graph: fx.Graph
    evaluation: fx.Graph
    tensors: tuple[str, ...]
    constants: dict[str, Any]
    tied: tuple[tuple[str, str], ...] = ()


class CutOtherwise(Exception):
    """A module has other layers in evaluation than in training."""


@dataclass
class _Segment:
    nodes: list[fx.Node]
    units: list[str]


def trace(module: nn.Module, example: torch.Tensor) -> tuple[list[Piece], tuple[str, ...]]:
    """Return the layers of a module in order, and sentences about boundaries that could not be cut.

    A graph has one way through what the module asks of `training`, so it is traced in evaluation, too.

    Args:
        module: of fake tensors; nothing is computed.
        example: a batch of two or more examples, as fake; any number of them can be asked later.

    Raises:
        CutOtherwise: its graph in evaluation cannot be cut at the same places.
        Exception: `torch.export` cannot trace the module, or it returns something else than one tensor.
    """
    found, notes = _Tracing(module, _exported(module, example)).layers()
    if len(found) == 1:
        return [_piece(one, one) for one in found], notes  # which nobody builds
    for part in module.modules():
        part.training = False
    evaluated, _ = _Tracing(module, _exported(module, example), "in_evaluation_").layers()
    if [one.form for one in evaluated] != [one.form for one in found]:
        raise CutOtherwise("in evaluation its layers are others than in training, or pass on tensors of other shapes")
    for one, other in zip(found, evaluated, strict=True):
        if lacking := sorted(other.copy.tensors - set(one.tensors)):
            raise CutOtherwise(f"layer {one.name!r} reads {lacking[0]!r} in evaluation alone")
    return [_piece(*pair) for pair in zip(found, evaluated, strict=True)], notes


def _exported(module: nn.Module, example: torch.Tensor) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, (example,), dynamic_shapes=shapes, strict=False)
    results = program.graph_signature.user_outputs
    if len(results) != 1:
        raise TypeError(f"it returns {len(results)} values; wanted one tensor")
    return program


class _Tracing:
    """The graph of a module in training or in evaluation, cut into layers.

    Args:
        prefix: of the names of constants.
    """

    def __init__(self, module: nn.Module, program: torch.export.ExportedProgram, prefix: str = "") -> None:
        self.module, self.program, self.prefix = module, program, prefix
        signature = program.graph_signature
        self.weights = dict(signature.inputs_to_parameters)
        self.buffers = dict(signature.inputs_to_buffers)
        self.constants = dict(signature.inputs_to_lifted_tensor_constants)
        self.nodes = list(program.graph.nodes)
        (name,) = signature.user_inputs
        self.input = next(node for node in self.nodes if node.name == name)
        self.batch = str(self.input.meta["val"].shape[0])
        self.mutated = {root for node in self.nodes for root in map(root_of, written_by(node))}
        self.free: set[fx.Node] = set()
        for node in self.nodes:
            if self._is_free(node):
                self.free.add(node)
        self.aliases: dict[str, list[str]] = {}
        every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        by_id: dict[int, list[str]] = {}
        for name, tensor in every:
            by_id.setdefault(id(tensor), []).append(name)
            self.aliases[name] = by_id[id(tensor)]

    def _is_free(self, node: fx.Node) -> bool:
        """Return whether any layer can compute it: from constants and the number of examples."""
        if node.op == "get_attr":
            return True
        if node.op == "placeholder":
            return node.name not in self.weights and node is not self.input and node not in self.mutated
        if node.op != "call_function" or root_of(node) in self.mutated or written_by(node):
            return False
        if node.target is torch.ops.aten.sym_size.int and str(node.meta["val"]) == self.batch:
            return True
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return False
        return all(one in self.free for one in node.all_input_nodes)

    def layers(self) -> tuple[list[_Layer], tuple[str, ...]]:
        segments, notes = self._segments()
        segments, tied = self._tie(segments)
        return self._graphs(segments), (*notes[:MOST_NOTES], *tied)

    def _segments(self) -> tuple[list[_Segment], list[str]]:
        """Cut where one unit's operators end and another's begin, as late as one tensor crosses."""
        steps = [n for n in self.nodes if n.op == "call_function" and n not in self.free and not is_assertion(n)]
        units = [self._unit(node) for node in steps]
        has_weights = [any(one.name in self.weights for one in node.all_input_nodes) for node in steps]
        cuts, notes, last, weighted = [0], list[str](), -1, False
        for position, unit in enumerate(units):
            if not unit:
                continue
            if last >= 0 and unit != units[last] and weighted and any(has_weights[position:]):
                cut = next((k for k in range(position, last, -1) if self._crosses(steps, k) is not None), None)
                if cut is not None:
                    cuts.append(cut)
                    weighted = False
                else:
                    notes.append(self._why_not(steps, position, units[last], unit))
            last, weighted = position, weighted or has_weights[position]
        segments = []
        for start, stop in pairwise([*cuts, len(steps)]):
            named = [unit for unit, has in zip(units[start:stop], has_weights[start:stop], strict=True) if unit and has]
            segments.append(_Segment(steps[start:stop], list(dict.fromkeys(named or filter(None, units[start:stop])))))
        return segments, notes

    def _crossing(self, steps: Sequence[fx.Node], cut: int) -> list[fx.Node]:
        before = [self.input, *steps[:cut]]
        after = {*steps[cut:], self.nodes[-1]}
        return [node for node in before if any(user in after for user in node.users)]

    def _crosses(self, steps: Sequence[fx.Node], cut: int) -> fx.Node | None:
        """Return the one tensor that crosses a cut, with the examples as its first dimension; None: no such."""
        crossing = self._crossing(steps, cut)
        value = crossing[0].meta.get("val") if len(crossing) == 1 else None
        fits = isinstance(value, torch.Tensor) and value.dim() and str(value.shape[0]) == self.batch
        return crossing[0] if fits else None

    def _why_not(self, steps: Sequence[fx.Node], cut: int, before: str, after: str) -> str:
        crossing = self._crossing(steps, cut)
        values = "; ".join(describe(node) for node in crossing[:MOST_NOTES])
        if len(crossing) == 1:
            return f"no cut between {before!r} and {after!r}: what crosses does not begin with the examples: {values}"
        return (
            f"no cut between {before!r} and {after!r}, where {len(crossing)} values cross, and one tensor may: {values}"
        )

    def _unit(self, node: fx.Node) -> str:
        """Return the module whose operators stay together: an item of the outermost list, or one without lists."""
        stack = node.meta.get("nn_module_stack") or {}
        path = str(next(reversed(stack.values()))[0]) if stack else ""
        prefix, module = list[str](), self.module
        for part in path.split(".") if path else ():
            child = module._modules.get(part)
            if child is None:
                break
            prefix.append(part)
            if isinstance(module, LISTS) or not any(isinstance(one, LISTS) for one in child.modules()):
                return ".".join(prefix)
            module = child
        return ""

    def _tie(self, segments: list[_Segment]) -> tuple[list[_Segment], list[str]]:
        """Merge segments that read the same weight, with everything between them, but where just two read it."""
        first: dict[str, int] = {}
        readers: dict[str, set[int]] = {}
        for number, segment in enumerate(segments):
            for name in self._owned(segment.nodes):
                readers.setdefault(name, set()).add(number)
        self.apart = {name for name in self.weights.values() if len(readers.get(name, ())) == TWO}
        until = list(range(len(segments)))
        notes: dict[str, None] = {}
        for number, segment in enumerate(segments):
            for name in set(self._owned(segment.nodes)) - self.apart:
                owner = first.setdefault(name, number)
                if owner != number:
                    until[owner] = max(until[owner], number)
                    said = f"{name!r} is read in {_called(segments[owner])!r} and in {_called(segment)!r}"
                    notes[f"{said}: they are one layer with all between them"] = None
        merged: list[_Segment] = []
        number = 0
        while number < len(segments):
            stop = position = number
            while position <= stop:
                stop = max(stop, until[position])
                position += 1
            together = segments[number : stop + 1]
            merged.append(
                _Segment(
                    [node for one in together for node in one.nodes],
                    list(dict.fromkeys(unit for one in together for unit in one.units)),
                )
            )
            number = stop + 1
        return merged, list(notes)[:MOST_NOTES]

    def _owned(self, nodes: Iterable[fx.Node]) -> list[str]:
        """Return the weights that operators read, and the buffers that they write."""
        read = {one for node in nodes for one in node.all_input_nodes if one.op == "placeholder"}
        owned = [self.weights[one.name] for one in read if one.name in self.weights]
        return owned + [self.buffers[one.name] for one in read if one.name in self.buffers and one in self.mutated]

    def _graphs(self, segments: list[_Segment]) -> list[_Layer]:
        made = []
        used: set[str] = set()
        ends: dict[str, list[tuple[str, str]]] = {}  # of each weight that two may have: layer and name
        for number, segment in enumerate(segments):
            done = [node for one in segments[:number] for node in one.nodes]
            steps = [node for one in segments for node in one.nodes]
            arriving = self._crosses(steps, len(done)) if number else self.input
            leaving = self._crosses(steps, len(done) + len(segment.nodes)) if number < len(segments) - 1 else None
            own = {name: self._own_name(name, segment) for name in self.apart & set(self._owned(segment.nodes))}
            for name, inner in own.items():
                ends.setdefault(name, []).append((_called(segment), inner))
            copy = _Copy(self, arriving, segment.nodes, own)
            copy.end(leaving if leaving is not None else self.nodes[-1].args[0][0])
            used |= copy.tensors
            made.append((segment, copy))
        every = [*self.program.state_dict, *self.buffers.values()]
        unused = [name for name in dict.fromkeys(every) if not {*self.aliases.get(name, (name,))} & used]
        return [
            _Layer(
                _called(segment),
                copy,
                tuple(self._with_aliases([*sorted(copy.tensors), *(unused if number == len(made) - 1 else ())])),
                tuple(
                    (held[1][1], ".".join(held[0]))
                    for held in ends.values()
                    if len(held) == TWO and held[1][0] == _called(segment)
                ),
            )
            for number, (segment, copy) in enumerate(made)
        ]

    def _own_name(self, name: str, segment: _Segment) -> str:
        """Return what a weight with several names is called in a segment's own modules."""
        return next((one for one in self.aliases[name] for unit in segment.units if one.startswith(f"{unit}.")), name)

    def _with_aliases(self, names: Iterable[str]) -> Iterator[str]:
        """Yield all names of each tensor, but of one that two layers have its name here."""
        apart = {one for name in self.apart for one in self.aliases[name]}
        for name in dict.fromkeys(names):
            yield from [name] if name in apart else self.aliases.get(name, [name])


class _Copy:
    """One layer's operators in a graph of their own, with what every layer computes for itself."""

    def __init__(
        self, tracing: _Tracing, arriving: fx.Node | None, nodes: Sequence[fx.Node], own: Mapping[str, str]
    ) -> None:
        self.tracing, self.graph, self.own = tracing, fx.Graph(), own
        self.tensors: set[str] = set()
        self.constants: dict[str, Any] = {}
        self.input = self.graph.placeholder(INPUT)
        self.known: dict[fx.Node, fx.Node] = {}
        self.passed_on: tuple[object, ...] = ()
        if arriving is not None:
            written = {root_of(one) for node in nodes for one in written_by(node)}
            is_written = any(root_of(node) is root_of(arriving) for node in written)
            # A tensor that crosses a cut must not be written to.
            start = self.graph.call_function(torch.ops.aten.clone.default, (self.input,)) if is_written else self.input
            self.known[arriving] = start
        for node in nodes:
            self._take(node)

    def end(self, result: fx.Node) -> None:
        self.graph.output(self._take(result))
        self.graph.lint()
        value = result.meta["val"]
        self.passed_on = (*map(str, value.shape[1:]), value.dtype)  # of one example

    def _take(self, node: fx.Node) -> fx.Node:
        if node not in self.known:
            self.known[node] = self._read(node) if node.op in ("placeholder", "get_attr") else self._call(node)
        return self.known[node]

    def _call(self, node: fx.Node) -> fx.Node:
        if node.target is torch.ops.aten.sym_size.int and str(node.meta["val"]) == self.tracing.batch:
            return self.graph.call_function(torch.ops.aten.sym_size.int, (self.input, 0))
        return self.graph.node_copy(node, self._take)

    def _read(self, node: fx.Node) -> fx.Node:
        tracing = self.tracing
        if node.op == "get_attr":  # a graph of its own, as a block without gradients has
            name = tracing.prefix + str(node.target)
            self.constants[name] = getattr(tracing.program.graph_module, str(node.target))
        elif node.name in tracing.weights or node.name in tracing.buffers:
            name = tracing.weights.get(node.name) or tracing.buffers[node.name]
            name = self.own.get(name, name)
            self.tensors.add(name)
        else:
            name = tracing.constants[node.name]
            if _has(tracing.module, name):  # a tensor that is neither weight nor buffer
                self.tensors.add(name)
            else:
                value, name = tracing.program.constants[name], tracing.prefix + name.replace(".", "_")
                self.constants[name] = value
        return self.graph.get_attr(name)


@dataclass(frozen=True)
class _Layer:
    """One layer of a tracing; `tensors` and `tied` are as a `Piece` has them."""

    name: str
    copy: _Copy
    tensors: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]

    @property
    def form(self) -> tuple[object, ...]:
        """What has to be the same in training and in evaluation."""
        return self.name, self.copy.passed_on, self.tied


def _piece(trained: _Layer, evaluated: _Layer) -> Piece:
    copy, other = trained.copy, evaluated.copy
    constants = copy.constants | other.constants
    return Piece(trained.name, copy.graph, other.graph, trained.tensors, constants, trained.tied)


def _called(segment: _Segment) -> str:
    units = segment.units
    return layer_name((units[0],)) if len(units) == 1 else layer_name((units[0], units[-1])) if units else "model"


def _has(module: nn.Module, name: str) -> bool:
    try:
        operator.attrgetter(name)(module)
    except AttributeError:
        return False
    return True
