"""The zoo. To add a model: its file, and one line here."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from dejavu.foundation.errors import InputError
from dejavu.foundation.hashing import stable_hash
from dejavu.foundation.registry import Family, did_you_mean, named
from dejavu.workload import Workload
from dejavu.workload.code import imported_texts
from dejavu.workload.data import dataset_of
from dejavu.workload.models._base import (
    LayerBuilder,
    Model,
    Source,
    Split,
    TensorParallel,
    WholeExperts,
    by_class,
    is_layer_name,
    source_hash,
    splits_loss,
)
from dejavu.workload.models.bert import BERT
from dejavu.workload.models.gpt import GPT
from dejavu.workload.models.hugging_face import PREFIX, load_config
from dejavu.workload.models.images.cnn import CNN
from dejavu.workload.models.images.mlp import MLP
from dejavu.workload.models.images.vgg import VGG
from dejavu.workload.models.images.wide_resnet import WideResNet
from dejavu.workload.models.llama import Llama
from dejavu.workload.models.mixtral import Mixtral
from dejavu.workload.models.moe import MoE
from dejavu.workload.models.t5 import T5
from dejavu.workload.models.user import UserModel, load_model

__all__ = [
    "MODELS",
    "LayerBuilder",
    "Model",
    "Source",
    "Split",
    "TensorParallel",
    "UserModel",
    "WholeExperts",
    "by_class",
    "layers_of",
    "model_of",
    "own_code",
    "source_hash",
    "splits_loss",
]

MODELS: Family[type[Model]] = Family(
    "model",
    {
        "gpt": GPT,
        "llama": Llama,
        "mixtral": Mixtral,
        "bert": BERT,
        "t5": T5,
        "moe": MoE,
        "cnn": CNN,
        "mlp": MLP,
        "vgg": VGG,
        "wide_resnet": WideResNet,
    },
    field=("model",),
    also=("package.module:factory", f"{PREFIX}config.json"),
)


def model_of(workload: Workload) -> Model:
    """The model that the workload names, with its options.

    Raises:
        InputError: an unknown name, or options that the model does not have.
    """
    if workload.model.startswith(PREFIX):
        return load_config(workload.model, workload.model_options)
    if ":" in workload.model:
        return load_model(workload.model, workload.model_options, getattr(torch, workload.dtype))
    kind = named(MODELS, workload.model)
    known = tuple(inspect.signature(kind).parameters)
    if unknown := [option for option in workload.model_options if option not in known]:
        raise InputError(
            f"model {workload.model!r} does not take model_options {unknown[0]!r}"
            f"{did_you_mean(unknown[0], known) or '; wanted one of ' + ', '.join(known)}",
            ("model_options", unknown[0]),
        )
    _check_kinds(kind, workload.model_options)
    try:
        return kind(**workload.model_options)
    except TypeError as error:
        raise InputError(
            f"model {workload.model!r} does not take model_options {workload.model_options}: {error}",
            ("model_options",),
        ) from error


def own_code(workload: Workload) -> dict[str, str]:
    """Hash the text of each module that a model of one's own is made by, by its name; none of a model of the zoo.

    Of a model of transformers it is the text of its config.json.
    """
    if workload.model.startswith(PREFIX):
        config = load_config(workload.model, workload.model_options).path
        return {config.name: stable_hash(config.read_text())}
    module, is_own, _ = workload.model.partition(":")
    if not is_own:
        return {}
    return {name: stable_hash(text.decode(errors="replace")) for name, text in imported_texts(module).items()}


def _check_kinds(kind: Callable[..., Model], options: Mapping[str, Any]) -> None:
    """Check that true, false and numbers are where they are wanted: the text "no" would pass for true."""
    for option, wanted in _types_of(kind).items():
        value = options.get(option)
        is_flag = isinstance(value, bool)
        if option not in options or (value is None and NoneType in wanted) or (is_flag and {bool, Any} & wanted):
            continue
        wants_a_number = wanted <= {int, float, NoneType}
        if is_flag or wanted <= {bool, NoneType} or (wants_a_number and not isinstance(value, int | float)):
            said = f"model_options: {option} is {json.dumps(value) if is_flag else repr(value)}"
            form = "a number" if wants_a_number else "neither true nor false" if is_flag else "true or false"
            raise InputError(f"{said}; wanted {form}", ("model_options", option))


def _types_of(kind: Callable[..., Model]) -> dict[str, set[Any]]:
    """Return which types each of a model's options may have; of a model that does not tell, as a function, nothing."""
    try:
        hints = get_type_hints(kind)
    except (NameError, TypeError):
        return {}
    return {
        name: set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint} for name, hint in hints.items()
    }


def layers_of(workload: Workload) -> tuple[LayerBuilder, ...]:
    """The layers of the workload's model, for the workload's data.

    Raises:
        InputError: a `Model` of one's own gives none, or some that cannot be told apart.
    """
    model = model_of(workload)
    *before, last = _told_apart(model.layers(dataset_of(workload).shape), f"model {workload.model!r}: its layers()")
    split = last.tensor_parallel
    if split is not None and split.loss_by_position and not model.has_loss_of_its_layers:
        split = replace(split, loss_by_position=False)
        last = replace(last, tensor_parallel=split)
    if split is not None and split.weights and not model.has_loss_by_class:
        weights = tuple((name, "gathered" if cut == "scores" else cut) for name, cut in split.weights)
        last = replace(last, tensor_parallel=replace(split, weights=weights))
    return (*before, last)


def _told_apart(found: Sequence[LayerBuilder], said: str) -> Sequence[LayerBuilder]:
    if not found:
        raise InputError(f"{said} returns no layers", ("model",))
    names = set[str]()
    for number, one in enumerate(found):
        if not isinstance(one, LayerBuilder):
            raise InputError(f"{said} has a {type(one).__name__} as layer {number}; wanted a LayerBuilder", ("model",))
        if one.name in names or not is_layer_name(one.name):
            raise InputError(
                f"{said} calls layer {number} {one.name!r}; wanted a name of its own, without dots, which torch's "
                "nn.Sequential and the training's stages have no other use for, as block0",
                ("model",),
            )
        names.add(one.name)
    return found
