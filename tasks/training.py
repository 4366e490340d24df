"""From a binding to a trained model: trials on Dask, the pipeline, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dejavu.binding.binding import Binding
from dejavu.cluster import Cluster
from dejavu.cost.trainings.remember import remember
from dejavu.cost.trainings.steps import remembered_step_seconds
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.foundation.units import plural
from dejavu.graphs.graph import Graph
from dejavu.init import Draw
from dejavu.launch.comparison import (
    MOST_SECONDS,
    Comparison,
    Contestant,
    expected_seconds,
    measure_gain,
)
from dejavu.launch.launcher import launch, torchrun_line
from dejavu.migration import Decision, RunningProblem
from dejavu.migration.launching import launch_changing
from dejavu.planning import Candidate
from dejavu.plans import Price
from dejavu.profiles import ProfileDatabase, ProfileError
from dejavu.profiling.measuring import least_samples
from dejavu.runtime.job import Begun, TrainingJob, TrainingResult, job_to_resume, prepared_job, resumed
from dejavu.runtime.job.resume import changed_code, has_other_data, what_is_other
from dejavu.runtime.optimizer import learning_rate
from dejavu.runtime.process.failures import RankError
from dejavu.runtime.single import largest_difference
from dejavu.runtime.state import checkpoint_step, complete_checkpoints
from dejavu.track import FOLDER_TAG, Curve, Run, sampled_ranks
from dejavu.trials import (
    Rung,
    TrialResult,
    Trials,
    client_of,
    local_client,
    most_draws,
    remembered_reference,
    remembered_search,
    search_initialization,
    what_other_parts_change,
    what_replicas_do_apart,
)
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import own_code
from dejavu.workload.pretrained import check_pretrained, fingerprint, folder_of
from tasks.events import tell
from tasks.recording import HELD_OUT_LOSS, record_logs, record_model, record_training, record_trials
from tasks.shown import Progress, TrainingProgress

REPORTED_EVERY_STEPS = 5


class BoundBaseline(NamedTuple):
    """The best baseline, and its devices; its workload has its number of microbatches."""

    name: str
    workload: Workload
    bound: Candidate
    binding: Binding


TOLERATED_DIFFERENCE = 1e-5


class GoneError(DejavuError):
    """The folder of a training was moved or deleted while it ran."""


@contextmanager
def _in_its_folder(job: TrainingJob) -> Iterator[None]:
    """Say so where the training's folder is gone: tried again, it would begin anew without its checkpoints.

    Raises:
        GoneError: it is.
    """
    try:
        yield
    except (OSError, DejavuError) as error:
        if (Path(job.folder) / "job.json").is_file():
            raise
        raise GoneError(
            f"{job.folder} was moved or deleted while its training ran; where it was moved, `dejavu run --resume` with "
            "its new place goes on from its last checkpoint"
        ) from error


def _may_succeed_again(task: Any, run: Any, state: Any) -> bool:
    return not isinstance(state.result(raise_on_failure=False), RankError | InputError | GoneError)


@task(name="trials", task_run_name="trials", cache_policy=NO_CACHE)
def try_initializations(
    workload: Workload, cluster: Cluster, folder: Path, record: Run, dask: str = "", log: Any = None
) -> Trials | None:
    """Search N initializations by successive halving, in parallel; None: none wanted, or weights to start from given.

    Args:
        dask: address of a scheduler whose workers share the folder; empty: one worker here for each device.
        log: where its progress goes; None: the task's own.
    """
    log = log or get_run_logger()
    for note in check_pretrained(workload):
        log.info("%s", note)
    if not workload.num_trials:
        if workload.pretrained:
            log.info("no initializations are tried: the weights to start from are given")
        return None

    bar, tried = Progress("trials", f"initializations of {workload.model}, each with its first rung"), set[Draw]()
    total = most_draws(workload.trials)

    def on_result(result: TrialResult) -> None:
        tried.add(result.draw)  # those that are promoted are trained further
        done = len(tried)
        bar(done, total)
        loss = None if result.failure else result.score
        tell("trying", what=str(result.draw), done=done, total=total, loss=loss, failure=result.failure or None)
        took = "remembered" if result.remembered else f"{result.seconds:.1f} s"
        again = f", attempt {result.attempts}" if result.attempts > 1 else ""
        found = result.failure or f"running loss {result.score:.4f} after {plural(result.steps, 'step')}"
        log.info("trial %s: %s (%s%s)", result.draw, found, took, again)

    def on_rung(rung: Rung) -> None:
        number, best = len(rung.survivors), rung.best_score
        said = "successive halving, rung of %s: %d of %s kept, best running loss %.4f"
        log.info(said, plural(rung.steps, "step"), number, plural(len(rung.draws), "trial"), best)

    gpus = torch.cuda.device_count()
    workers = min(gpus or cluster.num_devices, total)
    with record.child("trials") as run:
        # Results that are known need no workers.
        trials = remembered_search(workload, folder, on_result=on_result, on_rung=on_rung)
        if trials is None:
            with client_of(dask) if dask else local_client(workers, folder / "dask", gpus=gpus > 0) as client:
                trials = search_initialization(client, workload, folder, on_result=on_result, on_rung=on_rung)
        record_trials(run, trials)
    bar.end()
    log.info(
        "the best of %d initializations: %s (%d training steps in all, %.1f s)",
        len(trials.results),
        trials.winner.draw,
        trials.total_steps,
        trials.seconds,
    )
    if trials.bought:
        log.info("%s", trials.bought)
    return trials


@task(name="compare", task_run_name="compare-with-baseline", cache_policy=NO_CACHE)
def measure_against_baseline(
    workload: Workload, binding: Binding, predicted_seconds: float, baseline: BoundBaseline | None, folder: Path
) -> Comparison | None:
    """Measure the plan and the best baseline in turn; None: not wanted, no baseline, or it is the plan itself.

    A comparison that fails is logged and leaves the plan as it is.
    """
    log = get_run_logger()
    if baseline is None or baseline.binding.plan == binding.plan or workload.compare is False:
        return None
    expected = expected_seconds(predicted_seconds, baseline.bound.step_seconds)
    if workload.compare is None and expected > MOST_SECONDS:
        log.info("the gain is not measured: it would take about %.0f s (compare: true in the workload)", expected)
        return None
    try:
        contestants = (Contestant(workload, binding), Contestant(baseline.workload, baseline.binding))
        comparison = measure_gain(*contestants, baseline.name, folder)
    except DejavuError as error:
        log.warning("the gain is not measured: %s", error)
        return None
    log.info("%s", comparison)
    return comparison


@task(name="prepare", task_run_name="prepare", cache_policy=NO_CACHE)
def prepare_training(workload: Workload, binding: Binding, tried: Trials | None, folder: Path) -> TrainingJob:
    """Write the one file that every rank reads; the training starts where the winning trial stopped."""
    if workload.odd:
        get_run_logger().warning("%s", workload.odd)
    winner = tried.winner if tried else None
    job = TrainingJob(
        workload=workload,
        binding=binding,
        draw=winner.draw if winner else Draw(seed=workload.seed),
        start_from=winner.state if winner else None,
        first_step=winner.steps if winner else 0,
        last_step=workload.num_steps,
        folder=str(folder),
        data_fingerprint=dataset_of(workload).fingerprint,
        model_code=own_code(workload),
        pretrained_fingerprint=fingerprint(workload),
    )
    job.write()
    return job


def has_other_weights(job: TrainingJob) -> bool:
    """Return whether the saved weights that the training started from are not there any more, or were written since."""
    try:
        return job.pretrained_fingerprint not in ("", fingerprint(job.workload))
    except InputError:
        return True


@task(name="read-job", task_run_name="read-job", cache_policy=NO_CACHE)
def read_job(folder: Path) -> TrainingJob:
    """Read the training job that was prepared in a run's folder, and warn of what is not as it began."""
    job = prepared_job(folder)
    for said in what_is_other(job):
        get_run_logger().warning("%s", said)
    return job


