"""A module of one's own that is no chain of children: cut as it says, or where one tensor crosses in its graph."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import Trained, train_in_turn
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.tracing import fake_tensors
from dejavu.foundation.tracing.dtypes import to_dtype, to_dtype_of_fake
from dejavu.graphs.capture import CaptureError, capture
from dejavu.graphs.layer_trace import trace_layer
from dejavu.init import Draw, draw_layer
from dejavu.plans import Offload
from dejavu.runtime.batches.held_out import evaluating
from dejavu.runtime.job import TrainingJob, export
from dejavu.runtime.layout import World
from dejavu.runtime.optimizer import make_optimizer, set_learning_rate
from dejavu.runtime.pipeline import Pipeline
from dejavu.runtime.single import build_layers, train_single
from dejavu.runtime.training import Layers
from dejavu.testing.models import check_model
from dejavu.trials.spec import TrialSpec
from dejavu.workload import OptimizerSettings, TrialSettings, Workload
from dejavu.workload.data import ExampleShape, dataset_of
from dejavu.workload.models import LayerBuilder, layers_of, model_of
from dejavu.workload.models.user.cutting import cut
from dejavu.workload.models.user.layer import TracedLayer
from dejavu.workload.pretrained import check_pretrained
from tests import own_models
from tests.conftest import asked, some, spread
from tests.test_export import alone, check, checkpointed
from tests.test_models import load_parts
from tests.test_world import together

_ = alone  # a fixture
STEPS = 3
TOLERANCE = 1e-5  # of a loss, in float32; sums are taken in another order
CUT = {
    "Decoder": ["tokens", "blocks_0", "blocks_1", "blocks_2", "norm", "scores"],
    "Encoder": ["tokens", "encoder_layers_0", "encoder_layers_1", "encoder_layers_2", "scores"],
    "Skips": ["down", "blocks_0-blocks_1", "blocks_2", "scores"],
    "Images": ["first", "norm", "blocks_0", "blocks_1", "blocks_2", "scores"],
    "Declared": ["layer0", "layer1", "layer2", "layer3"],
    "BeforeFixed": ["0", "1", "2", "3"],
}
TEXT = {"data": "text", "sequence_length": 12}
ON_TEXT = ("Decoder", "DeclaredThirdName", "DeclaredTied", "Encoder", "Padded", "Shared", "ThirdName")


def workload_of(name: str, **options: Any) -> Workload:
    data = TEXT if name in ON_TEXT else {"data": "digits"}
    return Workload(
        model=f"tests.own_models:{name}",
        model_options=options,
        **data,
        batch_size=12,
        num_microbatches=4,
        num_steps=STEPS,
        optimizer=OptimizerSettings(learning_rate=1e-2, weight_decay=0.5),  # of weights with a gradient alone
        trials=TrialSettings(count=0),
    )


def batch_of(workload: Workload, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return dataset_of(workload).batch(0, size, seed=0)


@pytest.mark.parametrize("name", spread(CUT, 3))
def test_layers_compute_what_the_module_does(name: str) -> None:
    """For any number of examples, in training and in evaluation, and with all of its weights under its own names."""
    workload = workload_of(name)
    assert [builder.name for builder in layers_of(workload)] == CUT[name]
    whole = getattr(own_models, name)()
    parts = [builder.build() for builder in layers_of(workload)]
    assert load_parts(workload, parts, whole) == set(whole.state_dict())
    for size, trains in ((3, True), (2, False), (1, False), (5, False)):
        x, _ = batch_of(workload, size)
        chain = nn.Sequential(*parts).train(trains)
        torch.testing.assert_close(chain(x), whole.train(trains)(x), atol=1e-6, rtol=0)
    check_model(workload)


@pytest.mark.parametrize("kind", own_models.CHAINS)
def test_whatever_a_chain_does_its_layers_do(kind: str) -> None:
    """Each on a tensor of its own that wants a gradient, as a stage receives it, and of which nothing is written to.

    In sequence they give every weight the gradient that it has in the module, or none.
    """
    workload = workload_of("chain", kind=kind)
    whole = own_models.chain(kind)
    parts = [builder.build() for builder in layers_of(workload)]
    load_parts(workload, parts, whole)
    for size, trains in ((4, True), (3, False), (1, True)):
        x, _ = batch_of(workload, size)
        found, expected = x, whole.train(trains)(x.clone())
        for number, part in enumerate(parts):
            received = found.detach().requires_grad_(number > 0)
            kept = received.detach().clone()
            found = part.train(trains)(received)
            assert torch.equal(received, kept)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    layers = nn.ModuleDict({one.name: part for one, part in zip(layers_of(workload), parts, strict=True)})
    names = model_of(workload).weight_names(dataset_of(workload).shape, layers.state_dict())
    x, _ = batch_of(workload, 4)
    for output in (nn.Sequential(*parts).train()(x), whole.train()(x.clone())):
        if output.requires_grad:
            output.square().sum().backward()
    grads = {name: weight.grad for name, weight in whole.named_parameters()}
    for name, weight in layers.named_parameters():
        found, expected = weight.grad, grads[names[name]]
        assert (found is None) == (expected is None), name
        if found is not None:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


LEAST = {
    "a tuple between two": 2,
    "rates read from a tensor": 4,
    "truncated weights": 4,
    "a child without gradients": 2,
    "a child under autocast": 2,
    "a wrapped chain": 4,
    "wrapped twice, traced": 6,
    "wrapped, declared": 2,
    "wrapped, without gradients": 2,
}


@pytest.mark.parametrize(("kind", "least"), LEAST.items())
def test_such_chains_are_cut(kind: str, least: int) -> None:
    workload = workload_of("chain", kind=kind)
    assert len(layers_of(workload)) >= least
    assert all(layer.output_bytes > 0 for layer in capture(workload).layers)


def test_a_lazy_module_and_a_script_are_refused_by_a_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(InputError, match=r"it has a lazy module, .*; wanted nn\.Linear"):
        layers_of(workload_of("lazy"))
    with pytest.raises(InputError, match=r"it converts its weights .*; wanted them as modules make them"):
        layers_of(workload_of("converting"))
    with pytest.raises(InputError, match=r"it reads values of weights \(aten.*\), and planning makes them without any"):
        layers_of(workload_of("orthogonal"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_script_of_mine.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(InputError, match=r"cannot be imported: SystemExit: 2; wanted package\.module:factory"):
        layers_of(Workload(model="a_script_of_mine:make", data="digits"))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a state of its own", "layer '1': WithState keeps a state by get_extra_state.*; wanted it in buffers"),
        ("such a state inside", r"layer '1': its '1' \(WithState\) keeps a state by get_extra_state"),
        ("statistics of all ranks", r"layer '1': SyncBatchNorm takes .* over all ranks.*; wanted nn\.BatchNorm1d"),
        ("complex weights", r"layer '1': 'weights\.0' is in complex64; wanted .* float32"),
        (
            "hooks of sums",
            r"layer '1': 'bias' has a hook by register_post_accumulate_grad_hook, .*; wanted register_hook",
        ),
        ("sparse tables", r"layer '1': 'neighbours' is a sparse tensor.*; wanted a dense one"),
        ("sparse tables by rows", r"layer '1': 'neighbours' is a sparse tensor.*; wanted a dense one"),
        ("sparse gradients", r"layer '1': its '0' \(Embedding\) makes sparse gradients.*; wanted sparse=False"),
        ("sparse sums", r"layer '1': EmbeddingBag makes sparse gradients.*; wanted sparse=False"),
        ("rows with a norm", r"layer '1': Embedding writes its weights .*max_norm 0\.5.*; wanted max_norm=None"),
        ("sums of rows with a norm", r"layer '1': EmbeddingBag writes its weights .*max_norm 2\)"),
    ],
)
def test_what_no_plan_can_train_is_refused_when_it_is_captured(kind: str, said: str) -> None:
    """These planned, and ended a trial in a traceback, a launch in an error, or lost a part of the weights."""
    with pytest.raises(CaptureError, match=said):
        capture(workload_of("misfit", kind=kind))


@pytest.mark.parametrize("kind", [kind for kind in own_models.CHAINS if "turned" in kind])
@pytest.mark.parametrize("on_host", [False, True])
def test_complex_tables_are_trained_with_as_they_are(kind: str, on_host: bool) -> None:
    """Of the module and of what is trained, with equal weights, outputs are equal."""
    workload = workload_of("chain", kind=kind)
    away = Offload(optimizer="host", parameters="host") if on_host else Offload()
    layers = build_layers(workload, Draw(), torch.device("cpu"), offload=away)
    whole = own_models.chain(kind)
    names = model_of(workload).weight_names(dataset_of(workload).shape, layers.state_dict())
    whole.load_state_dict({names[name]: weight for name, weight in layers.state_dict().items()})
    x, _ = batch_of(workload, 3)
    torch.testing.assert_close(layers(x), whole(x), atol=1e-6, rtol=0)


def test_layers_may_be_called_anything() -> None:
    """A stage has its layers beside what is its own, and what torch's modules have."""
    stage = Layers(OrderedDict(), workload_of("Decoder"), 0)
    names = list(dict.fromkeys([*vars(stage), *dir(nn.Sequential), "", "a.b", "a_b", "a b", "0"]))
    names += ["x", "y", "z"][: -len(names) % 3]  # other tests' libraries may have given torch's modules more of them
    for first in range(0, len(names), 3):
        workload = workload_of("Called", names=names[first : first + 3])
        assert len(layers_of(workload)) == 3, names[first : first + 3]
        layers = build_layers(workload, Draw(), torch.device("cpu"))
        assert [name for name, _ in layers.named_children()] == [one.name for one in layers_of(workload)]
        x, _ = batch_of(workload, 2)
        layers(x).sum().backward()


