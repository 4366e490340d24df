"""The `dejavu` command. Heavy libraries are imported by the commands that need them, Prefect last of all."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.endings import FAILURE, end_at_once_when_interrupted_again, ending
from flows.launch_command import launching
from flows.listing import Commands, Importing, Listing
from flows.price_command import pricing
from flows.printing import print_in_any_locale
from flows.recorded.commands import records
from flows.room import PRIVATE_UMASK
from flows.upkeep.commands import upkeep

if TYPE_CHECKING:
    pass

STDOUT = "-"  # instead of a file name
YEAR_SECONDS = 365 * 24 * 3600.0
COMPILING = "compiling the searches' loops (each once per machine, about a minute in all)"

app = typer.Typer(
    name="dejavu",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(launching)
app.add_typer(pricing)
app.add_typer(records)
app.add_typer(upkeep)


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"dejavu {version('pipe-dejavu')}")
        raise typer.Exit


@app.callback()
def dejavu(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Plan, launch and remember pipeline-parallel training."""


ClusterOption = Annotated[Path, typer.Option("--cluster", help="the cluster file")]
WorkloadOption = Annotated[
    Path | None, typer.Option("--workload", help="what to train; without it a small GPT on Python's own source text")
]


SearchOption = Annotated[str, typer.Option(help="searches to run, comma-separated; default: all that help")]
ScheduleOption = Annotated[
    str,
    typer.Option(
        help="schedules the plan may use, comma-separated; default: the workload's (auto: seven, and chimera)"
    ),
]
MicrobatchesOption = Annotated[
    str,
    typer.Option(help="microbatches per step to try, comma-separated; default: powers of 2 and the workload's number"),
]
DataParallelOption = Annotated[int | None, typer.Option(min=1, help="at most so many replicas of a stage")]
TensorParallelOption = Annotated[int | None, typer.Option(min=1, help="at most so many devices share a layer")]
BudgetOption = Annotated[float, typer.Option(min=0.0, help="search time, all searches together")]


@app.command(
    cls=Listing,
    epilog="Examples:  dejavu run  |  dejavu run --workload examples/workloads/digits.yaml  |  dejavu run --no-train"
    "  |  dejavu run --cluster hosts.yaml --dask tls://10.0.0.1:8786  |  dejavu run --cluster hosts.yaml --dask slurm",
)
def run(
    workload: WorkloadOption = None,
    cluster: ClusterOption = Path("cluster.yaml"),
    train: Annotated[bool, typer.Option(help="with --no-train, stop after planning")] = True,
    search: SearchOption = "",
    schedule: ScheduleOption = "",
    microbatches: MicrobatchesOption = "",
    data_parallel: DataParallelOption = None,
    tensor_parallel: TensorParallelOption = None,
    budget_seconds: BudgetOption = 8.0,
    resume: Annotated[
        str,
        typer.Option(
            help="an earlier training, .dejavu/runs/…, the URL of its copies, or `last`; go on from its last "
            "checkpoint, of its own workload unless --workload is given"
        ),
    ] = "",
    dask: Annotated[
        str,
        typer.Option(
            help="address of a Dask scheduler with a worker on every host; or `slurm` or `pbs`: their jobs are the "
            "workers (docs/own-cluster.md); default: this host only"
        ),
    ] = "",
    wait: Annotated[bool, typer.Option("--wait", help="wait for another run in this folder to end")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print warnings and the summary at the end only")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print a line of JSON for each event")] = False,
) -> None:
    """Run everything in this process: profile, plan, try initializations, train, remember the measurements.

    Hosts of one cluster must share the project's folder.
    """
    from contextlib import ExitStack

    from flows.listening import be_quiet, printed_as_json, say_complete, say_end

    with ExitStack() as printed:
        if as_json:
            printed.enter_context(printed_as_json())
        from flows.inputs import TypedQuestion, check_dask, local_training, read_inputs, read_resume, workload_of
        from flows.room import check_room
        from flows.temporary_server import use_server

        machines, wanted = read_inputs(  # report mistakes before starting
            cluster, workload, train=train and not dask, starts=train and not resume
        )
        resume = local_training(resume, train=train)
        if resume and workload is None:
            wanted = workload_of(resume)
        earlier = read_resume(resume, wanted)
        if earlier is not None and earlier.has_nothing_left:
            say_complete(str(earlier), as_json=as_json)
            return
        typed = TypedQuestion(search, schedule, microbatches, data_parallel, tensor_parallel, budget_seconds)
        asked = typed.request(wanted, machines)
        check_dask(dask, machines, train=train)
        check_room(Path.cwd())
        if not quiet:
            typer.echo("starting Prefect's server and loading libraries (a few seconds)", err=True)
        with use_server(Path.cwd()) as server:
            if quiet:
                be_quiet()
            from dejavu.foundation.gc_frozen import gc_frozen

            with gc_frozen():
                from flows.full import Outcome, dejavu

            server.wait()
            found = dejavu(
                workload=wanted,
                cluster=str(cluster),
                train=train,
                searches=list(asked.searches),
                schedules=list(asked.schedules),
                microbatches=list(asked.microbatches),
                parallelism=asked.parallelism,
                budget_seconds=asked.budget_seconds,
                dask=dask,
                resume=resume,
                wait=wait,
            )
            assert isinstance(found, Outcome)  # for a completed training we returned above
            say_end(found, as_json=as_json)
            printed.close()  # nothing is printed after the end


