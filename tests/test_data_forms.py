"""Data of one's own: texts with a tokenizer, Parquet, folders of images, torch's datasets; what is wrong is said."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import dejavu
from benchmarks.pipeline.plans import by_hand, job_of, one_device
from dejavu.foundation.errors import InputError
from dejavu.launch.preflight import check_plan, check_spreading
from dejavu.runtime.batches import Reader
from dejavu.runtime.process.failures import LaunchError
from dejavu.testing import check_data_set
from dejavu.workload import Workload
from dejavu.workload.data import Dataset, Documents, dataset_of, image_folder
from dejavu.workload.data.prepared import kept, reading
from dejavu.workload.loader import load_workload
from dejavu.workload.models import MODELS, layers_of
from flows.parameters import WorkloadParameter

WORDS = [f"w{number}" for number in range(40)]
END = "<|endoftext|>"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepared data are kept in the folder where one works."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tokenizer(path: Path, words: list[str] | None = None) -> Path:
    vocabulary = {word: number for number, word in enumerate(words or [*WORDS, "[UNK]", END])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    made.save(str(path))
    return path


def sentences(count: int, seed: int = 0) -> list[str]:
    deal = random.Random(seed)
    return [" ".join(deal.choices(WORDS, k=deal.randint(1, 30))) for _ in range(count)]


def expected(documents: list[str]) -> list[int]:
    return [number for one in documents for number in [*(int(word[1:]) for word in one.split()), len(WORDS) + 1]]


def as_json_lines(folder: Path, documents: list[str]) -> dict[str, Any]:
    path = folder / "corpus.jsonl"
    path.write_text("\n\n".join(json.dumps({"id": k, "body": one}) for k, one in enumerate(documents)) + "\n")
    return {"data": "text", "text": path, "tokenizer": {"path": tokenizer(folder / "t.json"), "field": "body"}}


def as_files(folder: Path, documents: list[str]) -> dict[str, Any]:
    (folder / "corpus").mkdir()
    for k, one in enumerate(documents):
        (folder / "corpus" / f"{k:05d}.txt").write_text(one.replace(" ", "\n"))
    (folder / "corpus" / "notes.bin").write_bytes(b"\xff")
    return {"data": "text", "text": folder / "corpus", "tokenizer": str(tokenizer(folder / "t.json"))}


def as_column(folder: Path, documents: list[str]) -> dict[str, Any]:
    pq.write_table(pa.table({"id": range(len(documents)), "body": documents}), folder / "c.parquet", row_group_size=7)
    return {
        "data": "parquet",
        "parquet": {"path": folder / "c.parquet", "text": "body"},
        "tokenizer": tokenizer(folder / "t.json"),
    }


def as_tokens(folder: Path, documents: list[str]) -> dict[str, Any]:
    (folder / "parts").mkdir()
    half = len(documents) // 2
    for name, part in (("a", documents[:half]), ("b", documents[half:])):
        table = pa.table({"ids": [[int(word[1:]) for word in one.split()] for one in part]})
        pq.write_table(table, folder / "parts" / f"{name}.parquet")
    settings = {"path": folder / "parts", "tokens": "ids", "vocabulary": 42, "end_token": 41}
    return {"data": "parquet", "parquet": settings}


EVERY_FORM = pytest.mark.parametrize("form", [as_json_lines, as_files, as_column, as_tokens])


@EVERY_FORM
@pytest.mark.parametrize("at_once", [1, 100, 2**22])
def test_documents_follow_each_other_with_an_end_token(
    form: Callable[..., dict[str, Any]], at_once: int, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dejavu.workload.data.prepared.documents.AT_ONCE", at_once)
    monkeypatch.setattr(reading, "PIECE_BYTES", at_once)
    documents = sentences(60)
    data = dataset_of(Workload(**form(project, documents), sequence_length=8))
    assert isinstance(data, Documents)
    assert data.sequence().tolist() == expected(documents)
    assert data.sequence().dtype == np.uint16
    assert data.shape.num_classes == 42
    inputs, targets = data.batch(3, 5, seed=1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.dtype == torch.int64
    check_data_set(data)


@EVERY_FORM
def test_tokens_are_made_once_and_again_when_anything_changed(
    form: Callable[..., dict[str, Any]], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, made = form(project, sentences(20)), []
    monkeypatch.setattr(Documents, "_write", _counting(Documents._write, made))
    first = dataset_of(Workload(**fields)).fingerprint
    assert dataset_of(Workload(**fields)).fingerprint == first and len(made) == 1
    assert not [path for path in (project / kept.FOLDER).iterdir() if path.name.startswith(".")]
    changing = ("corpus.jsonl", "00003.txt", "c.parquet", "b.parquet")
    (changed,) = [path for path in project.rglob("*") if path.name in changing]
    (project / "other").mkdir()
    form(project / "other", sentences(20, seed=5))
    (project / "other" / changed.relative_to(project)).replace(changed)
    assert dataset_of(Workload(**fields)).fingerprint != first and len(made) == 2


def _counting(write: Callable[..., Any], made: list[Path]) -> Callable[..., Any]:
    def counted(self: Any, folder: Path, files: list[Path]) -> Any:
        made.append(folder)
        return write(self, folder, files)

    return counted


def test_what_failed_half_way_is_not_kept(project: Path) -> None:
    fields = as_json_lines(project, sentences(20))
    path = fields["text"]
    whole = path.read_text()
    path.write_text(whole + '{"body": 5}\n')
    for _ in range(2):
        with pytest.raises(InputError, match=r"corpus\.jsonl, line 40: 'body' is 5; wanted a text"):
            dataset_of(Workload(**fields)).batch(0, 1, seed=0)
    assert [one.suffix for one in (project / kept.FOLDER).iterdir()] == [".lock"]
    path.write_text(whole)
    dataset_of(Workload(**fields, sequence_length=4)).batch(0, 1, seed=0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{no json", r"line 3 is no JSON"),
        ("[1, 2]", r"line 3 is no object; wanted an object with the field 'body'"),
        ('{"text": "a", "id": 1}', r"line 3 has 'text', 'id'; wanted an object with the field 'body'"),
        ('{"body": null}', r"line 3: 'body' is null; wanted a text"),
    ],
)
def test_a_line_without_the_field_is_named(line: str, said: str, project: Path) -> None:
    fields = as_json_lines(project, sentences(1))
    fields["text"].write_text('{"body": "w1"}\n\n' + line + "\n")
    with pytest.raises(InputError, match=said) as found:
        dataset_of(Workload(**fields)).shape  # noqa: B018
    assert str(fields["text"]) in str(found.value)


def _with(**fields: Any) -> Callable[[Path], dict[str, Any]]:
    def spoil(project: Path) -> dict[str, Any]:
        made = as_json_lines(project, sentences(3))
        return {**made, "tokenizer": {**made["tokenizer"], **fields}}

    return spoil


def _no_tokenizer(project: Path) -> dict[str, Any]:
    (project / "wrong.json").write_text('{"model": 1}')
    return _with(path=project / "wrong.json")(project)


def _not_text(project: Path) -> dict[str, Any]:
    (project / "bad.txt").write_bytes(b"good\ngood\n\xff\xfe\n")
    return {**_with()(project), "text": project / "bad.txt"}


def _empty(project: Path) -> dict[str, Any]:
    (project / "empty.txt").write_bytes(b"")
    return {**_with()(project), "text": project / "empty.txt"}


def _no_files(project: Path) -> dict[str, Any]:
    (project / "folder").mkdir()
    return {**_with()(project), "text": project / "folder"}


def _large_token(project: Path) -> dict[str, Any]:
    pq.write_table(pa.table({"ids": [[1, 2], [3], [40, 41, 7]]}), project / "t.parquet")
    return {"data": "parquet", "parquet": {"path": project / "t.parquet", "tokens": "ids", "vocabulary": 41}}


def _empty_row(project: Path) -> dict[str, Any]:
    pq.write_table(pa.table({"ids": [[1, 2], None, [3]]}), project / "t.parquet")
    return {"data": "parquet", "parquet": {"path": project / "t.parquet", "tokens": "ids", "vocabulary": 41}}


def _parquet(settings: dict[str, Any], **columns: Any) -> Callable[[Path], dict[str, Any]]:
    def spoil(project: Path) -> dict[str, Any]:
        pq.write_table(pa.table(columns), project / "t.parquet")
        return {"data": "parquet", "parquet": {"path": project / "t.parquet", **settings}}

    return spoil


def _no_parquet(project: Path) -> dict[str, Any]:
    (project / "t.parquet").write_bytes(b"PAR1 and no more")
    return {"data": "parquet", "parquet": {"path": project / "t.parquet", "features": ["a"], "target": "b"}}


AB: dict[str, Any] = {"features": ["a"], "target": "b"}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_no_tokenizer, r"wrong\.json cannot be read as a tokenizer: .*; wanted a tokenizer\.json"),
        (_with(vocabulary=41), r"is 41, but .*t\.json has the token '<\|endoftext\|>' with the number 41; wan"),
        (_with(end_token="</s>"), r"has no token '</s>' to end documents with; it has <\|endoftext\|>"),
        (_not_text, r"bad\.txt, line 3 is no text in UTF-8"),
        (_empty, r"empty\.txt has 0 tokens; wanted more than the sequence_length of 128"),
        (_with(), r"corpus\.jsonl has \d+ tokens; wanted more than the sequence_length of 128"),
        (_no_files, r"folder has no file that ends in \.jsonl \.md \.py \.txt"),
        (_large_token, r"t\.parquet, row 2: a token is 41, and the vocabulary has 0 to 40"),
        (_empty_row, r"t\.parquet, row 1: column 'ids' is empty"),
        (_parquet({"tokens": "x", "vocabulary": 9}, ids=[[1]]), r"t\.parquet has no column 'x'; wanted one of 'ids'"),
        (_parquet({"tokens": "ids", "vocabulary": 9}, ids=[0.5]), r"column 'ids' is of double; wanted lists of whole"),
        (_no_parquet, r"t\.parquet cannot be read as Parquet"),
        (_parquet(AB, a=["x"], b=[1]), r"rows 0 to 1: column 'a' is of string; wanted numbers"),
        (_parquet(AB, a=[1.0, None], b=[1, 1]), r"rows 0 to 2: column 'a' is empty in 1"),
        (_parquet(AB, a=[1.0, float("inf")], b=[1, 1]), r"column 'a' has a number that is not finite"),
        (_parquet(AB, a=[1.0], b=[-1]), r"column 'b' has the class -1; wanted whole numbers from 0"),
        (_parquet(AB, a=[1.0], b=[0.5]), r"column 'b' is of double; wanted numbers"),
        (_parquet(AB, a=[[1.0], [1.0, 2.0]], b=[1, 1]), r"the lists of column 'a' are not all as long"),
        (_parquet(AB, a=pa.array([], pa.float32()), b=pa.array([], pa.int64())), r"t\.parquet has no rows"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_files_is_said(spoil: Callable[[Path], dict[str, Any]], said: str, project: Path) -> None:
    with pytest.raises(InputError, match=said) as found:
        dataset_of(Workload(**spoil(project))).batch(0, 4, seed=0)
    assert found.value.field[0] in Workload.model_fields


def test_fewer_examples_than_a_step_takes_are_told_with_the_line(project: Path) -> None:
    pq.write_table(pa.table({"a": np.zeros(30), "b": np.arange(30) % 3}), project / "t.parquet")
    lines = ["model: mlp", "data: parquet", "parquet: {path: t.parquet, features: [a], target: b}", "held_out: 0.2"]
    for size, said in ((24, ""), (25, r"workload\.yaml:5:\d+.* 24 examples to train on, and a step takes 25; wanted")):
        (project / "workload.yaml").write_text("\n".join([*lines, f"batch_size: {size}", "num_microbatches: 1"]))
        with pytest.raises(InputError, match=said) if said else nullcontext():
            load_workload(project / "workload.yaml")


def test_a_folder_without_room_is_said(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = as_json_lines(project, sentences(3))
    monkeypatch.setattr(kept, "FOLDER", Path("/dev/full/data"))
    with pytest.raises(InputError, match=r"prepared data cannot be kept in /dev/full/data/.*wanted a folder"):
        dataset_of(Workload(**fields)).batch(0, 4, seed=0)


def test_columns_of_numbers_are_examples(project: Path) -> None:
    count = 1000
    a, b = np.arange(count) / 4, np.arange(count).reshape(-1, 2).repeat(2, axis=0)
    table = pa.table({"a": a, "b": list(b), "kind": np.arange(count) % 5, "flag": np.arange(count) % 2 == 0})
    pq.write_table(table, project / "t.parquet", row_group_size=300)
    settings = {"path": project / "t.parquet", "features": ["a", "b", "flag"], "target": "kind"}
    data = dataset_of(Workload(model="mlp", data="parquet", parquet=settings, held_out=0.2))  # type: ignore[arg-type]
    assert (data.shape.input_shape, data.shape.num_classes) == ((4,), 5)
    inputs, targets = data.batch(0, 64, seed=2)
    rows = (inputs[:, 0] * 4).long()
    assert torch.equal(inputs[:, 1:3].long(), torch.from_numpy(b)[rows])
    assert torch.equal(targets, rows % 5) and torch.equal(inputs[:, 3] == 1, rows % 2 == 0)
    check_data_set(data)


@pytest.fixture
def images(project: Path) -> Path:
    for number, name in enumerate(("cats", "dogs", "mice")):
        (project / "images" / name).mkdir(parents=True)
        for k in range(6):
            color = (40 * number, 10 * k, 200)
            Image.new("RGB", (20 + k, 30), color).save(project / "images" / name / f"{k}.{'png' if k % 2 else 'bmp'}")
    (project / "images" / "cats" / "list.txt").write_text("no image")
    return project / "images"


@pytest.mark.parametrize("size", [(3, 8, 12), (1, 5, 5)])
def test_a_folder_of_images_has_a_class_for_each_folder(images: Path, size: tuple[int, int, int]) -> None:
    workload = Workload(model="cnn", data="image_folder", image_folder={"path": images, "shape": size})  # type: ignore[arg-type]
    data = dataset_of(workload)
    assert (data.shape.input_shape, data.shape.num_classes) == (size, 3)
    inputs, targets = data.batch(0, 40, seed=0)
    assert inputs.shape == (40, *size) and float(inputs.min()) >= 0 and float(inputs.max()) <= 1
    if size[0] == 3:
        assert torch.equal((inputs[:, 0, 0, 0] * 255).round().long(), 40 * targets)
    check_data_set(replace(data, held_out=0.0))


def test_another_image_of_the_same_size_is_another_folder(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all are read; where only some are, it may be one that is not."""

    def fingerprint() -> str:
        image_folder._found.cache_clear()  # as another process
        image_folder._content_hash.cache_clear()
        fields = {"model": "cnn", "data": "image_folder", "image_folder": {"path": images, "shape": (3, 8, 8)}}
        return dataset_of(Workload.model_validate(fields)).fingerprint

    before = fingerprint()
    replaced = images / "cats" / "0.bmp"
    size = replaced.stat().st_size
    Image.new("RGB", (20, 30), (1, 2, 3)).save(replaced)
    assert replaced.stat().st_size == size
    assert fingerprint() != before
    for limit in (1, size, 10 * size):
        monkeypatch.setattr(image_folder, "MOST_HASHED_BYTES", limit)
        assert fingerprint() == fingerprint()


