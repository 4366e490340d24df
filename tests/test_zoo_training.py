"""The zoo as pipelines of real ranks: the losses of a single process, wherever the model is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from dejavu.init import Draw
from dejavu.models import layers_of
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.launcher import launch
from dejavu.runtime.single import reference_difference
from dejavu.workload import TrialSettings
from tests.conftest import local_binding
from tests.test_models import ZOO

pytestmark = pytest.mark.integration
TOLERANCE = 1e-5  # of a loss, in float32; sums are taken in another order
SLOW = [
    ("bert", (2,)),
    ("t5", (3, 5)),
    ("moe", (2,)),
    ("mlp", (1, 3)),
    ("vgg", (3,)),
    ("wide_resnet_alpa", (1, 4)),
    ("user_chain", (2,)),
    ("user_tied", (2,)),
]


def difference(name: str, cuts: tuple[int, ...], folder: Path) -> float:
    workload = ZOO[name].model_copy(update={"num_microbatches": 4, "batch_size": 16, "num_steps": 3})
    workload = workload.model_copy(update={"trials": TrialSettings(count=0)})
    job = TrainingJob(
        workload=workload,
        binding=local_binding(workload, cuts, len(layers_of(workload))),
        folder=str(folder),
        draw=Draw("xavier", seed=7),
        start_from=None,
        first_step=0,
        last_step=workload.num_steps,
    )
    return reference_difference(job, launch(job))


def test_t5_is_cut_inside_its_encoder_and_its_decoder(tmp_path: Path) -> None:
    """Three stages: embedding and half the encoder; the rest of it and half the decoder; the end."""
    assert difference("t5_gated", (2, 5), tmp_path) < TOLERANCE


def test_batch_norm_sees_the_same_microbatches(tmp_path: Path) -> None:
    assert difference("wide_resnet", (3,), tmp_path) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cuts"), SLOW)
def test_every_model_as_a_pipeline(name: str, cuts: tuple[int, ...], tmp_path: Path) -> None:
    assert difference(name, cuts, tmp_path) < TOLERANCE