@app.command(
    epilog="Examples:  dejavu up && prefect deployment run dejavu/full --watch  |  "
    "dejavu up --watch --dask tls://10.0.0.1:8786"
)
def up(
    prefect_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="of the Prefect server; default: 4200 or the next free one")
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="of the MLflow server; default: 5000 or the next free one")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="look at the cluster again and again, and plan again when it changes")
    ] = False,
    every_seconds: Annotated[
        float | None, typer.Option(min=5.0, max=YEAR_SECONDS, help="of --watch: between two looks; default: 60")
    ] = None,
    workload: Annotated[Path | None, typer.Option("--workload", help="of --watch: what is planned")] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="of --watch: the cluster file; default: cluster.yaml")
    ] = None,
    dask: Annotated[
        str, typer.Option(help="of --watch: address of a Dask scheduler; hosts without a worker are gone")
    ] = "",
    links: Annotated[
        bool, typer.Option("--links", help="of --watch with --dask: also try the links between the hosts")
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            help="address that Prefect listens on; default: loopback; others want a password: docs/service.md"
        ),
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="stay, start again what ends, and stop everything on SIGTERM or Ctrl-C")
    ] = False,
) -> None:
    """Start the Prefect server, its worker and the MLflow server on loopback, and deploy the flows.

    What runs already goes on; what has ended is started again.
    """
    from dejavu.foundation.errors import InputError
    from flows import services
    from flows.foreground import stay_up
    from flows.inputs import check_dask_address, read_inputs
    from flows.prefect_api import Watch

    looks, file = None, cluster or Path("cluster.yaml")
    of_watch: dict[str, object] = {"--every-seconds": every_seconds, "--workload": workload, "--cluster": cluster}
    of_watch |= {"--dask": dask, "--links": links}
    if not watch and (given := [name for name, value in of_watch.items() if value]):
        raise InputError(f"{given[0]} is of --watch; wanted both, or none")
    if watch:
        check_dask_address(dask)
        if links and not dask:
            raise InputError("--links sends messages between Dask workers; give their scheduler's address with --dask")
        read_inputs(file, workload, train=False)  # report mistakes before starting
        parameters: dict[str, str | bool] = {"cluster": str(file), "dask": dask, "links": links}
        if workload:
            parameters["workload"] = str(workload)
        looks = Watch(60.0 if every_seconds is None else every_seconds, parameters)
    start = partial(services.up, Path.cwd(), prefect_port=prefect_port, mlflow_port=mlflow_port, host=host)
    if foreground:
        stay_up(Path.cwd(), start, looks, typer.echo)
    else:
        start(watch=looks, say=typer.echo)


@app.command()
def down() -> None:
    """Stop what `dejavu up` started."""
    from flows import services

    services.down(Path.cwd(), say=typer.echo)