def test_images_that_cannot_be_read_are_named(images: Path) -> None:
    (images / "dogs" / "3.png").write_bytes((images / "dogs" / "3.png").read_bytes()[:40])
    fields: dict[str, Any] = {"model": "cnn", "data": "image_folder"}
    data = dataset_of(Workload(**fields, image_folder={"path": images, "shape": (3, 8, 8)}))
    with pytest.raises(InputError, match=r"dogs/3\.png cannot be read as an image"):
        data.batch(0, 100, seed=0)
    (images / "owls").mkdir()
    (images.parent / "bare").mkdir()
    for path, said in ((images, "owls has no image; wanted files"), (images.parent / "bare", "bare has no folders")):
        image_folder._found.cache_clear()
        with pytest.raises(InputError, match=said):
            dataset_of(Workload(**fields, image_folder={"path": path, "shape": (3, 8, 8)})).shape  # noqa: B018


def test_the_form_has_texts_for_all_of_them() -> None:
    form = TypeAdapter(WorkloadParameter).json_schema()
    records = form["$defs"]
    assert {"ParquetSettings", "TokenizerSettings", "ImageFolderSettings", "ExamplesSettings"} <= set(records)
    assert records["ParquetSettings"]["properties"]["tokens"]["description"].startswith("the column with lists")


