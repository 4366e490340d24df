"""Pipeline schedules of the literature, synchronous and asynchronous: bubble, memory and staleness on demand.

Searches and trainings have those that torch's runtime runs (`dejavu.plans.schedule.SCHEDULES`), all synchronous; what
is here besides can be simulated and compared, and is never chosen by a search.

_base.py         what a schedule is, and what its paper says of it
synchronous.py   those that flush, one copy of the model: GPipe, 1F1B, interleaved of any depth, breadth-first, zero
                 bubble, waves
chimera.py       two pipelines in opposite directions
pipedream.py, pipemare.py, ampnet.py   those that do not flush
timeline.py      the simulation, over several steps where there is no flush
cutting.py       the same layers for every schedule
slices.py        TeraPipe: what slices of a sequence take on a causal decoder (which are best: `plans.slicing`)
training.py      a small training in one process with each schedule's versions of the weights
ranks.py         the same by ranks, with messages
"""

from __future__ import annotations

from dejavu.foundation.registry import Family
from dejavu.plans.schedule import SCHEDULES
from dejavu.plans.slicing import Slicing, best_slices, best_uniform_slices
from dejavu.schedules import synchronous
from dejavu.schedules._base import UPDATE, PipelineSchedule, Task, Theory, WeightRule
from dejavu.schedules.ampnet import AMPNet
from dejavu.schedules.chimera import Chimera
from dejavu.schedules.cutting import cut_evenly
from dejavu.schedules.pipedream import PipeDream, PipeDream2BW
from dejavu.schedules.pipemare import PipeMare
from dejavu.schedules.synchronous import Synchronous, of_depth
from dejavu.schedules.timeline import SimulatedSchedule, Staleness, Timeline, simulate_schedule, timeline

PIPELINE_SCHEDULES: Family[PipelineSchedule] = Family(
    "pipeline schedule",
    {
        "gpipe": Synchronous(SCHEDULES["gpipe"], synchronous.gpipe),
        "1f1b": Synchronous(SCHEDULES["1f1b"], synchronous.one_forward_one_backward),
        "interleaved_1f1b": Synchronous(SCHEDULES["interleaved_1f1b"], synchronous.interleaved),
        "interleaved_1f1b_4": Synchronous(SCHEDULES["interleaved_1f1b_4"], synchronous.interleaved),
        "looped_bfs": Synchronous(SCHEDULES["looped_bfs"], synchronous.breadth_first),
        "looped_bfs_4": Synchronous(of_depth("looped_bfs", 4), synchronous.breadth_first),
        "interleaved_zero_bubble": Synchronous(SCHEDULES["interleaved_zero_bubble"], synchronous.zero_bubble),
        "zbv": Synchronous(SCHEDULES["zbv"], synchronous.zero_bubble),
        "dualpipe_v": Synchronous(SCHEDULES["dualpipe_v"], synchronous.zero_bubble),
        "hanayo": Synchronous(SCHEDULES["hanayo"], synchronous.waves),
        "hanayo_2": Synchronous(SCHEDULES["hanayo_2"], synchronous.waves),
        "chimera": Chimera(),
        "pipedream": PipeDream(),
        "pipedream_2bw": PipeDream2BW(),
        "pipemare": PipeMare(),
        "ampnet": AMPNet(),
    },
)

__all__ = [
    "PIPELINE_SCHEDULES",
    "UPDATE",
    "AMPNet",
    "Chimera",
    "PipeDream",
    "PipeDream2BW",
    "PipeMare",
    "PipelineSchedule",
    "SimulatedSchedule",
    "Slicing",
    "Staleness",
    "Synchronous",
    "Task",
    "Theory",
    "Timeline",
    "WeightRule",
    "best_slices",
    "best_uniform_slices",
    "cut_evenly",
    "of_depth",
    "simulate_schedule",
    "timeline",
]
