"""The one way from a request to a plan, for what-if questions, runs and re-planning.

request.py     everything a plan depends on
prices.py      the problems: every layer priced in every way that it may be spread
loops/         what every planning runs, compiled
questions.py   searches run on problems, side by side or on Dask
candidates.py  plans as they would run: under a schedule, simulated, corrected by earlier trainings
bounds.py      lower bounds on any plan's simulated step
planner.py     runs searches, simulates, takes the fastest plan that fits
choice.py      the chosen plan, and everything it was chosen from
sentences.py, table.py, record.py   the same for people, terminals and programs
"""

from dejavu.planning.candidates import Candidate
from dejavu.planning.choice import Choice, Considered
from dejavu.planning.considered import print_choice
from dejavu.planning.plan_json import check_target, choice_to_dict, made_for, write_answer
from dejavu.planning.planner import Planner
from dejavu.planning.prices import Prices, price_workload
from dejavu.planning.questions import BASELINES, Question, on_dask
from dejavu.planning.request import PlanRequest
from dejavu.planning.sentences import reason

__all__ = [
    "BASELINES",
    "Candidate",
    "Choice",
    "Considered",
    "PlanRequest",
    "Planner",
    "Prices",
    "Question",
    "check_target",
    "choice_to_dict",
    "made_for",
    "on_dask",
    "price_workload",
    "print_choice",
    "reason",
    "write_answer",
]
