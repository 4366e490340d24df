"""Training that starts from saved weights: transformers' own loss, read tensor by tensor, under every way to spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import Trained, train_in_turn
from dejavu.foundation.errors import InputError
from dejavu.init import Draw
from dejavu.launch.launcher import launch
from dejavu.runtime.job import export, resumed
from dejavu.runtime.optimizer import make_optimizer, set_learning_rate
from dejavu.runtime.single import build_layers, train_single, trained_module
from dejavu.runtime.state import start_from_pretrained
from dejavu.workload import OptimizerSettings, TrialSettings, Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of, model_of
from dejavu.workload.models.ties import ties_of
from dejavu.workload.pretrained import check_pretrained, fingerprint
from tests import own_models
from tests.launching import job_of as launched
from tests.test_export import scores
from tests.test_hugging_face import CONFIGS, logits_of, needs_transformers, whole_class

TOLERANCE = 1e-5
STEPS = 3


def saved(kind: str, folder: Path, *, shard: str = "50GB", **fields: Any) -> Any:
    """A tiny model of transformers, with random weights in the folder."""
    import transformers

    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **{**CONFIGS[kind], **fields})
    whole = whole_class(kind)._from_config(config, attn_implementation="sdpa")
    whole.save_pretrained(folder, max_shard_size=shard)
    return whole.eval()


def workload_from(folder: Path, **fields: Any) -> Workload:
    fixed = {"sequence_length": 24, "batch_size": 4, "num_microbatches": 2, "num_steps": STEPS}
    return Workload(**{"model": f"hf:{folder}", "pretrained": True, **fixed, **fields})


def own_loss(whole: Any, workload: Workload) -> float:
    """Of transformers' model on the first batch, without dropout, over every position."""
    x, y = dataset_of(workload).batch(0, workload.batch_size, seed=workload.seed)
    with torch.no_grad():
        return float(model_of(workload).loss(logits_of(whole, x), y))