def own(name: str, held_out: float = 0.0, **options: Any) -> Dataset:
    settings = {"factory": f"tests.own_data:{name}", "options": options, "num_classes": 3, "shuffled": 16}
    return dataset_of(Workload(model="mlp", data="examples", examples=settings, held_out=held_out))  # type: ignore[arg-type]


def numbers(batch: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    inputs, targets = batch
    found = inputs[:, 0].long()
    assert torch.equal(inputs, found[:, None].float().expand(-1, 4)) and torch.equal(targets, found % 3)
    return found.tolist()


@pytest.mark.parametrize("name", ["rows", "two", "flow"])
def test_datasets_of_torch_are_examples(name: str) -> None:
    data = own(name, count=50)
    assert (data.shape.input_shape, data.shape.input_dtype, data.shape.num_classes) == ((4,), torch.float32, 3)
    check_data_set(own(name, count=50, held_out=0.0))
    first = [numbers(data.batch(step, 8, seed=1)) for step in range(9)]
    anew = own(name, count=50)
    for step in (5, 6, 2, 8, 0):  # as after a restart, in any order
        assert numbers(anew.batch(step, 8, seed=1)) == first[step]
    assert data.fingerprint == anew.fingerprint != own(name, count=51).fingerprint


SUCCESSORS = {"factory": "tests.own_data:successors", "options": {"count": 40}, "num_classes": 8}


def test_an_input_may_be_a_single_number(tmp_path: Path) -> None:
    """It has one position: whatever is checked of a plan before ranks start can be checked."""
    fields: dict[str, Any] = {"data": "examples", "examples": SUCCESSORS, "batch_size": 8, "num_microbatches": 4}
    workload = Workload(model="tests.own_models:dead", slices=1, **fields)
    assert dataset_of(workload).shape.length == 1
    for ranks in ([one_device(), one_device()], [one_device(2), one_device(1, 2)]):
        job = job_of(workload, by_hand("1f1b", (0, 2, 4), ranks, 4), 2)
        check_plan(job)
        check_spreading(job)
    with pytest.raises(LaunchError, match="does not say how its devices may split the sequence"):
        check_spreading(job_of(workload, by_hand("1f1b", (0, 4), [one_device(1, 2, sequence_parallel=True)], 4), 2))
    two = {"nodes": [{"name": "a", "devices": {"type": "T4", "count": 2}}]}
    (tmp_path / "cluster.yaml").write_text(json.dumps(two))  # JSON is YAML
    free = workload.model_copy(update={"slices": "auto"})
    choice = dejavu.plan(free, tmp_path / "cluster.yaml", database=tmp_path / "db", budget_seconds=0.3)
    assert "Proved: " in dejavu.explain(choice)


@pytest.mark.parametrize("model", MODELS)
def test_models_of_texts_and_images_say_that_they_read_no_single_numbers(model: str) -> None:
    workload = Workload(model=model, data="examples", examples=SUCCESSORS)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"the data gives (examples of shape )?\(\)"):
        layers_of(workload)


