"""The types of the flows' parameters: what Prefect's form shows of them, and what may be typed in their place.

The form's choices come from the families and its descriptions from the records' docstrings, so that what is added
there is in the form after the next `dejavu up`. A run needs neither, and starts without importing the families.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any

from griffe import Docstring, DocstringSectionKind
from pydantic import BaseModel, BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema

from dejavu.foundation.dask_workers import SYSTEMS
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import did_you_mean
from dejavu.parallelism import Parallelism
from dejavu.plans import Offload, StageConfiguration
from dejavu.workload.data_settings import (
    ExamplesSettings,
    ImageFolderSettings,
    ParquetSettings,
    SyntheticSettings,
    TokenizerSettings,
    TokensSettings,
)
from dejavu.workload.gradient_settings import GradientSettings
from dejavu.workload.settings import Workload
from dejavu.workload.training_settings import OptimizerSettings, ReplanSettings, TrialSettings
from flows.endings import without_a_reader, without_tracebacks
from flows.processes import RUN

if os.environ.get(RUN):  # a worker's run: a wrong parameter fails before the flow's own lines
    without_tracebacks()
    without_a_reader()

FAMILIES = {
    "search": ("dejavu.search", "SEARCHES"),
    "schedule": ("dejavu.plans.schedule", "SCHEDULES"),
    "proposer": ("dejavu.init", "PROPOSERS"),
    "model": ("dejavu.workload.models", "MODELS"),
    "data": ("dejavu.workload.data", "DATASETS"),
}
RECORDS: dict[str, type[BaseModel]] = {
    "optimizer": OptimizerSettings,
    "gradients": GradientSettings,
    "synthetic": SyntheticSettings,
    "tokens": TokensSettings,
    "tokenizer": TokenizerSettings,
    "parquet": ParquetSettings,
    "image_folder": ImageFolderSettings,
    "examples": ExamplesSettings,
    "trials": TrialSettings,
    "replan": ReplanSettings,
}


def choices(family: str, *also: str) -> list[str]:
    """Return the names that the form offers, or nothing in a run's own process."""
    if os.environ.get(RUN):
        return []
    module, members = FAMILIES[family]
    return [*also, *getattr(import_module(module), members)]


class Choice:
    """Annotate a string of the form: one of a family's members."""

    def __init__(self, family: str) -> None:
        self.family = family

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), **_one_of(choices(self.family))}


class WorkloadForm:
    """Annotate a workload: a file or a name may be typed for it, and its fields have titles, texts and choices."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        form = handler(schema)
        if not os.environ.get(RUN):
            fields = _describe(Workload, form, handler)
            fields["schedule"] |= _one_of(choices("schedule", "auto", "chimera"))
            fields["data"] |= _one_of(choices("data"))
            fields["model"] |= {"examples": choices("model")}
            _fields(fields["trials"], handler)["proposer"] |= _one_of(choices("proposer"))
        return {
            "anyOf": [
                {**form, "title": "fields"},
                {
                    "type": "string",
                    "title": "a file, an example or a model",
                    "examples": ["examples/workloads/digits.yaml", "gpt"],
                },
            ]
        }


def _one_of(names: Sequence[str]) -> dict[str, Any]:
    return {"enum": list(names)} if names else {}


def _fields(form: dict[str, Any], handler: GetJsonSchemaHandler) -> dict[str, Any]:
    fields: dict[str, Any] = handler.resolve_ref_schema(form)["properties"]
    return fields


def _describe(record: type[BaseModel], form: dict[str, Any], handler: GetJsonSchemaHandler) -> dict[str, Any]:
    """Give each field of a record's form the sentence that the record's docstring has about it; return the fields."""
    sections = Docstring(cleandoc(record.__doc__ or "")).parse("google", warnings=False)
    told = {
        attribute.name: attribute.description
        for section in sections
        if section.kind is DocstringSectionKind.attributes
        for attribute in section.value
    }
    handler.resolve_ref_schema(form)["description"] = cleandoc(record.__doc__ or "").partition("\n")[0]
    fields = _fields(form, handler)
    for name, field in fields.items():
        field["title"] = name.replace("_", " ")
        if name in told:
            field["description"] = told[name]
    for name, kind in RECORDS.items():
        field = fields.get(name, {})
        for one in (field, *field.get("anyOf", ())):
            if "$ref" in one:  # a column of a Parquet file may have a record's name
                _describe(kind, one, handler)
                break
    return fields


def _read(typed: Any) -> Any:
    if not isinstance(typed, str):
        return typed
    from dejavu.workload.loader import load_workload  # with torch, a second

    return load_workload(typed)


def _with_known_keys(typed: Any) -> Any:
    """Check the keys of what a form, or `-p`, gives for a `Parallelism`: pydantic would say neither value nor keys.

    Raises:
        InputError: one is unknown.
    """
    if isinstance(typed, Mapping):
        _check_keys("parallelism", typed, Parallelism)
        for name, record in (("offload", Offload), ("only", StageConfiguration)):
            listed = typed.get(name)
            for number, one in enumerate(listed if isinstance(listed, list | tuple) else ()):
                if isinstance(one, Mapping):
                    _check_keys(f"parallelism.{name}.{number}", one, record)
    return typed


def _check_keys(where: str, typed: Mapping[str, Any], record: type[Any]) -> None:
    known = [field.name for field in fields(record)]
    for key in typed.keys() - {*known}:
        raise InputError(
            f"unknown key {key!r:.60} in {where}, found with {typed[key]!r:.60}; wanted some of {', '.join(known)}"
            f"{did_you_mean(key, known)}"
        )


WorkloadParameter = Annotated[
    Workload, BeforeValidator(_read), WorkloadForm(), Field(json_schema_extra={"title": "what to train"})
]
# A file of it is read by the flow, which says once what is wrong with it.
WatchedWorkload = Annotated[
    Annotated[Workload, WorkloadForm()] | SkipJsonSchema[str], Field(json_schema_extra={"title": "what to train"})
]
WaysOfStages = Annotated[Parallelism, BeforeValidator(_with_known_keys)]
ClusterFile = Annotated[str, Field(json_schema_extra={"title": "cluster file"})]
Searches = Annotated[list[Annotated[str, Choice("search")]] | None, Field(json_schema_extra={"title": "searches"})]
Schedules = Annotated[list[Annotated[str, Choice("schedule")]] | None, Field(json_schema_extra={"title": "schedules"})]
Microbatches = Annotated[
    list[Annotated[int, Field(ge=1)]] | None, Field(json_schema_extra={"title": "numbers of microbatches"})
]
BudgetSeconds = Annotated[float, Field(ge=0, json_schema_extra={"title": "search time in seconds"})]
# Prefect's client prints what a pattern wants through rich, to which `[a-z…]` is markup: it would leave it out.
DaskAddress = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z]+://.+)?$",
        json_schema_extra={"title": "Dask scheduler", "examples": ["tls://10.0.0.1:8786"]},
    ),
]
DaskWorkers = Annotated[
    str,
    Field(
        pattern=rf"^([A-Za-z]+://.+|([1-9][0-9]*x)?({'|'.join(SYSTEMS)}))?$",
        json_schema_extra={"title": "Dask scheduler, or batch system", "examples": ["tls://10.0.0.1:8786", *SYSTEMS]},
    ),
]
TryLinks = Annotated[bool, Field(json_schema_extra={"title": "try the links"})]
