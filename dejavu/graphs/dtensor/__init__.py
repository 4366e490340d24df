"""What torch's distributed tensors lack: rules for operators, and views of what a collective has put in order."""

from dejavu.graphs.dtensor.rules import AVERAGED, REPLICATED, RULES, SUMMED, Rule, TensorType, tell_torch
from dejavu.graphs.dtensor.views import VIEW, lie_alike

__all__ = ["AVERAGED", "REPLICATED", "RULES", "SUMMED", "VIEW", "Rule", "TensorType", "lie_alike", "tell_torch"]