@pytest.mark.parametrize("name", ["rows", "flow"])
def test_held_out_examples_are_not_trained_on(name: str) -> None:
    data = own(name, 0.2, count=50)
    tested = numbers(data.test_batch(1000, seed=0))
    trained = {number for step in range(100) for number in numbers(data.batch(step, 8, seed=0))}
    assert len(tested) == len(set(tested)) == 10
    assert trained == set(range(50)) - set(tested)


def test_a_factory_may_bring_its_own_test_part() -> None:
    assert sorted(numbers(own("two").test_batch(100, seed=0))) == list(range(1000, 1010))
    assert max(numbers(own("two", 0.5).test_batch(100, seed=0))) < 50
    with pytest.raises(InputError, match="held_out is 0 and the data have no test part"):
        own("rows").test_batch(1, seed=0)


def test_a_stream_is_shuffled_by_the_seed_and_begins_again() -> None:
    def order(seed: int) -> list[int]:
        data = own("flow", count=50)
        return [number for step in range(10) for number in numbers(data.batch(step, 10, seed=seed))]

    one, other = order(0), order(1)
    assert sorted(one[:50]) == sorted(one[50:]) == list(range(50)) == sorted(other[:50])
    assert len({tuple(one[:50]), tuple(one[50:]), tuple(other[:50])}) == 3


