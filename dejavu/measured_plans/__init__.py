"""Prices plans from measured layers: whole layers by device, tensor-parallel degree and microbatch, and a network.

For plans that somebody trained, whose replicas may be of several types of devices: `read_folder`, then `price_plan`.
"""

from __future__ import annotations

from dejavu.measured_plans.folder import MeasuredFolder, read_folder
from dejavu.measured_plans.layers import LayerProfile, MissingProfileError
from dejavu.measured_plans.network import Network
from dejavu.measured_plans.plans import BadPlan, MeasuredPlan, MeasuredStage, Replica
from dejavu.measured_plans.pricing import MessageForm, PlanPrice, price_plan

__all__ = [
    "BadPlan",
    "LayerProfile",
    "MeasuredFolder",
    "MeasuredPlan",
    "MeasuredStage",
    "MessageForm",
    "MissingProfileError",
    "Network",
    "PlanPrice",
    "Replica",
    "price_plan",
    "read_folder",
]
