"""Everything that a plan depends on, in one frozen record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dejavu.cluster import Cluster
from dejavu.cost.priced_problem import microbatch_choices, split_into
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.parallelism import Parallelism
from dejavu.plans import Offload
from dejavu.plans.answers import BUDGET_SECONDS
from dejavu.plans.schedule import CHIMERA, SCHEDULES, default_schedules
from dejavu.runtime.both_ways import check_goes_both_ways
from dejavu.runtime.splits.sliceable import check_slices
from dejavu.search import SEARCHES
from dejavu.workload import AUTO, Workload
from dejavu.workload.settings import whole_backward_schedules


@dataclass(frozen=True)
class PlanRequest:
    """A question to the planner. Equal requests on the same database get the same answer, from every command.

    Attributes:
        database: folder of measured costs.
        parallelism: how stages may be spread; None: `Parallelism.usual` of the cluster.
        searches: which to run; empty: those that prove or are quick, and further ones where they leave a gap.
        schedules: which the plan may use; empty: the workload's own, which may be `auto`, all `default_schedules` and,
            where the workload can, `chimera`.
        microbatches: numbers of microbatches (gradient accumulation steps) to try; empty: `microbatch_choices` of the
            workload.
        budget_seconds: for all searches together; capturing and pricing the model takes what it takes.

    Raises:
        InputError: a budget that is no number from 0 on, an unknown search or schedule, one that compiled layers or
            slices cannot run, a model that is not trained in slices, or the batch does not divide into the
            microbatches.
    """

    workload: Workload
    cluster: Cluster
    database: Path = Path("profiles_db")
    parallelism: Parallelism | None = None
    searches: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    microbatches: tuple[int, ...] = ()
    budget_seconds: float = BUDGET_SECONDS
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.budget_seconds >= 0:  # a NaN is not: no search would ever be late
            raise InputError(f"budget_seconds is {self.budget_seconds}; wanted a number from 0 on")
        for name in self.searches:
            named(SEARCHES, name)
        for name in self.schedules:
            if name != CHIMERA and named(SCHEDULES, name).splits_backward and self.workload.compile:
                raise InputError(
                    f"schedule {name} runs the backward pass in two parts, and the workload's layers are compiled "
                    f"(compile: true); wanted one of {', '.join(whole_backward_schedules())}"
                )
        check_slices(self.workload, self.schedules)
        if self.workload.both_ways and self.allowed_schedules != (CHIMERA,):
            raise InputError(
                f"both_ways is 1F1B in both directions, and the plan may use {', '.join(self.allowed_schedules)}; "
                "wanted schedule: chimera in the workload, and no other"
            )
        if CHIMERA in (self.schedules or (self.workload.schedule,)):
            check_goes_both_ways(self.workload)
        for count in self.microbatches:
            split_into(self.workload, count)
        if not self.counts:
            raise InputError(
                f"schedule: chimera with {', '.join(map(str, self.microbatches))} microbatches; wanted an even number"
            )

    @property
    def spread(self) -> Parallelism:
        """How stages may be spread."""
        found = self.parallelism or Parallelism.usual(self.cluster, replicas=self.workload.gradients.gathers)
        if not self.listed_schedules:  # each device has a stage of either direction by itself
            return replace(found, max_data_parallel=1, max_tensor_parallel=1, offload=(Offload(),))
        levels = tuple(level for level in found.zero_levels if level < 2)
        if levels and all(named(SCHEDULES, name).splits_backward for name in self.listed_schedules):
            return replace(found, zero_levels=levels)  # the others reduce gradients before the second part has them
        return found

    @property
    def allowed_schedules(self) -> tuple[str, ...]:
        """Names of the schedules that the plan may use, each once."""
        if self.schedules:
            return tuple(dict.fromkeys(self.schedules))
        if self.workload.both_ways:
            return (CHIMERA,)
        if self.workload.schedule != AUTO:
            return (self.workload.planned_schedule,)
        whole = whole_backward_schedules()
        is_whole = self.workload.compile or self.workload.in_slices
        asked = tuple(name for name in default_schedules() if name in whole or not is_whole)
        return (*asked, CHIMERA) if self._may_go_both_ways else asked

    @property
    def listed_schedules(self) -> tuple[str, ...]:
        """Those of the allowed schedules that run one copy of the model: bounds are on their plans."""
        return tuple(name for name in self.allowed_schedules if name != CHIMERA)

    @property
    def _may_go_both_ways(self) -> bool:
        if self.workload.compile:  # no training of compiled layers in both directions was tried
            return False
        try:
            check_goes_both_ways(self.workload)
        except InputError:
            return False
        return True

    @property
    def may_slice(self) -> bool:
        """Whether sequences may come in slices, as is predicted to be faster: nothing is said, and the model can.

        Not where the model drops out, of which a slice draws other numbers than the whole sequence.
        """
        workload = self.workload
        if workload.slices != AUTO or self.allowed_schedules != replace(self, schedules=()).allowed_schedules:
            return False
        if workload.schedule != AUTO or workload.replan.action == "migrate":
            return False
        try:
            check_slices(workload.model_copy(update={"slices": 2}), drops_nothing=True)
        except InputError:
            return False
        return True

    @property
    def searched_schedule(self) -> str:
        """The schedule, with one stage per rank, whose price and memory rule the searches use.

        1F1B holds the least memory of all; GPipe's rule, where nothing else is allowed.
        """
        rules = {named(SCHEDULES, name).searched_as for name in self.listed_schedules} or {"1f1b"}
        return "1f1b" if "1f1b" in rules else rules.pop()

    @property
    def one_stage_a_rank(self) -> bool:
        """Whether every allowed schedule runs one stage on each pipeline rank, as the searches' problems have it."""
        one_copy = CHIMERA not in self.allowed_schedules
        return one_copy and all(named(SCHEDULES, name).stages_per_rank == 1 for name in self.listed_schedules)

    @property
    def may_run_one_stage_a_rank(self) -> bool:
        """Whether an allowed schedule runs one copy of the model with one stage on each pipeline rank."""
        return any(named(SCHEDULES, name).stages_per_rank == 1 for name in self.listed_schedules)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of microbatches, in rising order."""
        found = tuple(sorted(set(self.microbatches))) or microbatch_choices(self.workload)
        return tuple(count for count in found if count % 2 == 0) if not self.listed_schedules else found

    def split(self, num_microbatches: int, slices: tuple[int, ...] = ()) -> Workload:
        """Return the workload with so many microbatches, under the schedule that searches price.

        Args:
            slices: of each sequence; empty: as the workload says.
        """
        told = {"schedule": self.searched_schedule} | ({"slices": slices} if slices else {})
        return split_into(self.workload, num_microbatches).model_copy(update=told)