@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        ("tests.own_data:absent", {}, r"cannot be imported: AttributeError.*; wanted package\.module:factory"),
        ("tests.own_data", {}, r"cannot be imported: .*; wanted package\.module:factory"),
        ("tests.own_data:failing", {}, r"fails with options \{\}: RuntimeError: no such bucket"),
        ("tests.own_data:rows", {"size": 3}, r"fails with options \{'size': 3\}: TypeError"),
        ("tests.own_data:number", {}, r"returns a int; wanted a Dataset with a length"),
        ("tests.own_data:rows", {"count": 0}, r"has no examples; wanted at least one"),
        ("tests.own_data:flow", {"count": 0}, r"has no examples; wanted at least one"),
        ("tests.own_data:lonely", {}, r"the first example of .*:lonely is a float; wanted \(input, target\)"),
        ("tests.own_data:of_kind", {"targets": "float32"}, r"first .*: its target is of torch\.float32; wanted whole"),
        ("tests.own_data:of_kind", {"target": -1}, r"the first example .*: its target has -1; wanted 0 to 2"),
        ("tests.own_data:of_kind", {"target": 3}, r"the first example .*: its target has 3; wanted 0 to 2"),
        ("tests.own_data:of_kind", {"inputs": "complex64"}, r"first .* has complex numbers, torch\.complex64; wanted"),
        ("tests.own_data:random_ones", {}, r"draws from the random numbers of torch that the whole process shares"),
    ],
)  # fmt: skip
def test_factories_that_make_no_examples_are_told(factory: str, options: dict[str, Any], said: str) -> None:
    settings = {"factory": factory, "options": options, "num_classes": 3}
    with pytest.raises(InputError, match=said):
        dataset_of(Workload(model="mlp", data="examples", examples=settings)).shape  # type: ignore[arg-type]  # noqa: B018


