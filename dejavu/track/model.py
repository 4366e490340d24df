"""A trained model as MLflow keeps it: a traced graph with its weights, which loads without this project's code."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.foundation.errors import DejavuError

if TYPE_CHECKING:
    import torch


EXTRA_FILES = "extra_files"  # as MLflow calls the folder


class ModelError(DejavuError):
    """A model could not be traced or saved."""


def save_model(module: torch.nn.Module, example: torch.Tensor, folder: Path, files: Sequence[Path] = ()) -> None:
    """Save a module with its weights for `Run.model`; `mlflow.pytorch.load_model` reads it.

    Args:
        example: an input of two or more examples; any number of them can be asked later. Of one, only one.
        files: are moved beside it, into its folder `extra_files`.

    Raises:
        ModelError: torch cannot trace the module (`torch.export`), or the disk is full.
    """
    import mlflow.pytorch
    import torch
    from mlflow.models import infer_signature

    quiet = logging.getLogger("mlflow")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = module(example)
            mlflow.pytorch.save_model(
                module,
                folder,
                signature=infer_signature(_numpy(example), _numpy(output)),
                input_example=example.numpy(),
                serialization_format="pt2",
                pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],  # else a process looks for them
            )
        (folder / EXTRA_FILES).mkdir()
        for file in files:  # MLflow's own argument for them copies by way of the temporary files: another disk
            shutil.move(file, folder / EXTRA_FILES / file.name)
    except Exception as error:  # torch.export's, of many kinds
        why = " ".join(str(error).split())[:200]
        raise ModelError(f"the model cannot be saved for MLflow ({type(error).__name__}: {why})") from error
    finally:
        quiet.setLevel(level)


def _numpy(tensor: torch.Tensor) -> object:
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
