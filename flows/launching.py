"""`dejavu launch`: a training for hosts that are not reached from here, as torchrun lines or a script for SLURM."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.foundation.errors import DejavuError, InputError
from dejavu.launch.elsewhere import Places, Slurm, sbatch_script, torchrun_lines
from dejavu.launch.preflight import check_draw, check_plan, check_spreading
from dejavu.runtime.job import TrainingJob, prepared_job
from dejavu.workload.data import check_data, dataset_of
from dejavu.workload.models import own_code

if TYPE_CHECKING:
    from dejavu.planning import Choice, Planner
    from dejavu.virtual_workers import Team

SCRIPT = "train.sbatch"


def addresses_of(words: Sequence[str]) -> dict[str, str]:
    """Parse `alpha=10.0.0.1`.

    Raises:
        InputError: one is something else.
    """
    found: dict[str, str] = {}
    for word in words:
        host, is_there, address = word.partition("=")
        if not (host and is_there and address):
            raise InputError(f"--address {word}: found no host and address; wanted such as --address alpha=10.0.0.1")
        if found.setdefault(host, address) != address:
            raise InputError(f"--address {word}: {host} has the address {found[host]} already; wanted one")
    return found


def job_to_launch(
    folder: Path,
    workload: Path | None,
    cluster: Path | None,
    budget_seconds: float | None = None,
    virtual_workers: str = "",
) -> TrainingJob:
    """Read the folder's job, or plan the workload on the cluster file's devices and write one into the folder.

    Args:
        budget_seconds: of planning; None: the usual.
        virtual_workers: `always`, or `auto`, where they are predicted to be faster than one pipeline; empty: never.

    Raises:
        InputError: there is no job and nothing to make one of, or there is one and the options say another, or all of
            its steps are trained, or it cannot be trained.
    """
    path = folder / "job.json"
    if virtual_workers not in ("", "auto", "always"):
        raise InputError(f"--virtual-workers {virtual_workers}: wanted auto or always, or no --virtual-workers")
    if path.is_file():
        planning = {"--workload": workload, "--cluster": cluster, "--budget-seconds": budget_seconds}
        given = [name for name, value in planning.items() if value is not None]
        if given := given + ["--virtual-workers"] * bool(virtual_workers):
            raise InputError(f"{path} is there already; leave out {' and '.join(given)}, or name a new folder")
        job = prepared_job(folder)
        _check_earlier(job)
    elif workload is None or cluster is None:
        raise InputError(
            f"{folder} has no prepared training: {path} is not there; wanted a folder of .dejavu/runs, or --workload "
            "FILE and --cluster FILE to plan one"
        )
    else:
        if next((one for one in (folder, *folder.absolute().parents) if one.exists()), folder).is_file():
            raise InputError(f"{folder} is a file, or in one; wanted a new folder, or that of a prepared training")
        job = _planned_job(folder, workload, cluster, budget_seconds, virtual_workers)
    if job.workload.odd:
        print(f"warning: {job.workload.odd}", file=sys.stderr)
    return job


def _check_earlier(job: TrainingJob) -> None:
    """Check that a prepared training has steps left, and what they need, as far as that does not depend on its hosts.

    A result that is there is then an earlier one, and goes.

    Raises:
        InputError, LaunchError: it has not.
    """
    # With torch's checkpoints: half a second to import.
    from dejavu.runtime.job.resume import check_checkpoint, earlier_training, what_is_other

    _check(job)
    check_data(job.workload)
    earlier = earlier_training(Path(job.folder), job.workload)
    if earlier.is_complete:
        raise InputError(str(earlier))
    check_checkpoint(Path(job.folder), job.workload)
    job.result_path.unlink(missing_ok=True)  # of fewer steps: a script would take it for the end of this training
    for said in what_is_other(job):
        print(f"warning: {said}", file=sys.stderr)


def _check(job: TrainingJob) -> None:
    for check in (check_plan, check_spreading, check_draw):
        check(job)


def _planned_job(
    folder: Path, workload: Path, cluster: Path, budget_seconds: float | None, virtual_workers: str
) -> TrainingJob:
    from dejavu.cost.priced_problem import as_planned
    from dejavu.init import Draw
    from dejavu.planning import Planner, PlanRequest
    from dejavu.plans.answers import BUDGET_SECONDS
    from dejavu.workload.pretrained import check_pretrained, fingerprint
    from flows.inputs import read_inputs

    machines, wanted = read_inputs(cluster, workload, train=False)
    try:
        check_pretrained(wanted)
    except InputError as error:
        raise InputError(f"{workload}: {error}") from error
    planner = Planner(forks=True)
    seconds = BUDGET_SECONDS if budget_seconds is None else budget_seconds
    choice = planner.plan(PlanRequest(wanted, machines, budget_seconds=seconds, seed=wanted.seed))
    team = _team(choice, planner, virtual_workers) if virtual_workers else None
    binding = choice.binding if team is None else team.binding
    # The workers' plans are of whole sequences and one copy of the model, also where the one pipeline's is not.
    trained = choice.plan if team is None else replace(choice.plan, slices=(), both_ways=False)
    job = TrainingJob(
        workload=as_planned(wanted, trained),
        binding=binding,
        draw=Draw(seed=wanted.seed),
        start_from=None,
        first_step=0,
        last_step=wanted.num_steps,
        folder=str(folder.resolve()),
        data_fingerprint=dataset_of(wanted).fingerprint,
        model_code=own_code(wanted),
        pretrained_fingerprint=fingerprint(wanted),
    )
    _check(job)
    job.write()
    return job


def _team(choice: Choice, planner: Planner, wanted: str) -> Team | None:
    """Return virtual workers where they are wanted, and say how they compare with one pipeline.

    Raises:
        InputError: they are always wanted, and there are none.
    """
    from dejavu.virtual_workers import NoTeam, Teams, what_a_team_yields

    found = Teams(choice, planner).best()
    if isinstance(found, NoTeam):
        if wanted == "always":
            raise InputError(f"--virtual-workers always: {found}")
        return None
    team = found if wanted == "always" or found.is_faster else None
    taken = "one pipeline" if team is None else "virtual workers"
    print(f"{what_a_team_yields(found)} Prepared to be trained: {taken}.", file=sys.stderr)
    return team


def print_lines(job: TrainingJob, places: Places, say: Callable[[str], object]) -> None:
    """Print one line for each host."""
    lines = torchrun_lines(job, places)
    if len(lines) > 1:
        say(f"# one line on each host; all see {places.project} and {job.folder}")
    for host, line in lines.items():
        say(f"# {host}")
        say(line)


def submit(job: TrainingJob, places: Places, slurm: Slurm, *, dry: bool, say: Callable[[str], object]) -> None:
    """Write the script into the job's folder, and hand it to sbatch.

    Raises:
        InputError: there is no sbatch here.
        DejavuError: sbatch does not take it.
    """
    path = Path(job.folder) / SCRIPT
    path.write_text(sbatch_script(job, places, slurm))
    path.chmod(0o700)
    if dry:
        say(f"written: {path}; to submit it: {shlex.join(['sbatch', str(path)])}")
        return
    if shutil.which("sbatch") is None:
        raise InputError(f"there is no sbatch here; {path} is written: submit it where SLURM is, or use --dry-run")
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise DejavuError(f"sbatch did not take {path}: {done.stderr.strip()}")
    say(done.stdout.strip())