@app.command(
    epilog="Examples:  dejavu profile --workload examples/workloads/digits.yaml  |  "
    "dejavu profile --measure operators,collectives  |  dejavu profile --microbatches 1,4,16"
)
def profile(
    workload: WorkloadOption = None,
    cluster: ClusterOption = Path("cluster.yaml"),
    measure: Annotated[
        str, typer.Option(help="layers, transfers, passes, operators or collectives; comma-separated")
    ] = "layers,transfers,passes",
    microbatches: Annotated[
        str,
        typer.Option(help="sizes, comma-separated; default: the workload's; sizes in between are interpolated"),
    ] = "",
    again: Annotated[bool, typer.Option("--again", help="also measure what is already known")] = False,
    database: Annotated[Path, typer.Option(help="where the rows go")] = Path("profiles_db"),
    wait: Annotated[bool, typer.Option("--wait", help="until nobody else measures or trains in this folder")] = False,
) -> None:
    """Measure on this machine what the cost database lacks for a workload; what it already knows is reused.

    `operators` also calibrates predictions to this machine. An interrupted profile continues where it stopped.
    """
    from rich.console import Console

    from dejavu.graphs.capture import capture
    from dejavu.launch.training_lock import alone_in
    from dejavu.profiles import ProfileDatabase
    from dejavu.profiling.profiler import Profiler
    from flows.inputs import at_microbatches, check_costs, read_inputs
    from flows.progress import rows_bar

    check_costs(database)
    machines, wanted = read_inputs(cluster, workload, train=False)
    rows = ProfileDatabase(database)
    with alone_in(Path.cwd(), f"{wanted.model} on {machines.name}", wait=wait, on_wait=typer.echo):
        for one in at_microbatches(wanted, microbatches):
            campaign = Profiler(capture(one, machines.kind), one, machines, rows, again)
            with rows_bar(Console(), unit="measurements") as progress:
                measured = campaign.run([kind.strip() for kind in measure.split(",")], progress)
            typer.echo(f"microbatches of {one.microbatch_size}: {measured}")


ClustersOption = Annotated[
    list[Path] | None,
    typer.Option("--cluster", help="the cluster file, cluster.yaml without it; several, each with --cluster: compared"),
]
AddOption = Annotated[
    list[str] | None, typer.Option("--add", metavar="2xa100", help="what would so many more nodes of a group buy?")
]
RemoveOption = Annotated[
    list[str] | None, typer.Option("--remove", metavar="1xl4", help="and what would fewer nodes cost?")
]


@app.command(
    cls=Listing,
    epilog="Examples:  dejavu plan --model t5-11b --cluster examples/clusters/4x8-v100.yaml  |  "
    "dejavu plan --workload my.yaml --microbatches 8,16 --json plan.json  |  dejavu plan --add 2xa100  |  "
    "dejavu plan --virtual-workers  |  "
    "dejavu plan --cluster a.yaml --cluster b.yaml --goal cheapest --within 14days --tokens 300e9",
)
def plan(
    model: Annotated[str | None, typer.Option(help="a workload file, one of examples/workloads, or a model")] = None,
    workload: WorkloadOption = None,
    cluster: ClustersOption = None,
    search: SearchOption = "",
    schedule: ScheduleOption = "",
    microbatches: MicrobatchesOption = "",
    data_parallel: DataParallelOption = None,
    tensor_parallel: TensorParallelOption = None,
    budget_seconds: BudgetOption = 8.0,
    seed: Annotated[int | None, typer.Option(min=0, help="default: the workload's")] = None,
    dask: Annotated[
        str,
        typer.Option(
            help="address of a Dask scheduler whose workers run the searches; or `slurm`, `pbs` or `4xslurm`: jobs do"
        ),
    ] = "",
    json_target: Annotated[
        str | None, typer.Option("--json", metavar="[FILE]", help="write the plan as JSON; without FILE: print it")
    ] = None,
    database: Annotated[Path | None, typer.Option(help="folder of measured costs, profiles_db without it")] = None,
    add: AddOption = None,
    remove: RemoveOption = None,
    sequence_length: Annotated[str, typer.Option(help="in place of the workload's; several, as 2048,4096: each")] = "",
    batch_size: Annotated[str, typer.Option(help="likewise")] = "",
    goal: Annotated[str, typer.Option(help="`cheapest`: of the clusters' nodes, which and how many")] = "",
    within: Annotated[str, typer.Option(help="of --goal: the time there is, as 14days")] = "",
    tokens: Annotated[str, typer.Option(help="of --goal: what is trained on, as 300e9")] = "",
    nodes: Annotated[str, typer.Option(help="of --goal: how many of each, as 1-16; default: up to the file's")] = "",
    virtual_workers: Annotated[
        bool, typer.Option("--virtual-workers", help="also plan several pipelines that share each batch")
    ] = False,
) -> None:
    """What if: find the best plan for a model on any cluster, present or not, and bound how far it is from optimal."""
    from contextlib import ExitStack

    from dejavu.foundation.gc_frozen import gc_frozen

    with gc_frozen():
        from rich.console import Console

        from dejavu.foundation.compiled import told_of_compiling
        from dejavu.foundation.errors import InputError
        from dejavu.planning import Planner, check_target, choice_to_dict, on_dask, print_choice, write_answer
        from dejavu.planning.questions import Ask
        from flows.inputs import TypedQuestion, measured_costs, read_what_if
        from flows.progress import rows_bar
        from flows.virtual_workers import beside
        from flows.what_if import WhatIf, wide_console

    clusters = tuple(cluster or (Path("cluster.yaml"),))
    asked = WhatIf(
        clusters,
        *(tuple(add or ()), tuple(remove or ())),
        *(sequence_length, batch_size, goal, within, tokens, nodes),
    )
    if virtual_workers and asked.is_asked:
        raise InputError("--virtual-workers is for one question; found options of several, such as --add or --goal")
    target = None if json_target in (None, STDOUT) else Path(str(json_target))
    check_target(target)
    machines, wanted = read_what_if(clusters[0], model, workload)
    typed = TypedQuestion(search, schedule, microbatches, data_parallel, tensor_parallel, budget_seconds)
    drawn = wanted.seed if seed is None else seed
    request = typed.request(asked.first(wanted), machines, measured_costs(database), drawn)
    with ExitStack() as stack:
        ask: Ask | None = None
        if dask:
            from dejavu.trials import searching_client

            say = partial(typer.echo, err=True)
            ask = on_dask(stack.enter_context(searching_client(dask, machines, Path(".dejavu"), say)))
        tell = stack.enter_context(rows_bar(Console(stderr=True), unit="", what="capturing the model"))
        stack.enter_context(told_of_compiling(lambda: typer.echo(COMPILING, err=True)))
        planner = Planner(ask, tell=tell, forks=not dask)
        several = asked.answer(request, wanted, planner.plan) if asked.is_asked else None
        choice = None if several else planner.plan(request)
        team = beside(choice, planner) if choice and virtual_workers else None
    if several is not None:
        if json_target != STDOUT:
            several.show(wide_console())
        if json_target is not None:
            write_answer(several.content, target)
    elif choice is not None:
        if json_target != STDOUT:
            print_choice(choice)
            if team is not None:
                team.show(wide_console())
        if json_target is not None:
            write_answer(choice_to_dict(choice) | (team.content if team is not None else {}), target)


