"""Plan again for a changed cluster, and decide between the plan that is there and the new one."""

from __future__ import annotations

from dataclasses import replace

from prefect.runtime import flow_run

from dejavu.cluster import Cluster
from dejavu.cost.estimates import CostError
from dejavu.launch.running import status_of
from dejavu.planning import PlanRequest
from dejavu.profiles.manifest import state_of
from dejavu.watching import Decided, Decision, Notes, changed_since
from dejavu.workload import Workload
from flows.endings import may_pass
from flows.planned import planned
from flows.session import session
from tasks.deciding import decide_on, without_plan


def replanned(
    workload: Workload, file: str, now: Cluster, notes: Notes, budget_seconds: float, change: str
) -> Decision:
    """Search for the best plan on the cluster as it is now, decide, and keep a note of both.

    Where it fails, by finding no plan or otherwise, that is noted: it is tried again for another question alone,
    and where a cost was not known, when others have been measured.
    The cluster counts as planned for when the decision is written: a run that is ended before leaves the change to the
    next look. Searches run in this process: a Dask worker's thread may be the training's until that ends.
    """
    before = notes.planned
    with session(workload, file, cluster=now) as here:
        request = PlanRequest(workload, now, here.database, budget_seconds=budget_seconds, seed=workload.seed)
        run, state = str(flow_run.id), state_of(here.database)
        try:
            found = planned(request, here, measure=False)
            with notes.alone():  # another run may have made a plan meanwhile
                if (latest := notes.planned) != before:
                    before, change = latest, "; ".join(changed_since(latest, now)) or "another run has planned for it"
                follows = status_of(here.project).follows_its_cluster
                decision = decide_on(found.choice, workload, before, change, run, is_followed=follows)
                notes.decided(decision)
                if decision.decided != Decided.PLANNED and before is not None and decision.old_step_seconds is not None:
                    notes.keep(now, before.plan, decision.old_step_seconds, run)
                else:
                    notes.keep(now, found.choice.plan, found.choice.step_seconds, run)
        except Exception as error:
            if not may_pass(error):
                lacked_in = state if isinstance(error, CostError) else ""
                decision = replace(without_plan(workload, now, before, change, run, error), lacked_in=lacked_in)
                here.run.tags(_tags(decision))
                notes.decided(decision)
            raise
        here.run.tags(_tags(decision))
        return decision


def _tags(decision: Decision) -> dict[str, str]:
    return {"dejavu.replan.change": decision.change, "dejavu.replan.decided": decision.decided}
