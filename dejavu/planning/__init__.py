"""The what-if question: which plan for this model on that cluster, what else was considered, and how good it is."""

from dejavu.planning.choice import Choice, Considered, PricedPlan
from dejavu.planning.question import Question
from dejavu.planning.table import print_choice, write_choice

__all__ = ["Choice", "Considered", "PricedPlan", "Question", "print_choice", "write_choice"]
