"""Importers of others' profiles and problems: one file for each.

`IMPORTERS` are the profiles that `import_profile` brings into the cost database; `alpa_cases` reads planner problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dejavu.foundation.errors import InputError
from dejavu.importers._base import BadRow, Batch, Importer
from dejavu.importers.alpa import Alpa
from dejavu.importers.devices import DeviceNames
from dejavu.importers.intake import ImportReport, import_profile
from dejavu.importers.metis import Metis
from dejavu.importers.nccl_tests import NcclTests
from dejavu.importers.neusight import NeuSight
from dejavu.importers.vidur import Vidur

IMPORTERS: dict[str, type[Importer]] = {
    "alpa": Alpa,
    "neusight": NeuSight,
    "vidur": Vidur,
    "metis": Metis,
    "nccl-tests": NcclTests,
}


def importer_named(name: str, devices: DeviceNames, options: Mapping[str, Any]) -> Importer:
    """The importer of a format with what the user said; options that are None were not given.

    Raises:
        InputError: no such format, or an option that is not for it.
    """
    if name not in IMPORTERS:
        raise InputError(f"unknown format {name!r}; wanted one of {', '.join(IMPORTERS)}")
    given = {option: value for option, value in options.items() if value is not None}
    known = {field.name for field in fields(IMPORTERS[name])}
    for option in given:
        if option not in known:
            others = [other for other, class_ in IMPORTERS.items() if option in {f.name for f in fields(class_)}]
            raise InputError(f"--{option.replace('_', '-')} is not for {name}; it is for {', '.join(others)}")
    return IMPORTERS[name](devices=devices, **given)


__all__ = [
    "IMPORTERS",
    "BadRow",
    "Batch",
    "DeviceNames",
    "ImportReport",
    "Importer",
    "import_profile",
    "importer_named",
]