def needed_bytes(workload: Workload, binding: Binding, price: Price) -> list[float]:
    """Return each rank's predicted peak memory; 0 where the costs say only whether it fits."""
    return [np.nan_to_num(price.peak_bytes[placed.pipeline_rank]) for placed in binding.placements]


@task(name="prepare", task_run_name="resume", cache_policy=NO_CACHE)
def resume_training(workload: Workload, binding: Binding, folder: Path) -> TrainingJob:
    """Prepare an earlier training to continue, under today's plan.

    With a checkpoint it started from the saved weights that it was begun with, whatever the workload says now.
    """
    job = resumed(folder, workload, binding)
    complete = complete_checkpoints(job.checkpoints)
    before, step = job_to_resume(folder), checkpoint_step(complete[-1]) if complete else 0
    if complete:
        its_own = {"pretrained": before.workload.pretrained}
        begun = before.begun or Begun(before.workload, before.binding, step)
        job = replace(job, workload=workload.model_copy(update=its_own), begun=begun)
    else:
        job = replace(job, pretrained_fingerprint=fingerprint(workload), begun=None)
    job.write()
    where = f"step {step}" if complete else "its beginning: there is no checkpoint"
    get_run_logger().info("%s continues from %s", folder, where)
    if complete:
        for said in filter(None, (_other_rate(before.workload, workload, step), _other_parts(before, job))):
            get_run_logger().warning("%s", said)
    return job


