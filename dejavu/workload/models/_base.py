"""The interface of the zoo's models: layers in order, each built on its own, and the loss."""

from __future__ import annotations

import hashlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.workload.code import imported_code
from dejavu.workload.data import ExampleShape


def source_hash(thing: object) -> str:
    """Hash the whole file that defines a class, a function or a module."""
    return hashlib.sha256(inspect.getsource(inspect.getmodule(thing) or type(thing)).encode()).hexdigest()[:16]


IMAGES = {"data": "synthetic", "synthetic": {"num_classes": 1000, "image_shape": (3, 224, 224)}}  # as ImageNet's
DIGITS = {"data": "digits"}
MOST_BLOCKS, MOST_SIZE = 100_000, 10_000_000  # of a model, and a width or number in it: more is a typing mistake

# What a stage keeps beside its layers (`runtime.training.Layers`); a test holds the two together.
_OF_STAGES = {"start", "recompute", "offload", "seed", "autocast", "step", "microbatch", "first_example", "sequence"}
_OF_STAGES |= {"besides", "in_parts", "computes_in", "fixed", "_last", "_is_last", "_own_buffers", "_draws"}
_OF_TORCH = nn.Sequential()


def is_layer_name(name: str) -> bool:
    """Return whether a stage can have a layer of this name: nothing else in it is called so, and it has no dots."""
    return bool(name) and "." not in name and name not in _OF_STAGES and not hasattr(_OF_TORCH, name)


Split = Literal["columns", "rows", "gathered", "scores", "shared", "summed", "positions", "all positions"]
_Loss = TypeVar("_Loss", bound=Callable[..., torch.Tensor])


@dataclass(frozen=True)
class WholeExperts:
    """A layer's mixture of experts, of which a tensor-parallel device may hold some experts whole.

    Attributes:
        count: E; a degree that divides it gives each device as many.
        choices: experts that each token goes to, whatever their load; None: all experts have equal places to fill.
    """

    count: int
    choices: int | None = None


@dataclass(frozen=True)
class TensorParallel:
    """How one layer may be sharded over devices that each hold a part of every weight (Shoeybi et al., 2019).

    Attributes:
        most: the highest degree; every degree must divide it (attention heads stay whole).
        forward_sums, backward_sums: the all-reduces of a pass, each as a multiple of the bytes of the layer's output.
        weights: which modules inside the layer are sharded, by name: `columns` of a linear map (outputs stay sharded),
            its `rows` (outputs are summed; of an embedding its words), or columns `gathered` after it, or `scores`:
            columns whose outputs are what the layer puts out, one for each class, which stay sharded where the loss can
            be computed so (`splits_loss`) and are gathered elsewhere. All others are whole on every device. Of a module
            of such modules, `shared`: what it receives goes to several of them, so its gradient is summed once.
            `summed`: it works on parts (`GroupedLinear`), and its output and the gradients of all that it receives are
            summed. `positions`: it gives something for each position (…, T, W), of which a device of a
            sequence-parallel group takes its own. `all positions`: such a device gathers its input, which goes to
            several sharded modules. None: priced, but not trained so.
        sequence: everything else works token by token, so it may be split along the sequence, dimension 1
            (Korthikanti et al., 2023).
        experts: what `summed` names is a mixture of such experts, which can be told which of them are its own.
        context: it also works on a part of the sequence as a whole (context parallelism): tokens meet only in torch's
            `scaled_dot_product_attention`, and places in the sequence are from `modules.positions`.
        loss_by_position: of the last such layer: the loss is the mean over all positions, each by itself, so a device
            computes that of its own; else what comes out of the model is gathered first.
    """

    most: int
    forward_sums: tuple[float, ...] = ()
    backward_sums: tuple[float, ...] = ()
    weights: tuple[tuple[str, Split], ...] | None = None
    sequence: bool = False
    experts: WholeExperts | None = None
    context: bool = False
    loss_by_position: bool = False

    @classmethod
    def block(
        cls,
        num_heads: int,
        columns: Sequence[str] = (),
        rows: Sequence[str] = (),
        shared: Sequence[str] = (),
        summed: Sequence[str] = (),
        *,
        gathers: Sequence[str] = (),
        sequence: bool = False,
        experts: WholeExperts | None = None,
    ) -> TensorParallel:
        """Shard a transformer block: a sum after attention and after the feed-forward network, and as many backward."""
        weights: list[tuple[str, Split]] = [
            *((name, "columns") for name in columns),
            *((name, "rows") for name in rows),
            *((name, "shared") for name in shared),
            *((name, "summed") for name in summed),
            *((name, "all positions") for name in gathers),
        ]
        return cls(num_heads, (1.0, 1.0), (1.0, 1.0), tuple(weights) or None, sequence, experts)

    @classmethod
    def embedding(
        cls, num_heads: int, words: str | None = None, positions: Sequence[str] | None = None
    ) -> TensorParallel:
        """Shard the vocabulary, padded to any degree as Megatron does: each device adds its own words' vectors.

        Args:
            positions: the modules that give something for each position; None: not to be split along the sequence.
        """
        weights: list[tuple[str, Split]] = [] if words is None else [(words, "rows")]
        weights += [(name, "positions") for name in positions or ()]
        return cls(num_heads, (1.0,), (), None if words is None else tuple(weights), positions is not None)

    @classmethod
    def head(
        cls, num_heads: int, width: int, num_tokens: int, scores: str | None = None, *, sequence: bool = False
    ) -> TensorParallel:
        """Shard the vocabulary: backward sums the input's gradient, and the loss is computed of sharded scores."""
        weights: tuple[tuple[str, Split], ...] | None = None if scores is None else ((scores, "scores"),)
        return cls(num_heads, (), (width / num_tokens,), weights, sequence)