@needs_transformers
@pytest.mark.parametrize("shard", ["50GB", "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_first_loss_is_that_of_the_saved_model(kind: str, shard: str, tmp_path: Path) -> None:
    whole = saved(kind, tmp_path, shard=shard)
    workload = workload_from(tmp_path)
    assert len(check_pretrained(workload)) == 1  # every tensor of the files is used
    first, *_ = train_single(workload, Draw("xavier"), range(1))
    assert first == pytest.approx(own_loss(whole, workload), abs=1e-6)


@needs_transformers
@pytest.mark.parametrize("kind", CONFIGS)
def test_training_goes_on_as_transformers_own_does(kind: str, tmp_path: Path) -> None:
    """Every weight gets its gradient, also a table that all of T5's blocks share; heads have weights of their own."""
    whole = saved(kind, tmp_path, tie_word_embeddings=False)
    workload = workload_from(tmp_path, optimizer=OptimizerSettings(learning_rate=1e-2))
    expected = own_loss(whole, workload)
    head = whole.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    optimizer = make_optimizer(workload.optimizer, whole.parameters())
    losses = []
    for step in range(STEPS):
        x, y = dataset_of(workload).batch(step, workload.batch_size, seed=workload.seed)
        loss = model_of(workload).loss(logits_of(whole, x), y)
        optimizer.zero_grad()
        loss.backward()
        set_learning_rate(optimizer, workload, step)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(expected, abs=1e-6)
    assert train_single(workload, Draw(), range(STEPS)) == pytest.approx(losses, abs=TOLERANCE)


@needs_transformers
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_starts_as_a_copy_of_the_embedding(kind: str, tied: bool, tmp_path: Path) -> None:
    whole = saved(kind, tmp_path, tie_word_embeddings=tied)
    workload = workload_from(tmp_path)
    layers = build_layers(workload, Draw(), torch.device("cpu"))
    start_from_pretrained(layers, workload)
    held = layers.state_dict()
    embedding = held["embedding.token.weight" if kind == "gpt2" else "embedding.weight"]
    assert torch.equal(held["head.logits.weight"], embedding) == tied
    assert train_single(workload, Draw(), range(1))[0] == pytest.approx(own_loss(whole, workload), abs=1e-6)


@needs_transformers
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_tied_model_trains_as_transformers_own(kind: str, tmp_path: Path) -> None:
    """Where both ends are one matrix, its gradient is the sum of both."""
    whole = saved(kind, tmp_path, tie_word_embeddings=True)
    workload = workload_from(tmp_path, optimizer=OptimizerSettings(name="sgd", learning_rate=0.1))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, weight_decay=workload.optimizer.weight_decay)
    losses = []
    for step in range(STEPS):
        x, y = dataset_of(workload).batch(step, workload.batch_size, seed=workload.seed)
        optimizer.zero_grad()
        loss = model_of(workload).loss(logits_of(whole, x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert train_single(workload, Draw(), range(STEPS)) == pytest.approx(losses, abs=TOLERANCE)


@needs_transformers
def test_a_stage_reads_its_own_tensors_only(tmp_path: Path) -> None:
    """The files of all others may be broken."""
    saved("llama", tmp_path, shard="10KB")
    workload, names = workload_from(tmp_path), [builder.name for builder in layers_of(workload_from(tmp_path))]
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    own = {file for name, file in where.items() if ".layers.1." in name}
    for file in set(where.values()) - own:
        (tmp_path / file).write_bytes(b"")
    k = names.index("block1")
    start_from_pretrained(build_layers(workload, Draw(), torch.device("cpu"), k, k + 1), workload)
    with pytest.raises(InputError, match=r"cannot be read: .*; wanted a whole safetensors file"):
        start_from_pretrained(build_layers(workload, Draw(), torch.device("cpu"), k - 1, k + 1), workload)
    with pytest.raises(InputError, match="cannot be read"):
        check_pretrained(workload)


@needs_transformers
def test_names_of_older_files_are_known(tmp_path: Path) -> None:
    """GPT-2's files lack the head's part of the names; BERT's call a norm's weights gamma and beta."""
    for kind, old in (("gpt2", ("transformer.", "")), ("bert", ("LayerNorm.weight", "LayerNorm.gamma"))):
        whole = saved(kind, tmp_path / kind)
        file = tmp_path / kind / "model.safetensors"
        state = {name.replace(*old): tensor for name, tensor in load_file(file).items()}
        state["a_mask.bias"] = torch.ones(2, 3, dtype=torch.bool)
        save_file(state, file)
        workload = workload_from(tmp_path / kind)
        assert "such as 'a_mask.bias' of shape (2, 3)" in check_pretrained(workload)[1]
        assert train_single(workload, Draw(), range(1))[0] == pytest.approx(own_loss(whole, workload), abs=1e-6)


def _drop(folder: Path) -> None:
    _change(folder, lambda state: state.pop("model.layers.1.mlp.up_proj.weight"))


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _narrow(folder: Path) -> None:
    _change(folder, lambda state: state.update({"model.norm.weight": torch.ones(31)}))


def _quantize(folder: Path) -> None:
    _change(folder, lambda state: state.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _lead_out(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')


def _lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')


def _change(folder: Path, change: Any) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


@needs_transformers
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_drop, r"has no tensor 'model.layers.1.mlp.up_proj.weight' among its \d+; wanted one of shape \(48, 32\)"),
        (_narrow, r"tensor 'model.norm.weight' has shape \(31,\); wanted \(32,\) for 'head.norm.weight'"),
        (_quantize, r"'model.norm.weight' is of type I8; wanted floating point"),
        (_cut, r"model.safetensors cannot be read: .*; wanted a whole safetensors file"),
        (_pickle, r"pytorch_model.bin is a pickle, which may run code .* converted by `python -c .*save_pretrained"),
        (_lead_out, r"index.json cannot be read: .* said to be in '../b', outside the folder"),
        (_lose_a_shard, r"b.safetensors is not there; .* says that 'a' and 0 other tensors are in it"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights: neither model.safetensors nor"),
    ],
)
def test_what_does_not_fit_is_said(spoil: Any, said: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    spoil(tmp_path)
    with pytest.raises(InputError, match=said):
        check_pretrained(workload_from(tmp_path))


@needs_transformers
def test_no_initializations_are_tried(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    for trials in (TrialSettings(), TrialSettings(count=3, steps=30)):  # too many for the steps: nothing to reject
        assert workload_from(tmp_path, num_steps=1, trials=trials).num_trials == 0
    with pytest.raises(ValueError, match="true is for the folder of a model by hf:PATH, and model is 'gpt'"):
        Workload(pretrained=True)
    before = fingerprint(workload_from(tmp_path))
    _narrow(tmp_path)
    assert fingerprint(workload_from(tmp_path)) != before


one = one_device()
PLANS = {
    "uneven cuts": ("1f1b", (0, 1, 4), [one, one]),
    "ZeRO 1 and 1 replica": ("zbv", (0, 1, 2, 3, 4), [one_device(2, zero_level=1), one]),
    "ZeRO 3": ("1f1b", (0, 2, 4), [one_device(2, zero_level=3), one]),
    "2 shards": ("1f1b", (0, 2, 4), [one_device(1, 2), one_device(1, 2)]),
    "2 replicas of 2 shards, ZeRO 1": ("1f1b", (0, 4), [one_device(2, 2, zero_level=1)]),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workload, float, dict[str, Trained]]:
    folder = tmp_path_factory.mktemp("llama")
    whole = saved("llama", folder, shard="20KB", tie_word_embeddings=True)
    workload = workload_from(folder, num_microbatches=4, batch_size=8, trials=TrialSettings(count=0))
    order = sorted(PLANS, key=lambda case: -sum(rank.num_devices for rank in PLANS[case][2]))
    jobs = [job_of(workload, by_hand(*PLANS[case], 4), STEPS) for case in order]
    return workload, own_loss(whole, workload), dict(zip(order, train_in_turn(jobs), strict=True))


@needs_transformers
@pytest.mark.integration
@pytest.mark.parametrize("case", PLANS)
def test_a_pipeline_starts_from_them(case: str, trained: tuple[Workload, float, dict[str, Trained]]) -> None:
    workload, first, found = trained
    assert found[case].losses[0] == pytest.approx(first, abs=TOLERANCE)
    assert found[case].losses == pytest.approx(train_single(workload, Draw(), range(STEPS)), abs=TOLERANCE)


@needs_transformers
@pytest.mark.integration
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.slow
def test_there_and_back_again(kind: str, tmp_path: Path) -> None:
    """Saved by transformers, trained on two ranks, exported, read by transformers, trained further."""
    saved(kind, tmp_path / "first")
    workload = workload_from(tmp_path / "first", trials=TrialSettings(count=0))
    job = launched(workload, tmp_path / "run")
    result = launch(job)
    assert result.losses == pytest.approx(train_single(workload, Draw(), range(STEPS)), abs=TOLERANCE)
    checkpoint = export.kept_checkpoint(tmp_path / "run")
    export.export(tmp_path / "run", checkpoint, "hf", tmp_path / "out")
    plain = whole_class(kind).from_pretrained(tmp_path / "out")
    ours, inputs = trained_module(job, checkpoint)
    expected = scores(ours, inputs)
    torch.testing.assert_close(scores(plain, inputs), expected, atol=1e-6, rtol=0)
    again = workload_from(tmp_path / "out")
    layers = build_layers(again, Draw(), torch.device("cpu"))
    start_from_pretrained(layers, again)
    assert torch.equal(scores(layers, inputs), expected)


@needs_transformers
@pytest.mark.integration
@pytest.mark.slow
def test_a_checkpoint_needs_the_files_no_more(tmp_path: Path) -> None:
    saved("t5", tmp_path / "first")
    workload = workload_from(tmp_path / "first", num_microbatches=4, trials=TrialSettings(count=0))
    longer = workload.model_copy(update={"num_steps": STEPS + 1})
    unbroken = train_single(longer, Draw(), range(STEPS + 1))
    job = launched(workload, tmp_path / "run", cuts=(2, 5))
    assert launch(job).losses == pytest.approx(unbroken[:STEPS], abs=TOLERANCE)
    (tmp_path / "first" / "model.safetensors").unlink()
    again = resumed(tmp_path / "run", longer, launched(longer, tmp_path / "run", cuts=(4,)).binding)
    assert launch(again).losses == pytest.approx(unbroken, abs=TOLERANCE)


def test_weights_of_one_s_own_module_start_it_again(tmp_path: Path) -> None:
    """Also where a file has one tensor of two that are shared."""
    own = model_of(Workload(model="tests.own_models:with_shared_weight", data="digits"))
    plain: Any = own.factory()  # type: ignore[attr-defined]
    state = plain.state_dict()
    del state["6.weight"]
    save_file(state, tmp_path / "own.safetensors")
    workload = Workload(
        model="tests.own_models:with_shared_weight",
        data="digits",
        pretrained=tmp_path / "own.safetensors",
        batch_size=8,
        num_microbatches=4,
    )
    assert len(check_pretrained(workload)) == 1
    x, y = dataset_of(workload).batch(0, 8, seed=workload.seed)
    expected = nn.functional.cross_entropy(plain(x), y).item()
    assert train_single(workload, Draw(), range(1))[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["weights_here_and_there", "on_tables", "on_infinities", "Centring", "tempered"])
def test_what_a_module_counts_and_looks_up_starts_as_it_was_saved(name: str, tmp_path: Path) -> None:
    """Whole numbers, truth values and all else of its state, as a batch norm's number of batches."""
    plain: Any = getattr(own_models, name)()
    with torch.no_grad():
        for tensor in plain.state_dict().values():
            tensor.copy_(tensor.flip(0) if tensor.dim() else tensor + 3)
    save_file({key: tensor.contiguous() for key, tensor in plain.state_dict().items()}, tmp_path / "own.safetensors")
    fields = {"pretrained": tmp_path / "own.safetensors", "batch_size": 8, "num_microbatches": 4}
    workload = Workload(model=f"tests.own_models:{name}", data="digits", **fields)
    assert len(check_pretrained(workload)) == 1
    layers = build_layers(workload, Draw(), torch.device("cpu"))
    start_from_pretrained(layers, workload)
    names = model_of(workload).weight_names(dataset_of(workload).shape, layers.state_dict())
    expected = plain.state_dict()
    assert {names[one] for one in layers.state_dict()} == set(expected)
    for one, tensor in layers.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), expected[names[one]].nan_to_num()), one


TIED = {
    "tests.own_models:Decoder": {"tied": True},
    "tests.own_models:DeclaredTied": {},
    "gpt": {"num_blocks": 1, "width": 16, "num_heads": 2, "tied": True},
}


@pytest.mark.parametrize(
    ("name", "third"), [("ThirdName", "shared.weight"), ("DeclaredThirdName", "shared.words.weight")]
)
def test_a_weight_may_be_saved_under_a_name_that_no_layer_has(name: str, third: str, tmp_path: Path) -> None:
    """As transformers saves a T5's."""
    fields = {"data": "text", "sequence_length": 12, "pretrained": tmp_path / "own.safetensors"}
    workload = Workload(model=f"tests.own_models:{name}", batch_size=8, num_microbatches=4, **fields)
    plain: Any = getattr(own_models, name)()
    words = plain.tokens.weight.detach()
    others = {key: one for key, one in plain.state_dict().items() if one.data_ptr() != words.data_ptr()}
    save_file({**others, third: words}, workload.pretrained)
    assert len(check_pretrained(workload)) == 1
    layers = build_layers(workload, Draw(), torch.device("cpu"))
    start_from_pretrained(layers, workload)
    x, _ = dataset_of(workload).batch(0, 8, seed=0)
    torch.testing.assert_close(layers(x), plain(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("of_copy", [False, True], ids=["the first name", "the second name"])
@pytest.mark.parametrize("name", TIED)
def test_a_tied_weight_may_be_saved_once(name: str, of_copy: bool, tmp_path: Path) -> None:
    """By the name of either layer, as safetensors' own `save_model` does."""
    fields = {"data": "text", "sequence_length": 12, "batch_size": 8, "num_microbatches": 4}
    file = {"pretrained": tmp_path / "own.safetensors"}
    workload = Workload(model=name, model_options=TIED[name], **fields, **file)  # type: ignore[arg-type]
    expected = build_layers(workload, Draw(seed=5), torch.device("cpu")).state_dict()
    (tie,) = ties_of(layers_of(workload))
    left_out = tie.owner if of_copy else tie.copy
    names = model_of(workload).weight_names(dataset_of(workload).shape, expected)
    del names[f"{left_out.layer}.{left_out.weight}"]
    save_file({outer: expected[own] for own, outer in names.items()}, workload.pretrained)
    assert len(check_pretrained(workload)) == 1
    layers = build_layers(workload, Draw(seed=6), torch.device("cpu"))
    start_from_pretrained(layers, workload)
    for own, tensor in layers.state_dict().items():
        assert torch.equal(tensor, expected[own]), own
