"""A change of a running training's plan, as its result tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dejavu.plans import Plan


@dataclass(frozen=True)
class Migration:
    """The training went on under another plan, or the same one, after the cluster had changed.

    Attributes:
        step: how many steps had been trained in the state that it went on from.
        reason: sentences: what changed, and why this plan.
        from_plan, to_plan: equal where only ranks were replaced.
        seconds: from the moment the change was seen to the next new step.
        steps_lost: steps that all ranks had done, and that had to be done again.
    """

    step: int
    reason: str
    from_plan: Plan
    to_plan: Plan
    seconds: float
    steps_lost: int

    @property
    def changes_plan(self) -> bool:
        return self.from_plan != self.to_plan

    def __str__(self) -> str:
        again = f", of which {self.steps_lost} had to be done again" if self.steps_lost else ""
        return f"it went on after {self.seconds:.1f} s from step {self.step}{again}: {self.reason}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Migration:
        return cls(
            **{
                **data,
                "from_plan": Plan.from_dict(data["from_plan"]),
                "to_plan": Plan.from_dict(data["to_plan"]),
            }
        )