def test_what_is_kept_of_a_stream_is_of_all_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "a_stream_of_mine"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "making.py").write_text("from tests.own_data import flow\nfrom .rows import count\n")
    (folder / "rows.py").write_text("count = 50\n")
    settings = {"factory": "a_stream_of_mine.making:flow", "options": {"count": 50}, "num_classes": 3}

    def fingerprint() -> str:
        return dataset_of(Workload(model="mlp", data="examples", examples=settings)).fingerprint  # type: ignore[arg-type]

    before = fingerprint()
    assert fingerprint() == before
    (folder / "rows.py").write_text("count = 40\n")
    assert fingerprint() != before


@pytest.mark.parametrize(
    ("name", "bad", "said"),
    [
        ("leaves", -1, r"fails with options \{.*\}: SystemExit: 0"),
        ("leaves", 0, r"the first example of .*:leaves fails: SystemExit: 0"),
        ("flow_leaves", 0, r"the first example of .*:flow_leaves fails: SystemExit: 0"),
        ("leaves", 40, r"leaves\[40\] fails: SystemExit: 0"),
        ("flow_leaves", 40, r"example 40 of .*:flow_leaves fails: SystemExit: 0"),
    ],
)
@pytest.mark.parametrize("seconds", [0.0, 0.006], ids=["at once", "in a thread"])
def test_an_exit_of_a_datasets_code_is_told_as_an_error(name: str, bad: int, said: str, seconds: float) -> None:
    """It ended a command without a word, or the thread that reads, for which the training then waited."""
    settings = {"factory": f"tests.own_data:{name}", "options": {"bad": bad, "seconds": seconds}, "num_classes": 3}
    workload = Workload(model="mlp", data="examples", examples=settings, batch_size=5, num_microbatches=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=said):
        for _ in (reader := Reader(workload, range(10))):
            reader.stepped()


