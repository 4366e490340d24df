"""Trainings for hosts that nobody reaches from here: torchrun lines, and a script for SLURM."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.pipeline.emulation import CABLE, EmulationError, apart
from dejavu.cluster import Kind, load_cluster
from dejavu.cluster.catalogue import is_gpu
from dejavu.foundation.errors import DejavuError, InputError
from dejavu.launch.elsewhere import WARNED_SECONDS, Places, Slurm, sbatch_script, torchrun_lines
from dejavu.launch.launcher import torchrun_line
from dejavu.runtime.job import TrainingJob, TrainingResult
from dejavu.runtime.process import rank_environment, rank_settings
from dejavu.workload import OptimizerSettings, Workload
from flows.__main__ import app
from flows.launching import addresses_of, job_to_launch
from tasks.training import read_job
from tests.conftest import TINY
from tests.launching import TOLERANCE, job_of, largest_difference
from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
TWO_AND_ONE = ("alpha", "beta", "alpha")  # hosts of ranks 0, 1, 2: torchrun would number them otherwise


def job_on(folder: Path, hosts: Iterable[str] = TWO_AND_ONE, group: str = "here") -> TrainingJob:
    job = job_of(TINY, folder / "run", (2, 3), hosts)
    placements = tuple(
        replace(one, device=replace(one.device, group=group, node_index=_node(one.device.host)))
        for one in job.binding.placements
    )
    job = replace(job, binding=replace(job.binding, placements=placements))
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    job.write()
    return job


def _node(host: str) -> int:
    """The number of a node that the cluster file only counts."""
    return int(host.rpartition("-")[2]) if "-" in host else 0


def environment() -> dict[str, str]:
    """Of a shell that knows nothing of ours but where the project is."""
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/")}


def result_of(job: TrainingJob) -> TrainingResult:
    return TrainingResult.from_dict(json.loads(job.result_path.read_text()))


def variables(line: str) -> dict[str, str]:
    words = shlex.split(line.partition("&& ")[2] or line)
    return dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))


@pytest.mark.parametrize("hosts", [("localhost",), TWO_AND_ONE])
def test_lines_set_all_that_our_own_launcher_sets(hosts: tuple[str, ...], tmp_path: Path) -> None:
    """The allocator's variables among them."""
    job = job_on(tmp_path, hosts)
    ours = {k: v for k, v in rank_environment("eth0").items() if os.environ.get(k) != v} | rank_settings("eth0")
    for host, line in torchrun_lines(job, Places(ROOT, interface="eth0")).items():
        assert ours.items() <= variables(line).items()
        assert len(hosts) == 1 or variables(line)["DEJAVU_HOST"] == host
    if hosts == ("localhost",):
        assert rank_settings().items() <= variables(torchrun_line(job)).items()


def test_lines_agree_on_the_rendezvous_and_count_each_hosts_ranks(tmp_path: Path) -> None:
    lines = torchrun_lines(job_on(tmp_path), Places(ROOT, {"beta": "10.0.0.2"}, port=4567))
    assert list(lines) == ["alpha", "beta"]
    for line, ranks, first, own in zip(lines.values(), (2, 1), (1, 0), ("alpha", "10.0.0.2"), strict=True):
        words = shlex.split(line)
        assert f"--nproc-per-node={ranks}" in words and "--nnodes=2" in words
        assert "--rdzv-endpoint=alpha:4567" in words and f"--local-addr={own}" in words
        assert any(word.startswith(f"--rdzv-conf=is_host={first},") for word in words)
        assert "--max-restarts=0" in words, "torchrun numbers attempts differently on several hosts"


def test_addresses_of_unknown_hosts_are_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the plan's hosts are alpha, beta"):
        torchrun_lines(job_on(tmp_path), Places(ROOT, {"gamma": "10.0.0.3"}))
    for word in ("alpha", "=1", "alpha="):
        with pytest.raises(InputError, match="wanted such as --address"):
            addresses_of([word])
    assert addresses_of(["alpha=1", "beta=1", "alpha=1"]) == {"alpha": "1", "beta": "1"}
    with pytest.raises(InputError, match="--address alpha=2: alpha has the address 1 already"):
        addresses_of(["alpha=1", "beta=1", "alpha=2"])


