"""A change of a running training's plan, as its result tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dejavu.foundation.units import format_seconds
from dejavu.plans import Plan


@dataclass(frozen=True)
class Gain:
    """What a change of plan was for, and what came of it; medians of a few seconds.

    Attributes:
        before_seconds: a step under the plan before, measured.
        predicted_seconds: a step under the plan after.
        after_seconds: the same, measured; None: too few steps followed.
    """

    before_seconds: float
    predicted_seconds: float
    after_seconds: float | None = None

    def __str__(self) -> str:
        before, predicted = format_seconds(self.before_seconds), format_seconds(self.predicted_seconds)
        measured = (
            "were not measured" if self.after_seconds is None else f"{format_seconds(self.after_seconds)} measured"
        )
        return f"a step took {before}, {predicted} were predicted, {measured}"


@dataclass(frozen=True)
class Migration:
    """The training went on under another plan, or the same one, after the cluster had changed or its plan was improved.

    Attributes:
        step: how many steps had been trained in the state that it went on from.
        reason: sentences: what changed, and why this plan.
        from_plan, to_plan: equal where only ranks were replaced.
        seconds: from the moment the change was seen to the next new step.
        steps_lost: steps that all ranks had done, and that had to be done again.
        gain: None: the change was not for a faster step.
    """

    step: int
    reason: str
    from_plan: Plan
    to_plan: Plan
    seconds: float
    steps_lost: int
    gain: Gain | None = None

    @property
    def changes_plan(self) -> bool:
        return self.from_plan != self.to_plan

    def __str__(self) -> str:
        again = f", of which {self.steps_lost} had to be done again" if self.steps_lost else ""
        gained = f"; {self.gain}" if self.gain is not None else ""
        return f"it went on after {self.seconds:.1f} s from step {self.step}{again}: {self.reason}{gained}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Migration:
        return cls(
            **{
                **data,
                "from_plan": Plan.from_dict(data["from_plan"]),
                "to_plan": Plan.from_dict(data["to_plan"]),
                "gain": Gain(**data["gain"]) if data.get("gain") else None,
            }
        )
