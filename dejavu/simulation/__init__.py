"""Simulates torch's own order of actions, event by event, with the times of each stage and each message.

The searches' formula (`plans.price`) hides messages, lets one stage bound forward and backward, and adds the fill after
the slowest stage; this does none of it, so the final candidates are compared by it.
"""

from __future__ import annotations

from dejavu.simulation.blocking import BlockedStep, BlockingMessages, Sending, simulate_blocking
from dejavu.simulation.plans import (
    both_ways_seconds,
    price_of_simulated,
    simulate_plan,
    simulate_plan_blocking,
    stages_of,
)
from dejavu.simulation.result import Event, Simulation, trace_rows
from dejavu.simulation.step import Message, StageSeconds, order_of, simulate

__all__ = [
    "BlockedStep",
    "BlockingMessages",
    "Event",
    "Message",
    "Sending",
    "Simulation",
    "StageSeconds",
    "both_ways_seconds",
    "order_of",
    "price_of_simulated",
    "simulate",
    "simulate_blocking",
    "simulate_plan",
    "simulate_plan_blocking",
    "stages_of",
    "trace_rows",
]
