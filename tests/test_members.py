"""Every family of parts: one registry, one answer to an unknown name, and a new member at once where it is wanted."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from dejavu.cluster import catalogue
from dejavu.cost import SOURCES
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import Family, named
from dejavu.importers import IMPORTERS
from dejavu.init import PROPOSERS, SCHEMES
from dejavu.plans.schedule import SCHEDULES
from dejavu.profiling.profiler import KINDS
from dejavu.search import SEARCHES
from dejavu.workload.data import DATASETS
from dejavu.workload.models import MODELS

FAMILIES: list[Family[Any]] = [
    *(SEARCHES, SCHEDULES, SCHEMES, PROPOSERS, IMPORTERS, MODELS, DATASETS, SOURCES, KINDS),
    catalogue(),
]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.what)


@every_family
def test_a_name_finds_its_member_and_a_misspelt_one_is_asked_about(family: Family[Any]) -> None:
    for name, member in family.items():
        assert named(family, name) is member
        for misspelt in (name.swapcase(), f"{name}{name[-1]}", name[:-1]):
            if misspelt in family:
                continue
            with pytest.raises(InputError, match=f"^unknown {family.what} {misspelt!r}; did you mean '") as caught:
                named(family, misspelt)
            assert caught.value.field == family.field
        assert repr(name) in family.unknown(name.swapcase())


@every_family
def test_of_a_name_like_none_all_that_are_known_are_told(family: Family[Any]) -> None:
    told = family.unknown("§" * 1000)
    assert told.startswith(f"unknown {family.what} '{'§' * 80}'; wanted one of ")
    assert family.wanted in told if family.wanted else all(name in told for name in (*family, *family.also))


def test_a_family_is_a_dict_that_survives_copies() -> None:
    for again in (copy.copy(SCHEDULES), copy.deepcopy(SCHEDULES), pickle.loads(pickle.dumps(SCHEDULES))):
        assert again == dict(SCHEDULES)
        assert again.unknown("2f2b") == SCHEDULES.unknown("2f2b")
