"""The zoo as pipelines of real ranks: the losses of a single process, wherever the model is cut."""

from __future__ import annotations

import pytest

from benchmarks.pipeline.plans import by_hand, job_of, one_device
from benchmarks.pipeline.ranks import Trained, train_in_turn
from dejavu.init import Draw
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.single import train_single
from dejavu.workload import TrialSettings
from dejavu.workload.models import layers_of
from tests.test_models import ZOO

pytestmark = [pytest.mark.integration, pytest.mark.slow]  # tests/test_pipeline.py has two of them
TOLERANCE = 1e-5  # of a loss, in float32; sums are taken in another order
STEPS = 3
CUTS = {
    "bert": (2,),
    "t5": (3, 5),
    "llama": (1, 3),
    "mixtral": (1, 2),
    "moe": (2,),
    "mlp": (1, 3),
    "vgg": (3,),
    "wide_resnet_alpa": (1, 4),
    "user_chain": (2,),
    "user_tied": (2,),
}


def job(name: str) -> TrainingJob:
    settings = {"num_microbatches": 4, "batch_size": 16, "num_steps": STEPS, "trials": TrialSettings(count=0)}
    workload = ZOO[name].model_copy(update=settings)
    bounds = (0, *CUTS[name], len(layers_of(workload)))
    return job_of(
        workload, by_hand("1f1b", bounds, [one_device()] * (len(bounds) - 1), 4), STEPS, Draw("xavier", seed=7)
    )


@pytest.fixture(scope="module")
def trained() -> dict[str, Trained]:
    """All of them, in the same processes one after another, those of most ranks first."""
    order = sorted(CUTS, key=lambda name: -len(CUTS[name]))
    return dict(zip(order, train_in_turn([job(name) for name in order]), strict=True))


@pytest.mark.parametrize("name", CUTS)
def test_every_model_as_a_pipeline(name: str, trained: dict[str, Trained]) -> None:
    own = job(name)
    assert trained[name].losses == pytest.approx(train_single(own.workload, own.draw, range(STEPS)), abs=TOLERANCE)
