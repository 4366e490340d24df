"""Two copies of the model on the same ranks, in opposite directions (Chimera, Li and Hoefler, SC 2021).

Rank r of P has stage r of the copy that goes down the ranks and stage P − 1 − r of the one that goes up. Each has half
of every run's examples, so what one leaves idle the other fills. Once a step both holders of a layer sum its gradients,
as virtual workers do: for `World` these are two pipelines of the same ranks.

schedule.py   the passes of both in torch's runtime
"""

from __future__ import annotations

from dejavu.foundation.errors import InputError
from dejavu.foundation.units import plural
from dejavu.plans import Plan, StageConfiguration
from dejavu.workload import Workload
from dejavu.workload.models import layers_of
from dejavu.workload.models.ties import ties_of


def check_goes_both_ways(workload: Workload) -> None:
    """Check that a workload can be trained in both directions, under some plan.

    Raises:
        InputError: it cannot; the message says what would do.
    """
    asked = "schedule: chimera"
    if ties_of(layers_of(workload)):
        raise InputError(f"{asked}: model {workload.model!r} has tied weights; wanted tied: false")
    if workload.in_slices or workload.gradients.gathers or workload.replan.action == "migrate":
        raise InputError(
            f"{asked} runs whole sequences, sums gradients, and keeps its plan; wanted no slices, gradients: mean, and "
            "replan: {action: notify}"
        )
    if workload.run_size % 2:
        raise InputError(f"{asked} with a batch of {workload.run_size}; wanted one that halves")


def is_one_device(one: StageConfiguration) -> bool:
    """Return whether a stage of this configuration can have one of the other copy beside it: on a device of its own."""
    return one == StageConfiguration(one.device_type, recompute=one.recompute, groups=one.groups)


def check_both_ways(workload: Workload, plan: Plan) -> None:
    """Check that a plan can be trained in both directions, where that is wanted.

    Raises:
        InputError: it cannot; the message says what would do.
    """
    if not workload.both_ways:
        if plan.both_ways:
            raise InputError("the plan goes both ways and the workload does not; wanted both_ways: true")
        return
    asked, stages, count = "schedule: chimera", len(plan.stages), plan.num_microbatches
    if plan.schedule != "1f1b":
        raise InputError(f"{asked} is 1F1B in both directions, and the plan's schedule is {plan.schedule}; wanted 1f1b")
    if stages % 2 or count % 2:
        raise InputError(
            f"{asked}: the plan has {plural(stages, 'stage')} and {plural(count, 'microbatch')}; wanted even numbers "
            "of both, as half of the microbatches go up the ranks that the others go down"
        )
    for number, stage in enumerate(plan.stages):
        if not is_one_device(stage.configuration):
            raise InputError(
                f"{asked}: stage {number} is on {stage.configuration}; wanted one device for each stage, without ZeRO "
                "and with nothing kept elsewhere: tensor_parallel 1, data_parallel 1"
            )
    check_goes_both_ways(workload)
