"""A workload by what a person types: a file, an example's name, or a model's."""

from __future__ import annotations

from pathlib import Path

from dejavu.foundation import strict_yaml
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import did_you_mean
from dejavu.workload.data import check_data
from dejavu.workload.models import MODELS, layers_of
from dejavu.workload.settings import Workload

EXAMPLES = Path("examples/workloads")
CHECKOUT = Path(__file__).parents[2]  # where the examples are, unless only the package is installed
WANTED = "a workload file, or a model's name"


def load_workload(named: str | Path) -> Workload:
    """Read a workload.yaml, or take a model with the data that such a model is usually trained on.

    Args:
        named: a file, the name of a file of `examples/workloads` (here or of the project), a model of the
            zoo, or `package.module:factory`.

    Raises:
        InputError: a mistake, with file, line and column where it stands in a file.

    Example:
        >>> import dejavu
        >>> dejavu.load_workload("mlp").data
        'digits'
    """
    if not str(named).strip() or named == Path():
        raise InputError(f"found no name; wanted {WANTED}")
    files = [Path(named), EXAMPLES / f"{named}.yaml", CHECKOUT / EXAMPLES / f"{named}.yaml"]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        if Path(named).is_dir() and str(named) not in MODELS:
            raise InputError(f"{Path(named)} is a folder; wanted {WANTED}")
        if Path(named).suffix in (".yaml", ".yml"):
            raise InputError(f"there is no {named} in {Path.cwd()}; wanted {WANTED}")
        if str(named) not in MODELS and ":" not in str(named):
            raise InputError(_unknown(str(named)), ("model",))
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


def _unknown(name: str) -> str:
    """What is said of a name that is no file's, no example's and no model's."""
    folders = [folder for folder in dict.fromkeys((EXAMPLES, CHECKOUT / EXAMPLES)) if folder.is_dir()]
    examples = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    listed = [*MODELS, *(example for example in examples if example not in MODELS)]
    where = f"examples: {', '.join(examples)}" if examples else f"there are no {EXAMPLES} here"
    hint = did_you_mean(name, listed)
    return (
        f"unknown model {name[:80]!r}{hint}{' The' if hint else '; the'} models are {', '.join(MODELS)}; {where}; your "
        "own is package.module:factory, hf:config.json, or a workload file"
    )
