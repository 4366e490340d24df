"""Checks before any rank starts: what cannot run is an error that says what would work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from dejavu.cluster import Cluster, this_machine
from dejavu.cluster.catalogue import is_gpu
from dejavu.foundation import units
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.graphs.compiling import check_compiler
from dejavu.init import SCHEMES
from dejavu.launch.rendezvous import Host, is_here
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.plans.schedule import SCHEDULES, actions, allowed_microbatches
from dejavu.runtime.both_ways import check_both_ways
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.layout import Layout, World, workload_of
from dejavu.runtime.process.failures import LaunchError
from dejavu.runtime.process.group import shares_gpus
from dejavu.runtime.shapes import boundaries
from dejavu.runtime.splits.sliceable import check_slices, check_stages_of_slices
from dejavu.workload.data import check_data, dataset_of
from dejavu.workload.models import LayerBuilder, layers_of
from dejavu.workload.slices import slice_lengths


def check_job(job: TrainingJob) -> None:
    """Check everything of a job that does not depend on its hosts.

    Raises:
        LaunchError, InputError: it cannot be trained; the message says what would do.
    """
    for check in (check_plan, check_spreading, check_draw, check_compiled):
        check(job)
    check_data(job.workload)


def check_plan(job: TrainingJob) -> None:
    """Check that the plan fits this model and batch; of virtual workers, each one's, and all of them together.

    Raises:
        LaunchError: it is not.
        InputError: virtual workers have not the whole batch, or split layers differently.
    """
    _check_each(job, _check_plan)
    if job.binding.workers:
        _check_workers(job)


def _check_each(job: TrainingJob, check: Callable[[TrainingJob], None]) -> None:
    """Check every pipeline by itself; of several, an error names the virtual worker."""
    for number, own in enumerate(of_pipelines(job)):
        try:
            check(own)
        except (LaunchError, InputError) as error:
            if not job.binding.workers:
                raise
            raise type(error)(f"virtual worker {number}: {error}") from error


def of_pipelines(job: TrainingJob) -> list[TrainingJob]:
    """Return the job of each pipeline by itself; this one, if it is the only.

    Raises:
        InputError: a virtual worker's examples do not divide into its microbatches.
    """
    if not job.binding.workers:
        return [job]
    pairs = zip(job.binding.workers, job.binding.pipelines, strict=True)
    return [replace(job, workload=workload_of(job.workload, worker), binding=own) for worker, own in pairs]


def _check_workers(job: TrainingJob) -> None:
    """Check that virtual workers can sum their gradients, and that nothing is asked that works on one plan alone."""
    if job.workload.both_ways:
        raise LaunchError("schedule: chimera goes both ways through one plan; wanted no virtual workers")
    world, workload = World.of(job.binding, job.workload), job.workload
    for number, layout in enumerate(world.layouts):
        for rank in range(len(layout.plan.ranks)):
            if level := layout.plan.rank_configuration(rank).zero_level:
                raise LaunchError(
                    f"virtual worker {number} has ZeRO level {level} on pipeline rank {rank}; gradients of several "
                    "pipelines are summed whole: wanted level 0"
                )
    _ = world.holders  # rejects layers that are split over different numbers of devices
    if workload.gradients.gathers:
        raise LaunchError(
            f"gradients: {workload.gradients.rule} judges the replicas of one plan, and there are "
            f"{len(world.layouts)} virtual workers; wanted gradients: mean"
        )
    if workload.replan.action == "migrate":
        raise LaunchError(
            "replan: {action: migrate} changes one running plan, and there are "
            f"{len(world.layouts)} virtual workers; wanted action: notify or plan"
        )


def _check_plan(job: TrainingJob) -> None:
    plan, workload = job.binding.plan, job.workload
    num_layers, num_stages = len(layers_of(workload)), len(plan.stages)
    if num_stages > num_layers:
        layers, most = units.plural(num_layers, "layer"), units.plural(num_layers, "stage")
        raise LaunchError(f"{units.plural(num_stages, 'stage')} for {layers}; wanted at most {most}")
    ends = [0, *(stage.stop for stage in plan.stages)]
    are_empty = [stage.start >= stage.stop for stage in plan.stages]
    if any(are_empty) or [stage.start for stage in plan.stages] != ends[:-1] or ends[-1] != num_layers:
        raise LaunchError(
            f"the stages hold layers {', '.join(map(_span, plan.stages))}; "
            f"wanted each of the model's {units.plural(num_layers, 'layer')} once, in order"
        )
    batch, number, slices = workload.run_size, plan.num_microbatches, max(1, len(slice_lengths(workload)))
    if number < 1 or batch % number or not allowed_microbatches(plan.schedule, num_stages, number, slices):
        why = f"a batch of {batch} does not divide into {number} microbatches"
        if number >= 1 and not batch % number:
            try:
                actions(plan.schedule, num_stages, number, slices)
            except InputError as error:
                why = str(error)
        raise LaunchError(f"{why}; {_microbatches_that_would_do(job)}")


def _span(stage: Stage) -> str:
    return f"{stage.start}–{stage.stop - 1}" if stage.start < stage.stop else "none"


def check_spreading(job: TrainingJob) -> None:
    """Check that every pipeline rank can be spread over devices as the plan says.

    Raises:
        LaunchError: it cannot; the message names the rank or the layer.
        InputError: there are more replicas than examples in a microbatch, or a layer mixes examples.
    """
    _check_each(job, _check_spreading)


def _check_spreading(job: TrainingJob) -> None:
    plan, workload, builders = job.binding.plan, job.workload, layers_of(job.workload)
    if workload.num_microbatches != plan.num_microbatches:
        has = units.plural(workload.num_microbatches, "microbatch")
        raise LaunchError(f"the workload has {has} a step, the plan {plan.num_microbatches}")
    check_slices(workload)
    check_stages_of_slices(workload, plan)
    check_both_ways(workload, plan)
    _check_gradients(job)
    placed = job.binding.placements
    _ = Layout(job.binding, workload.microbatch_size).grids  # rejects what does not fit the plan and the microbatches
    for rank, stages in enumerate(plan.ranks):
        configuration = plan.rank_configuration(rank)
        for s in stages:
            check_split(builders[plan.stages[s].start : plan.stages[s].stop], configuration)
        length, parts = dataset_of(workload).shape.length, configuration.sequence_parts
        if length % parts:
            raise LaunchError(
                f"pipeline rank {rank} splits {length} positions among {parts} devices; wanted a sequence_length that "
                "they divide, or sequence_parallel false and context_parallel 1"
            )
        away = configuration.offload
        if named(SCHEDULES, plan.schedule).splits_backward and not configuration.comes_back_in_parts:
            what = "activations" if away.activations else "parameters while it recomputes"
            raise LaunchError(
                f"pipeline rank {rank} keeps {what} in its node's memory, from where they come back once, and "
                f"{plan.schedule} runs the backward pass in two parts; wanted them on the device, or another schedule"
            )
        nowhere = [one for one in placed if one.pipeline_rank == rank and not one.device.disk_folder]
        if away.optimizer == "nvme" and nowhere:
            raise LaunchError(
                f"pipeline rank {rank} keeps the optimizer's state on its node's disks, and the cluster file does not "
                f"say where on {nowhere[0].device.host}; wanted nvme: {{…, folder: /an/absolute/path}}, or no nvme, "
                "without which plans keep it elsewhere"
            )
        if configuration.reduces_in_passes and named(SCHEDULES, plan.schedule).splits_backward:
            raise LaunchError(
                f"pipeline rank {rank} has ZeRO level {configuration.zero_level}, whose gradients are reduced as soon "
                f"as the input's gradient is there; {plan.schedule} computes the weights' gradients later: wanted "
                "level 0 or 1, or a schedule that does not split the backward pass"
            )
    # Rejects layers whose outputs do not begin with the examples.
    if not boundaries(workload)[-1].requires_grad:
        raise LaunchError(
            f"model {workload.model!r}: its output has no gradient, so nothing can be trained; wanted one weight or "
            "more with requires_grad, from which the output is computed differentiably"
        )


def _check_gradients(job: TrainingJob) -> None:
    """Check that every stage's replicas can combine their gradients by the workload's rule."""
    plan, settings = job.binding.plan, job.workload.gradients
    for rank in range(len(plan.ranks)):
        if misfit := settings.misfit(plan.rank_configuration(rank)):
            raise LaunchError(f"pipeline rank {rank}: {misfit}")
    if settings.rule == "zeno" and len(plan.stages) > 1:
        raise LaunchError(
            f"the plan has {len(plan.stages)} stages, and gradients: zeno scores a replica's gradient by that of "
            "held-out examples, which a replica computes by itself only if it has the whole model: through a pipeline "
            "it would be the work of the very devices that are judged; wanted a plan of one stage, or gradients: "
            "suspicion"
        )


def check_compiled(job: TrainingJob) -> None:
    """Check that layers can be compiled, where that is wanted.

    Raises:
        InputError: they cannot.
    """
    if not job.workload.compile:
        return
    for own in of_pipelines(job):
        _check_compiled_plan(own.binding.plan)
    if not any(is_gpu(placement.device) for placement in job.binding.placements):
        check_compiler()


def _check_compiled_plan(plan: Plan) -> None:
    if named(SCHEDULES, plan.schedule).splits_backward:
        raise InputError(
            f"the plan's schedule {plan.schedule} runs the backward pass in two parts, and layers are "
            "compiled; wanted another schedule, or compile: false"
        )
    if any(stage.configuration.expert_parallel for stage in plan.stages):
        raise InputError(
            "layers are compiled, and devices of the plan hold whole experts, whose rows are counted as they come; "
            "wanted expert_parallel false, or compile: false"
        )
    if any(stage.configuration.context_parallel > 1 for stage in plan.stages):
        raise InputError(
            "layers are compiled, and replicas of the plan share examples, for which torch's attention is replaced; "
            "wanted context_parallel 1, or compile: false"
        )


def check_draw(job: TrainingJob) -> None:
    """Check that the initial weights can be drawn one stage at a time.

    Raises:
        InputError: there is no such scheme, or it needs the whole model.
    """
    if named(SCHEMES, job.draw.scheme).calibrated and job.start_from is None:
        raise InputError(
            f"the scheme {job.draw.scheme!r} rescales weights by a batch through the whole model, which no stage has; "
            "wanted the saved weights of a trial to start from, or another scheme"
        )


def check_split(builders: Sequence[LayerBuilder], configuration: StageConfiguration) -> None:
    """Check that the layers can be trained in so many shards and parts of the sequence.

    Raises:
        LaunchError: one cannot; the message names it and what would work.
    """
    degree = configuration.tensor_parallel
    for builder in builders if configuration.context_parallel > 1 else ():
        if builder.tensor_parallel is None or not builder.tensor_parallel.context:
            raise LaunchError(
                f"layer {builder.name!r} does not say that its tokens meet in torch's attention alone, so devices "
                "cannot each have a part of the sequence; wanted context_parallel 1"
            )
        if degree > 1 and builder.tensor_parallel.weights is None:
            raise LaunchError(
                f"layer {builder.name!r} does not declare how it is sharded, and a split that was found works on whole "
                "sequences; wanted context_parallel 1, or tensor_parallel 1"
            )
    for builder in builders if degree > 1 else ():
        split = builder.tensor_parallel
        if split is None or split.weights is None:  # split as the plan found, or whole on every device
            if configuration.sequence_parallel:
                raise LaunchError(
                    f"layer {builder.name!r} does not say how its devices may split the sequence; wanted "
                    "sequence_parallel false"
                )
            continue
        if split.most % degree:
            good = [d for d in range(1, split.most + 1) if split.most % d == 0]
            raise LaunchError(
                f"layer {builder.name!r} has {split.most} heads, which tensor-parallel degree {degree} does not "
                f"divide; wanted one of {', '.join(map(str, good))}"
            )
        if configuration.sequence_parallel and not split.sequence:
            raise LaunchError(
                f"layer {builder.name!r} does not work token by token outside its sharded weights, so its devices "
                "cannot split the sequence; wanted sequence_parallel false"
            )
        if configuration.expert_parallel and split.experts and split.experts.count % degree:
            raise LaunchError(
                f"layer {builder.name!r} has {split.experts.count} experts, which {degree} devices cannot share whole; "
                "wanted a tensor-parallel degree that divides them, or expert_parallel false"
            )


def _microbatches_that_would_do(job: TrainingJob) -> str:
    plan, batch = job.binding.plan, job.workload.run_size
    divisors = [number for number in range(1, batch + 1) if batch % number == 0]
    for number in sorted(divisors, key=lambda divisor: abs(divisor - plan.num_microbatches)):
        if allowed_microbatches(plan.schedule, len(plan.stages), number, max(1, len(slice_lengths(job.workload)))):
            return f"{units.plural(number, 'microbatch')} would do"
    return f"no number of microbatches of a batch of {batch} would do: a larger batch, or fewer stages"


def check_hosts(hosts: Iterable[str]) -> None:
    """Check that all these hosts are this machine.

    Raises:
        InputError: one is not.
    """
    elsewhere = sorted(host for host in set(hosts) if not is_here(host))
    if elsewhere:
        shown = ", ".join(elsewhere[:3]) + (" …" if len(elsewhere) > 3 else "")
        raise InputError(
            f"the cluster's devices are on {shown}; without a Dask client that reaches them, ranks are started on this "
            "machine only: plan for it without training (--no-train, or the deployment dejavu/plan), "
            "or train on `nodes: auto`"
        )


def check_cluster(cluster: Cluster) -> None:
    """Check that all devices of the cluster are on this machine.

    Raises:
        InputError: a host is not this machine, or has other devices, more of them or in another order (fewer may be
            shared, where `SHARE_GPUS` is set).
    """
    check_hosts(device.host for device in cluster.devices())
    machine = this_machine()
    here = machine.device_counts
    for name, count in cluster.device_counts.items():
        has_some = here.get(name, 0) > 0
        if count > here.get(name, 0) and not (has_some and shares_gpus()):
            has = ", ".join(f"{number} × {kind}" for kind, number in here.items())
            raise InputError(f"the cluster says that this machine has {count} × {name}; it has {has}; see --no-train")
    own = [device.type_name for device in machine.devices()]
    for device in cluster.devices() if len(here) > 1 and not shares_gpus() else ():
        if own[device.index] != device.type_name:
            raise InputError(
                f"device {device.index} of {device.host} is {device.type_name} in the cluster file, and CUDA's GPU "
                f"{device.index} is {own[device.index]}; wanted a node's devices in CUDA's order: {', '.join(own)}"
            )


def check_devices(job: TrainingJob, hosts: Sequence[Host], needed_bytes: Sequence[float] | None) -> None:
    """Check that the hosts see the job's folder, and have the plan's devices and their memory now.

    Cores are shared where there are fewer than ranks; GPUs are not, unless `SHARE_GPUS` is set.

    Args:
        needed_bytes: predicted for each rank; None: unknown.

    Raises:
        LaunchError: they do not.
    """
    by_name = {host.name: host for host in hosts}
    if blind := [host.name for host in hosts if not host.sees_folder]:
        raise LaunchError(
            f"{', '.join(blind)} cannot see {job.folder}; wanted a folder under one path on every host (a shared file "
            "system)"
        )
    needed: dict[tuple[str, int | None], float] = defaultdict(float)
    for rank, placement in enumerate(job.binding.placements):
        device, host = placement.device, by_name[placement.device.host]
        on_gpu = host.num_gpus > 0 or is_gpu(device)
        index = device.index
        if on_gpu and host.num_gpus and shares_gpus():
            index %= host.num_gpus
        if on_gpu and index >= host.num_gpus:
            raise LaunchError(
                f"rank {rank} is to run on device {device.index} ({device.type_name}) of {host.name}, which is gone: "
                f"torch sees {host.num_gpus} GPUs there; plan again for what is left"
            )
        needed[host.name, index if on_gpu else None] += needed_bytes[rank] if needed_bytes else 0.0
    for (name, gpu), wanted in needed.items() if needed_bytes else ():
        free = by_name[name].free_bytes if gpu is None else by_name[name].free_gpu_bytes[gpu]
        if wanted > free:
            where = f"{name}" if gpu is None else f"device {gpu} of {name}"
            raise LaunchError(
                f"the ranks on {where} need {units.format_bytes(wanted)} by the prediction; "
                f"{units.format_bytes(free)} are free now: stop what else runs there, or plan again with more stages, "
                "recomputation or smaller microbatches"
            )
