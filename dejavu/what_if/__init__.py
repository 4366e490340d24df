"""What-if questions over several plans: other clusters, more or fewer nodes, other batches, the cheapest that will do.

nodes.py      how many nodes of which group: `--add 2xa100`, `--remove 1xl4`, node types
asked.py      the cases of a question: a cluster and a workload each, by name
answers.py    what each case came to, and the differences
cheapest.py   the cheapest cluster that trains so many tokens in some time
table.py, record.py   the same for terminals and programs
plan_file.py, own_plan.py   a plan of one's own: read, and priced
"""

from dejavu.what_if.answers import Answered, Case, Difference, answer, difference
from dejavu.what_if.asked import varied
from dejavu.what_if.cheapest import Cheapest, Goal, Trained, cheapest
from dejavu.what_if.nodes import NodeFile, changed, parse_changes
from dejavu.what_if.own_plan import OwnPlan, price_own_plan
from dejavu.what_if.plan_file import read_plan, unlike
from dejavu.what_if.record import cheapest_to_dict, rows_to_dict
from dejavu.what_if.table import cases_table, goal_table, what_changes, what_is_cheapest

__all__ = [
    "Answered",
    "Case",
    "Cheapest",
    "Difference",
    "Goal",
    "NodeFile",
    "OwnPlan",
    "Trained",
    "answer",
    "cases_table",
    "changed",
    "cheapest",
    "cheapest_to_dict",
    "difference",
    "goal_table",
    "parse_changes",
    "price_own_plan",
    "read_plan",
    "rows_to_dict",
    "unlike",
    "varied",
    "what_changes",
    "what_is_cheapest",
]