@pytest.mark.integration
@pytest.mark.slow
def test_printed_lines_train_and_go_on_when_they_are_run_again(tmp_path: Path) -> None:
    """Each in a shell of its own on loopback, in an environment that knows nothing of ours."""
    job = job_on(tmp_path)
    words = ["launch", job.folder, "--torchrun", "--interface", "lo", "--port", str(free_port())]
    words += ["--address", "alpha=127.0.0.1", "--address", "beta=127.0.0.1"]
    printed = CliRunner().invoke(app, words).output
    lines = [line for line in printed.splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    options = {"shell": True, "env": environment(), "cwd": "/", "text": True}
    for is_first in (True, False):  # the second time there is no step left, and the result is written again
        job.result_path.unlink(missing_ok=True)
        replace(job, data_fingerprint="" if is_first else "another's").write()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        shells = [subprocess.Popen(line, **options, **pipes) for line in lines]
        told = [shell.communicate(timeout=180) for shell in shells]
        assert [shell.returncode for shell in shells] == [0, 0], told
        assert largest_difference(TINY, result_of(job).losses) < TOLERANCE
        result, before = result_of(job), "" if is_first else ", all of them before"
        reached = (
            f"{job.last_step} of {job.last_step} steps trained{before}, the last at loss {result.losses[-1]:.4f}; "
        )
        assert told[0][0] == f"{reached}result: {job.result_path}; weights: {result.final_checkpoint}\n"
        assert not told[1][0], "rank 0 alone"
        assert [error.count("are not those that this training began with") for _, error in told] == [not is_first, 0]
    assert result_of(job).resumed_from_step == TINY.num_steps


@pytest.mark.integration
@pytest.mark.slow
def test_printed_lines_train_on_two_hosts(tmp_path: Path) -> None:
    """In two network namespaces: each host has its own loopback, and the cable between them."""
    job = job_on(tmp_path)
    with ExitStack() as stack:
        try:
            namespaces = stack.enter_context(apart(("alpha", "beta"), 1e9))
        except EmulationError as error:
            pytest.skip(str(error))
        addresses = {"alpha": "10.78.0.1", "beta": "10.78.0.2"}
        lines = torchrun_lines(job, Places(ROOT, addresses, CABLE, 29401))
        shells = [
            subprocess.Popen(["nsenter", f"--net=/run/netns/{namespaces[host]}", "bash", "-c", line], env=environment())
            for host, line in lines.items()
        ]
        assert [shell.wait(180) for shell in shells] == [0, 0]
    assert largest_difference(TINY, result_of(job).losses) < TOLERANCE


SCRIPTS = {
    "by name": (TWO_AND_ONE, "here"),
    "counted": (("here-0", "here-1", "here-0"), "here"),
    "one host": (("localhost",), "here"),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_is_valid_and_asks_for_what_the_plan_has(kind: str, tmp_path: Path) -> None:
    hosts, group = SCRIPTS[kind]
    job = job_on(tmp_path, hosts, group)
    text = sbatch_script(job, Places(ROOT), Slurm("2-00:00:00", ("--partition=gpu",)))
    path = tmp_path / "train.sbatch"
    path.write_text(text)
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    number = len(set(hosts))
    wanted = {f"--nodes={number}", "--ntasks-per-node=1", "--requeue", "--time=2-00:00:00", "--partition=gpu"}
    assert wanted <= set(asked) and ("--nodelist=alpha,beta" in asked) == (kind == "by name")
    assert "--cpus-per-task=3" in asked, "one of its ranks is on the third core"
    assert not re.search(r"@[A-Z_]+@", text), "something is not filled in"
    for name, value in rank_settings("").items():
        assert f"export {name}={value}" in text


KINDS: tuple[Kind | None, ...] = ("cuda", "rocm", "cpu", None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["core", "MyAccelerator", "T4", "my T4"])
def test_gpus_are_asked_for_where_devices_are_gpus_whatever_they_are_called(
    kind: Kind | None, name: str, tmp_path: Path
) -> None:
    """Of a job of an earlier version, which has no kinds, the catalogue knows; one's own GPU is in no catalogue."""
    job = job_on(tmp_path)
    devices = [replace(one.device, type_name=name, kind=kind) for one in job.binding.placements]
    placements = tuple(replace(one, device=device) for one, device in zip(job.binding.placements, devices, strict=True))
    binding = replace(job.binding, placements=placements)
    replace(job, binding=binding).write()
    text = sbatch_script(TrainingJob.read(Path(job.folder) / "job.json"), Places(ROOT), Slurm())
    wanted = kind in ("cuda", "rocm") or (kind is None and name == "T4")
    assert ("--gpus-per-node=" in text, "--cpus-per-task=" in text) == (wanted, not wanted)
    other = replace(binding.placements[1].device, kind="cpu" if wanted else "cuda")
    mixed = (binding.placements[0], replace(binding.placements[1], device=other), *binding.placements[2:])
    with pytest.raises(InputError, match=r"the plan is on GPUs .* and on others .* wanted one kind, or --torchrun"):
        sbatch_script(replace(job, binding=replace(binding, placements=mixed)), Places(ROOT), Slurm())


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_device_of_a_cluster_says_its_kind(path: Path) -> None:
    cluster = load_cluster(path)
    for device in cluster.devices():
        assert device.kind == cluster.device_types[device.type_name].kind
        assert is_gpu(device) == (device.kind != "cpu")


@pytest.mark.parametrize("name", ["run", "my run", "it's", 'a "b" c', "ü n", "a#b", "50%job", "%%", "100%"])
def test_sbatch_reads_each_option_as_one_word(name: str, tmp_path: Path) -> None:
    """It splits its lines as a shell does."""
    job = replace(job_on(tmp_path), folder=str(tmp_path / name))
    lines = [line for line in sbatch_script(job, Places(ROOT), Slurm()).splitlines() if line.startswith("#SBATCH ")]
    read = [shlex.split(line.removeprefix("#SBATCH "), comments=True) for line in lines]
    assert all(len(words) == 1 for words in read)
    (output,) = (words[0] for words in read if words[0].startswith("--output="))
    filled = re.sub("%(.)", lambda found: {"%": "%", "j": "17"}[found[1]], output)  # as sbatch does
    assert filled == f"--output={tmp_path / name}/slurm-17.log"


@pytest.mark.parametrize("port", [1, 29400, 64536, 64537, 65535])
def test_every_job_of_slurm_meets_at_a_port(port: int, tmp_path: Path) -> None:
    job = job_on(tmp_path)
    if port > 64536:
        with pytest.raises(InputError, match=rf"--port {port}: .* adds up to 999 to it; wanted 64536 or less"):
            sbatch_script(job, Places(ROOT, port=port), Slurm())
        return
    (line,) = re.findall(r"\$\(\(.*SLURM_JOB_ID % .*\)\)", sbatch_script(job, Places(ROOT, port=port), Slurm()))
    for number in (0, 999, 1000, 123456):
        words = ["bash", "-c", f"SLURM_JOB_ID={number}; echo {line}"]
        found = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        assert port <= found <= 65535


@pytest.mark.parametrize("name", ["run", "my run", "it's", "a;b", "$HOME"])
def test_the_command_that_is_said_is_one_for_a_shell(name: str, tmp_path: Path) -> None:
    job_on(tmp_path / name)
    said = CliRunner().invoke(app, ["launch", str(tmp_path / name / "run"), "--slurm", "--dry-run"]).output
    words = shlex.split(said.replace("\n", "").partition("to submit it: ")[2])
    assert words == ["sbatch", str(tmp_path / name / "run" / "train.sbatch")]


@pytest.mark.parametrize("word", ["partition=gpu", "", " ", "-", "--", "gpu", "rm -rf"])
def test_a_word_that_is_no_option_of_sbatch_is_said(word: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"--sbatch {word}: found no option of sbatch"):
        sbatch_script(job_on(tmp_path), Places(ROOT), Slurm(options=("--partition=gpu", word)))


def test_nodes_of_several_groups_have_to_be_named(tmp_path: Path) -> None:
    job = job_on(tmp_path, ("one-0", "two-0", "one-0"))
    placements = tuple(
        replace(one, device=replace(one.device, group=one.device.host.split("-")[0], node_index=0))
        for one in job.binding.placements
    )
    mixed = replace(job, binding=replace(job.binding, placements=placements))
    with pytest.raises(InputError, match="only counted in the cluster file; wanted `hosts:`"):
        sbatch_script(mixed, Places(ROOT), Slurm())


# Stand-ins for SLURM's programs: srun runs a task for each node here, all with loopback's name.
SRUN = """#!/bin/bash
echo "srun $*" >> "$FAKE_LOG"
while [[ $1 == --* ]]; do shift; done
pids=()
ended=""
end_tasks() { ended=1; if [ ${#pids[@]} -gt 0 ]; then kill -TERM "${pids[@]}" 2>/dev/null; fi; }
trap end_tasks TERM
for k in $(seq 0 $(( FAKE_NODES - 1 ))); do
    SLURM_NODEID=$k SLURMD_NODENAME=127.0.0.1 "$@" & pids+=($!)
done
if [ -n "$ended" ]; then end_tasks; fi
code=0
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do sleep 0.2 & wait $!; done
    wait "$pid" || code=$?
done
exit $code
"""
ENDLESS = f"""#!{sys.executable} -SE
import os, signal
open(os.environ["DEJAVU_FOLDER"] + "/began-" + os.environ["DEJAVU_HOST"], "w").close()
signal.pause()
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$FAKE_LOG"
if [ "$1" = show ]; then echo 127.0.0.1; fi
"""


def slurm_environment(folder: Path, nodes: int) -> dict[str, str]:
    programs = folder / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    own = environment()
    job = {"SLURM_JOB_ID": str(free_port() % 1000), "SLURM_JOB_NODELIST": "n[1-2]"}
    fake = {"FAKE_LOG": str(folder / "log"), "FAKE_NODES": str(nodes)}
    return {**own, **job, **fake, "PATH": f"{programs}{os.pathsep}{own['PATH']}"}


@pytest.mark.integration
def test_the_script_trains_and_says_when_it_has(tmp_path: Path) -> None:
    job = job_on(tmp_path, ("here-0", "here-1", "here-0"))
    said = CliRunner().invoke(app, ["launch", job.folder, "--slurm", "--dry-run", "--interface", "lo"])
    assert said.exit_code == 0, said.output
    script, fake = Path(job.folder) / "train.sbatch", slurm_environment(tmp_path, 2)
    done = subprocess.run(["bash", str(script)], env=fake, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert largest_difference(TINY, result_of(job).losses) < TOLERANCE
    again = subprocess.run(["bash", str(script)], env=fake, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert again.returncode == 0 and "is complete" in again.stdout
    assert (tmp_path / "log").read_text().count("srun") == 1


def test_a_script_does_not_take_an_earlier_result_for_the_whole_training(tmp_path: Path) -> None:
    """As of one that was to go on for more steps, or whose last checkpoint was damaged and deleted."""
    job = job_on(tmp_path, ("here-0",))
    job.result_path.write_text("{}")
    said = CliRunner().invoke(app, ["launch", job.folder, "--slurm", "--dry-run"])
    assert said.exit_code == 0, said.output
    fake = slurm_environment(tmp_path, 1)
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\nexit 7\n")  # it would train
    script = Path(job.folder) / "train.sbatch"
    done = subprocess.run(["bash", str(script)], env=fake, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 7 and "is complete" not in done.stdout


@pytest.mark.integration
@pytest.mark.parametrize("by", ["USR1", "TERM", "clock"])
def test_before_the_time_limit_ranks_end_and_the_job_is_queued_again(by: str, tmp_path: Path) -> None:
    """With a program in torchrun's place that trains for ever; a cancelled job is not queued again.

    A shell that was started to ignore a signal can't trap it: where SLURM says when the job ends, the clock does.
    """
    job = job_on(tmp_path, ("here-0", "here-1", "here-0"))
    endless = tmp_path / "endless"
    endless.write_text(ENDLESS)
    endless.chmod(0o755)
    script = tmp_path / "train.sbatch"
    script.write_text(sbatch_script(job, Places(ROOT, torchrun=str(endless)), Slurm()))
    began = [Path(job.folder) / f"began-{host}" for host in ("here-0", "here-1")]
    limit_seconds = 2 if by == "clock" else 2 * PATIENCE_SECONDS
    end = {"SLURM_JOB_END_TIME": str(int(time.time() + limit_seconds + WARNED_SECONDS))}
    with (tmp_path / "said").open("w") as said:
        fake = slurm_environment(tmp_path, 2) | end
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN if by == "clock" else signal.SIG_DFL)
        done = subprocess.Popen(["bash", str(script)], env=fake, stdout=said, stderr=said)
        signal.signal(signal.SIGUSR1, before)
        while done.poll() is None and not all(path.exists() for path in began):
            time.sleep(0.05)
        done.send_signal(signal.SIGTERM if by == "TERM" else signal.SIGUSR1)
        done.wait(timeout=PATIENCE_SECONDS)
    log, text = (tmp_path / "log").read_text(), (tmp_path / "said").read_text()
    assert ("scontrol requeue" in log) == (by != "TERM"), (done.returncode, text)
    assert (done.returncode == 0) == (by != "TERM") and log.count("srun") == 1, (done.returncode, text)


@pytest.mark.parametrize("how", ["--torchrun", "--slurm"])
@pytest.mark.parametrize("moved", [shutil.copytree, os.rename, os.symlink], ids=["copied", "moved", "linked"])
def test_a_folder_that_was_moved_is_trained_in_where_it_is(
    how: str, moved: Callable[[Path, Path], object], tmp_path: Path
) -> None:
    """As one that a shared disk is given, or was fetched from another host; a link leads to the folder itself."""
    before = Path(job_on(tmp_path).folder)
    named = tmp_path / "elsewhere"
    moved(before, named)
    done = CliRunner().invoke(app, ["launch", str(named), how, *(["--dry-run"] if how == "--slurm" else [])])
    assert done.exit_code == 0, done.output
    said = (named / "train.sbatch").read_text() if how == "--slurm" else done.output
    own, other = (before, named) if moved is os.symlink else (named, before)
    assert str(own) in said and str(other) not in said
    assert TrainingJob.read(named / "job.json").folder == str(own)


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    for words, said in (
        (["launch", str(tmp_path / "none"), "--torchrun"], "has no prepared training"),
        (["launch", str(tmp_path), "--torchrun", "--slurm"], "wanted one of --torchrun"),
        (["launch", str(tmp_path)], "wanted one of --torchrun"),
        (["launch", str(tmp_path), "--torchrun", "--dry-run"], "--dry-run is for --slurm"),
        (["launch", str(tmp_path), "--torchrun", "--time", "1:00"], "--time is for --slurm"),
        (["launch", str(tmp_path), "--torchrun", "--sbatch=--partition=gpu"], "--sbatch is for --slurm"),
        (["launch", str(tmp_path), "--slurm", "--address", "alpha=1"], "--address alpha=1 is for --torchrun"),
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code != 0 and said in str(done.exception)


@pytest.mark.parametrize("option", ["--workload", "--cluster", "--budget-seconds", "--virtual-workers"])
def test_options_of_planning_are_none_of_a_training_that_is_prepared(option: str, tmp_path: Path) -> None:
    folder, value = (
        job_on(tmp_path).folder,
        {"--budget-seconds": "8", "--virtual-workers": "auto"}.get(option, "x.yaml"),
    )
    done = CliRunner().invoke(app, ["launch", folder, "--torchrun", option, value])
    assert f"is there already; leave out {option}, or name" in str(done.exception)


def _trained(job: TrainingJob) -> TrainingJob:
    marker = job.checkpoints / f"step-{job.last_step:08d}" / "COMPLETE.json"
    marker.parent.mkdir(parents=True)
    marker.write_text(json.dumps({"step": job.last_step}))
    return job


def _of_workload(**changed: object) -> Callable[[TrainingJob], TrainingJob]:
    return lambda job: replace(job, workload=Workload.model_validate(job.workload.model_dump(mode="json") | changed))


def _of_gone_tokens(job: TrainingJob) -> TrainingJob:
    path = Path(job.folder).with_name("tokens.bin")
    path.write_bytes(bytes(4096))
    job = _of_workload(data="tokens", tokens={"path": str(path), "vocabulary": 9})(job)
    path.unlink()
    return job


def _of_three_microbatches(job: TrainingJob) -> TrainingJob:
    return replace(job, binding=replace(job.binding, plan=replace(job.binding.plan, num_microbatches=3)))


CANNOT = {
    "trained to its end": (_trained, "is complete: 5 steps are trained"),
    "a batch that does not divide": (_of_three_microbatches, "does not divide into"),
    "data that are gone": (_of_gone_tokens, "is trained on is not there: tokens: there is no file"),
    "no state to start from": (lambda job: replace(job, start_from="/gone.safetensors"), "/gone.safetensors"),
    "no weights to start from": (_of_workload(pretrained="gone"), "gone"),
}


@pytest.mark.parametrize("how", ["--torchrun", "--slurm"])
@pytest.mark.parametrize("case", CANNOT)
def test_a_prepared_training_that_cannot_go_on_is_a_sentence(case: str, how: str, tmp_path: Path) -> None:
    """Ranks would say it on their hosts; where all steps are trained, they would write a result without times."""
    spoil, said = CANNOT[case]
    job = spoil(replace(job_on(tmp_path), last_step=5, workload=TINY.model_copy(update={"num_steps": 5})))
    job.write()
    done = CliRunner().invoke(app, ["launch", job.folder, how, *(["--dry-run"] if how == "--slurm" else [])])
    assert isinstance(done.exception, DejavuError) and said in str(done.exception), done.output
    assert not done.output and not (Path(job.folder) / "train.sbatch").exists()


@pytest.mark.parametrize("warmup_steps", [0, 5, 6, 50])
def test_a_warm_up_that_is_longer_than_the_training_is_said(warmup_steps: int, tmp_path: Path) -> None:
    """As `dejavu run` does; standard output has the lines alone."""
    optimizer = OptimizerSettings(warmup_steps=warmup_steps)
    job = replace(
        job_on(tmp_path), last_step=5, workload=TINY.model_copy(update={"num_steps": 5, "optimizer": optimizer})
    )
    job.write()
    done = CliRunner().invoke(app, ["launch", job.folder, "--torchrun"])
    assert done.exit_code == 0 and "warmup_steps" not in done.stdout
    assert (f"warmup_steps is {warmup_steps}" in done.stderr) == (warmup_steps > 5)


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_file_is_no_folder_of_a_training(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ["launch", str(tmp_path / name), "--torchrun", "--workload", "w.yaml", "--cluster", "c.yaml"]
    done = CliRunner().invoke(app, words)
    assert f"{tmp_path / name} is a file, or in one; wanted a new folder" in str(done.exception)


@pytest.mark.parametrize("how", [lambda folder: _read(folder), lambda folder: read_job.fn(folder)])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"workload": {}}'])
def test_a_job_that_cannot_be_read_is_a_sentence_for_the_command_and_the_flow(
    text: str, how: Callable[[Path], TrainingJob], tmp_path: Path
) -> None:
    folder = Path(job_on(tmp_path).folder)
    assert how(folder) == TrainingJob.read(folder / "job.json")
    moved = folder.rename(tmp_path / "elsewhere")
    assert how(moved).folder == str(moved), "it is trained where it is"
    (moved / "job.json").write_text(text)
    with pytest.raises(InputError, match=r"job\.json cannot be read: .*; wanted the file that a training"):
        how(moved)


def _read(folder: Path) -> TrainingJob:
    return job_to_launch(folder, None, None)


def test_weights_that_are_not_there_are_said_before_a_folder_is_made(tmp_path: Path) -> None:
    """As `dejavu run` does: the ranks would end on their hosts."""
    given = TINY.model_dump(mode="json", include={"model_options", "batch_size"}) | {"pretrained": str(tmp_path / "no")}
    (tmp_path / "w.yaml").write_text(json.dumps(given))
    (tmp_path / "c.yaml").write_text("nodes: [{name: a, devices: {type: T4, count: 2}}]")
    words = ["--workload", str(tmp_path / "w.yaml"), "--cluster", str(tmp_path / "c.yaml"), "--torchrun"]
    done = CliRunner().invoke(app, ["launch", str(tmp_path / "run"), *words])
    assert isinstance(done.exception, InputError) and "has no weights: no such folder or file" in str(done.exception)
    assert str(tmp_path / "w.yaml") in str(done.exception) and not (tmp_path / "run").exists()


def test_a_new_folder_is_planned(tmp_path: Path) -> None:
    """For hosts that are not here."""
    (tmp_path / "w.yaml").write_text(
        json.dumps({**TINY.model_dump(mode="json", include={"model_options", "batch_size"})})
    )
    core = "devices: {core: {kind: cpu, memory: 4 GiB, bandwidth: 10 GB/s, float32: 50 GFLOP/s}}"
    nodes = "nodes: [{name: a, hosts: [alpha, beta], devices: {type: core}}]"
    (tmp_path / "hosts.yaml").write_text(f"{nodes}\n{core}\nlinks: {{default: {{bandwidth: 10 Gbit/s}}}}\n")
    folder = tmp_path / "run"
    words = ["launch", str(folder), "--workload", str(tmp_path / "w.yaml"), "--cluster", str(tmp_path / "hosts.yaml")]
    done = CliRunner().invoke(app, [*words, "--torchrun", "--budget-seconds", "1"])
    assert done.exit_code == 0, done.output
    job = TrainingJob.read(folder / "job.json")
    assert {one.device.host for one in job.binding.placements} <= {"alpha", "beta"}
    again = CliRunner().invoke(app, [*words, "--torchrun"])
    assert again.exit_code != 0 and "is there already" in str(again.exception)
    assert sys.executable.rpartition("/")[0] in done.output