def splits_loss(last: TensorParallel | None, num_classes: int, degree: int) -> bool:
    """Return whether so many devices compute the loss of scores of which each has those of its own classes.

    Then they exchange a maximum and two sums for each target (Shoeybi et al., 2019, section 3). Else the scores are
    gathered, and each device computes the whole loss. Prices and trainings both ask here.

    Args:
        last: how the model's last layer may be sharded.
        num_classes: of its scores, in the whole model.
    """
    if degree == 1 or last is None or last.most % degree or "scores" not in dict(last.weights or ()).values():
        return False
    return _each_has_a_class(num_classes, degree)


def _each_has_a_class(num_classes: int, degree: int) -> bool:
    return (degree - 1) * -(-num_classes // degree) < num_classes  # torch's chunks: all but the last are as large


def by_class(loss: _Loss) -> _Loss:
    """Mark a model's loss as `cross_entropy` of class indices, which `splits_loss` may compute of parts of the classes.

    It calls torch's function once, on all of a microbatch's scores that count, as (targets, classes); before that it
    only selects and views scores, and leaves their last dimension, the classes, as it is. No label smoothing.
    """
    loss.by_class = True  # type: ignore[attr-defined]
    return loss


@dataclass(frozen=True)
class LayerBuilder:
    """One layer: its name, unique in the model, and its constructor.

    A stage builds its own layers only, so no process ever holds a model that is too large for it.

    Attributes:
        tensor_parallel: how it may be sharded; None: not at all.
        residual: names of the modules inside the layer whose output is added to a residual stream; a scheme may draw
            their weights smaller. Empty: none is known.
        tied: weights that are the same matrix as an earlier layer's throughout the training, each as (own name,
            `<layer>.<weight>` of that one). Both layers hold it, and may be on different stages.
        work: gives a key that is equal for layers of the model that compute the same; None: their class and arguments
            say so, where these are plain.
    """

    name: str
    build: Callable[[], nn.Module]
    tensor_parallel: TensorParallel | None = None
    residual: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    work: Callable[[], Any] | None = field(default=None, compare=False)


def with_context_parallel(chain: Sequence[LayerBuilder], *, loss_by_position: bool) -> tuple[LayerBuilder, ...]:
    """Return layers as ones that work on a part of the sequence, too (`TensorParallel.context`)."""
    found = []
    for number, layer in enumerate(chain, 1):
        assert layer.tensor_parallel is not None
        by_position = loss_by_position and number == len(chain)
        split = replace(layer.tensor_parallel, context=True, loss_by_position=by_position)
        found.append(replace(layer, tensor_parallel=split))
    return tuple(found)


def _only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    (tensor,) = tensors
    return tensor


@dataclass(frozen=True)
class Source:
    """Where saved weights may have one of ours.

    Attributes:
        names: of the saved tensors, all of which are needed.
        join: makes our weight from them, in this order.
    """

    names: tuple[str, ...]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor] = _only