def _other_rate(before: Workload, now: Workload, step: int) -> str:
    """Say what a training's learning rate does where it goes on for another number of steps; "": as it would have."""
    was, rate = learning_rate(before, step), learning_rate(now, step)
    if was == rate:
        return ""
    return (
        f"the learning rate decays to the end of the training: with num_steps {now.num_steps} in place of "
        f"{before.num_steps} it is {rate:.3g} in step {step + 1}, after {learning_rate(before, step - 1):.3g} in step "
        f"{step}, and losses are not those of a training that has {now.num_steps} from its beginning"
    )


def went_on(job: TrainingJob, result: TrainingResult) -> Iterator[str]:
    """Say of each change of the plan how the training went on, and what of its losses it changed."""
    for migration in result.migrations:
        yield str(migration)
        plans = (migration.from_plan, migration.to_plan)
        before, now = (replace(job, binding=replace(job.binding, plan=plan)) for plan in plans)
        if said := _other_parts(before, now):
            yield said


def _other_parts(before: TrainingJob, now: TrainingJob) -> str:
    """Say that a training goes on with other losses, as its plan parts the examples in another way; "": it does not."""
    if not (what := what_other_parts_change(before, now)):
        return ""
    others = "the plan has other microbatches or replicas than the one before, and losses are not those under that"
    return f"{others}. {what}"


@task(
    name="train",
    task_run_name="train",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=1,
    retry_condition_fn=_may_succeed_again,
)
def train_pipeline(
    job: TrainingJob,
    graph: Graph,
    cluster: Cluster,
    database: Path,
    record: Run,
    needed_bytes: Sequence[float] | None,
    dask: str = "",
    log: Any = None,
) -> TrainingResult:
    """Launch the ranks, on other hosts through a Dask scheduler; a retry resumes from the last complete checkpoint.

    Where the workload says `replan: {action: migrate}`, the plan follows the cluster while the training runs.

    Args:
        log: where its progress goes, the losses among it; None: the task's own.
    """
    log, rows = log or get_run_logger(), ProfileDatabase(database)
    job = replace(job, least_sample_seconds=least_samples(rows))
    before = remembered_step_seconds(graph, job.binding.plan, rows, job.workload.accumulate)
    if before is not None:
        log.info("déjà vu: this plan was trained before, at %.1f ms a step", before * 1e3)
    plan = job.binding.plan
    stages, devices = plural(len(plan.stages), "stage"), plural(len(job.binding.placements), "device")
    log.info("training %s on %s under %s", stages, devices, plan.schedule_name)

    bar, progress = Progress("training", f"steps of {job.workload.model}"), TrainingProgress(job, graph, cluster)

    def on_step(step: int, loss: float) -> None:
        done = step + 1
        bar(done, job.last_step)
        losses.add(step, loss)
        progress.add(step, loss)
        if step == job.first_step or done == job.last_step or done % REPORTED_EVERY_STEPS == 0:
            log.info("step %d of %d: loss %.4f%s", done, job.last_step, loss, str(progress))

    def on_evaluation(step: int, loss: float) -> None:
        held_out.add(step, loss)
        log.info("step %d of %d: loss %.4f on what is held out", step + 1, job.last_step, loss)

    def on_decision(decision: Decision) -> None:
        log.warning("%s", decision)

    with client_of(dask) if dask else nullcontext() as client:
        line = torchrun_line(job, client)
        log.info("to launch it by hand: %s", line)
        record.tags({FOLDER_TAG: job.folder})
        with record.child("training", {"torchrun": line}, {FOLDER_TAG: job.folder}) as run:
            losses, held_out = Curve(run, "loss"), Curve(run, HELD_OUT_LOSS)
            told: dict[str, Any] = {"on_step": on_step, "on_evaluation": on_evaluation}
            try:
                with _in_its_folder(job), sampled_ranks(run, len(job.binding.placements)):
                    if job.workload.replan.action == "migrate":
                        running = RunningProblem.of_plan(plan, job.workload, cluster, database)
                        result = launch_changing(
                            job, running, client, needed_bytes=needed_bytes, on_decision=on_decision, **told
                        )
                    else:
                        result = launch(job, client, needed_bytes=needed_bytes, **told)
            finally:
                losses.flush()
                held_out.flush()
                record_logs(run, Path(job.folder))
            record_training(run, losses, held_out, result)
            log.info("%s", record_model(run, job, result))
    bar.end()
    if result.left_out_steps:
        are_all = len(result.left_out_steps) == len(result.losses)
        log.log(WARNING if are_all else INFO, "left out: %s", result.said_of_left_out)
    for warning in result.warnings:
        log.warning("%s", warning)
    for said in went_on(job, result):
        log.warning("%s", said)
    if result.restarts and not result.migrations:
        why = "; ".join(result.failures)
        times = plural(result.restarts, "time")
        log.warning("ranks were restarted %s, the last time from %s: %s", times, result.origin, why)
    return result


