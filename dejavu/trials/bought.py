"""What a search gained: the winner against draws of the framework's default, all after the same number of steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dejavu.foundation.units import plural
from dejavu.init import SCHEMES, Draw
from dejavu.trials.halving import running_loss
from dejavu.trials.spec import TrialResult

DEFAULT = next(iter(SCHEMES))  # the scheme that leaves all weights as the layers' own constructors drew them


class Standing(StrEnum):
    """Where the winner's loss lies among those of the default draws."""

    BELOW = "below every default draw"
    AMONG = "among the default draws"  # so other seeds explain it
    ABOVE = "above every default draw"
    ALONE = "the only default draw"  # the winner itself: nothing to compare it with


@dataclass(frozen=True)
class Bought:
    """The winner's running training loss against those of default draws that differ only in their seeds.

    The winner was chosen by these same losses, on the batches that all trials train on, so they flatter it: of N draws
    with the same expectation the best one lies below the median too. `standing` says whether the default's seeds differ
    as much.

    Attributes:
        steps: after which all are compared: the first rung.
        winner: the draw that won the last rung.
        winner_loss: its running loss after so many steps.
        default_losses: of each default draw, the winner's own among them where it is one; infinite where one failed.
    """

    steps: int
    winner: Draw
    winner_loss: float
    default_losses: tuple[float, ...]

    @property
    def is_default(self) -> bool:
        """Whether the winner is itself a draw of the framework's default."""
        return is_default(self.winner)

    @property
    def median_default_loss(self) -> float:
        """The median over the default draws; infinite where half of them failed, or more."""
        return statistics.median(self.default_losses)

    @property
    def gain(self) -> float:
        """How far the winner is below the median default draw's loss, as a fraction of it; negative: above it."""
        if math.isinf(self.median_default_loss):
            return math.inf
        return (self.median_default_loss - self.winner_loss) / (abs(self.median_default_loss) or 1.0)

    @property
    def standing(self) -> Standing:
        """Where the winner's loss lies among those of the default draws; its own, where it is one, does not count."""
        others = list(self.default_losses)
        if self.is_default and self.winner_loss in others:
            others.remove(self.winner_loss)
        if not others:
            return Standing.ALONE
        if all(self.winner_loss < loss for loss in others):
            return Standing.BELOW
        return Standing.ABOVE if all(self.winner_loss > loss for loss in others) else Standing.AMONG

    def to_dict(self) -> dict[str, Any]:
        """Return the record for JSON, with what follows from it; None for losses of failed draws."""
        found: dict[str, Any] = {"steps": self.steps, "winner": str(self.winner), "winner_loss": self.winner_loss}
        return found | {
            "default_losses": [_finite(loss) for loss in self.default_losses],
            "median_default_loss": _finite(self.median_default_loss),
            "gain": _finite(self.gain),
            "is_default": self.is_default,
            "standing": self.standing.value,
        }

    def __str__(self) -> str:
        """Describe it in one sentence for people."""
        count = len(self.default_losses)
        those = f"the median of {count} default draws" if count > 1 else "the one default draw"
        least, most = min(self.default_losses), max(self.default_losses)
        spread = f" ({_loss(least)} to {_loss(most)})" if count > 1 else ""
        who = "the winner, a default draw itself," if self.is_default else "the winner"
        measured = f"after {plural(self.steps, 'step')} {who} has running loss {_loss(self.winner_loss)}, "
        return f"{measured}{those} {_loss(self.median_default_loss)}{spread}: {self._verdict()}"

    def _verdict(self) -> str:
        if self.is_default:
            return "the search found nothing better than the default"
        if self.standing is Standing.ABOVE:
            return "worse than the default here: the search chose it by later steps"
        if self.standing is Standing.AMONG:
            return "no more than the default's seeds differ"
        if math.isinf(self.gain):
            failed = sum(map(math.isinf, self.default_losses))
            return f"{failed} of {plural(len(self.default_losses), 'default draw')} failed"
        return f"{self.gain:.1%} below the default"


def is_default(draw: Draw) -> bool:
    """Return whether this is the framework's default as it is, with any seed."""
    return draw == Draw(DEFAULT, seed=draw.seed)


def default_draws(tried: Sequence[Draw], count: int, *, seed: int) -> list[Draw]:
    """Return at least `count` draws of the default to compare a winner with: those tried anyway first, then others.

    Args:
        seed: of the search; proposers number their draws' seeds upwards from it.
    """
    known = [draw for draw in tried if is_default(draw)]
    taken = {draw.seed for draw in known}
    new, candidate = list[Draw](), seed + len(tried)
    while len(known) + len(new) < count:
        if candidate not in taken:
            new.append(Draw(DEFAULT, seed=candidate))
        candidate += 1
    return known + new


def bought(winner: TrialResult, defaults: Sequence[TrialResult], steps: int) -> Bought:
    """Compare the winner with default draws after `steps` steps; each draw has trained that many, or failed before."""
    losses = tuple(math.inf if one.failure and one.steps < steps else _after(one, steps) for one in defaults)
    return Bought(steps, winner.draw, _after(winner, steps), losses)


def _after(result: TrialResult, steps: int) -> float:
    return running_loss(result.losses[:steps])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _loss(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "none, for it failed"