def test_a_script_makes_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_script_with_data.py").write_text("raise SystemExit(2)\n")
    settings = {"factory": "a_script_with_data:make", "num_classes": 3}
    with pytest.raises(InputError, match=r"cannot be imported: SystemExit: 2; wanted package\.module:factory"):
        dataset_of(Workload(model="mlp", data="examples", examples=settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (7, r"broken\[7\] is a NoneType; wanted \(input, target\)"),
        (8, r"broken\[8\] is \(5,\) of torch\.float32 with a target \(\); wanted \(4,\) of torch\.float32"),
        (9, r"broken\[9\]: its target has 3; wanted 0 to 2, as num_classes says"),
        (10, r"broken\[10\]: its target is of torch\.float32; wanted whole numbers"),
    ],
)
def test_an_example_unlike_the_first_is_named(number: int, said: str) -> None:
    train, _ = own("broken").parts()  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=said):
        train.take(np.array([1, number]))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": "digits", "tokenizer": "t.json"}, "tokenizer is given, but data is 'digits'"),
        ({"data": "text", "tokenizer": "t.json"}, "tokenizer is given, but no text"),
        ({"data": "text", "tokenizer": "absent.json"}, "there is no file absent.json"),
        ({"data": "parquet"}, "the key parquet is missing"),
        ({"data": "parquet", "parquet": {"path": "t.json"}}, "wanted one of text .a column., tokens"),
        ({"data": "parquet", "parquet": {"path": "t.json", "features": ["a"]}}, "features and target belong together"),
        ({"data": "parquet", "parquet": {"path": "t.json", "tokens": "a"}}, "tokens and vocabulary belong together"),
        ({"data": "parquet", "parquet": {"path": "t.json", "text": "a"}}, "a column of text and a tokenizer belong"),
        ({"data": "image_folder"}, "the key image_folder is missing"),
        ({"data": "image_folder", "image_folder": {"path": "no", "shape": [3, 8, 8]}}, "there is no folder no"),
        ({"data": "image_folder", "image_folder": {"path": ".", "shape": [2, 8, 8]}}, "wanted 1 or 3 channels"),
        ({"data": "examples"}, "the key examples is missing"),
        ({"data": "text", "examples": {"factory": "a:b", "num_classes": 2}}, "examples is given, but data is 'text'"),
    ],
)
def test_workloads_that_cannot_be_are_refused(fields: dict[str, Any], said: str, project: Path) -> None:
    tokenizer(project / "t.json")
    with pytest.raises(ValidationError, match=said):
        Workload(**fields)
