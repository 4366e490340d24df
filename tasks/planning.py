"""From a request to a plan on devices: search in parallel, choose, bind, simulate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.utilities.annotations import opaque

from dejavu.binding import Binding
from dejavu.foundation.units import counted_devices, format_seconds, plural
from dejavu.planning import Choice, Planner, PlanRequest, Question, on_dask, reason
from dejavu.planning.candidates import simulate_bound
from dejavu.planning.questions import Ask
from dejavu.plans import Answer, SearchResult
from dejavu.trials import client_of
from tasks.answers import question_key
from tasks.events import tell


@task(name="search", task_run_name="search: {what}", cache_policy=NO_CACHE)
def search(what: str, questions: Sequence[Question], client: Any) -> list[Answer]:
    """Run searches, on Dask workers or in this thread; searches of milliseconds share a task run."""
    answers = on_dask(client)(questions) if client is not None else [question.answer() for question in questions]
    log = get_run_logger()
    for question, answer in zip(questions, answers, strict=True):
        level = logging.DEBUG if question.is_quick else logging.INFO
        if isinstance(answer, SearchResult):
            said = f"estimated step {format_seconds(answer.step_seconds)} (cost model)"
            log.log(level, "%s: %s, %.2f s of CPU time", question, said, answer.seconds)
        else:
            log.log(level, "%s: %s", question, answer)
    return answers


def side_by_side(client: Any) -> Ask:
    """Run each question as a task run of its own, concurrently; the quick ones of one problem share one."""

    def ask(questions: Sequence[Question]) -> list[Answer]:
        groups: dict[Any, list[int]] = {}
        for k, question in enumerate(questions):
            groups.setdefault((id(question.priced), None if question.is_quick else question.search), []).append(k)
        num_problems = len({id(question.priced) for question in questions})
        num_counts = len({question.num_microbatches for question in questions})
        runs = []
        for numbers in groups.values():
            group = [questions[k] for k in numbers]
            name = _named(group, tells_devices=num_problems > num_counts)
            runs.append((numbers, search.submit(name, opaque(group), opaque(client))))
        found = {k: answer for numbers, run in runs for k, answer in zip(numbers, run.result(), strict=True)}
        return [found[k] for k in range(len(questions))]

    return ask


def _named(questions: Sequence[Question], *, tells_devices: bool) -> str:
    """Name the task run that answers these questions about one problem."""
    searches, first = ", ".join(question.search for question in questions), questions[0]
    up_to = f", up to {counted_devices(first.priced.problem.device_counts)}" if tells_devices else ""
    return f"{searches}: {plural(first.num_microbatches, 'microbatch')}{up_to}"


@task(
    name="choose",
    task_run_name="choose",
    cache_key_fn=question_key,
    persist_result=True,
    result_serializer="pickle",
)
def choose_plan(request: PlanRequest, dask: str) -> Choice:
    """Plan as `dejavu plan` does, each search a task run. An equal request is answered from the cache."""
    log = get_run_logger()
    with client_of(dask) if dask else nullcontext() as client:
        now: dict[str, Any] = {"what": "", "best_step_seconds": None, "lower_bound_seconds": None}

        def on_progress(what: str, done: int, total: int) -> None:
            log.debug("%s", what)
            now["what"] = what.partition(" (")[0]
            tell("searching", **now, done=done, total=total)

        def on_found(best_seconds: float | None, bound_seconds: float | None) -> None:
            now.update(best_step_seconds=best_seconds, lower_bound_seconds=bound_seconds)
            tell("searching", **now, done=None, total=None)

        return Planner(side_by_side(client), tell=on_progress, found=on_found).plan(request)


def say_choice(choice: Choice, log: Any) -> None:
    """Log what was chosen, and what corrected its prices."""
    log.info("%s", reason(choice))
    for correction in choice.prices.corrections:
        log.info("déjà vu: %s", correction)


@task(name="bind", task_run_name="bind", cache_policy=NO_CACHE)
def bind_stages(choice: Choice) -> Binding:
    """Bind stages to actual devices, as they were when the plan was simulated, and log why each is where it is."""
    binding = choice.binding
    get_run_logger().info("bound to devices: %s", "; ".join(binding.reasons))
    return binding


@task(name="simulate", task_run_name="simulate-without-memory", cache_policy=NO_CACHE)
def without_memory(choice: Choice, binding: Binding) -> float:
    """Return the step that would be predicted if no training had ever been remembered, in seconds."""
    return simulate_bound(choice.prices.fresh.priced_for(binding.plan), binding, choice.request.cluster).step_seconds
