"""A trial, its result, and the key under which the result is kept."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from dejavu.foundation.errors import DejavuError
from dejavu.foundation.hashing import stable_hash
from dejavu.init import Draw, _base, drawing, schemes
from dejavu.init import output_scale as calibration
from dejavu.runtime import optimizer, single, training
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import model_of, source_hash
from dejavu.workload.models.user import waiting

MOST_ATTEMPTS = 3
_CODE = (
    _base,
    calibration,
    drawing,
    schemes,
    training,
    optimizer,
    single,
    waiting,
)  # also decides the losses: other code, other results
# Names, not contents: the contents are in the data's fingerprint.
_FREE = {"trials", "checkpoint_every", "text", "images", "schedule", "compare", "replan"}
_FREE |= {"evaluate_every", "evaluation_examples", "gradients"}
_FREE |= {"slices", "both_ways", "compile", "checkpoints"}  # of ranks alone


class TrialError(DejavuError):
    """The trials could not be run, or none of them gave a usable model."""


@dataclass(frozen=True)
class TrialSpec:
    """One trial: train the workload from this draw for its first `steps` steps; 0: only probe the first batch."""

    workload: Workload
    draw: Draw
    steps: int

    @property
    def key(self) -> str:
        """The name of its files: a hash of everything that determines the losses, and the number of steps."""
        return Keys().of(self)


def split_key(key: str) -> tuple[str, int]:
    """Split a key into the trial, which is the same for all numbers of steps, and the number of steps."""
    trial, _, steps = key.rpartition("-")
    return trial, int(steps)


class Keys:
    """Keys of trials. What all trials of a workload share (its data, its code) is hashed once."""

    def __init__(self) -> None:
        self._shared: dict[str, str] = {}

    def of(self, spec: TrialSpec) -> str:
        return f"{stable_hash([self.shared(spec.workload), asdict(spec.draw)])}-{spec.steps}"

    def shared(self, workload: Workload) -> str:
        """Hash everything but the draw that determines the losses of single-process training."""
        text = workload.model_dump_json()
        if text not in self._shared:
            self._shared[text] = _shared_hash(workload)
        return self._shared[text]


def _shared_hash(workload: Workload) -> str:
    # The learning rate of a step depends on the length of the training only where it decays.
    free = _FREE | ({"num_steps"} if workload.optimizer.decay == "constant" else set())
    decides = json.loads(workload.model_dump_json(exclude=free))
    code = [torch.__version__, model_of(workload).code, *map(source_hash, _CODE)]
    return stable_hash([code, dataset_of(workload).fingerprint, decides])


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial.

    Attributes:
        losses: of each step from the training's first, over all rungs.
        score: the running training loss at the end; infinite where the trial failed.
        state: the file with weights and optimizer after the last step; empty where there is none (any more).
        attempts: how often its last part was started, or an earlier part, if that was more often.
        seconds: of all steps.
        remembered: it had run before, and was only read.
        failure: why there is no score; empty otherwise.
        first_gradient_norm: of all gradients together in the first step that is made, before any clipping; None where
            it was not finite.
    """

    draw: Draw
    losses: tuple[float, ...]
    score: float
    state: str
    attempts: int
    seconds: float
    remembered: bool = False
    failure: str = ""
    first_gradient_norm: float | None = None

    @property
    def steps(self) -> int:
        """How many steps were trained."""
        return len(self.losses)
