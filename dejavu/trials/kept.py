"""Results of earlier runs instead of workers: a search that was done before is read, and starts no process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dejavu.foundation.units import plural
from dejavu.trials.running import Ended, Source, kept_steps, other_steps, result_of
from dejavu.trials.spec import Keys, TrialError, TrialSpec
from dejavu.trials.worker import remembered_trial


class NotKeptError(TrialError):
    """A trial has no kept result and would have to run."""


class KeptTrials(Source):
    """Trials read from their files.

    Raises:
        NotKeptError: on submitting a trial without a usable result.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys, self.num_slots = folder, Keys(), 0
        self._steps = kept_steps(folder)
        self._ended: list[Ended] = []

    @property
    def num_running(self) -> int:
        return len(self._ended)

    def submit(self, specs: Sequence[TrialSpec], *, needs_state: bool = False) -> None:
        for spec in specs:
            key = self.keys.of(spec)
            # No call has the empty name, so a failure that was kept for one call only does not count here.
            others = other_steps(self._steps, key)
            plain = remembered_trial(key, others, folder=self.folder, call="", needs_state=needs_state)
            if plain is None:
                raise NotKeptError(
                    f"there is no result of {spec.draw} after {plural(spec.steps, 'step')} in {self.folder}"
                )
            self._ended.append(Ended(spec, key, result_of(spec.draw, plain)))

    def wait(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, specs: Sequence[TrialSpec]) -> None:
        pass  # nothing runs

    def settle(self) -> None:
        pass
