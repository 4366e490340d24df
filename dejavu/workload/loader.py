"""A workload by what a person types: a file, an example's name, or a model's."""

from __future__ import annotations

from pathlib import Path

from dejavu.foundation import strict_yaml
from dejavu.foundation.errors import InputError
from dejavu.workload.data import check_data
from dejavu.workload.models import MODELS, layers_of
from dejavu.workload.settings import Workload

EXAMPLES = Path("examples/workloads")


def load_workload(named: str | Path) -> Workload:
    """Read a workload.yaml, or take a model with the data that such a model is usually trained on.

    Args:
        named: a file, the name of a file of `examples/workloads`, a model of the zoo, or `package.module:factory`.

    Raises:
        InputError: a mistake, with file, line and column where it stands in a file.

    Example:
        >>> import dejavu
        >>> dejavu.load_workload("mlp").data
        'digits'
    """
    files = [Path(named), EXAMPLES / f"{named}.yaml"]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        if Path(named).is_dir() and str(named) not in MODELS:
            raise InputError(f"{Path(named)} is a folder; wanted a workload file, or a model's name")
        if Path(named).suffix in (".yaml", ".yml"):
            raise InputError(f"there is no {named} in {Path.cwd()}; wanted a workload file, or a model's name")
        known = MODELS.get(str(named))
        wanted = Workload.model_validate({"model": str(named), **(known.usual_data if known else {})})
        layers_of(wanted)
        return wanted
    document = strict_yaml.load(file, Workload)
    try:
        layers_of(document.value)
        check_data(document.value)
    except InputError as error:
        raise document.error(error.field, str(error)) from error
    return document.value
