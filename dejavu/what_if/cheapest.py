"""The cheapest cluster that trains so many tokens in some time, of node types and their numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dejavu.cost.ranges import Range
from dejavu.cost.rates import tokens_in_a_step
from dejavu.foundation.errors import InputError
from dejavu.planning import Choice, PlanRequest
from dejavu.what_if.answers import Answered, Case, answer
from dejavu.what_if.nodes import NodeFile

CLOSE_COUNTS = 8  # up to here every number of nodes is planned; beyond powers of 2, then those in between that matter
SAME, GAINS_NOTHING = 3, 1e-3  # so many powers of 2 in a row whose steps differ by less than this part


@dataclass(frozen=True)
class Goal:
    """What has to be trained, and by when."""

    tokens: float
    within_seconds: float


@dataclass(frozen=True, eq=False)
class Trained:
    """What a cluster needs for a goal.

    Attributes:
        num_nodes: of the type, that the plan may use.
    """

    answered: Answered
    goal: Goal
    num_nodes: int

    @property
    def num_steps(self) -> int:
        tokens = tokens_in_a_step(self.answered.case.request.workload)
        assert tokens is not None  # `cheapest` checked it
        return math.ceil(self.goal.tokens / tokens)

    @property
    def seconds(self) -> float:
        """Predicted; infinite where there is no plan."""
        choice = self.answered.choice
        return math.inf if choice is None else self.num_steps * choice.step_seconds

    @property
    def range_seconds(self) -> Range:
        """The 90 % range of `seconds`."""
        choice = self.answered.choice
        assert choice is not None
        return Range(*(self.num_steps * end for end in choice.range_seconds))

    @property
    def is_in_time(self) -> bool:
        """As predicted; without a plan it never is."""
        return self.answered.choice is not None and self.seconds <= self.goal.within_seconds

    @property
    def is_proved_late(self) -> bool:
        """Whether it is proved that no plan is simulated to be in time, of those that bounds cover (`scope`)."""
        choice = self.answered.choice
        if choice is None:
            return False
        return self.num_steps * choice.simulated_lower_bound_seconds > self.goal.within_seconds

    @property
    def cost(self) -> float:
        """Of the whole training, by the prediction, with each node that the plan uses paid while it lasts."""
        choice = self.answered.choice
        if choice is None or choice.rates.cost is None:
            return math.inf
        return choice.rates.cost[0] * self.seconds / 3600.0

    @property
    def num_used_nodes(self) -> int:
        """Of how many nodes the plan uses a device, which are those that are paid; 0: there is no plan."""
        return 0 if self.answered.choice is None else self.answered.choice.rates.num_nodes


@dataclass(frozen=True, eq=False)
class Cheapest:
    """Every cluster that was planned for a goal.

    Attributes:
        rows: type by type, each by rising numbers of nodes.
    """

    goal: Goal
    rows: tuple[Trained, ...]
    currency: str

    @cached_property
    def best(self) -> Trained | None:
        """The cheapest that is predicted to be in time; None: none is."""
        return min((row for row in self.rows if row.is_in_time), key=lambda row: row.cost, default=None)

    @cached_property
    def fastest(self) -> Trained | None:
        """The one that is predicted to end first, of several the cheapest; None: nothing has a plan."""
        planned = (row for row in self.rows if row.answered.choice)
        return min(planned, key=lambda row: (row.seconds, row.cost), default=None)


def cheapest(
    goal: Goal,
    files: Sequence[NodeFile],
    request: PlanRequest,
    plan: Callable[[PlanRequest], Choice],
    nodes: tuple[int, int] | None = None,
) -> Cheapest:
    """Plan each type of node in numbers from 1 to the file's, or within `nodes`, and see what the goal costs on it.

    More nodes of a type are hardly ever cheaper for the same work, so that the least number that is in time decides:
    up to `CLOSE_COUNTS` numbers all are planned; of more the powers of 2 until more are no use, then what lies between
    too few and enough.

    Args:
        request: its cluster is replaced.

    Raises:
        InputError: the examples are no tokens, a price is missing, or prices are in several currencies.
    """
    currency = currency_of(files)
    if tokens_in_a_step(request.workload) is None:
        raise InputError(f"--tokens: the examples of {request.workload.model} on {request.workload.data} are no tokens")
    found: list[Trained] = []
    in_files = Counter(group for file in files for group in file.counts)
    for file in files:
        for group in file.counts:
            lowest, most = nodes or (1, file.counts[group])

            def trained(number: int, file: NodeFile = file, group: str = group) -> Trained:
                where = f" of {file.path}" if in_files[group] > 1 else ""
                cluster = replace(file.with_counts({group: number}), name=f"{number} × {group}{where}")
                (answered,) = answer([Case(cluster.name, replace(request, cluster=cluster))], plan)
                return Trained(answered, goal, number)

            found += _least_enough(trained, lowest, most)
    return Cheapest(goal, tuple(found), currency)


def _least_enough(trained: Callable[[int], Trained], lowest: int, most: int) -> list[Trained]:
    """Plan numbers of nodes of one type until it is known which is the least that is in time."""
    if most - lowest < CLOSE_COUNTS:
        return [trained(number) for number in range(lowest, most + 1)]
    powers = [2**k for k in range(most.bit_length()) if lowest < 2**k < most]
    known = dict[int, Trained]()
    for number in (lowest, *powers, most):
        known[number] = trained(number)
        if _need_no_more(list(known.values())):
            break
    while True:
        enough = min((number for number, row in known.items() if row.is_in_time), default=None)
        late = [number for number in known if enough is not None and number < enough]
        if enough is None or not late or enough - max(late) <= 1:
            return [known[number] for number in sorted(known)]
        middle = (enough + max(late)) // 2
        known[middle] = trained(middle)


def _need_no_more(rows: Sequence[Trained]) -> bool:
    """Return whether more nodes than the last row has are neither wanted nor any use.

    They are not where fewer are in time and the last ones are no cheaper, nor where twice as many were no faster twice.
    """
    before, last = [row for row in rows[:-1] if row.is_in_time], rows[-1]
    if before:
        return last.cost >= min(row.cost for row in before)
    known = [row.seconds for row in rows if row.answered.choice is not None][-SAME:]
    return len(known) == SAME and not last.is_in_time and known[-1] > known[0] * (1 - GAINS_NOTHING)


def currency_of(files: Sequence[NodeFile]) -> str:
    """Return the one currency of all nodes' prices.

    Raises:
        InputError: there are several, or a price is missing.
    """
    prices = {(file.path, group.name): group.price for file in files for group in file.cluster.groups}
    unsaid = [f"{name} in {path}" for (path, name), price in prices.items() if price is None]
    if unsaid:
        raise InputError(
            f"--goal cheapest: found no price of {', '.join(unsaid)}; wanted such as `price: 2.10 USD/hour` beside its "
            "`devices:`, of one node"
        )
    currencies = sorted({price[1] for price in prices.values() if price is not None})
    if len(currencies) > 1:
        raise InputError(f"--goal cheapest: found prices in {' and '.join(currencies)}; wanted one currency")
    return currencies[0]
