"""Messages of tensor-parallel devices beside their products, as other software sends them: prices of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dejavu.cluster import Cluster, Link, NodeGroup, catalogue
from dejavu.cost.collectives.beside import SLOWED, beside_products
from dejavu.parallelism import Parallelism
from dejavu.planning import PlanRequest
from dejavu.planning.prices import Prices
from dejavu.plans.priced_problem import PricedProblem
from dejavu.workload import TrialSettings, Workload

GPU = "H100-SXM5-80GB"
MODELS = {
    "gpt": {"num_blocks": 2, "width": 1024, "num_heads": 8},
    "llama": {"num_blocks": 2, "width": 1024, "num_heads": 8, "num_kv_heads": 4},
    "mixtral": {"num_blocks": 1, "width": 512, "num_heads": 8, "num_kv_heads": 4, "num_experts": 4},
}


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_what_is_left_is_between_nothing_and_all_of_it(parts: int) -> None:
    rng = np.random.default_rng(parts)
    sent, products = rng.exponential(1.0, 200), rng.exponential(1.0, 200)
    products[:20] = 0.0
    in_parts = products * rng.uniform(0.9, 1.3, 200)
    left = beside_products(sent, products, in_parts, parts)
    assert (left <= sent).all() and (left >= 0).all()
    assert left[:20] == pytest.approx(sent[:20]), "nothing is computed meanwhile"
    more = beside_products(1.5 * sent, products, in_parts, parts)
    assert (more >= left).all()
    if parts == 1:
        assert left == pytest.approx(sent)
    else:
        short = np.minimum(sent, products * (parts - 1) / parts)
        assert beside_products(short, products, products, parts) == pytest.approx(SLOWED * short)
        assert beside_products(sent, products, products, parts) == pytest.approx(sent - (1 - SLOWED) * short)


def priced(name: str, database: Path, *, beside: bool) -> PricedProblem:
    workload = Workload.model_validate(
        {
            "model": name,
            "model_options": MODELS[name],
            "data": "synthetic",
            "synthetic": {"num_classes": 1024},
            "sequence_length": 512,
            "batch_size": 8,
            "num_microbatches": 4,
            "dtype": "bfloat16",
            "trials": TrialSettings(count=0),
        }
    )
    group = NodeGroup("g", 1, (), ((GPU, 4),), Link(100e9, 5e-6))
    cluster = Cluster("test", (group,), {GPU: catalogue()[GPU]}, {("g", "g"): Link(50e9, 1e-5)})
    request = PlanRequest(workload, cluster, database, Parallelism(zero_levels=(0,), also_unsplit=True))
    return Prices(request, sends_beside_products=beside).priced(4)


@pytest.mark.parametrize("name", MODELS)
def test_only_plans_that_split_the_sequence_are_priced_so(name: str, tmp_path: Path) -> None:
    """A reduction and a gather go part by part; an all-reduce of all can't, and stays as it is."""
    after, beside = (priced(name, tmp_path, beside=one) for one in (False, True))
    assert after.problem.configurations == beside.problem.configurations
    gained = 0
    for c, one in enumerate(after.problem.configurations):
        for field in ("forward_seconds_CL", "backward_seconds_CL"):
            before, now = (getattr(found, field)[c] for found in (after, beside))
            if one.sequence_parallel:
                assert (now <= before * (1 + 1e-12)).all()
                gained += bool(now.sum() < before.sum() * (1 - 1e-6))
            else:
                assert (now == before).all()
    assert gained >= 4, name
