"""The whole way: from a model and a cluster to a tracked pipeline training that starts from the best of N draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from prefect import flow
from prefect.runtime import flow_run

from dejavu.parallelism import Parallelism
from dejavu.report import ReportData
from dejavu.runtime.launcher import torchrun_line
from dejavu.simulate import stages_of
from dejavu.track import Tracker
from dejavu.workload import Workload
from tasks.planning import bind_stages, play_candidates, play_plan, play_without_memory, search_plan, split_evenly
from tasks.pricing import (
    capture_model,
    follow_trainings,
    measure_what_is_missing,
    pose_problem,
    price_layers,
    read_cluster,
)
from tasks.recording import record_costs, record_question, record_report
from tasks.training import (
    compare_with_one_process,
    needed_bytes,
    prepare_training,
    remember_times,
    resume_training,
    train_pipeline,
    try_initializations,
)


class Outcome(NamedTuple):
    """What a flow found, and where its records are."""

    report: ReportData
    artifacts: Path | None
    tracking_uri: str


@flow(name="dejavu", flow_run_name="{workload.model} on {cluster}", validate_parameters=True)
def dejavu(
    workload: Workload = Workload(),  # noqa: B008
    cluster: str = "cluster.yaml",
    train: bool = True,
    parallelism: Parallelism | None = None,
    dask: str = "",
    resume: str = "",
) -> Outcome:
    """Predict, search, bind, try initializations, train, remember.

    Args:
        workload: what is to be trained.
        cluster: the cluster file, relative to the project folder.
        train: False stops behind the plan.
        parallelism: in which ways stages may be spread over devices; nothing: everything, on CPUs one core for a stage.
        dask: address of a Dask scheduler with a worker on every host of the cluster; nothing: all is on this machine.
        resume: the folder of an earlier training (.dejavu/runs/…), which goes on from its last checkpoint, under
            today's plan.
    """
    project = Path.cwd()
    database, work = project / "profiles_db", project / ".dejavu"
    machines = read_cluster(project / cluster, train, dask)
    with Tracker.open(project, f"{workload.model} on {machines.name}", tags={"prefect.flow_run": flow_run.id}) as run:
        record_question(run, workload, machines, project / cluster)
        graph = capture_model(workload, machines)
        measured = measure_what_is_missing(graph, workload, machines, database)
        fresh = price_layers(graph, machines, workload, database)
        table = follow_trainings(fresh, graph, workload, database)
        record_costs(run, graph, measured, table)

        spread = parallelism or Parallelism.usual(machines)
        posed = pose_problem(graph, table, machines, workload, database, spread)
        problem = posed.problem
        best = search_plan(problem, "exact", workload.seed, run)
        even = split_evenly(problem, workload.seed, run)
        searches = {"exact": best} | ({"uniform": even} if even else {})
        played = play_candidates(posed, searches, workload, graph, database)
        chosen, uniform = next(iter(played.values())), played.get("uniform")
        binding = bind_stages(problem, chosen.plan, machines)
        if binding.plan != chosen.plan:
            chosen = play_plan(posed, binding.plan, graph, database)
        found = ReportData(
            workload=workload,
            cluster=machines,
            table=table,
            searches=searches,
            price=chosen.price,
            uniform_price=uniform and uniform.price,
            binding=binding,
            simulation=chosen.simulation,
            uniform_simulation=uniform and uniform.simulation,
            step_factor=chosen.step_factor,
            uniform_step_factor=uniform.step_factor if uniform else 1.0,
            unremembered_step_seconds=play_without_memory(
                chosen.plan, graph, fresh, machines, workload, database, spread
            ),
            predicted_stages=tuple(stages_of(posed, chosen.plan)),
        )
        if train:
            tried = None if resume else try_initializations(workload, machines, work / "trials", run, dask)
            winner = tried.winner if tried else None
            if resume:
                job = resume_training(workload, binding, project / resume)
            else:
                job = prepare_training(workload, binding, winner, work / "runs" / str(flow_run.id))
            result = train_pipeline(job, graph, database, run, needed_bytes(binding, chosen.price), dask)
            remember_times(job, result, graph, database)
            difference = compare_with_one_process(job, result, work / "trials")
            found = replace(
                found,
                trials=tried.results if tried else None,
                winner=winner,
                training=result,
                torchrun_line="" if dask else torchrun_line(job),
                reference_difference=difference,
            )
        record_report(run, found)
        return Outcome(found, run.artifact_folder, run.uri)
