"""Reading a plan of one's own from a file, as `dejavu plan --json` writes it or a person."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import did_you_mean
from dejavu.planning import PlanRequest, made_for
from dejavu.plans import Plan
from dejavu.plans.plan import LayerSplit, Stage, StageConfiguration
from dejavu.plans.schedule import CHIMERA, SCHEDULES
from dejavu.plans.stage_costs import PlanError

ANSWER = "considered"  # the key that only an answer of `dejavu plan` has
ANSWERS = "rows"  # the key of answers to several questions, each with its plan
PLAN_KEYS = ("stages", "schedule", "num_microbatches", "microbatches", "slices", "both_ways", "splits")
COUNT_KEYS = ("num_microbatches", "microbatches")
STAGE_KEYS = ("start", "stop", "layers", "configuration")


def read_plan(path: Path) -> Plan:
    """Read a plan: what `dejavu plan --json` wrote, or stages with `start`, `stop` (not included) and `configuration`.

    Raises:
        InputError: it cannot be read, or is no plan; the message names the stage.
    """
    content = _content(path)
    if isinstance(content, dict) and ANSWERS in content and "stages" not in content:
        raise InputError(
            f"{path} has answers to several questions; wanted a file with one plan, as `plan` in one of its `{ANSWERS}`"
        )
    rows = content.get("stages") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        found = f"stages is {rows!r:.60}" if isinstance(content, dict) else f"found {content!r:.60}"
        raise InputError(f"{path}: {found}; wanted an object with `stages`, a list of one stage or more")
    if ANSWER not in content:  # what `dejavu plan --json` wrote has more, and a schedule and numbers among it
        _check_keys(str(path), content, PLAN_KEYS)
        for s, row in enumerate(rows):
            _check_keys(f"{path}: stage {s}", row, STAGE_KEYS)
    name, *others = [name for name in COUNT_KEYS if name in content] or COUNT_KEYS[:1]
    count = content.get(name)
    if others and content[others[0]] != count:
        raise InputError(
            f"{path}: {name} is {count!r:.60} and {others[0]} {content[others[0]]!r:.60}; wanted one of the two"
        )
    if not _is_count(count):
        raise InputError(f"{path}: {name} is {count!r:.60}; wanted a whole number, 1 or more")
    stages = tuple(_stage(f"{path}: stage {s}", row) for s, row in enumerate(rows))
    _check_layers(path, stages)
    slices = content.get("slices", [])
    if not isinstance(slices, list) or not all(map(_is_count, slices)):
        raise InputError(f"{path}: slices is {slices!r:.60}; wanted a list of positions, each 1 or more")
    schedule, both_ways = _schedule(path, content)
    try:
        SCHEDULES[schedule].num_ranks(len(stages))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return Plan(stages, schedule, count, _splits(path, content), tuple(slices), both_ways)


def unlike(path: Path, request: PlanRequest) -> str:
    """Say where the plan in this file was made for something else than the request asks; empty: nowhere, or unsaid.

    Raises:
        InputError: the file cannot be read, or `made_for` in it is no object.
    """
    content = _content(path)
    told = content.get("made_for", {}) if isinstance(content, dict) else {}
    if not isinstance(told, dict):
        raise InputError(f"{path}: made_for is {told!r:.60}; wanted an object, as `dejavu plan --json` writes it")
    asked = json.loads(json.dumps(made_for(request)))  # tuples are lists, as they are in the file
    different = [name for name in asked if name in told and told[name] != asked[name]]
    if not different:
        return ""
    theirs, ours = (", ".join(f"{name} {one[name]}" for name in different) for one in (told, asked))
    return f"the plan was made for {theirs}, and is priced for {ours}"


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error


def _splits(path: Path, content: Mapping[str, Any]) -> tuple[LayerSplit, ...]:
    rows = content.get("splits", [])
    try:
        return Plan.from_dict({"stages": (), "schedule": "1f1b", "num_microbatches": 1, "splits": rows}).splits
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: splits is {rows!r:.60}; wanted a list as a training's job.json has it") from error


def _check_keys(place: str, found: Any, known: Sequence[str]) -> None:
    """Check that there is no key that would be ignored."""
    for key in found if isinstance(found, Mapping) else ():
        if key not in known:
            hint = did_you_mean(key, known) or f"; wanted some of {', '.join(known)}"
            raise InputError(f"{place}: unknown key {key!r:.60}{hint}")


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _schedule(path: Path, content: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the name of the schedule that each copy of the model runs under, and whether there are two."""
    schedule = content.get("schedule", "1f1b")
    if not isinstance(schedule, str) or schedule not in (*SCHEDULES, CHIMERA):
        raise InputError(f"{path}: schedule: {SCHEDULES.unknown(str(schedule), CHIMERA)}")
    both_ways = content.get("both_ways", schedule == CHIMERA)
    if not isinstance(both_ways, bool):
        raise InputError(f"{path}: both_ways is {both_ways!r:.60}; wanted true or false")
    if both_ways != (schedule == CHIMERA) and schedule != "1f1b":
        wanted = "true with chimera, or another schedule" if schedule == CHIMERA else "false, or schedule chimera"
        raise InputError(f"{path}: both_ways is {str(both_ways).lower()} with schedule {schedule}; wanted {wanted}")
    return "1f1b" if both_ways else schedule, both_ways


def _stage(place: str, row: Any) -> Stage:
    span = row.get("layers", row) if isinstance(row, Mapping) else row
    if not isinstance(row, Mapping) or not isinstance(span, Mapping):
        key = "" if span is row else "layers "
        raise InputError(f"{place}: {key}is {span!r:.60}; wanted an object with start and stop")
    for name, least in (("start", 0), ("stop", 1)):
        end = span.get(name)
        if not isinstance(end, int) or isinstance(end, bool) or end < least:
            raise InputError(f"{place}: {name} is {end!r:.60}; wanted a whole number, {least} or more")
        if (other := row.get(name, end)) != end:
            raise InputError(f"{place}: {name} is {other!r:.60}, and in layers {end}; wanted one of the two")
    try:
        configuration = StageConfiguration.from_dict(row.get("configuration", {}))
    except PlanError as error:
        raise InputError(f"{place}: {error}") from error
    return Stage(span["start"], span["stop"], configuration)


def _check_layers(path: Path, stages: Sequence[Stage]) -> None:
    at = 0
    for s, stage in enumerate(stages):
        if stage.stop <= stage.start:
            raise InputError(
                f"{path}: stage {s} is layers {stage.start} to {stage.stop}, not included; wanted one or more"
            )
        if stage.start != at:
            twice = f"layer {stage.start} stands twice" if stage.start < at else f"layer {at} is in no stage"
            raise InputError(f"{path}: stage {s} starts at layer {stage.start}; wanted {at}: {twice}")
        at = stage.stop
