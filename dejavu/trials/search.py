"""The search for an initialization: a proposer's draws, through rungs of successive halving, to one winner."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import distributed

from dejavu.foundation.registry import named
from dejavu.init import PROPOSERS, Draw, Scored, space_of
from dejavu.trials.bought import Bought, bought, default_draws
from dejavu.trials.halving import ahead, ranked, rungs, survivors
from dejavu.trials.kept import KeptTrials, NotKeptError
from dejavu.trials.running import OnResult, Pool, Resources, Source, best, probes
from dejavu.trials.spec import TrialError, TrialResult, TrialSpec
from dejavu.trials.worker import STATE
from dejavu.workload import TrialSettings, Workload


@dataclass(frozen=True)
class Rung:
    """Trials that were compared after the same number of steps.

    Attributes:
        steps: of each of them, from the training's first.
        draws: that were tried up to here.
        survivors: those of them that were promoted; after the last rung only the winner.
        best_score: the lowest running loss.
        num_ahead: how many were promoted before the rung was complete, because workers would have idled.
        num_confirmed: how many of these survived; the others' further steps are discarded.
    """

    steps: int
    draws: tuple[Draw, ...]
    survivors: tuple[Draw, ...]
    best_score: float
    num_ahead: int
    num_confirmed: int


@dataclass(frozen=True)
class Trials:
    """The outcome of a search.

    Attributes:
        results: of each draw, at its last rung, in the order in which they were proposed; draws of the default that
            were added for the comparison are the last.
        winner: the best of the last rung.
        total_steps: that all trials trained together, in this run or earlier; a probe of a first batch counts as one,
            unfinished parts of trials do not count.
        seconds: that the search took.
        bought: the winner against draws of the framework's default; None: no comparison is wanted, or fewer than two
            draws were tried.
    """

    results: tuple[TrialResult, ...]
    winner: TrialResult
    rungs: tuple[Rung, ...]
    total_steps: int
    seconds: float
    bought: Bought | None = None


OnRung = Callable[[Rung], None]


def most_draws(settings: TrialSettings) -> int:
    """Return how many draws a search tries at most: what is proposed, and draws of the default to compare with."""
    count = sum(named(PROPOSERS, settings.proposer).batches(settings.count))
    return count + (settings.default_draws if count > 1 else 0)


def search_initialization(
    client: distributed.Client,
    workload: Workload,
    folder: Path,
    *,
    resources: Resources | None = None,
    on_result: OnResult = lambda result: None,
    on_rung: OnRung = lambda rung: None,
) -> Trials:
    """Try the draws that the workload asks for by successive halving, until one is left.

    The winner depends on the workload alone: neither on the number of workers nor on their order and speed. Promotions
    are decided on complete rungs; a resumed search repeats no finished part of a trial.

    Args:
        folder: where results and the winner's state are kept.
        resources: what a worker must offer to each trial; None: a GPU where some worker offers one, else nothing.
        on_result: called for each part of a trial that ended.

    Raises:
        TrialError: no worker, or none with the resources; the deadline passed; the scheduler was lost; no trial gave a
            finite loss.
        InputError: the workload's proposer or schemes are unknown.
    """
    began = time.perf_counter()
    with Pool(client, folder, workload.trials.deadline_seconds, resources) as pool:
        return _search(pool, workload, on_result, on_rung, began)


def remembered_search(
    workload: Workload,
    folder: Path,
    *,
    on_result: OnResult = lambda result: None,
    on_rung: OnRung = lambda rung: None,
) -> Trials | None:
    """Read a search whose every trial is kept in `folder`, as `search_initialization` would; no worker is needed.

    Returns:
        None where some trial has to be run; then `on_result` and `on_rung` were not called.

    Raises:
        TrialError: no trial succeeded.
        InputError: the workload's proposer or schemes are unknown.
    """
    began, told = time.perf_counter(), list[Callable[[], None]]()
    try:
        found = _search(
            KeptTrials(folder),
            workload,
            lambda result: told.append(partial(on_result, result)),
            lambda rung: told.append(partial(on_rung, rung)),
            began,
        )
    except NotKeptError:
        return None
    for tell in told:
        tell()
    return found


def _search(source: Source, workload: Workload, on_result: OnResult, on_rung: OnRung, began: float) -> Trials:
    race = _Race(source, workload, on_result)
    proposed = race.first_rung()
    wanted = workload.trials.default_draws if len(proposed) > 1 else 0
    compared = default_draws(proposed, wanted, seed=workload.seed) if wanted else []
    draws = list(dict.fromkeys([*proposed, *compared]))  # the default draws for the comparison may win, too
    final, done = _halve(race, draws, on_rung)
    winner = race.with_state(best([final[draw] for draw in done[-1].draws]))
    defaults = race.run(compared, 0)
    race.end([draw for draw in draws if draw != winner.draw])
    return Trials(
        results=tuple(winner if draw == winner.draw else final[draw] for draw in draws),
        winner=winner,
        rungs=tuple(done),
        total_steps=race.total_steps,
        seconds=time.perf_counter() - began,
        bought=bought(winner, defaults, race.rungs[0]) if defaults else None,
    )


def _halve(race: _Race, draws: Sequence[Draw], on_rung: OnRung) -> tuple[dict[Draw, TrialResult], list[Rung]]:
    """Return the last result of each draw, and the rungs; where all promoted ones diverge, promote the next best."""
    final: dict[Draw, TrialResult] = {}
    done: list[Rung] = []
    entrants, reserve = list(draws), list[Draw]()
    for number, steps in enumerate(race.rungs):
        results = race.run(entrants, number)
        while reserve and not any(math.isfinite(result.score) for result in results):
            entrants.append(reserve.pop(0))
            results = race.run(entrants, number)
        final.update(zip(entrants, results, strict=True))
        leader = best(results)
        if number == len(race.rungs) - 1:
            kept = [leader.draw]
        else:
            going = survivors([() if result.failure else result.losses for result in results], race.reduction)
            kept = [entrants[k] for k in sorted(going)]  # in the order of the draws, whatever their scores
        early = race.sent_ahead(number)
        confirmed = early & set(kept)
        done.append(Rung(steps, tuple(entrants), tuple(kept), leader.score, len(early), len(confirmed)))
        on_rung(done[-1])
        reserve = [entrants[k] for k in ranked([result.score for result in results]) if entrants[k] not in kept]
        race.drop([draw for draw in entrants if draw not in kept])
        entrants = kept
    return final, done


class _Race:
    """The trials of a search: which were submitted up to which rung, and their results.

    Attributes:
        rungs: after how many steps trials are compared.
        total_steps: how many were trained.
    """

    def __init__(self, pool: Source, workload: Workload, on_result: OnResult) -> None:
        self.pool, self.workload, self.on_result = pool, workload, on_result
        settings = workload.trials
        self.reduction = settings.reduction
        batches = named(PROPOSERS, settings.proposer).batches(settings.count)
        self.rungs = rungs(sum(batches), workload.trial_steps, settings.reduction)
        self._num_probed = 0
        self._asked: dict[tuple[Draw, int], None] = {}  # as a set that keeps its order
        self._results: dict[tuple[Draw, int], TrialResult] = {}
        self._ahead: set[tuple[Draw, int]] = set()

    @property
    def total_steps(self) -> int:
        longest: dict[Draw, int] = {}
        for (draw, _), result in self._results.items():
            longest[draw] = max(longest.get(draw, 0), result.steps)
        return self._num_probed + sum(longest.values())

    def first_rung(self) -> list[Draw]:
        """Run all draws to the first rung, proposed in batches; later batches know the scores of earlier ones.

        Raises:
            TrialError: none is wanted.
        """
        settings, seed = self.workload.trials, self.workload.seed
        proposer, space = named(PROPOSERS, settings.proposer), space_of(self.workload)
        self._num_probed = proposer.num_probed(settings.count)
        known: list[Scored] = []
        for count in proposer.batches(settings.count):
            draws = proposer.propose(space, self._num_probed or count, seed=seed, known=known)
            if self._num_probed:
                draws = proposer.choose(probes(self.pool, self.workload, draws), count)
            known += [Scored(result.draw, result.score) for result in self.run(draws, 0)]
        if not known:
            raise TrialError(f"no initialization to try; wanted a count of at least 1, found {settings.count}")
        return [draw for draw, _ in known]

    def run(self, draws: Sequence[Draw], rung: int) -> list[TrialResult]:
        """Return these draws' results at a rung; meanwhile idle workers train the best so far ahead."""
        self._submit([draw for draw in draws if (draw, rung) not in self._asked], rung)
        while any((draw, rung) not in self._results for draw in draws):
            self._promote_early(rung)
            for spec, _, result in self.pool.wait():
                self._results[spec.draw, self.rungs.index(spec.steps)] = result
                self.on_result(result)
        return [self._results[draw, rung] for draw in draws]

    def sent_ahead(self, rung: int) -> set[Draw]:
        """Return those that were promoted from this rung before it was complete."""
        return {draw for draw, at in self._ahead if at == rung + 1}

    def with_state(self, winner: TrialResult) -> TrialResult:
        """Return the winner, trained again if its result was remembered but its state is gone."""
        if winner.state:
            return winner
        (again,) = self.pool.run([TrialSpec(self.workload, winner.draw, winner.steps)], needs_state=True)
        if again.failure:
            raise TrialError(f"the winner {winner.draw} could not be trained again: {again.failure}")
        return again

    def drop(self, draws: Sequence[Draw]) -> None:
        """Eliminate these: stop what runs and delete their states; their results are kept."""
        dropped = set(draws)
        running = [asked for asked in self._asked if asked[0] in dropped and asked not in self._results]
        for asked in running:
            del self._asked[asked]
        self.pool.cancel([TrialSpec(self.workload, draw, self.rungs[at]) for draw, at in running])
        self._forget(draws)

    def end(self, losers: Sequence[Draw]) -> None:
        """Stop everything that still runs, and delete states that a cancelled trial was just saving."""
        self.pool.settle()
        self._forget(losers)

    def _forget(self, draws: Sequence[Draw]) -> None:
        for draw in draws:
            for steps in self.rungs:
                key = self.pool.keys.of(TrialSpec(self.workload, draw, steps))
                (self.pool.folder / f"{key}{STATE}").unlink(missing_ok=True)

    def _submit(self, draws: Sequence[Draw], rung: int) -> None:
        self._asked.update(((draw, rung), None) for draw in draws)
        self.pool.submit([TrialSpec(self.workload, draw, self.rungs[rung]) for draw in draws])

    def _promote_early(self, rung: int) -> None:
        """Let idle workers promote the best `1/reduction` of the finished trials early, as ASHA does."""
        for at in reversed(range(rung, len(self.rungs) - 1)):
            idle = self.pool.num_slots - self.pool.num_running
            done = [draw for draw, where in self._asked if where == at and (draw, at) in self._results]
            order = ahead([self._results[draw, at].score for draw in done], self.reduction)
            going = [done[k] for k in order if (done[k], at + 1) not in self._asked][: max(0, idle)]
            self._ahead.update((draw, at + 1) for draw in going)
            self._submit(going, at + 1)