class Model(ABC):
    """A model as a chain of layers: each takes the output of the one before it. Settings are the fields.

    Attributes:
        usual_data: default fields of the workload for such a model's data; empty: text.
    """

    usual_data: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def layers(self, shape: ExampleShape) -> tuple[LayerBuilder, ...]:
        """Return the layers in order, for examples of this shape.

        Raises:
            InputError: the model cannot take such examples.
        """

    def untied_parameters(self, shape: ExampleShape) -> int:
        """Count weights that are tied in the published model and separate here.

        Tied weights have to be on one stage, and a head is seldom on the stage of its embedding. The paper's number of
        parameters is the captured number minus these.
        """
        return 0

    def notes(self, shape: ExampleShape) -> tuple[str, ...]:
        """Return notes for the user on how the model was cut into layers; empty where nothing is unusual."""
        return ()

    def weight_names(self, shape: ExampleShape, names: Iterable[str]) -> dict[str, str]:
        """Return what weights are called outside: in the plain module, or in the library that the model is of.

        Args:
            names: as checkpoints have them, `<layer>.<weight>`.

        Returns:
            The outer name by ours; what the plain module does not have is left out.
        """
        return {name: name for name in names}

    def names_of_same(self) -> tuple[tuple[str, ...], ...]:
        """Return all names of each tensor that has several in the plain module's state."""
        return ()

    def weight_sources(self, shape: ExampleShape, names: Iterable[str]) -> dict[str, tuple[Source, ...]]:
        """Return where each weight may be in saved weights, in the order in which it is looked for."""
        return {name: (Source((outer,)),) for name, outer in self.weight_names(shape, names).items()}

    @property
    def code(self) -> str:
        """A hash of the model's code: what trials and plans found under one code is not used for another's."""
        shared, asked = set[str](), [type(self).__module__]
        while asked:
            used = {str(getattr(one, "__module__", "")) for one in vars(sys.modules[asked.pop()]).values()}
            more = {name for name in used if name.startswith(f"{__package__}.modules.")} - shared
            shared |= more
            asked += more
        own = imported_code(type(self).__module__) or source_hash(type(self))
        return "-".join([own, *(source_hash(sys.modules[name]) for name in sorted(shared))])

    @property
    def has_loss_by_class(self) -> bool:
        """Whether the loss is one that can be computed of parts of the classes; one that overrides it says so again."""
        return getattr(type(self).loss, "by_class", False)

    @property
    def has_loss_of_its_layers(self) -> bool:
        """Whether `layers` speaks of this loss: not where a class has taken them over and has another."""
        kinds = type(self).__mro__
        own = {name: next(n for n, kind in enumerate(kinds) if name in vars(kind)) for name in ("layers", "loss")}
        return own["loss"] >= own["layers"]

    @by_class
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return mean cross entropy over all targets of a microbatch; classes are the output's last dimension.

        One of your own has to be a mean over the examples: each replica is given its own, and what they find is
        averaged by how many they have. A sum, or a mean of what is not ignored, would be another loss with replicas.
        """
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def renamed(names: Iterable[str], modules: Mapping[str, str]) -> dict[str, str]:
    """Return weights' names with their module's replaced, `blocks.0.weight` for `blocks_0.weight`.

    Args:
        modules: the outer name of a layer, or of a module inside it, which has precedence; of the whole model it is
            empty. Weights of others are left out.
    """
    found = {}
    for name in names:
        parts = name.split(".")
        known = [length for length in (1, 2) if ".".join(parts[:length]) in modules]
        if known:
            outer = modules[".".join(parts[: known[-1]])]
            found[name] = ".".join([*([outer] if outer else []), *parts[known[-1] :]])
    return found


def check_whole_numbers(model: Model, *names: str) -> None:
    """Check that these settings are whole numbers ≥ 1, and no larger than any model's.

    Raises:
        InputError: one is not.
    """
    for name in names:
        value = getattr(model, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"model_options: {name} is {value!r}; wanted a whole number ≥ 1", ("model_options",))
        most = MOST_BLOCKS if name == "num_blocks" else MOST_SIZE
        if value > most:
            raise InputError(f"model_options: {name} is {value:,}; wanted at most {most:,}", ("model_options",))


def are_counts(value: Any, length: int) -> bool:
    """Whether this is a list of so many numbers of layers, 1 or more each."""
    if not isinstance(value, list | tuple) or len(value) != length:
        return False
    return all(isinstance(one, int) and not isinstance(one, bool) and 1 <= one <= MOST_BLOCKS for one in value)


def check_divides(model: Model, name: str, divisor: str) -> None:
    """Check that one setting is a multiple of another.

    Raises:
        InputError: it is not.
    """
    if getattr(model, name) % getattr(model, divisor):
        raise InputError(
            f"model_options: {name} {getattr(model, name)} does not divide into {divisor} {getattr(model, divisor)}",
            ("model_options",),
        )


def check_tokens(model: str, shape: ExampleShape, least_length: int = 1) -> None:
    """Check that examples are tokens, at least so many.

    Raises:
        InputError: they are not.
    """
    if shape.input_dtype.is_floating_point or len(shape.input_shape) != 1:
        raise InputError(
            f"model {model} reads tokens; the data gives {shape.input_shape} of {shape.input_dtype}", ("data",)
        )
    if shape.input_shape[0] < least_length:
        raise InputError(
            f"model {model} needs at least {least_length} tokens; the data gives {shape.input_shape[0]}", ("data",)
        )


def check_images(model: str, shape: ExampleShape, least_pixels: int = 1) -> None:
    """Check that examples are images (channels, height, width), at least so many pixels high and wide.

    Raises:
        InputError: they are not.
    """
    if len(shape.input_shape) != 3:
        raise InputError(f"model {model} reads images; the data gives examples of shape {shape.input_shape}", ("data",))
    if min(shape.input_shape[1:]) < least_pixels:
        raise InputError(
            f"model {model} needs images of at least {least_pixels} × {least_pixels} pixels; "
            f"the data gives {shape.input_shape[1]} × {shape.input_shape[2]}",
            ("data",),
        )
