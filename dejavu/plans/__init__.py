"""A search's input (`Problem`), its output (`Plan`), and the one price that all searches share.

schedule.py     when each rank does what, by torch's own lists
stage_costs.py  what stages cost: sums over layers, or a tensor
plan.py         stage configurations, stages, plans
problem.py      what a search is asked
answers.py      what it answers: a plan, a proof that there is none, or nothing
pricing.py      the price, and the checks of a plan
priced_problem.py  a problem with what the simulator needs besides
"""

from __future__ import annotations

from dejavu.plans.answers import Answer, Infeasible, NoPlanError, NotFound, Obstacle, SearchResult, solved
from dejavu.plans.plan import LayerSplit, Offload, Plan, Stage, StageConfiguration
from dejavu.plans.priced_problem import PassCost, PricedProblem
from dejavu.plans.pricing import DoesNotFitError, Price, check, is_valid, price, step_seconds
from dejavu.plans.problem import Problem

__all__ = [
    "Answer",
    "DoesNotFitError",
    "Infeasible",
    "LayerSplit",
    "NoPlanError",
    "NotFound",
    "Obstacle",
    "Offload",
    "PassCost",
    "Plan",
    "Price",
    "PricedProblem",
    "Problem",
    "SearchResult",
    "Stage",
    "StageConfiguration",
    "check",
    "is_valid",
    "price",
    "solved",
    "step_seconds",
]
