"""Importers of others' profiles and problems: one file for each.

`IMPORTERS` are the profiles that `import_profile` brings into the cost database; `alpa.cases` reads planner problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import Family, named
from dejavu.importers._base import BadRow, Batch, Importer, option
from dejavu.importers.alpa import Alpa
from dejavu.importers.devices import DeviceNames
from dejavu.importers.intake import ImportReport, import_profile
from dejavu.importers.metis import Metis
from dejavu.importers.nccl_tests import NcclTests
from dejavu.importers.neusight import NeuSight
from dejavu.importers.vidur import Vidur

IMPORTERS: Family[type[Importer]] = Family(
    "format",
    {
        "alpa": Alpa,
        "neusight": NeuSight,
        "vidur": Vidur,
        "metis": Metis,
        "nccl-tests": NcclTests,
    },
)


COMMON = tuple(field.name for field in fields(Importer))  # what the command asks of all


@dataclass(frozen=True)
class ImporterOption:
    """What importers can be told: a field of theirs.

    Attributes:
        name: of the field; the command calls it `--the-name`.
        type: of its value.
        help: what it is for, format by format.
        formats: which importers take it.
    """

    name: str
    type: type
    help: str
    formats: tuple[str, ...]


def importers_options() -> tuple[ImporterOption, ...]:
    """Every option of every importer, made from their fields; what two importers share is one option."""
    found: dict[str, ImporterOption] = {}
    for format, kind in IMPORTERS.items():
        types = get_type_hints(kind)
        for field in fields(kind):
            if field.name in COMMON:
                continue
            value = next(one for one in (get_args(types[field.name]) or (types[field.name],)) if one is not NoneType)
            help, others = f"{format}: {field.metadata['help']}", found.get(field.name)
            if others is not None:
                help, formats = f"{others.help}; {help}", (*others.formats, format)
            else:
                formats = (format,)
            found[field.name] = ImporterOption(field.name, value, help, formats)
    return tuple(found.values())


def importer_of(format: str, devices: DeviceNames, options: Mapping[str, Any]) -> Importer:
    """The importer of a format with what the user said; options that are None were not given.

    Raises:
        InputError: no such format, or an option that is not for it.
    """
    kind = named(IMPORTERS, format)
    given = {name: value for name, value in options.items() if value is not None}
    for one in importers_options():
        if one.name in given and format not in one.formats:
            takers = ", ".join(one.formats)
            raise InputError(f"--{one.name.replace('_', '-')} is not for {format}; it is for {takers}")
    return kind(devices=devices, **given)


__all__ = [
    "IMPORTERS",
    "BadRow",
    "Batch",
    "DeviceNames",
    "ImportReport",
    "Importer",
    "ImporterOption",
    "import_profile",
    "importer_of",
    "importers_options",
    "option",
]
