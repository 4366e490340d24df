"""What a person may write in a workload or a cluster file, key by key, over all keys: one sentence for each slip."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel, ValidationError

from dejavu.cluster.form import ClusterForm
from dejavu.cluster.loader import load_cluster
from dejavu.foundation import strict_yaml
from dejavu.foundation.errors import InputError
from dejavu.runtime.optimizer import set_learning_rate
from dejavu.workload import OptimizerSettings, TrialSettings, Workload, loader
from dejavu.workload.loader import CHECKOUT, EXAMPLES, load_workload
from dejavu.workload.models import MODELS

TOKENS = {"path": __file__, "vocabulary": 300}
NEEDED: dict[str, dict[str, Any]] = {  # what makes a key possible
    "synthetic": {"data": "synthetic", "synthetic": {"num_classes": 10}},
    "tokens": {"data": "tokens", "tokens": TOKENS},
    "tokenizer": {"text": str(Path(__file__).parent), "tokenizer": {"path": __file__}},
    "parquet": {"data": "parquet", "parquet": {"path": __file__, "tokens": "a", "vocabulary": 300}},
    "image_folder": {"data": "image_folder", "image_folder": {"path": str(Path(__file__).parent), "shape": [3, 8, 8]}},
    "examples": {"data": "examples", "examples": {"factory": "a:b", "num_classes": 10}},
    "images": {"data": "cifar10"},
}
CLUSTER = {"nodes": [{"name": "a", "devices": {"type": "Mine", "count": 2}}]}
DEVICE = {"kind": "cuda", "memory": "16 GiB", "bandwidth": "900 GB/s", "float32": "15 TFLOP/s"}
CLUSTER |= {"devices": {"Mine": DEVICE}}


def plain_types(annotation: Any) -> set[type]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return plain_types(arguments[0])
    if origin is dict:
        return set()
    if arguments:
        return set().union(*map(plain_types, arguments))
    return {annotation} if isinstance(annotation, type) else set()


def keys_of(record: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], set[type]]]:
    """Every key of a record and of those in it, with the plain types that its value may have."""
    for name, field in record.model_fields.items():
        kinds = plain_types(field.annotation)
        yield (*above, name), kinds
        for inner in kinds:
            if issubclass(inner, BaseModel):
                yield from keys_of(inner, (*above, name))


KEYS = dict(keys_of(Workload))
NUMBERS = [key for key, kinds in KEYS.items() if kinds & {int, float} and bool not in kinds]
PATHS = [key for key, kinds in KEYS.items() if Path in kinds]


def with_value(key: tuple[str, ...], value: Any) -> dict[str, Any]:
    given = copy.deepcopy(NEEDED.get(key[0], {}))
    inner = given
    for part in key[:-1]:
        inner = inner.setdefault(part, {})
    before = inner.get(key[-1])
    inner[key[-1]] = [value, *before[1:]] if isinstance(before, list) else value
    return given


def test_the_keys_are_found() -> None:
    assert len(NUMBERS) > 25 and ("trials", "count") in NUMBERS and ("optimizer", "betas") in NUMBERS
    assert {("text",), ("tokens", "path"), ("image_folder", "path"), ("pretrained",)} <= set(PATHS)


@pytest.mark.parametrize("value", [True, False, math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("key", NUMBERS, ids=".".join)
def test_a_number_is_finite_and_no_flag(key: tuple[str, ...], value: float, tmp_path: Path) -> None:
    """In a file, from Python and from a form alike; true was 1 in the last two."""
    for one in (value, [value, 8, 8]) if key[-1] in ("image_shape", "slices") else (value,):
        with pytest.raises(ValidationError, match=rf"(?s){key[-1]}.*Input should be"):
            Workload.model_validate(with_value(key, one))
        path = tmp_path / "workload.yaml"
        text = re.sub(
            r"-?(NaN|Infinity)",
            lambda found: f"{'-' * (found[0][0] == '-')}.{found[1][:3].lower()}",
            json.dumps(with_value(key, one)),
        )
        path.write_text(text.replace("-.nan", ".nan"))
        with pytest.raises(InputError, match=rf"workload.yaml:1:\d+: {key[-1]}: found .*, wanted ") as caught:
            strict_yaml.load(path, Workload)
        assert "\n" not in str(caught.value), "one sentence for one slip"


@pytest.mark.parametrize("value", ["", " ", "\t"], ids=repr)
@pytest.mark.parametrize("key", PATHS, ids=".".join)
def test_an_empty_path_is_not_the_current_folder(
    key: tuple[str, ...], value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workload.yaml").write_text(json.dumps(with_value(key, value)))
    with pytest.raises(InputError, match=rf"{key[-1]}: found .*, wanted a path"):
        strict_yaml.load(Path("workload.yaml"), Workload)
    with pytest.raises(ValidationError, match="wanted a path"):
        Workload.model_validate(with_value(key, value))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("slices: 0", "slices: found 0, wanted 'auto', at least 1 or a list"),
        ("slices: [1, 0]", "slices: found 0, wanted at least 1"),
        ("slices: many", "slices: found 'many', wanted 'auto', a whole number or a list"),
        ("checkpoint_every: 0", "checkpoint_every: found 0, wanted 'auto' or at least 1"),
        ("optimizer: {learning_rate: .inf}", "learning_rate: found Infinity, wanted a finite number"),
        ("optimizer: {betas: [0.9]}", "betas: item 2 is missing"),
    ],
)
def test_one_slip_is_one_sentence_whatever_forms_a_value_may_have(text: str, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "workload.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        strict_yaml.load(tmp_path / "workload.yaml", Workload)
    assert re.sub(r"^.*?:\d+:\d+: ", "", str(caught.value)) == wanted


@pytest.mark.parametrize("value", ["true", ".nan", ".inf", "1e99", "-1", "0", "9223372036854775807"])
@pytest.mark.parametrize("key", [key for key, kinds in keys_of(ClusterForm) if kinds & {int, float}], ids=".".join)
def test_a_cluster_s_numbers_are_of_things_that_there_are(key: tuple[str, ...], value: str, tmp_path: Path) -> None:
    cluster: Any = copy.deepcopy(CLUSTER)
    names = {"nodes": ("nodes", 0), "devices": ("devices", "Mine")}
    at = [*names.get(key[0], key[:1]), *key[1:]]
    inner = cluster
    for part in at[:-1]:
        inner = inner.setdefault(part, {}) if isinstance(inner, dict) else inner[part]
        if part in ("link", "host_memory"):
            inner |= {"bandwidth": "1 GB/s"} | ({"size": "1 GiB"} if part == "host_memory" else {})
    inner[at[-1]] = "@"
    path = tmp_path / "cluster.yaml"
    for one in (value, f'"{value} USD/hour"') if key[-1] == "price" else (value,):
        path.write_text(json.dumps(cluster).replace('"@"', one))
        with pytest.raises(InputError, match=r"cluster.yaml:1:\d+: "):
            load_cluster(path)


@pytest.mark.parametrize(
    "value", ["true", "false", ".nan", ".inf", "1e99", "9223372036854775807", '"no"', "null", "[1]"]
)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_s_options_are_of_their_kind(model: str, value: str, tmp_path: Path) -> None:
    """`tied: no` is text in YAML 1.2, and was true; so many blocks that no memory holds their list were made."""
    kind = MODELS[model]
    for option, annotation in kind.__annotations__.items():
        is_flag = annotation == "bool"
        if annotation not in ("int", "bool", "float") or (is_flag and value in ("true", "false")):
            continue
        if (annotation == "float" and value in ("1e99", "9223372036854775807")) or (option, value) == (
            "feedforward",
            "null",
        ):
            continue
        path = tmp_path / "workload.yaml"
        path.write_text(
            json.dumps({"model": model, "model_options": {option: "@"}, **kind.usual_data}).replace('"@"', value)
        )
        with pytest.raises(InputError, match=rf"workload.yaml:1:\d+: model_options: {option} is ") as caught:
            load_workload(path)
        if is_flag:
            assert str(caught.value).endswith("wanted true or false")


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 160])
@pytest.mark.parametrize("warmup", [0, 1, 10, 11, 160, 2000])
def test_a_warm_up_that_never_ends_is_told(warmup: int, steps: int) -> None:
    """Where the last step's rate is not yet the one that was asked for, and nowhere else."""
    workload = Workload(
        num_steps=steps, optimizer=OptimizerSettings(warmup_steps=warmup), trials=TrialSettings(count=0)
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    set_learning_rate(optimizer, workload, steps - 1)
    assert bool(workload.odd) == (optimizer.param_groups[0]["lr"] < workload.optimizer.learning_rate)
    assert not workload.odd or f"warmup_steps is {warmup:,}" in workload.odd


def test_an_example_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own folder of examples comes first; a name that is none is told the names that there are."""
    monkeypatch.chdir(tmp_path)
    for file in sorted((CHECKOUT / EXAMPLES).glob("*.yaml")):
        if file.stem != "own_model":  # which is imported from the checkout's folder
            assert load_workload(file.stem) == load_workload(file)
    with pytest.raises(InputError, match=r"'bert49'; did you mean 'bert48'\? .*examples: bert48, .*workload file"):
        load_workload("bert49")
    (tmp_path / EXAMPLES).mkdir(parents=True)
    (tmp_path / EXAMPLES / "bert48.yaml").write_text("model: mlp\ndata: digits\n")
    assert load_workload("bert48").model == "mlp"
    monkeypatch.setattr(loader, "CHECKOUT", tmp_path / "installed")
    (tmp_path / EXAMPLES / "bert48.yaml").unlink()
    (tmp_path / EXAMPLES).rmdir()
    with pytest.raises(InputError, match=r"there are no examples/workloads here; your own is package\.module:factory"):
        load_workload("bert48")
    for empty in ("", "  ", Path()):
        with pytest.raises(InputError, match="found no name; wanted a workload file, or a model's name"):
            load_workload(empty)