@task(name="compare", task_run_name="compare", cache_policy=NO_CACHE)
def compare_with_one_process(job: TrainingJob, result: TrainingResult, trials: Path) -> float | None:
    """Return the largest difference between the pipeline's first losses and those of single-process training.

    Args:
        trials: the folder of the trials, where the single process's losses are kept.

    Returns:
        None where there is nothing to compare.
    """
    job = job.at_its_beginning
    if has_other_data(job):
        get_run_logger().info(
            "the first losses are not compared with single-process training: the examples of data: %s are not those "
            "that the training began with",
            job.workload.data,
        )
        return None
    if has_other_weights(job):
        get_run_logger().info(
            "the first losses are not compared with single-process training: the weights in %s, from which the "
            "training started, are not there any more or were written since",
            folder_of(job.workload),
        )
        return None
    expected = remembered_reference(job, trials)
    if expected is None:
        get_run_logger().info(
            "the first losses are not compared with single-process training: %s, from which the training started, is "
            "not here any more",
            job.start_from,
        )
        return None
    difference = largest_difference(expected, result) if result.first_step == job.first_step else None
    if difference is None:  # there was no step, or the first losses are lost
        return None
    if not difference <= TOLERATED_DIFFERENCE and not job.workload.gradients.gathers:  # one process takes the mean
        causes = filter(None, (what_replicas_do_apart(job), changed_code(job)))
        get_run_logger().warning(
            "the first losses differ from single-process training by %.1e; up to %.0e is rounding%s",
            difference,
            TOLERATED_DIFFERENCE,
            "".join(f". {cause[0].upper()}{cause[1:]}" for cause in causes),
        )
    return difference


@task(name="remember", task_run_name="remember", cache_policy=NO_CACHE)
def remember_times(job: TrainingJob, result: TrainingResult, graph: Graph, database: Path, cluster: Cluster) -> None:
    """Save measured step and stage times as rows of the database; where it takes none, that is a warning.

    The training is complete, and its page and summary are still to come.
    """
    if not result.kept_its_plan:
        get_run_logger().info(
            "no times are remembered: the plan changed, or a device or a link became slower, while the training ran"
        )
        return
    try:
        rows = remember(job.workload, job.binding, result.times, graph, ProfileDatabase(database), cluster)
    except ProfileError as error:
        get_run_logger().warning("no times are remembered: %s", error)
        return
    get_run_logger().info("remembered %d measured step and stage times", rows)
