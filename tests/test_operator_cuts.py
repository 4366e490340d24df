"""Pipeline cuts on operators: the members agree, the price is its formula, and bad input is answered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dejavu.foundation.errors import InputError
from dejavu.operator_cuts import (
    CONFIGURATIONS,
    CUTTERS,
    CutPlan,
    CutProblem,
    Cutter,
    Dqn,
    Enumeration,
    Found,
    LabelProgram,
    NoneFits,
    NoneFound,
    OperatorArrays,
    Servers,
    coarsen,
    fits,
    generated_arrays,
    joined,
    price,
)
from dejavu.operator_cuts.dqn import Settings

ROUNDING = 1e-9


def random_problem(seed: int) -> CutProblem:
    """A problem that can be listed: ties, nothing to compute, tight memory, one server, cuts left out, few stages."""
    rng = np.random.default_rng(seed)
    P, whole = int(rng.integers(1, 7)), rng.random() < 0.4

    def draw() -> np.ndarray:
        return rng.integers(0, 5, P).astype(float) if whole else rng.random(P) * 4 * (rng.random(P) < 0.9)

    inside, between, memory = rng.choice([2.0, 10.0]), rng.choice([0.5, 2.0]), rng.choice([6.0, 15.0, 30.0, 60.0, 1e9])
    servers = Servers(*(int(rng.integers(1, most)) for most in (4, 4)), float(inside), float(between), float(memory))
    return CutProblem(
        OperatorArrays(draw(), draw(), draw(), draw() if rng.random() < 0.7 else None),
        servers,
        tuple(cut for cut in servers.everywhere if rng.random() < 0.7),
        int(rng.choice([1, 2, 4])),
        int(rng.integers(1, P + 1)) if rng.random() < 0.6 else None,
    )


@pytest.mark.parametrize("block", range(4))
def test_the_label_program_equals_a_list_of_all_plans(block: int) -> None:
    found = 0
    for seed in range(100 * block, 100 * block + 100):
        problem = random_problem(seed)
        listed, answer = Enumeration().run(problem), LabelProgram().run(problem)
        assert type(listed) is type(answer), seed
        if isinstance(listed, Found) and isinstance(answer, Found):
            found += 1
            assert answer.step_seconds == pytest.approx(listed.step_seconds, rel=ROUNDING), seed
            assert answer.gap_percent == 0.0
        elif isinstance(listed, NoneFits) and isinstance(answer, NoneFits):
            assert answer.least_bytes == pytest.approx(listed.least_bytes, rel=ROUNDING), seed
    assert 40 <= found <= 90  # both kinds of answers were met


def test_the_least_memory_is_just_enough() -> None:
    for seed in range(60):
        problem = random_problem(seed)
        answer = LabelProgram().run(problem)
        if isinstance(answer, NoneFits):
            assert "wanted at least" in str(answer)
            enough = replace(problem, servers=replace(problem.servers, memory_bytes=answer.least_bytes))
            assert isinstance(LabelProgram().run(enough), Found), seed


def member(name: str) -> Cutter:
    """The member, with less to learn than it usually has."""
    settings = Settings(num_steps=100, epsilon_steps=80, width=16)
    return CUTTERS[name](settings=settings) if name in ("dqn", "dqn_offline") else CUTTERS[name]()


@pytest.mark.parametrize("name", CUTTERS)
def test_every_member_answers_with_a_plan_of_the_problem(name: str) -> None:
    arrays = generated_arrays("normal", 8, 0)
    problem = CutProblem(arrays, Servers(2, 2), (1, 2, 3))
    answer = member(name).run(problem, seed=1)
    assert isinstance(answer, Found)
    found = price(problem, answer.plan)
    assert found.step_seconds == pytest.approx(answer.step_seconds) and fits(problem, found)
    best = LabelProgram().run(problem)
    assert isinstance(best, Found)
    assert answer.lower_bound_seconds <= best.step_seconds * (1 + ROUNDING) <= answer.step_seconds * (1 + 2 * ROUNDING)
    assert member(name).run(problem, seed=1).plan == answer.plan


@pytest.mark.parametrize("name", CUTTERS)
def test_members_say_so_where_nothing_fits_or_nothing_can_be_cut(name: str) -> None:
    one = CutProblem(OperatorArrays([2.0], [8.0], [1.0]), Servers(2, 2, memory_bytes=1e3))
    answer = member(name).run(one)
    assert isinstance(answer, Found) and answer.plan == CutPlan()
    full = CutProblem(generated_arrays("uniform", 6, 0), Servers(2, 2, memory_bytes=1.0))
    answer = member(name).run(full)
    assert isinstance(answer, NoneFound if name.startswith("dqn") else NoneFits)


@pytest.mark.parametrize("name", CUTTERS)
@pytest.mark.parametrize("what", [(), (0,), (1,), (2,)], ids=["nothing", "compute", "weights", "what crosses"])
def test_what_takes_no_time_is_cut_like_anything_else(name: str, what: tuple[int, ...]) -> None:
    arrays = [np.ones(6) if k in what else np.zeros(6) for k in range(3)]
    problem = CutProblem(OperatorArrays(*arrays), Servers(2, 2), (1, 2, 3))
    answer, best = member(name).run(problem, seed=2), LabelProgram().run(problem)
    assert isinstance(answer, Found) and isinstance(best, Found)
    assert answer.step_seconds == pytest.approx(price(problem, answer.plan).step_seconds)
    assert best.step_seconds <= answer.step_seconds * (1 + ROUNDING)


def test_an_agent_learns_and_leaves_the_random_state_alone() -> None:
    """Its own plan, without random moves, comes near the best of a problem of 30 plans."""
    problem = CutProblem(OperatorArrays([1.0, 1, 1, 9, 1, 1], [1.0] * 6, [1.0] * 6), Servers(2, 1, 1e3, 1e3))
    best, heard = LabelProgram().run(problem), list[float]()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    settings = Settings(num_steps=600, epsilon_steps=400, width=32)
    Dqn(settings, every=50, told=lambda moves, found, own: heard.append(own)).run(problem, seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert isinstance(best, Found) and heard[-1] == pytest.approx(best.step_seconds)


def test_the_price_is_its_formula() -> None:
    arrays = OperatorArrays([3.0, 1.0, 2.0, 6.0], [8.0, 0.0, 4.0, 4.0], [10.0, 20.0, 6.0, 99.0], [1.0, 2.0, 3.0, 4.0])
    problem = CutProblem(arrays, Servers(2, 2, 4.0, 1.0, 1e3), (1, 2, 3), num_microbatches=4)
    found = price(problem, CutPlan((1, 3), (1, 2)))
    assert found.stage_seconds == (3.0, 3.0, 3.0)
    # The last stage is two devices of one server; both cuts carry their bytes forward and backward. The second goes to
    # the other server: all of it over the network.
    assert found.transfer_seconds == pytest.approx((2 * 10 / 4, 2 * 6 / 1))
    assert found.all_reduce_seconds == pytest.approx((0.0, 0.0, 2 * 0.5 * 4 / 4))
    assert found.step_seconds == pytest.approx(9 + 17 + max(3 * 3 + 1, 3 * 12))
    # 1F1B: three microbatches on the first of three stages.
    assert found.device_bytes == pytest.approx((4 * 8 + 3 * 1, 4 * 4 + 2 * 5, 4 * 4 + 1 * 4 / 2))
    whole = price(problem, CutPlan())
    assert whole.all_reduce_seconds == pytest.approx((2 * 3 / 4 * 16 / 1,))  # the ring leaves the server


def test_rows_that_stay_in_a_server_do_not_use_its_network() -> None:
    servers = Servers(2, 4, inside_bytes_per_second=1e12, between_bytes_per_second=1.0)
    arrays = OperatorArrays([1, 1], [0, 0], [8.0, 0])
    inside = price(CutProblem(arrays, servers, (2,)), CutPlan((1,), (2,))).transfer_seconds[0]
    across = price(CutProblem(arrays, servers, (4,)), CutPlan((1,), (4,))).transfer_seconds[0]
    # Two devices to six, of which two are beside them: a third of the rows stays.
    assert across == pytest.approx(16.0) and inside == pytest.approx(16 * 2 / 3, rel=1e-6)


@pytest.mark.parametrize("draw", ["uniform", "normal"])
def test_more_cuts_are_never_dearer(draw: str) -> None:
    arrays = coarsen(generated_arrays(draw, 90, 3), 24)  # type: ignore[arg-type]
    servers = replace(CONFIGURATIONS["B"], memory_bytes=float("inf"))
    spaces = (servers.boundaries, servers.near_boundaries(), servers.everywhere)
    steps = [LabelProgram().run(CutProblem(arrays, servers, cuts)).step_seconds for cuts in spaces]
    assert steps[0] >= steps[1] >= steps[2] > 0


def test_coarsening_keeps_sums_and_cuts_where_little_crosses() -> None:
    fine = generated_arrays("uniform", 700, 5)
    for count in (1, 2, 128, 700, 1000):
        coarse = coarsen(fine, count)
        assert len(coarse) == min(count, 700)
        for name in ("compute_seconds_P", "weight_bytes_P", "held_bytes_P"):
            assert getattr(coarse, name).sum() == pytest.approx(getattr(fine, name).sum())
    coarse = coarsen(fine, 128)
    assert coarse.crossing_bytes_P[:-1].mean() < 0.5 * fine.crossing_bytes_P.mean()
    # One operator longer than many windows: the other points go where there is something to cut.
    long = OperatorArrays([1.0] * 10 + [1000.0] + [1.0] * 10, [1.0] * 21, [5.0] * 21)
    assert len(coarsen(long, 12)) == 12
    assert len(coarsen(OperatorArrays([0.0] * 9, [1.0] * 9, [5.0] * 9), 4)) == 4
    assert joined(long, [10, 21]).compute_seconds_P.tolist() == [10.0, 1010.0]


def test_bad_input_is_answered() -> None:
    good = OperatorArrays([1.0, 2.0], [1.0, 1.0], [1.0, 1.0])
    servers = Servers(2, 2)
    for wrong, words in (
        (lambda: OperatorArrays([1.0, 2.0], [1.0], [1.0, 1.0]), "wanted one length"),
        (lambda: OperatorArrays([1.0, -2.0], [1.0, 1.0], [1.0, 1.0]), r"compute_seconds\[1\] = -2.0"),
        (lambda: OperatorArrays([1.0, 2.0], [1.0, float("nan")], [1.0, 1.0]), "finite"),
        (lambda: OperatorArrays([], [], []), "wanted one number for each point"),
        (lambda: OperatorArrays(["much"], [1.0], [1.0]), "wanted numbers"),
        (lambda: CutProblem(good, servers, max_stages=3), "from 1 to 2"),
        (lambda: CutProblem(good, servers, (4,)), "wanted whole numbers from 1 to 3"),
        (lambda: CutProblem(good, servers, num_microbatches=0), "microbatches"),
        (lambda: Servers(0), "count"),
        (lambda: Servers(1, memory_bytes=-1), "memory_bytes"),
        (lambda: coarsen(good, 0), "points"),
        (lambda: price(CutProblem(good, servers), CutPlan((1,), (1,))), "device cuts"),
        (lambda: price(CutProblem(good, servers), CutPlan((1,), ())), "as many"),
        (lambda: Enumeration(most_plans=1).run(CutProblem(good, servers)), "at most 1"),
    ):
        with pytest.raises(InputError, match=words):
            wrong()
