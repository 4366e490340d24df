"""Virtual workers beside the one pipeline of `dejavu plan`: what is printed and written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dejavu.foundation.tables import print_whole
from dejavu.planning import Choice, Planner
from dejavu.virtual_workers import Team, Teams, team_tables, what_a_team_yields
from flows.what_if import Answers

if TYPE_CHECKING:
    from rich.console import Console


def beside(choice: Choice, planner: Planner) -> Answers:
    """Plan virtual workers for the question that one pipeline was chosen for."""
    found = Teams(choice, planner).best()

    def show(console: Console) -> None:
        for table in team_tables(found):
            print_whole(console, table)
        console.print(what_a_team_yields(found), highlight=False, markup=False)

    return Answers({"virtual_workers": found.to_dict() if isinstance(found, Team) else None}, show)
