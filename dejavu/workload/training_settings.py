"""How a workload is trained: its optimizer, the trials of initial weights, and what follows a change of the cluster."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dejavu.workload.record import Number, Record, Whole

LEAST_RUNG_STEPS = 10  # trials of fewer compare how weights were scaled, and not yet how they learn
TRIED_PART = 20  # one in so many of the planned steps: trials stay cheap compared with the training that they start
# In a short training the longest trials take a larger part: up to one step in four for two rungs, and up to every
# second step for the one comparison without which no draw is chosen by how it learns. (The winner's steps are not lost:
# the training continues from them.)
HALVED_PART, COMPARED_PART = 4, 2


Share = Annotated[Number, Field(ge=0, lt=1)]


class OptimizerSettings(Record):
    """A torch optimizer by name.

    Attributes:
        warmup_steps: the learning rate rises linearly from zero.
        decay: what it does afterwards, to the end of the training.
        momentum: of sgd.
        betas: of adamw: of its means of gradients and of their squares.
        epsilon: of adamw, added to the root of the squares.
        decayed: which weights `weight_decay` is for: `all`, or `matrices`, which leaves out norms and biases.
        master_weights: of bfloat16 weights the optimizer keeps float32 masters, which it updates; gradients add up in
            float32 and so do its moments (Micikevicius et al., ICLR 2018; Megatron's mixed precision).
        clip_norm: the most that the norm of all gradients may be; None: no bound.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Number = Field(1e-3, gt=0, lt=float("inf"))
    weight_decay: Number = Field(0.01, ge=0, lt=float("inf"))
    warmup_steps: Whole = Field(0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    momentum: Number = Field(0.0, ge=0, lt=1)
    betas: tuple[Share, Share] = (0.9, 0.999)
    epsilon: Number = Field(1e-8, gt=0, lt=1)
    decayed: Literal["all", "matrices"] = "all"
    clip_norm: Number | None = Field(None, gt=0, lt=float("inf"))
    master_weights: bool = False

    @property
    def kind(self) -> str:
        """The key of its measurements: the cost of its step depends only on this and the weights."""
        return f"{self.name} with master weights" if self.master_weights else self.name


class TrialSettings(Record):
    """How many initializations are tried, which ones, and for how long.

    Attributes:
        count: how many; 0: none, the framework's default is trained.
        steps: of the longest trials, the winner's among them; None: a twentieth of the training, and in a short one
            as many as two rungs need (10 and 30 steps) or at least one (10), where that leaves enough to train.
        reduction: of successive halving: one in about so many trials is promoted to the next rung, which is so many
            times longer.
        proposer: a name of `dejavu.init.PROPOSERS`.
        schemes: names of `dejavu.init.SCHEMES` to choose from; None: its `MENU`.
        deadline_seconds: for all trials together.
        default_draws: so many draws of the framework's default, each with another seed, are tried for the winner to be
            compared with: those that a proposer tries anyway, and others beside the `count`. 0: no comparison.
    """

    count: Whole = Field(8, ge=0, le=100_000)
    steps: Whole | None = Field(None, ge=1)
    reduction: Whole = Field(3, ge=2)
    proposer: str = "mixed"
    schemes: tuple[str, ...] | None = None
    deadline_seconds: Number = Field(3600.0, gt=0, lt=float("inf"))
    default_draws: Whole = Field(3, ge=0, le=1000)

    def longest(self, num_steps: int) -> int:
        """Return the steps of the longest trials, where the whole training has `num_steps`.

        Of the default settings: 30 from 120 steps on, 10 from 20 on, half of the training below; 0 of a training of
        one step, which leaves none for a trial.
        """
        if self.steps:
            return self.steps
        part = num_steps // TRIED_PART
        two_rungs = LEAST_RUNG_STEPS * self.reduction
        if self.count >= self.reduction and HALVED_PART * two_rungs <= num_steps:
            return max(part, two_rungs)
        return max(part, min(LEAST_RUNG_STEPS, num_steps // COMPARED_PART))


class ReplanSettings(Record):
    """What happens when the cluster changes while the training runs.

    Attributes:
        action: `notify`: a new plan is only said; `plan`: later changes are compared with it; `migrate`: the same, and
            the training goes on under one.
        margin: a plan that would be faster by a smaller share than this is not worth a change; `3%` or 0.03.
        snapshot_every: with `migrate`, so many steps between two snapshots of the training's state in its hosts'
            memory. 0: none, and a change goes back to the last checkpoint.
        improve: with `migrate`, whether the plan also changes for what the training measures of it, on a cluster that
            stays as it is: `search`: to the exact search's plan at the measured prices; `joint`: to the plan of
            strategy variables that take gradient steps between training steps. `never` is the default.
    """

    action: Literal["notify", "plan", "migrate"] = "notify"
    margin: Number = Field(0.03, ge=0, lt=1)
    snapshot_every: Whole = Field(1, ge=0)
    improve: Literal["never", "search", "joint"] = "never"

    @model_validator(mode="after")
    def _improves_while_it_migrates(self) -> Self:
        if self.improve != "never" and self.action != "migrate":
            raise ValueError(
                f"improve: {self.improve} changes a running plan; wanted action: migrate, found {self.action}"
            )
        return self

    @field_validator("margin", mode="before")
    @classmethod
    def _percent(cls, margin: object) -> object:
        if isinstance(margin, str) and margin.strip().endswith("%"):
            try:
                return float(margin.strip().removesuffix("%")) / 100
            except ValueError:
                pass
        return margin
