"""What every member of a family owes, as cases that run without pytest: ours are held to them, and so can be yours.

    from dejavu.testing import check_search

    def test_my_search() -> None:
        check_search(MySearch())

A case that fails raises an AssertionError that says what was asked, what was found, and what is owed. Each file has its
cases one by one as well (`CASES`), to be run and reported apart.
"""

from __future__ import annotations

from dejavu.testing.cost_sources import check_cost_source
from dejavu.testing.data_sets import check_data_set
from dejavu.testing.importers import check_importer
from dejavu.testing.models import check_model
from dejavu.testing.schedules import check_schedule
from dejavu.testing.searches import check_search

__all__ = [
    "check_cost_source",
    "check_data_set",
    "check_importer",
    "check_model",
    "check_schedule",
    "check_search",
]
