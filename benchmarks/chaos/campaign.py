"""Rounds of one flow in one project: a fault in each, then the flow again until it ends, and a look at what is left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks._processes import processes_of
from benchmarks.chaos.faults import FAULTS, PHASES, Fault, Struck
from benchmarks.pipeline.full_disk import Filler, small_disk
from dejavu.launch.training_lock import holder_in
from dejavu.profiles import ProfileDatabase
from dejavu.runtime.state import checkpoint_step, complete_checkpoints
from dejavu.track.server import Server, sweep_killed

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD: dict[str, Any] = {
    "model_options": {"num_blocks": 2, "width": 64, "num_heads": 2},
    "sequence_length": 64,
    "batch_size": 16,
    "num_microbatches": 4,
    "num_steps": 400,
    "checkpoint_every": 50,
    "compare": False,
    "trials": {"count": 3, "steps": 4, "default_draws": 0},
}
DISK_BYTES = 1024 * 2**20
HANG_SECONDS = 1800.0  # a round takes two minutes on a quiet machine; the watchdog of ranks that set up waits for 15
ENDING_SECONDS = 30.0  # for what a flow started, after its own end
LATEST_SECONDS = 2.0  # from a phase's beginning to its fault
TOLERANCE = 1e-4  # of a loss in float32, after hundreds of steps under any plan


@dataclass
class Project:
    """The folder that all rounds share, and what must not be lost of it.

    Attributes:
        disk: fills the disk that it is on; None: not permitted.
        losses: of the training that nothing struck.
    """

    folder: Path
    disk: Filler | None
    losses: Sequence[float] = ()
    wrong: list[str] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return int(ProfileDatabase(self.folder / "profiles_db").read().num_rows)

    @property
    def training(self) -> Path | None:
        """The folder of the newest training."""
        jobs = list((self.folder / ".dejavu" / "runs").glob("*/job.json"))
        return max(jobs, key=lambda path: path.stat().st_mtime_ns).parent if jobs else None

    def num_saved(self) -> dict[Path, int]:
        """How many steps the newest complete checkpoint of each training has."""
        runs = (self.folder / ".dejavu" / "runs").glob("*/checkpoints")
        return {run: checkpoint_step(complete[-1]) for run in runs if (complete := complete_checkpoints(run))}


@contextmanager
def project() -> Iterator[Project]:
    """A project on a disk of its own, where that is permitted."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dejavu-chaos-"))).resolve()
        try:
            disk: Filler | None = stack.enter_context(small_disk(str(folder), DISK_BYTES))
        except (PermissionError, FileNotFoundError):
            disk = None
        (folder / "cluster.yaml").write_text("nodes: auto\n")
        (folder / "workload.yaml").write_text(json.dumps(WORKLOAD))
        yield Project(folder, disk)


