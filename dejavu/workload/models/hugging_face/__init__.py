"""Models of Hugging Face's transformers, from a local config.json: `hf:PATH`.

The package is optional: `pip install pipe-dejavu[hf]`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejavu.foundation.errors import InputError
from dejavu.workload.models.hugging_face.families import FAMILIES
from dejavu.workload.models.hugging_face.model import PREFIX, HuggingFace
from dejavu.workload.models.hugging_face.t5 import T5

__all__ = ["FAMILIES", "PREFIX", "HuggingFace", "load_config"]

_FORMER_NAMES = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}  # of classes, in configs of years ago


def load_config(reference: str, options: Mapping[str, Any]) -> HuggingFace:
    """Load the model of `hf:PATH`, a config.json or the folder that contains one.

    Raises:
        InputError: transformers is missing, there is no such file, or it describes a model that is not known here.
    """
    if importlib.util.find_spec("transformers") is None:
        raise InputError(
            f"model {reference!r} needs the package transformers, which is not installed; "
            "`pip install --constraint constraints.txt pipe-dejavu[hf]` brings it",
            ("model",),
        )
    path = Path(reference.removeprefix(PREFIX))
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text())
        kind = fields["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"model {reference!r} cannot be read: {type(error).__name__}: {error}; wanted a config.json that names its "
            "model_type",
            ("model",),
        ) from error
    if kind not in FAMILIES:
        raise InputError(
            f"{path}: model_type is {kind!r}; wanted one of {', '.join(FAMILIES)}, or `model: package.module:factory` "
            "with a factory of your own that returns transformers' module",
            ("model",),
        )
    model = T5(path, options) if kind == "t5" else HuggingFace(path, options)
    known = importlib.import_module("transformers").AutoConfig.for_model(kind).to_dict()
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(f"{path}: a config of {kind} has no field {unknown[0]!r}", ("model_options",))
    try:
        config = model.config()
    except Exception as error:  # whatever transformers finds wrong with the fields
        raise InputError(f"{path}: {type(error).__name__}: {error}", ("model",)) from error
    _check_class(path, config)
    return model


def _check_class(path: Path, config: Any) -> None:
    """Check that the config, where it names classes, names the one that is trained, or the one that has no head.

    Raises:
        InputError: it names others, as a classifier or an encoder alone.
    """
    trained = FAMILIES[config.model_type].whole
    headless = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_MAPPING_NAMES[config.model_type]
    classes = config.architectures or []
    listed = classes if isinstance(classes, list) else [classes]
    named = [_FORMER_NAMES.get(str(name), str(name)) for name in listed]
    if named and not {trained, headless} & {*named}:
        raise InputError(
            f"{path}: architectures is {', '.join(named)}; wanted {trained}, the one that hf: trains of "
            f"{config.model_type}; `model_options: {{architectures: [{trained}]}}` trains that, `model: "
            f"package.module:factory` with a factory of your own a {named[0]}",
            ("model",),
        )
