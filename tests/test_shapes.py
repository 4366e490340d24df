"""What crosses the cuts of a model, found without running it: as if every layer had been run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dejavu.graphs.capture import capture
from dejavu.graphs.graph import DTYPES
from dejavu.init import Draw
from dejavu.runtime import shapes
from dejavu.runtime.process.group import to_send
from dejavu.runtime.training import build_layers
from dejavu.workload import TrialSettings, Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import model_of
from tests import own_models
from tests.test_models import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_layers_that_compute_the_same_are_run_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = ZOO[name].model_copy(update={"trials": TrialSettings(count=0)})
    found = shapes.boundaries(workload)
    assert shapes.boundaries(workload.model_copy(update={"schedule": "gpipe"})) is found
    monkeypatch.setattr(shapes, "work_of", lambda builder, form: None)
    shapes._boundaries.cache_clear()
    one_by_one = shapes.boundaries(workload)
    shapes._boundaries.cache_clear()

    def forms(cuts: tuple[torch.Tensor, ...]) -> list[object]:
        return [(cut.shape, cut.dtype, cut.requires_grad, cut.device.type) for cut in cuts]

    assert forms(found) == forms(one_by_one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", own_models.OWN_TYPES)
def test_what_crosses_and_weighs_is_what_layers_have_in_a_training(kind: str, dtype: str) -> None:
    """Also of weights and buffers that say their type, and of tensors that are neither and keep it."""
    model = {"model": "tests.own_models:of_own_types", "model_options": {"kind": kind}, "data": "digits"}
    workload = Workload(**model, dtype=dtype, batch_size=8, num_microbatches=2, trials=TrialSettings(count=0))
    x = dataset_of(workload).batch(0, 4, seed=0)[0].to(DTYPES[dtype])
    cuts, layers = shapes.boundaries(workload), capture(workload).layers
    for k, layer in enumerate(build_layers(workload, Draw(), torch.device("cpu"))):
        x = layer(x)
        assert (cuts[k + 1].shape, cuts[k + 1].dtype, cuts[k + 1].requires_grad) == (x.shape, x.dtype, True)
        assert layers[k].output_bytes == x.nbytes
        assert layers[k].parameter_bytes == sum(one.nbytes for one in layer.parameters())


VIEWS = {
    "as it is": lambda x: x,
    "conjugated": torch.conj,
    "its imaginary part": lambda x: x.conj().imag,
    "negated": lambda x: torch._neg_view(x.real.contiguous()),
    "one conjugated number": lambda x: x[:1, :1].conj().imag,
    "transposed": lambda x: x.t(),
    "conjugated rows": lambda x: x.conj()[1:3],
    "expanded": lambda x: x[:1].conj().expand(4, 3),
}


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_sent_are_the_numbers_themselves(view: str) -> None:
    """Of views that torch conjugates or negates when they are read: messages are what lies in memory."""
    found = VIEWS[view](torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)))
    sent = to_send(found)
    assert torch.equal(sent, found) and sent.is_contiguous()
    assert not sent.is_conj() and not sent.is_neg()


def test_few_of_many_layers_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """257 equal blocks take as long as one."""
    workload = Workload(
        model_options={"num_blocks": 255, "width": 32, "num_heads": 4},
        data="synthetic",
        synthetic={"num_classes": 50},
        sequence_length=16,
        batch_size=8,
        num_microbatches=4,
    )
    builders, built = shapes.layers_of(workload), list[str]()

    def counted(name: str, build: object) -> object:
        def make() -> torch.nn.Module:
            built.append(name)
            return build()

        return make

    watched = [
        replace(one, build=counted(one.name, one.build), work=lambda one=one: one.build.func) for one in builders
    ]
    monkeypatch.setattr(shapes, "layers_of", lambda workload: watched)
    shapes._boundaries.cache_clear()
    assert len(shapes.boundaries(workload)) == 258 == len(builders) + 1
    shapes._boundaries.cache_clear()
    assert built == ["embedding", "block0", "head"]
    assert model_of(workload).num_blocks == 255