def test_a_chain_of_such_names_is_trained_and_exported(tmp_path: Path, alone: None) -> None:
    job, checkpoint = checkpointed(workload_of("FromStart"), tmp_path / "run")
    assert len(layers_of(job.workload)) == 3
    found = export.export(tmp_path / "run", checkpoint, "state_dict", tmp_path / "out")
    state = torch.load(found.files[0], weights_only=True)
    check(own_models.FromStart(), state, job, checkpoint)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], r"its layers\(\) returns no layers"),
        ([None], r"its layers\(\) has a Sequential as layer 0; wanted a LayerBuilder"),
        (["a", "a"], r"its layers\(\) calls layer 1 'a'; wanted a name of its own"),
        (["a.b"], r"its layers\(\) calls layer 0 'a\.b'; wanted .* without dots"),
        (["a", ""], r"its layers\(\) calls layer 1 ''"),
        (["step"], r"its layers\(\) calls layer 0 'step'; wanted .* no other use for"),
        (["forward"], r"its layers\(\) calls layer 0 'forward'"),
    ],
)
def test_layers_of_a_model_that_cannot_be_told_apart_are_refused(names: list[str | None], said: str) -> None:
    """These were planned, and a training ended in a traceback; of two with one name one was left out."""
    with pytest.raises(InputError, match=said):
        layers_of(Workload(model="tests.own_losses:InParts", model_options={"names": names}, data="digits"))


