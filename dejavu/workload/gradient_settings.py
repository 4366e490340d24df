"""How the gradients of a stage's replicas become one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from dejavu.plans import StageConfiguration
from dejavu.workload.record import Number, Record, Whole

# a key: the rules that it is for
_OF_RULES = {
    "num_suspected": ("suspicion", "trimmed_mean", "krum"),
    "alpha": ("suspicion",),
    "per": ("suspicion", "krum", "zeno"),
    "rho": ("zeno",),
    "epsilon": ("zeno",),
    "held_out_every": ("zeno",),
}


class GradientSettings(Record):
    """The rule by which the gradients of a stage's replicas become one, on each of them.

    Attributes:
        rule: `mean`: summed by an all-reduce. All others gather every replica's gradient: `suspicion` weighs them by
            how close they are to their weighted sum; `median` and `trimmed_mean` are of each coordinate; `krum` takes
            one; `zeno` (one stage only) takes those that promise to lower the loss of held-out examples.
        num_suspected: how many of a stage's replicas may be faulty in a step: so many are replaced (suspicion),
            trimmed at both ends of each coordinate (trimmed_mean), or allowed for (krum).
        alpha: of suspicion: weights are alpha / (alpha + distance), in the unit of the gradient's norm.
        per: replicas are judged by a stage's whole gradient, or by each layer's.
        rho: of zeno: the weight of a gradient's squared length in its score.
        epsilon: of zeno: by how much the score of a gradient that is used may be below 0.
        held_out_every: of zeno: so many steps use one gradient of held-out examples.
    """

    rule: Literal["mean", "suspicion", "median", "trimmed_mean", "krum", "zeno"] = "mean"
    num_suspected: Whole = Field(1, ge=0)
    alpha: Number = Field(1.0, gt=0, lt=float("inf"))
    per: Literal["stage", "layer"] = "stage"
    rho: Number = Field(0.002, ge=0, lt=float("inf"))
    epsilon: Number = Field(0.0, ge=0, lt=float("inf"))
    held_out_every: Whole = Field(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _a_rule_alone(cls, found: Any) -> Any:
        """Take `gradients: median` for `gradients: {rule: median}`."""
        return {"rule": found} if isinstance(found, str) else found

    @field_validator(*_OF_RULES)
    @classmethod
    def _belongs_to_the_rule(cls, value: Any, info: Any) -> Any:
        rule, rules = info.data.get("rule"), _OF_RULES[info.field_name]
        if rule is not None and rule not in rules and value != cls.model_fields[info.field_name].default:
            raise ValueError(
                f"{info.field_name} is given, but the rule is {rule!r}; wanted rule: {' or '.join(rules)}, or no "
                f"{info.field_name}"
            )
        return value

    @property
    def gathers(self) -> bool:
        """Whether replicas gather each other's gradients; else they sum them by an all-reduce."""
        return self.rule != "mean"

    @property
    def least_replicas(self) -> int:
        """Of how many replicas the rule has an outvoted minority of `num_suspected`, as its source wants it."""
        least = {
            "mean": 1,
            "suspicion": max(3, 2 * self.num_suspected + 1),
            "median": 3,
            "trimmed_mean": max(3, 2 * self.num_suspected + 1),
            "krum": 2 * self.num_suspected + 3,
            "zeno": 2,
        }
        return least[self.rule]

    def misfit(self, configuration: StageConfiguration) -> str:
        """Return why the rule cannot combine the gradients of such a stage, and what it wants; empty: it can."""
        said = f"gradients: {self.rule}"
        if not self.gathers:
            return ""
        if configuration.data_parallel < self.least_replicas:
            suspected = f" with num_suspected {self.num_suspected}" if self.rule in _OF_RULES["num_suspected"] else ""
            return (
                f"{said}{suspected} is for {self.least_replicas} replicas or more of a stage, and one of "
                f"{configuration} has {configuration.data_parallel}; wanted more replicas, a smaller num_suspected, or "
                "gradients: mean"
            )
        if configuration.offload.parameters:
            return (
                f"{said} compares gradients on devices, and those of {configuration} are in their node's memory; "
                "wanted parameters on the device, or gradients: mean"
            )
        if configuration.context_parallel > 1:
            return (
                f"{said} compares gradients of whole examples, and {configuration.context_parallel} replicas share "
                "theirs; wanted context_parallel 1, or gradients: mean"
            )
        if self.rule == "zeno" and configuration.tensor_parallel > 1:
            return (
                f"{said} computes held-out examples on each replica by itself, and one of {configuration} is "
                f"{configuration.tensor_parallel} devices; wanted tensor_parallel 1, or another rule"
            )
        return ""