class Command:
    """`dejavu run` in a session and, where that is permitted, a network namespace of its own."""

    def __init__(self, where: Project, log: Path, *options: str) -> None:
        self.log = log
        own_network = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        words = [sys.executable, "-m", "flows", "run", "--workload", "workload.yaml", "--microbatches", "4", *options]
        with log.open("w") as output:
            self.process = psutil.Popen(
                [*(own_network if os.geteuid() == 0 else ()), *words],
                cwd=where.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def has_reached(self, phase: str) -> bool:
        """Wait for the phase; False: the command ended before."""
        stop = time.monotonic() + HANG_SECONDS
        while PHASES[phase] not in self.log.read_text() and time.monotonic() < stop:
            if self.process.poll() is not None:
                return False
            time.sleep(0.05)
        return True

    def end(self) -> int | None:
        """Wait for its end and return its exit code; None: it hangs, and is killed."""
        try:
            return int(self.process.wait(HANG_SECONDS))
        except psutil.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None


def campaign(seed: int, seconds: float) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Run rounds for so long; return title, rows and summary of the report."""
    chance, rows = random.Random(seed), list[dict[str, Any]]()
    with project() as where, tempfile.TemporaryDirectory(prefix="dejavu-chaos-logs-") as logs:
        first = Command(where, Path(logs) / "undisturbed.log")
        if first.end() != 0 or where.training is None:
            raise RuntimeError(f"a run without any fault failed:\n{first.log.read_text()}")
        where.losses, began = losses_of(where.training), time.monotonic()
        for number, (name, phase) in enumerate(rounds(chance)):
            if time.monotonic() - began > seconds:
                break
            rows.append(
                {"round": number, "fault": name, "phase": phase, **strike(where, name, phase, chance, Path(logs))}
            )
            print(json.dumps(rows[-1]), flush=True)
    wrong = [row for row in rows if row["wrong"]]
    counts = Counter(f"{row['fault']}: {row['outcome']}" for row in rows)
    summary = {"rounds": len(rows), "rounds_with_something_wrong": len(wrong), **dict(sorted(counts.items()))}
    return f"faults during whole flows, seed {seed}", rows, summary


def rounds(chance: random.Random) -> Iterator[tuple[str, str]]:
    """Name the faults without end: every one of them in a random order and phase, then again."""
    while True:
        for name in chance.sample(list(FAULTS), len(FAULTS)):
            yield name, chance.choice(FAULTS[name].phases)


def strike(where: Project, name: str, phase: str, chance: random.Random, logs: Path) -> dict[str, Any]:
    """Run one round: the fault, the flow again until it ends well, and what was found wrong."""
    fault, began = FAULTS[name], time.monotonic()
    where.wrong = []
    forget_trials(where)
    before, log = where.training, logs / f"{time.monotonic_ns()}.log"
    command = Command(where, log)
    hit, rows, saved = False, where.num_rows, where.num_saved()
    if command.has_reached(phase):
        time.sleep(chance.uniform(0, LATEST_SECONDS))
        rows, saved = where.num_rows, where.num_saved()
        hit = command.process.poll() is None and fault.strike(Struck(command.process, where.disk, chance))
    code = command.end()
    if where.disk is not None and name == "the disk fills" and hit:
        where.disk.free()
    check_end(where, fault, code, log.read_text())
    check_kept(where, rows, saved)
    trained = where.training if where.training != before else None
    outcome = f"exit {code}" if code else "goes on" if hit else "not struck"
    if code != 0:
        options = ("--resume", str(trained.relative_to(where.folder))) if trained else ()
        again = Command(where, logs / f"{time.monotonic_ns()}-again.log", *options)
        outcome += ", resumed" if trained else ", run again"
        if (end := again.end()) != 0:
            where.wrong.append(f"what goes on ended with {end}: {last_line(again.log.read_text())}")
        check_left(where)
        trained = where.training
    if trained is not None:
        check_losses(where, trained)
    return {"outcome": outcome, "seconds": time.monotonic() - began, "wrong": "; ".join(where.wrong)}


def forget_trials(where: Project) -> None:
    """Remove the results of trials, so that every round has some; they are the same again."""
    subprocess.run(["rm", "-rf", str(where.folder / ".dejavu" / "trials")], check=True)


def check_end(where: Project, fault: Fault, code: int | None, log: str) -> None:
    """Check how the flow ended: as is documented, in sentences, with nothing left."""
    if code is None:
        where.wrong.append(f"it hung for {HANG_SECONDS:g} s: {last_line(log)}")
    elif code not in (0, *fault.exits):
        where.wrong.append(f"exit {code}: {last_line(log)}")
    if "Traceback" in log:
        where.wrong.append(f"a traceback: {re.findall(r'^[A-Za-z.]+(?:Error|Exception).*', log, re.M)[-1:]}")
    check_left(where)


def check_left(where: Project) -> None:
    """Check that no process, lock or running record of a flow is left."""
    stop = time.monotonic() + ENDING_SECONDS
    while (left := processes_of(where.folder)) and time.monotonic() < stop:
        time.sleep(0.1)
    where.wrong += [f"left: {process.pid} {' '.join(process.cmdline())[:80]}" for process in left]
    for process in left:
        process.kill()
    if holder := holder_in(where.folder):
        where.wrong.append(f"the folder is locked by {holder}")
    sweep_killed(where.folder)  # as the next command does
    running = Server(where.folder).search("attributes.status = 'RUNNING'", most=10)
    where.wrong += [f"MLflow calls {run.info.run_name} running" for run in running]


def check_kept(where: Project, num_rows: int, saved: dict[Path, int]) -> None:
    """Check that nothing is lost that was there when the fault struck."""
    if where.num_rows < num_rows:
        where.wrong.append(f"{num_rows - where.num_rows} of {num_rows} rows are lost")
    where.wrong += [str(finding.what) for finding in ProfileDatabase(where.folder / "profiles_db").check()]
    now = where.num_saved()
    where.wrong += [
        f"{run}: step {now.get(run)}, before it was {step}" for run, step in saved.items() if now.get(run, -1) < step
    ]


def check_losses(where: Project, training: Path) -> None:
    """Check that a training ended with the losses of the one that nothing struck."""
    found = losses_of(training)
    if len(found) != len(where.losses):
        where.wrong.append(f"{training.name} has {len(found)} losses, wanted {len(where.losses)}")
    elif found and max(abs(a - b) for a, b in zip(found, where.losses, strict=True)) > TOLERANCE:
        where.wrong.append(f"{training.name} has other losses, the last {found[-1]} and not {where.losses[-1]}")


def losses_of(training: Path) -> list[float]:
    path = training / "result.json"
    return list(json.loads(path.read_text())["losses"]) if path.is_file() else []


def last_line(log: str) -> str:
    return (log.strip().splitlines() or ["no output"])[-1][:200]