IMPORTS = {  # how a model's file reads another of its folder, which says how wide it is
    "relative": "from .other import width",
    "module": "from . import other\nwidth = other.width",
    "absolute": "from {package}.other import width",
    "by a third": "from .third import width",
    "beside the package": "from {package}_beside import width",
    "in a function": "def width():\n    from .other import width\n    return width()",
    "a partial": "import functools\nfrom .other import width",
}


@pytest.mark.parametrize("how", IMPORTS)
def test_what_is_kept_of_a_model_is_of_all_its_files(how: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Trials and plans of other code would be taken for its own."""
    package = f"a_model_{list(IMPORTS).index(how)}"
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").touch()
    other = tmp_path / f"{package}_beside.py" if how == "beside the package" else folder / "other.py"
    other.write_text("def width():\n    return 16\n")
    (folder / "third.py").write_text("from .other import width\n" if how == "by a third" else "")
    (folder / "apart.py").write_text("from nowhere import nothing\n")
    making = "def built():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, width()), nn.Linear(width(), 10))\n"
    making += "make = functools.partial(built)\n" if how == "a partial" else "make = built\n"
    (folder / "nets.py").write_text(f"from torch import nn\n{IMPORTS[how].format(package=package)}\n{making}")
    monkeypatch.syspath_prepend(tmp_path)
    workload = Workload(model=f"{package}.nets:make", data="digits")

    def key() -> str:
        return TrialSpec(workload, Draw(), 1).key

    before = key()
    (folder / "apart.py").write_text("from nowhere import something\n")
    assert key() == before, "no file of the model's"
    other.write_text("def width():\n    return 8 + 8\n")
    after = key()
    assert after != before
    (folder / "nets.py").write_text((folder / "nets.py").read_text() + "# nothing else\n")
    assert key() not in (before, after)


@pytest.mark.parametrize("name", CUT)
def test_masks_and_tables_go_where_the_layer_goes(name: str) -> None:
    workload = workload_of(name)
    layers = nn.Sequential(*(builder.build() for builder in layers_of(workload)))
    x, _ = batch_of(workload, 3)
    shape = layers(x).shape
    found = layers.to("meta")(x.to("meta"))
    assert (found.device.type, found.shape) == ("meta", shape)


@pytest.mark.parametrize("name", ["Decoder", "Images"])
def test_dropout_ends_with_training(name: str) -> None:
    workload = workload_of(name, dropout=0.5)
    whole = getattr(own_models, name)(dropout=0.5)
    parts = [builder.build() for builder in layers_of(workload)]
    load_parts(workload, parts, whole)
    chain, (x, _) = nn.Sequential(*parts), batch_of(workload, 4)
    assert not torch.equal(chain(x), chain(x))
    load_parts(workload, parts, whole)  # batch norms have counted
    torch.testing.assert_close(chain.eval()(x), whole.eval()(x), atol=1e-6, rtol=0)
    assert not torch.equal(chain.train()(x), chain(x))


class Forgetful(nn.Module):
    """A part that computes otherwise in training than in evaluation, between two that do not."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(6, 8), part, nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.part(x)
        found: torch.Tensor = self.last(x + (y[0] if isinstance(y, tuple) else y))
        return found


class Dropping(nn.Module):
    """Drops out inside torch's attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = 0.5 if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], None, p).squeeze(1)


class Ungraded(nn.Module):
    """Drops out in a block without gradients, which is a graph of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return nn.functional.dropout(x, 0.5, self.training)


class Asking(nn.Module):
    """Drops paths, as vision models do, and keeps a mean that it subtracts: in training alone, which it asks itself."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self.drops = drops
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.drops:
            return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5) * 2
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.5)
        return x - self.mean


class Literal(nn.Module):
    """Makes a tensor of numbers in its forward pass, as caches of transformers do of none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cat([torch.tensor([]), torch.tensor([0.5]), torch.ones(7)])


class Typed(nn.Module):
    """Computes in float32 and returns the type that it is given, as norms of transformers do; and has a table of its
    own type, which is neither weight nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.full((8,), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.cat([torch.tensor([], dtype=x.dtype), torch.ones(8, dtype=x.dtype)])
        return (x.float() * torch.tensor([0.3]) + self.table).to(x.dtype) * ones


class OnlyInEvaluation(nn.Module):
    """Reads a table in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.training else self.linear(x) * self.table  # type: ignore[no-any-return]


PARTS = {
    "dropout": lambda: nn.Dropout(0.5),
    "dropout of whole features": lambda: nn.Dropout1d(0.5),
    "alpha dropout": lambda: nn.AlphaDropout(0.5),
    "attention": Dropping,
    "no gradients": Ungraded,
    "random slopes": nn.RReLU,
    "recurrent": lambda: nn.GRU(8, 8, 2, batch_first=True, dropout=0.5),
    "batch norm": lambda: nn.BatchNorm1d(5),
    "frozen batch norm": lambda: nn.BatchNorm1d(5).eval(),
    "instance norm": lambda: nn.InstanceNorm1d(5),
    "instance norm with statistics": lambda: nn.InstanceNorm1d(5, track_running_stats=True),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "dropped paths": lambda: Asking(drops=True),
    "a mean of what it sees": lambda: Asking(drops=False),
    "a tensor of numbers": Literal,
}


COMPUTES_ALIKE = (
    "frozen batch norm",
    "instance norm",
    "spectral norm",
    "a mean of what it sees",
    "a tensor of numbers",
)


@pytest.mark.parametrize("name", PARTS)
def test_an_evaluation_of_traced_layers_is_the_module_s_own(name: str) -> None:
    """Without dropout, by the statistics that norms keep, which it leaves as they are; then training goes on."""
    shape = ExampleShape((5, 6), torch.float32, (), 4)
    found = cut(lambda: Forgetful(PARTS[name]()), shape)
    torch.manual_seed(0)
    whole = Forgetful(PARTS[name]())
    twin = Forgetful(PARTS[name]())
    twin.load_state_dict(whole.state_dict())
    chain = nn.Sequential(*(take(twin) for take in found.takes.values()))
    assert any(isinstance(layer, TracedLayer) for layer in chain)
    x = torch.randn(4, 5, 6)
    for _ in range(2):
        for module in (chain, whole):  # training draws the same, and keeps the same
            torch.manual_seed(1)
            trained = module(x)
        torch.manual_seed(1)
        before = {key: tensor.clone() for key, tensor in chain.state_dict().items()}
        with evaluating([chain]):
            found_once, found_twice = chain(x), chain(x)
        assert torch.equal(found_once, found_twice)
        torch.testing.assert_close(found_once, whole.eval()(x), atol=1e-6, rtol=0)
        whole.train()
        if "frozen" in name:
            whole.part.eval()
        assert all(torch.equal(tensor, before[key]) for key, tensor in chain.state_dict().items())
        for key, tensor in twin.state_dict().items():
            torch.testing.assert_close(tensor, whole.state_dict()[key])
        if name not in COMPUTES_ALIKE:
            assert not torch.equal(trained, found_once)


class Keeping(nn.Module):
    """Leaves something for later passes, in the way that its kind says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.count, self.seen = kind, 0, list[torch.Tensor]()
        self.last: torch.Tensor | None = None
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = x.detach().mean((0, 1))
        if self.kind == "a count":
            self.count += 1
        elif self.kind == "a list":
            self.seen.append(now)
        elif self.kind == "an attribute":
            now = now if self.last is None else torch.lerp(self.last, now, 0.5)
        elif self.kind == "a new buffer":
            self.mean = torch.lerp(self.mean, now, 0.5)
        elif self.kind == "a buffer":
            self.mean.lerp_(now, 0.5)
        elif self.kind == "random numbers":
            random.random()
        self.last = now  # most do not read it
        return x - self.mean * 0.9**self.count


LEFT = {
    "a count": "reads what earlier ones left in 'part.count'",
    "a list": "reads what earlier ones left in 'part.seen'",
    "an attribute": "reads what earlier ones left in 'part.last'",
    "a new buffer": "puts another tensor in the place of 'part.mean'",
    "random numbers": "draws random numbers of Python or NumPy",
    "a buffer": "",
    "nothing": "",
}


@pytest.mark.parametrize("kind", LEFT)
def test_a_module_whose_passes_leave_what_a_graph_would_not_is_one_layer(kind: str) -> None:
    """Graphs had a count or a new buffer as it was when they were traced: trainings were others without a word."""
    found = cut(lambda: Forgetful(Keeping(kind)), ExampleShape((5, 6), torch.float32, (), 4))
    said = f"its forward pass {LEFT[kind]}; wanted "
    if LEFT[kind]:
        assert list(found.takes) == ["model"] and found.notes[1].startswith(said)
    else:
        assert list(found.takes) == ["first", "last"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_layers_compute_in_the_types_that_the_module_does(dtype: torch.dtype) -> None:
    """On real tensors, and on fake ones, which plans are made by."""
    found = cut(lambda: Forgetful(Typed()), ExampleShape((5, 6), torch.float32, (), 4), dtype)
    whole = Forgetful(Typed())
    twin = copy.deepcopy(whole)
    chain = nn.Sequential(*(take(twin) for take in found.takes.values()))
    assert any(isinstance(layer, TracedLayer) for layer in chain)
    for module in (whole, chain):
        to_dtype(module, dtype)
    x = torch.randn(4, 5, 6, dtype=dtype)
    assert torch.equal(chain(x), whole(x))
    with fake_tensors():
        fake = nn.Sequential(*(take(Forgetful(Typed())) for take in found.takes.values()))
        to_dtype_of_fake(fake, dtype)
        assert fake(torch.empty(4, 5, 6, dtype=dtype)).dtype is dtype


def test_a_module_with_other_layers_in_evaluation_is_one_layer() -> None:
    found = cut(lambda: Forgetful(OnlyInEvaluation()), ExampleShape((5, 6), torch.float32, (), 4))
    assert list(found.takes) == ["model"]
    assert found.notes[1] == "layer 'part' reads 'part.table' in evaluation alone"


def test_what_cannot_be_cut_is_said_with_its_lines() -> None:
    file = own_models.__file__
    lines = Path(file).read_text().splitlines()

    def at(text: str, after: str) -> str:
        start = next(k for k, line in enumerate(lines) if line.startswith(f"class {after}"))
        number = next(k for k in range(start, len(lines)) if lines[k].strip() == text)
        return f"`{text}` ({file}:{number + 1})"

    notes = capture(workload_of("Skips")).notes
    skip, relu = at("skip = self.down(x.flatten(1))", "Skips"), at("x = torch.relu(self.blocks[0](skip))", "Skips")
    assert (
        f"no cut between 'blocks.0' and 'blocks.1', where 2 values cross, and one tensor may: {skip}; {relu}" in notes
    )
    assert [builder.name for builder in layers_of(workload_of("Padded"))] == ["tokens-blocks_2", "norm", "scores"]
    mask = at("mask = (tokens != 0)[:, None, None, :]", "Padded")
    assert all(mask in note for note in capture(workload_of("Padded")).notes)
    workload = workload_of("Branching")
    first, why = model_of(workload).notes(dataset_of(workload).shape)
    assert "the model is one layer: " in first
    assert why.startswith("torch.export cannot trace it: ") and "`if x.sum() > 0:`" in why


@pytest.mark.parametrize(
    ("depends", "operator"),
    [
        (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense"),
        (lambda x: x + x.max().item(), "_local_scalar_dense"),
        (lambda x: x + x[x > 0].sum(), "nonzero"),
        (lambda x: x + len(x.unique()), "_unique2"),
    ],
)
def test_a_layer_that_depends_on_numbers_is_refused_by_a_sentence(
    depends: Callable[[torch.Tensor], torch.Tensor], operator: str
) -> None:
    class Depends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return depends(x)

    builder = LayerBuilder("1", lambda: nn.Sequential(nn.Linear(6, 4), Depends()))
    said = rf"layer '1', in its '1' \(Depends\), cannot .*: it depends on the numbers in its tensors \(aten.{operator}"
    with fake_tensors(), pytest.raises(CaptureError, match=said):
        trace_layer(builder, torch.empty(4, 6), torch.float32, None)


@pytest.mark.parametrize("inner", [1, 16, 31, 33])
def test_a_product_that_does_not_fit_is_a_sentence_without_torchs_stack(inner: int) -> None:
    """Torch logs its own stack of forty lines before it raises, in each of the ways in which a module is traced."""
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        with pytest.raises(CaptureError, match=r"in its 'b' \(Linear\), cannot be traced on .*: a and b must"):
            capture(workload_of("Mismatched", inner=inner))
    finally:
        log.removeHandler(handler)
    assert not logged and not log.disabled


def test_a_record_is_refused_with_what_could_be_returned() -> None:
    said = r"returns a OrderedDict; wanted one tensor, the scores: its 'logits', by a module .* that alone$"
    with pytest.raises(CaptureError, match=said):
        capture(workload_of("WithRecord"))


@pytest.mark.parametrize("kind", own_models.FIRST)
@pytest.mark.parametrize("inputs", ["float64", "float16", "int64", "int32", "uint8", "bool"])
def test_a_model_is_planned_only_where_torch_would_run_it(kind: str, inputs: str) -> None:
    """Numbers that are not floats are tokens: a matrix that is to be multiplied by them is a sentence before a run."""
    examples = {"factory": "tests.own_data:of_kind", "options": {"inputs": inputs}, "num_classes": 3}
    workload = Workload(
        model="tests.own_models:first_is",
        model_options={"kind": kind},
        data="examples",
        examples=examples,
        batch_size=8,  # type: ignore[arg-type]
    )
    x, y = dataset_of(workload).batch(0, 8, seed=0)
    try:
        loss = model_of(workload).loss(own_models.first_is(kind)(x), y)
    except (RuntimeError, TypeError):
        with pytest.raises(CaptureError, match=r"layer '0'.* cannot be traced on"):
            capture(workload)
    else:
        assert loss.isfinite() and len(capture(workload).layers) == 2


def test_a_tied_head_stays_tied_wherever_it_is() -> None:
    """Each end has the matrix under its own name; a weight that three layers read makes them one."""
    workload = workload_of("Decoder", tied=True)
    builders = layers_of(workload)
    assert [builder.name for builder in builders] == CUT["Decoder"]
    assert builders[-1].tied == (("scores.weight", "tokens.tokens.weight"),)
    assert not any(builder.tied for builder in builders[:-1])
    declared = layers_of(workload_of("DeclaredTied"))
    assert [builder.tied for builder in declared] == [(), (), (("weight", "tokens.weight"),)]
    shared = capture(workload_of("Shared"))
    assert [layer.name for layer in shared.layers] == ["tokens", "blocks_0-blocks_2", "norm", "scores"]
    assert any("they are one layer with all between" in note for note in shared.notes)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("a number", "returns a int; wanted a list or a dict of modules"),
        ("none", "returns no layers"),
        ("no module", "has a str as layer 1; wanted a module"),
        ("a weight is missing", r"the weight 'blocks.1.weight' is in none of its 3 layers"),
        ("out of order", r"layer 'back' fails on what the input gives, \(2, 1, 8, 8\): "),
        ("another output", r"its layers, in order, give \(2, 2, 10\); the module itself \(2, 10\)"),
    ],
)
def test_wrong_layers_are_refused(how: str, said: str) -> None:
    with pytest.raises(InputError, match=rf"DeclaredWrong.dejavu_layers\(\).*{said}"):
        layers_of(workload_of("DeclaredWrong", how=how))


def test_an_embedding_is_drawn_as_one() -> None:
    """A layer of a graph has the module's own parts, which say what a weight is."""
    first = layers_of(workload_of("Decoder"))[0]
    drawn = draw_layer(first, Draw(embedding=0.0), position=0, depth=6)
    assert not drawn.get_parameter("tokens.weight").any()


@pytest.mark.parametrize("name", CUT)
def test_an_export_loads_into_the_module(name: str, tmp_path: Path, alone: None) -> None:
    job, checkpoint = checkpointed(workload_of(name), tmp_path / "run")
    found = export.export(tmp_path / "run", checkpoint, "state_dict", tmp_path / "out")
    state = torch.load(found.files[0], weights_only=True)
    whole = getattr(own_models, name)()
    assert list(state) and set(state) == set(whole.state_dict())
    check(whole, state, job, checkpoint)


def test_a_buffer_that_layers_share_is_in_one_file(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where their weights are in several; with what lies there the module is as it was trained."""
    job, checkpoint = checkpointed(workload_of("Decoder"), tmp_path / "run")
    monkeypatch.setattr(export, "MOST_FILE_BYTES", 4000)
    *files, index = export.export(tmp_path / "run", checkpoint, "safetensors", tmp_path / "out").files
    assert len(files) > 3
    found = [(name, tensor) for file in files for name, tensor in load_file(file).items()]
    state = own_models.Decoder().state_dict()
    assert sorted(name for name, _ in found) == sorted(state)
    about = json.loads(index.read_text())
    assert set(about["weight_map"]) == set(state)
    assert about["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    check(own_models.Decoder(), dict(found), job, checkpoint)
    check_pretrained(job.workload.model_copy(update={"pretrained": tmp_path / "out"}))


@pytest.mark.parametrize(
    ("name", "options"),
    [("Decoder", {"tied": True}), ("DeclaredTied", {}), ("ThirdName", {}), ("DeclaredThirdName", {})],
)
def test_all_names_of_a_tied_weight_are_exported(name: str, options: Any, tmp_path: Path, alone: None) -> None:
    job, checkpoint = checkpointed(workload_of(name, **options), tmp_path / "run")
    found = export.export(tmp_path / "run", checkpoint, "state_dict", tmp_path / "out")
    state = torch.load(found.files[0], weights_only=True)
    whole = getattr(own_models, name)(**options)
    assert set(state) == set(whole.state_dict()) and found.num_weights == len(state)
    check(whole, state, job, checkpoint)
    found = export.export(tmp_path / "run", checkpoint, "safetensors", tmp_path / "files")
    check(getattr(own_models, name)(**options), load_file(found.files[0]), job, checkpoint)


one = one_device()
WAYS = {
    "uneven cuts": ("1f1b", 2, [one, one]),
    "2 replicas and 1, split backward": ("zbv", 4, [one_device(2), one]),
    "recomputed, ZeRO 2": ("1f1b", 2, [one_device(2, recompute=True, zero_level=2), one]),
}


def jobs() -> dict[tuple[str, str], TrainingJob]:
    found = {}
    for name, layers in CUT.items():
        for way, (schedule, stages, ranks) in WAYS.items():
            if name == "Decoder":
                tied = workload_of(name, tied=True)
                bounds = (0, *range(1, stages), len(layers))
                found[f"{name} tied", way] = job_of(tied, by_hand(schedule, bounds, ranks, 4), STEPS)
            if len(layers) < stages or (name == "Images" and way != "uneven cuts"):  # batch norms see parts of a batch
                continue
            bounds = (0, *range(1, stages), len(layers))
            found[name, way] = job_of(workload_of(name), by_hand(schedule, bounds, ranks, 4), STEPS)
    return found


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[tuple[str, str], Trained]:
    cases = asked(request.session, "case")
    every = {case: job for case, job in jobs().items() if case in cases}
    order = sorted(every, key=lambda case: -len(every[case].binding.placements))
    return dict(zip(order, train_in_turn([every[case] for case in order]), strict=True))


def plain_losses(workload: Workload) -> list[float]:
    """Of the module itself in a loop as people write it, from the same weights."""
    layers = build_layers(workload, Draw(), torch.device("cpu"))
    whole: Any = model_of(workload).factory(**workload.model_options)  # type: ignore[attr-defined]
    names = model_of(workload).weight_names(dataset_of(workload).shape, layers.state_dict())
    whole.load_state_dict({names[name]: tensor for name, tensor in layers.state_dict().items()})
    optimizer = make_optimizer(workload.optimizer, whole.parameters())
    losses = []
    for step in range(STEPS):
        x, y = dataset_of(workload).batch(step, workload.batch_size, seed=workload.seed)
        optimizer.zero_grad()
        total = 0.0
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = model_of(workload).loss(whole(part), target) / 4
            loss.backward()
            total += loss.item()
        set_learning_rate(optimizer, workload, step)
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.integration
@pytest.mark.parametrize("case", some(jobs(), [*jobs()][::2]), ids=", ".join)
def test_a_pipeline_has_the_losses_of_the_plain_module(
    case: tuple[str, str], trained: dict[tuple[str, str], Trained]
) -> None:
    workload = jobs()[case].workload
    expected = plain_losses(workload)
    assert trained[case].losses == pytest.approx(expected, abs=TOLERANCE)
    assert train_single(workload, Draw(), range(STEPS)) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("kind", ["forward", "exit", "backward", "narrow", "short", "wide", "whole"])
def test_a_layer_that_fails_in_a_later_step_is_named_with_the_step(kind: str, schedule: str, alone: None) -> None:
    """And what it says of itself; what the next stage cannot receive is not sent."""
    options = {"kind": kind, "calls": 2}
    workload = Workload(model="tests.own_models:fails", model_options=options, data="digits", batch_size=8)
    workload = workload.model_copy(update={"num_microbatches": 2, "schedule": schedule})
    binding = by_hand(schedule, (0, 2, 4), [one_device()], 2)
    pipeline = Pipeline(Draw(), World.of(binding, workload), binding.placements[0], torch.device("cpu"))
    inputs, targets = batch_of(workload, 8)
    pipeline(6, inputs, targets)
    form = r"stage 0 \(layers 0, 1\) in step 8 gives {}; wanted \(4, 16\) of torch.float32, as when it was planned"
    said = {
        "forward": r"the forward pass of stage 0 in step 8, in its '1.0' \(Fails\): OSError: a table is gone$",
        "exit": r"the forward pass of stage 0 in step 8, in its '1.0' \(Fails\): SystemExit: 0$",
        "backward": r"the backward pass of stage 0 in step 8: OSError: a table is gone$",
        "narrow": form.format(r"\(4, 15\) of torch.float32"),
        "short": form.format(r"\(3, 16\) of torch.float32"),
        "wide": form.format(r"\(4, 16\) of torch.float64"),
        "whole": form.format(r"\(4, 16\) of torch.int64"),
    }
    with pytest.raises(DejavuError, match=said[kind]):
        pipeline(7, inputs, targets)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (1, "returns a NoneType; wanted one number, as a tensor"),
        (2, "returns a tuple; wanted one"),
        (3, "returns a dict; wanted one"),
        (4, r"returns a tensor of \(3,\); wanted one"),
        (5, "returns a float; wanted one"),
        (6, "returns a number without a gradient; wanted one"),
        (7, r"fails on outputs of \(1, 12, 256\) and targets of \(1, 12\): RuntimeError: "),
        (8, r"fails on outputs of .*: KeyError: 'loss'"),
        (9, r"fails on outputs of .*: SystemExit"),
    ],
)
def test_a_loss_that_is_no_number_is_refused_as_such(form: int, said: str) -> None:
    """It is traced with the last layer, which was blamed."""
    fields = {"num_blocks": 1, "width": 8 * form, "num_heads": form}
    with pytest.raises(CaptureError, match=f"^the model's loss {said}"):
        capture(Workload(model="tests.own_losses:NoNumber", model_options=fields, **TEXT, batch_size=8))


@pytest.mark.parametrize(("num_blocks", "said"), [(1, "OSError"), (2, "SystemExit")])
def test_a_loss_that_fails_is_named_with_the_step(num_blocks: int, said: str, alone: None) -> None:
    fields = {"num_blocks": num_blocks, "width": 8, "num_heads": 1}
    workload = Workload(model="tests.own_losses:Breaking", model_options=fields, **TEXT, batch_size=8)
    workload = workload.model_copy(update={"num_microbatches": 2, "schedule": "1f1b"})
    binding = by_hand("1f1b", (0, len(layers_of(workload))), [one_device()], 2)
    pipeline = Pipeline(Draw(), World.of(binding, workload), binding.placements[0], torch.device("cpu"))
    with pytest.raises(DejavuError, match=f"^the loss in step 8: {said}: a table is gone$"):
        pipeline(7, *batch_of(workload, 8))


@pytest.mark.integration
def test_replicas_may_each_use_other_weights() -> None:
    """Whose gradients came in messages of other lengths; a weight that nobody used yet is not decayed."""
    one, two = one_device(), one_device(2)
    fields = {"batch_size": 4, "num_microbatches": 2, "num_steps": 10}
    workload = workload_of("sometimes").model_copy(update=fields)
    levels = [
        by_hand(schedule, (0, 3, 5), [replace(two, zero_level=level), one], 2)
        for schedule, level in (("1f1b", 0), ("1f1b", 1), ("1f1b", 2), ("gpipe", 3))
    ]
    in_parts = [by_hand("zbv", (0, 1, 2, 3, 5), [replace(two, zero_level=level), two], 2) for level in (0, 1)]
    workers = together((by_hand("gpipe", (0, 5), [one], 2), 2), (by_hand("1f1b", (0, 2, 5), [one, one], 2), 2))
    expected = train_single(workload, Draw(), range(10))
    jobs = [
        TrainingJob(workload.model_copy(update={"schedule": binding.plan.schedule}), binding, Draw(), None, 0, 10, "")
        for binding in (*levels, *in_parts, workers)
    ]
    for job, trained in zip(jobs, train_in_turn(jobs), strict=True):
        assert trained.losses == pytest.approx(expected, abs=TOLERANCE), job.binding.plan
