"""What a search bought over the framework's default: the comparison and the sentence, on results alone."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejavu.init import PROPOSERS, Draw, Scored, Space
from dejavu.trials import Bought, Standing, TrialResult, most_draws
from dejavu.trials.bought import bought, default_draws, is_default
from dejavu.trials.halving import running_loss
from dejavu.workload import TrialSettings

OTHER = Draw("kaiming", 0.9, seed=4)
losses = st.floats(0.01, 10.0)


def result(draw: Draw, curve: list[float], failure: str = "") -> TrialResult:
    score = math.inf if failure else running_loss(curve)
    return TrialResult(draw, tuple(curve), score, "", 1, 0.0, failure=failure)


def compared(winner_loss: float, *default_losses: float, winner: Draw = OTHER) -> Bought:
    return Bought(10, winner, winner_loss, default_losses)


@given(losses, st.lists(losses | st.just(math.inf), min_size=1, max_size=9))
def test_gain_and_standing_agree_with_the_losses(winner_loss: float, default_losses: list[float]) -> None:
    found = compared(winner_loss, *default_losses)
    median = statistics.median(default_losses)
    assert found.median_default_loss == median
    assert (found.gain > 0) == (winner_loss < median) and (found.gain < 0) == (winner_loss > median)
    assert (found.standing is Standing.BELOW) == (winner_loss < min(default_losses))
    assert (found.standing is Standing.ABOVE) == (winner_loss > max(default_losses))
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["standing"] == found.standing


def test_a_default_draw_that_wins_alone_is_below_no_other() -> None:
    assert compared(1.0, 1.0, winner=Draw(seed=3)).standing is Standing.ALONE


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            compared(3.414, 3.6, 3.55, 3.66),
            "after 10 steps the winner has running loss 3.414, the median of 3 default draws 3.6 (3.55 to 3.66): "
            "5.2% below the default",
        ),
        (compared(3.58, 3.6, 3.55, 3.66), "no more than the default's seeds differ"),
        (compared(3.7, 3.6, 3.55, 3.66), "worse than the default here: the search chose it by later steps"),
        (
            compared(3.55, 3.6, 3.55, 3.66, winner=Draw(seed=7)),
            "after 10 steps the winner, a default draw itself, has running loss 3.55, the median of 3 default draws "
            "3.6 (3.55 to 3.66): the search found nothing better than the default",
        ),
        (compared(3.66, 3.6, 3.55, 3.66, winner=Draw(seed=7)), "the search found nothing better than the default"),
        (compared(3.5, math.inf, math.inf, 3.66), "(3.66 to none, for it failed): 2 of 3 default draws failed"),
        (compared(3.0, 4.0), "the one default draw 4: 25.0% below the default"),
    ],
)
def test_the_sentence_says_what_was_measured(found: Bought, sentence: str) -> None:
    assert str(found).endswith(sentence)


@given(st.lists(losses | st.just(math.inf), min_size=1, max_size=9))
def test_how_many_default_draws_failed_is_counted(default_losses: list[float]) -> None:
    failed, said = sum(map(math.isinf, default_losses)), str(compared(0.001, *default_losses))
    assert ("failed" in said.rpartition(": ")[2]) == (2 * failed >= len(default_losses))
    assert "most" not in said and (
        f"{failed} of {len(default_losses)} default draw" in said or 2 * failed < len(default_losses)
    )


def test_all_are_compared_after_as_many_steps() -> None:
    """The winner was trained further; of a default draw that was promoted too only the same steps count."""
    curves = [[5.0 - 0.1 * k for k in range(30)], [6.0 - 0.1 * k for k in range(30)], [7.0] * 10]
    found = bought(result(OTHER, curves[0]), [result(Draw(seed=k), curve) for k, curve in enumerate(curves[1:])], 10)
    assert (found.steps, found.winner) == (10, OTHER)
    assert found.winner_loss == running_loss(curves[0][:10])
    assert found.default_losses == (running_loss(curves[1][:10]), 7.0)


def test_a_draw_that_failed_within_these_steps_has_no_loss_and_a_later_failure_does_not_count() -> None:
    early, late = (
        result(Draw(seed=0), [3.0] * 4, "the loss was nan"),
        result(Draw(seed=1), [3.0] * 12, "the loss was inf"),
    )
    assert bought(result(OTHER, [2.0] * 30), [early, late], 10).default_losses == (math.inf, 3.0)


@given(st.integers(0, 2**31 - 1), st.integers(2, 40), st.integers(1, 9))
@pytest.mark.parametrize("proposer", ["mixed", "seeds", "families", "latin_hypercube"])
def test_compared_draws_are_the_default_as_it_is_each_once(proposer: str, seed: int, count: int, number: int) -> None:
    tried = PROPOSERS[proposer].propose(Space(("default", "xavier")), count, seed=seed)
    found = default_draws(tried, number, seed=seed)
    assert all(map(is_default, found)) and len(set(found)) == len(found) >= number
    assert [draw for draw in found if draw in tried] == [draw for draw in tried if is_default(draw)]
    assert len(found) == max(number, len([draw for draw in tried if is_default(draw)]))


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_no_more_draws_are_tried_than_are_told_beforehand(proposer: str) -> None:
    space, number = Space(("default", "xavier")), 3
    for count in range(1, 14):
        member, known = PROPOSERS[proposer], list[Scored]()
        for k, batch in enumerate(member.batches(count)):
            draws = member.propose(space, member.num_probed(count) or batch, seed=5, known=known)[:batch]
            known += [Scored(draw, 1.0 + k) for draw in draws]
        tried = [draw for draw, _ in known]
        all_draws = {*tried, *(default_draws(tried, number, seed=5) if len(tried) > 1 else ())}
        told = most_draws(TrialSettings(proposer=proposer, count=count, default_draws=number))
        assert len(tried) <= len(all_draws) <= told <= len(tried) + number
        assert told == 1 or len(tried) > 1, "of one draw there is nothing to compare"


def test_the_default_with_any_factor_is_no_default() -> None:
    assert is_default(Draw(seed=3))
    assert not is_default(Draw("default", 0.9)) and not is_default(Draw(bias=0.5)) and not is_default(Draw("xavier"))
