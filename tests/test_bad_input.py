"""Bad input, as a family, through the commands: each is one sentence and exit code 2, and nothing was started or lost.

What can only be found while ranks run (a loss that is no number, a disk that fills up) is in tests/test_launcher.py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from dejavu.init import Draw
from dejavu.runtime.single import build_layers
from dejavu.runtime.state import gather_state, save_checkpoint
from dejavu.workload import Workload
from flows.__main__ import app
from flows.endings import INPUT_ERROR, ending
from tests.launching import job_of

Given = dict[str, Any]
Spoil = Callable[[], Given]

GPT: Given = {
    "model_options": {"num_blocks": 2, "width": 16, "num_heads": 2},
    "sequence_length": 16,
    "batch_size": 4,
    "num_microbatches": 2,
    "num_steps": 8,
    "checkpoint_every": 3,
    "trials": {"count": 0},
}
MLP: Given = {"model": "mlp", "batch_size": 8, "num_microbatches": 2, "num_steps": 8, "trials": {"count": 0}}
OWN = """
import numpy as np
from torch import nn
from torch.utils.data import Dataset
class Rows(Dataset):
    def __len__(self): return 6
    def __getitem__(self, number): return np.zeros(4), 0
def few(): return Rows()
def failing(): raise RuntimeError("no such bucket")
def model(): raise KeyError("width")
def five(): return 5
"""
LLAMA: Given = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a module of the user's own, where one works."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cluster.yaml").write_text("nodes: auto\n")
    (tmp_path / "own_of_mine.py").write_text(OWN)
    yield tmp_path
    sys.modules.pop("own_of_mine", None)


def tokenizer(file: str = "t.json") -> str:
    made = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2, "<|endoftext|>": 40}, unk_token="[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    made.save(file)
    return file


def text(content: str = "a b " * 400, **fields: Any) -> Given:
    Path("text.txt").write_text(content)
    return {**GPT, "data": "text", "text": "text.txt", **fields}


def wrong_tokenizer() -> Given:
    Path("wrong.json").write_text('{"model": {"type": "llama"}}')
    return text(tokenizer="wrong.json")


def small_vocabulary() -> Given:
    return text(tokenizer={"path": tokenizer(), "vocabulary": 30})


def tokens(content: bytes, vocabulary: int = 100) -> Spoil:
    def spoil() -> Given:
        path = Path("t.bin").absolute()  # what a path holds is remembered in one process
        path.write_bytes(content)
        return {**GPT, "data": "tokens", "tokens": {"path": str(path), "vocabulary": vocabulary}}

    return spoil


def examples(name: str) -> Spoil:
    return lambda: {**MLP, "data": "examples", "examples": {"factory": f"own_of_mine:{name}", "num_classes": 3}}


def model(name: str) -> Spoil:
    return lambda: {**MLP, "data": "digits", "model": f"own_of_mine:{name}"}


def columns(**fields: Any) -> Spoil:
    def spoil() -> Given:
        pq.write_table(pa.table({"a": np.arange(50.0), "kind": np.arange(50) % 3}), "t.parquet")
        return {**MLP, "data": "parquet", "parquet": {"path": "t.parquet", **fields}}

    return spoil


def small_images() -> Given:
    folder = Path("images").absolute()
    for number in range(20):
        path = folder / f"cats{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + number, 30)).save(path)  # each of another size
    return {**MLP, "model": "vgg", "data": "image_folder", "image_folder": {"path": str(folder), "shape": [3, 8, 8]}}


def no_image() -> Given:
    given = small_images()
    for path in Path("images").glob("*/*.png"):
        path.write_bytes(path.read_bytes()[:40])
    return {**given, "model": "cnn"}


def hugging_face(content: str, **fields: Any) -> Spoil:
    def spoil() -> Given:
        Path("hf").mkdir()
        Path("hf/config.json").write_text(content)
        return {**{key: value for key, value in GPT.items() if key != "model_options"}, "model": "hf:hf", **fields}

    return spoil


def pretrained(write: Callable[[Path], Any]) -> Spoil:
    def spoil() -> Given:
        Path("saved").mkdir()
        write(Path("saved/model.safetensors"))
        return hugging_face(json.dumps(LLAMA), pretrained="saved")()

    return spoil


WIDE = {"features": ["a", "c"], "target": "kind"}
CASES: dict[str, tuple[Spoil, str]] = {
    "a tokenizer of another kind": (wrong_tokenizer, "wrong.json cannot be read as a tokenizer: "),
    "a vocabulary below a token": (small_vocabulary, "vocabulary is 30, but t.json has the token '<|endoftext|>' with"),
    "a token above the vocabulary": (tokens(b"\xff\x00" * 400), "t.bin: token 0 is 255, and the vocabulary has 0 to"),
    "a cut file of tokens": (tokens(bytes(801)), "t.bin cannot be read: it has 801 bytes, which is no whole number"),
    "tokens for less than an example": (tokens(bytes(20)), "t.bin has 10 tokens; wanted more than the sequence_length"),
    "a text of less than an example": (lambda: text("a b"), "text.txt has 3 "),
    "fewer examples than a step takes": (examples("few"), "there are 6 examples to train on, and a step takes 8; want"),
    "a factory of data that raises": (examples("failing"), "examples 'own_of_mine:failing' fails with options {}: Run"),
    "a factory that is not there": (examples("absent"), "examples 'own_of_mine:absent' cannot be imported: Attribute"),
    "a factory of something else": (examples("five"), "returns a int; wanted a Dataset with a length"),
    "a model's factory that raises": (model("model"), "model 'own_of_mine:model' fails with model_options {}: KeyErr"),
    "a model's factory of something else": (model("five"), "returns a int; wanted a module or a Model"),
    "a column that is not there": (columns(**WIDE), "t.parquet has no column 'c'; wanted one of 'a', 'kind'"),
    "a target that is not there": (columns(features=["a"], target="b"), "t.parquet has no column 'b'; wanted one of"),
    "images below the model's size": (small_images, "model vgg needs images of at least 32 × 32 pixels; the data giv"),
    "an image that is none": (no_image, ".png cannot be read as an image: "),
    "a family that is unknown": (hugging_face('{"model_type": "mamba"}'), "hf/config.json: model_type is 'mamba'; wa"),
    "a config without a family": (hugging_face("{}"), "model 'hf:hf' cannot be read: KeyError: 'model_type'; wanted"),
    "a config that is cut off": (hugging_face('{"model_ty'), "model 'hf:hf' cannot be read: JSONDecodeError: "),
    "a vocabulary above the model's": (
        lambda: {**hugging_face(json.dumps(LLAMA))(), **tokens(bytes(800), 5000)(), "model_options": {}},
        "config.json: vocab_size is 300; the data needs at least 5000",
    ),
    "weights of another model": (
        pretrained(lambda file: save_file({"wte.weight": torch.zeros(3)}, file)),
        "saved has no tensor 'model.embed_tokens.weight' among its 1; wanted one of shape (300, 16)",
    ),
    "weights of another width": (
        pretrained(lambda file: save_file({"model.embed_tokens.weight": torch.zeros(300, 8)}, file)),
        "tensor 'model.embed_tokens.weight' has shape (300, 8); wanted (300, 16)",
    ),
    "weights that are cut off": (
        pretrained(lambda file: file.write_bytes(b"\x10" + bytes(20))),
        "saved/model.safetensors cannot be read: ",
    ),
}


def said_by(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that is refused says."""
    umask = os.umask(0o077)
    try:
        with pytest.raises(SystemExit) as ended:
            ending(lambda: app(args=list(words)), Path.cwd())
    finally:
        os.umask(umask)
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (INPUT_ERROR, ""), told.err
    assert told.err.count("\n") == 1, told.err
    return told.err


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_what_is_wrong_is_a_sentence_and_nothing_was_started(
    name: str, command: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, said = CASES[name]
    given = spoil()
    if command == "plan" and ("pretrained" in given or spoil is no_image):
        pytest.skip("a plan needs neither weights nor what images show")
    (project / "w.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in given.items()))
    before = {path for path in project.iterdir() if path.name != "__pycache__"}
    found = said_by(capsys, command, "--workload", "w.yaml")
    assert said in found and found.startswith("w.yaml:")
    started = {path for path in project.iterdir() if path.name != "__pycache__"} - before
    assert {path.name for path in started} <= {".dejavu"} and not list(project.glob(".dejavu/runs/*"))


WORDS = {
    "plan --model ''": "found no name; wanted a workload file, or a model's name",
    "plan --workload ''": "found no name; wanted a workload file, or a model's name",
    "plan --dask tls://": "Dask at tls:// is no scheduler's address; wanted a host and a port",
    "plan --dask tls://head": "Dask at tls://head is no scheduler's address; wanted a host and a port",
    "run --dask tls://[::1": "is no scheduler's address; wanted a host and a port",
    "run --no-train --resume .dejavu/runs/3f2a": "--resume .dejavu/runs/3f2a goes on with a training, and --no-train",
    "plan --sequence-length 0": "--sequence-length 0: found '0'; wanted whole numbers from 1 to 999,999,999, as 8,16",
    "plan --batch-size 8,x": "--batch-size 8,x: found 'x'; wanted whole numbers from 1 to 999,999,999, as 8,16",
    "plan --search ,": "--search ',' names nothing; wanted names, separated by commas",
    "plan --schedule ' , '": "--schedule ' , ' names nothing; wanted names, separated by commas",
    "price missing.json": "missing.json cannot be read: No such file or directory",
    "price .": ". cannot be read: Is a directory",
    "profile --database ''": "--database . is no cost database; wanted one of `dejavu profile` or `dejavu import`",
    "profile --database own_of_mine.py": "--database own_of_mine.py is no cost database; wanted",
    "import alpa found.pkl --database .": "--database . is no cost database; wanted",
    "backup .": ". is a folder; wanted a file in it, as dejavu.tar.gz",
    "restore .": ". is a folder; wanted a file that `dejavu backup` wrote",
    "restore own_of_mine.py": "own_of_mine.py is no whole backup: ",
}


@pytest.mark.parametrize("words", WORDS)
def test_options_that_are_wrong_are_a_sentence(words: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = {path: path.read_bytes() for path in project.rglob("*.py")}
    assert WORDS[words] in said_by(capsys, *shlex.split(words))
    assert {path: path.read_bytes() for path in project.rglob("*.py")} == kept
    assert not list(project.glob(".dejavu/runs/*"))


@pytest.mark.parametrize("option", ["batch-size", "sequence-length", "microbatches"])
@pytest.mark.parametrize("digits", [9, 10, 18, 19, 30, 5000])
def test_numbers_that_nobody_means_are_a_sentence(
    option: str, digits: int, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch's and Python's own counting end in errors of theirs; so in a workload's file."""
    Path("c.yaml").write_text("nodes: [{name: a, devices: {type: T4, count: 2}}]")
    number = "1" + "0" * digits
    said = said_by(capsys, "plan", "--cluster", "c.yaml", f"--{option}", number)
    assert f"--{option} {number[:40]}: found '{number[:40]}'; wanted whole numbers from 1 to 999,999,999" in said
    key = {"microbatches": "num_microbatches"}.get(option, option.replace("-", "_"))
    Path("w.yaml").write_text(f"{key}: {number}")
    assert said_by(capsys, "plan", "--workload", "w.yaml", "--cluster", "c.yaml").startswith("w.yaml:1:")


@pytest.mark.parametrize("measure", ["layers,passes", "layers, passes", " passes ,layers "])
def test_kinds_of_measurements_may_be_spaced(measure: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of devices that are not here, so that nothing is measured."""
    Path("c.yaml").write_text("nodes: [{name: a, devices: {type: T4, count: 2}}]")
    given = {**MLP, "data": "digits"}
    Path("w.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in given.items()))
    with pytest.raises(SystemExit) as ended:
        app(args=["profile", "--workload", "w.yaml", "--cluster", "c.yaml", "--measure", measure])
    assert ended.value.code == 0 and "0 measured now; not on this machine" in capsys.readouterr().out


@pytest.fixture
def earlier(project: Path) -> Iterator[Path]:
    """The folder of a training of 3 of 8 steps, beside w.yaml, which goes on with it."""
    given = {**GPT, "model": "mlp", "model_options": {"num_blocks": 2, "width": 16}, "data": "digits"}
    (project / "w.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in given.items()))
    job = job_of(Workload(**given), project / "run", (1,))
    job.write()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        save(Path(job.folder), job.workload)
        yield Path("run")
    finally:
        dist.destroy_process_group()


def save(folder: Path, workload: Workload, step: int = 3) -> Path:
    layers = build_layers(workload, Draw(), torch.device("cpu"))
    return save_checkpoint(
        folder / "checkpoints", step, gather_state(layers, torch.optim.SGD(layers.parameters(), 0.1))
    )


def of_another_width(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())["workload"]
    save(folder, Workload(**{**job, "model_options": {"num_blocks": 2, "width": 8}}))


def of_fewer_layers(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())["workload"]
    save(folder, Workload(**{**job, "model_options": {"num_blocks": 1, "width": 16}}))


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: [os.truncate(path, 100) for path in folder.glob(f"checkpoints/*/{name}")] and None


def without_tensors(folder: Path) -> None:
    for path in folder.glob("checkpoints/*/*.distcp"):
        path.unlink()


def other(**fields: Any) -> Callable[[Path], None]:
    """The workload asks for something else than what was trained."""

    def spoil(folder: Path) -> None:
        with Path("w.yaml").open("a") as file:
            file.write("".join(f"\n{key}: {json.dumps(value)}" for key, value in fields.items()))

    return spoil


def one_before(spoil: Callable[[Path], None]) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        first = folder / "checkpoints" / "step-00000003"
        later = shutil.copytree(first, first.with_name("step-00000006"))
        (later / "COMPLETE.json").write_text(json.dumps({"step": 6, "world_size": 1}))
        spoil(folder)

    return both


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (of_another_width, "step-00000003 is of another model: its weight '"),
        (of_fewer_layers, "step-00000003 is of another model: it has no weight '"),
        (cut("*.distcp"), "__0_0.distcp has 100 bytes, so it is cut off; wanted "),
        (cut(".metadata"), ".metadata: pickle data was truncated; wanted a checkpoint's list of tensors"),
        (without_tensors, "__0_0.distcp is not there; wanted "),
        (cut("*.distcp"), "step-00000003, and the training continues at its first step"),
        (one_before(cut("*.distcp")), "step-00000006, and the training continues from step-00000003"),
        (other(seed=5), "run was trained with seed 0; wanted the same, found seed 5"),
    ],
)
def test_a_checkpoint_of_another_model_or_a_damaged_one_is_told_before_anything_starts(
    spoil: Callable[[Path], None], said: str, earlier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(earlier)
    kept = {path: path.read_bytes() for path in sorted(earlier.rglob("*")) if path.is_file()}
    assert said in said_by(capsys, "run", "--workload", "w.yaml", "--resume", "run")
    assert {path: path.read_bytes() for path in sorted(earlier.rglob("*")) if path.is_file()} == kept