@app.command(
    "import",
    cls=Importing,
    epilog="Examples:  dejavu import alpa prof_database.pkl  |  dejavu import metis profiles/ --device "
    "A100=A100-SXM4-40GB --dtype float16  |  dejavu import nccl-tests all_reduce.txt",
)
def import_(
    context: typer.Context,
    format: Annotated[str, typer.Argument(help="what wrote it")],
    path: Annotated[Path, typer.Argument(help="the file, or a folder of such files")],
    database: Annotated[Path, typer.Option(help="where the rows go")] = Path("profiles_db"),
    device: Annotated[
        list[str] | None,
        typer.Option(help="what the source's device is: NAME for all rows, or FOUND=NAME, repeated"),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="leave bad rows out, where one would refuse the file")
    ] = False,
) -> None:
    """Bring others' measurements into the cost database; the same file twice adds nothing."""
    from rich.console import Console

    from dejavu.importers import DeviceNames, import_profile, importer_of
    from dejavu.profiles import ProfileDatabase
    from flows.inputs import check_costs
    from flows.progress import rows_bar

    check_costs(database)
    importer = importer_of(format, DeviceNames.of(device or []), context.obj)
    console = Console()
    with rows_bar(console) as progress:
        report = import_profile(importer, path, ProfileDatabase(database), skip_bad=skip_bad, progress=progress)
    for bad in report.bad:
        console.print(f"skipped {bad}", highlight=False, markup=False, soft_wrap=True)
    console.print(str(report), highlight=False, markup=False, soft_wrap=True)


@app.command()
def doctor() -> None:
    """Check versions, ports, services, database, cluster file and devices, and say how to fix what is wrong."""
    from rich.console import Console

    from flows.doctor import checks, table

    found = checks(Path.cwd())
    Console().print(table(found))
    if any(check.ok is False for check in found):
        raise typer.Exit(FAILURE)


def _with_json_target(words: list[str]) -> list[str]:
    """Make `plan --json` alone `--json -`: typer has no option whose value may be left out."""
    if words[:1] != ["plan"]:
        return words
    alone = [k for k, word in enumerate(words) if word == "--json" and (words[k + 1 :] or ["--"])[0].startswith("--")]
    for k in reversed(alone):
        words = [*words[: k + 1], STDOUT, *words[k + 1 :]]
    return words


def main() -> None:
    """Run the command of `sys.argv`; what it writes is for its user alone."""
    os.umask(PRIVATE_UMASK)
    print_in_any_locale()
    project = Path.cwd()
    sys.path.insert(0, str(project))  # so that a user's own model is importable from here
    end_at_once_when_interrupted_again()
    ending(lambda: app(args=_with_json_target(sys.argv[1:])), project)


if __name__ == "__main__":
    main()
