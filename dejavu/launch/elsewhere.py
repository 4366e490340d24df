"""A prepared training for machines that nobody reaches from here: torchrun lines for shells, a script for SLURM.

Both train in the job's own folder, which all hosts have to see, and go on from its last checkpoint when they are run
again. A host's ranks are those of the plan there, whatever number torchrun or SLURM gives the host.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dejavu.cluster.catalogue import is_gpu
from dejavu.foundation.errors import InputError
from dejavu.launch.rendezvous import is_here
from dejavu.launch.torchrun import (
    JOIN_SECONDS,
    Rendezvous,
    assignments,
    several_hosts_settings,
    torchrun_words,
)
from dejavu.runtime.job import TrainingJob
from dejavu.runtime.process import rank_settings
from dejavu.runtime.process.own_rank import HOST, ranks_on

PORT, PORTS = 29400, 1000  # a job of SLURM adds a number below the second, so that two on a node do not meet
MOST_PORT = 65535 - (PORTS - 1)
WARNED_SECONDS = 120  # before a time limit, in which SLURM tells the script, and that ends its ranks
ATTEMPTS = 3  # of all ranks in one allocation


@dataclass(frozen=True)
class Places:
    """Where hosts are, as far as their names do not say it.

    Attributes:
        project: the folder that ranks start in, from which a user's own model is imported; every host sees it.
        addresses: of hosts by name; a host that is not there is reached by its name.
        interface: the network interface of the ranks' messages; empty: that of the host's name.
        port: of the rendezvous, on the first host.
        torchrun: the command.
    """

    project: Path
    addresses: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""
    port: int = PORT
    torchrun: str = ""

    @property
    def command(self) -> list[str]:
        """The words of torchrun: this environment's own, which other hosts see under the same path."""
        beside = Path(sys.executable).with_name("torchrun")
        if self.torchrun:
            return shlex.split(self.torchrun)
        return [str(beside)] if beside.is_file() else [sys.executable, "-m", "torch.distributed.run"]


def hosts_of(job: TrainingJob) -> list[str]:
    """Return the hosts of the plan, in the order of its ranks."""
    return list(dict.fromkeys(placement.device.host for placement in job.binding.placements))


def torchrun_lines(job: TrainingJob, places: Places) -> dict[str, str]:
    """Return for each host the one line that trains its ranks: folder, environment and arguments.

    Raises:
        InputError: addresses name hosts that the plan does not have.
    """
    hosts, path = hosts_of(job), Path(job.folder) / "job.json"
    unknown = [name for name in places.addresses if name not in hosts]
    if unknown:
        raise InputError(f"--address {unknown[0]}: the plan's hosts are {', '.join(hosts)}; wanted one of them")
    inside = shlex.join(["cd", str(places.project)])
    if len(hosts) == 1:
        interface = places.interface or ("lo" if is_here(hosts[0]) else "")
        words = torchrun_words(len(job.binding.placements), path)
        return {hosts[0]: f"{inside} && {_line(rank_settings(interface), places, words)}"}
    first = places.addresses.get(hosts[0], hosts[0])
    lines = {}
    for host in hosts:
        address = places.addresses.get(host, host)
        meeting = Rendezvous(_id_of(job), len(hosts), f"{first}:{places.port}", host == hosts[0], address)
        words = torchrun_words(len(ranks_on(job.binding, host)), path, meeting=meeting, restarts=0)
        lines[host] = f"{inside} && {_line(several_hosts_settings(host, places.interface), places, words)}"
    return lines


def _line(settings: Mapping[str, str], places: Places, words: list[str]) -> str:
    return shlex.join(["env", *assignments(settings), *places.command, *words])


def _id_of(job: TrainingJob) -> str:
    return "".join(c for c in Path(job.folder).name if c.isalnum() or c in "-_") or "dejavu"


@dataclass(frozen=True)
class Slurm:
    """What a script for SLURM says besides.

    Attributes:
        time: the limit, as sbatch takes it; empty: the partition's own.
        options: further ones of sbatch, each as one word such as `--partition=gpu`.
    """

    time: str = ""
    options: tuple[str, ...] = ()


def sbatch_script(job: TrainingJob, places: Places, slurm: Slurm) -> str:
    """Return a batch script that trains the job's ranks, one task of srun on each node.

    Nodes whose names the cluster file lists are asked for by name; others are taken in SLURM's order.
    The ranks end some time before the limit (SLURM's signal or its clock says when), and SLURM runs the script again
    (`--requeue`), which goes on from the last checkpoint; so does a failure, up to `ATTEMPTS` times in one allocation.

    Raises:
        InputError: nodes of several kinds are only counted in the cluster file: SLURM would not know which to give; or
            some devices are GPUs and others are not; or an option of sbatch is none; or the port is too high.
    """
    if places.port > MOST_PORT:
        raise InputError(
            f"--port {places.port}: a job of SLURM adds up to {PORTS - 1} to it; wanted {MOST_PORT} or less"
        )
    if words := [option for option in slurm.options if not re.match(r"--?[A-Za-z]", option)]:
        raise InputError(f"--sbatch {words[0]}: found no option of sbatch; wanted such as --sbatch=--partition=gpu")
    hosts = hosts_of(job)
    devices = {placement.device.host: placement.device for placement in job.binding.placements}
    counted = [host for host in hosts if host == f"{devices[host].group}-{devices[host].node_index}"]
    named = len(counted) < len(hosts) and not (len(hosts) == 1 and is_here(hosts[0]))
    if counted and len({devices[host].group for host in hosts}) > 1:
        raise InputError(
            f"the plan uses nodes of several groups, and {counted[0]} is only counted in the cluster file; wanted "
            "`hosts:` with their names, so that SLURM gives each group its own"
        )
    ranks = {host: len(ranks_on(job.binding, host)) for host in hosts}
    folder = Path(job.folder)
    options = [
        f"--job-name=dejavu-{_id_of(job)}",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
        _devices_option(job),
        *([f"--nodelist={','.join(hosts)}"] if named else []),
        *([f"--time={slurm.time}"] if slurm.time else []),
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{WARNED_SECONDS}",
        # sbatch reads quotes as a shell does, and % as the beginning of a number of its own.
        f"--output={shlex.quote(str(folder).replace('%', '%%'))}/slurm-%j.log",
        *slurm.options,
    ]
    settings = {k: v for k, v in several_hosts_settings("", places.interface).items() if k != HOST}
    header = [f"#SBATCH {option}" for option in options]
    values = {
        "HEADER": "\n".join(header),
        "PROJECT": shlex.quote(str(places.project)),
        "FOLDER": shlex.quote(str(folder)),
        "HOSTS": " ".join(map(shlex.quote, hosts)),
        "RANKS": " ".join(str(ranks[host]) for host in hosts),
        "BY_NAME": "1" if named else "",
        "SETTINGS": "\n".join(f"export {shlex.quote(f'{name}={value}')}" for name, value in settings.items()),
        "TORCHRUN": shlex.join(places.command),
        "PORT": str(places.port),
        "PORTS": str(PORTS),
        "JOIN": f"{JOIN_SECONDS:g}",
        "NODES": str(len(hosts)),
        "ATTEMPTS": str(ATTEMPTS),
        "WARNED": str(WARNED_SECONDS),
    }
    text = _SCRIPT
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _devices_option(job: TrainingJob) -> str:
    """Ask for as many devices of each node as the ranks' numbers there need: some of a node's may be idle.

    Raises:
        InputError: some are GPUs, and others are not: a job asks all its nodes for the same.
    """
    devices = [placement.device for placement in job.binding.placements]
    needed = max(device.index for device in devices) + 1
    gpus = [device for device in devices if is_gpu(device)]
    if gpus and (others := [device for device in devices if not is_gpu(device)]):
        raise InputError(
            f"the plan is on GPUs ({gpus[0].type_name} of {gpus[0].host}) and on others ({others[0].type_name} of "
            f"{others[0].host}), and a job of SLURM asks each of its nodes for the same; wanted one kind, or --torchrun"
        )
    return f"--gpus-per-node={needed}" if gpus else f"--cpus-per-task={needed}"


_SCRIPT = r"""#!/bin/bash
# Written by `dejavu launch --slurm`; submit it with sbatch. Run again, it goes on from the last checkpoint.
@HEADER@
set -u

folder=@FOLDER@
if [ -e "$folder/result.json" ]; then
    echo "the training in $folder is complete"
    exit 0
fi
cd @PROJECT@ || exit 1

# One task on each node: its ranks are those of the plan's host that it stands for.
read -r -d '' node <<'ON_A_NODE' || true
hosts=(@HOSTS@)
ranks=(@RANKS@)
by_name=@BY_NAME@
k=${SLURM_NODEID:-0}
if [ -n "$by_name" ]; then
    for k in "${!hosts[@]}"; do
        if [ "${hosts[$k]}" = "$SLURMD_NODENAME" ]; then break; fi
    done
    if [ "${hosts[$k]}" != "$SLURMD_NODENAME" ]; then
        echo "the plan has no host $SLURMD_NODENAME; its hosts are ${hosts[*]}" >&2
        exit 1
    fi
fi
export DEJAVU_HOST=${hosts[$k]}
@SETTINGS@
exec @TORCHRUN@ --nnodes=@NODES@ --nproc-per-node="${ranks[$k]}" --rdzv-backend=c10d \
    --rdzv-endpoint="$DEJAVU_RENDEZVOUS" --rdzv-id="$DEJAVU_LAUNCH" \
    --rdzv-conf="is_host=$(( ${SLURM_NODEID:-0} == 0 )),join_timeout=@JOIN@" \
    --local-addr="$SLURMD_NODENAME" --max-restarts=0 --monitor-interval=0.2 \
    -m dejavu.runtime.worker "$DEJAVU_FOLDER/job.json"
ON_A_NODE

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export DEJAVU_FOLDER=$folder
export DEJAVU_RENDEZVOUS="$first:$(( @PORT@ + SLURM_JOB_ID % @PORTS@ ))"

ended=""  # by a signal: which
ranks_pid=""
end_ranks() {
    ended=$1
    if [ -n "$ranks_pid" ]; then kill -TERM "$ranks_pid" 2>/dev/null; fi
}
limit_is_near() {  # by the clock, where SLURM says when: no shell can trap a signal that it was started to ignore
    local end=${SLURM_JOB_END_TIME:-0}
    [ "$end" -gt 0 ] 2>/dev/null && [ "$(date +%s)" -ge $(( end - @WARNED@ )) ]
}
trap 'end_ranks USR1' USR1  # the time limit is near
trap 'end_ranks TERM' TERM INT

code=1
for attempt in $(seq @ATTEMPTS@); do
    export DEJAVU_LAUNCH="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$attempt"
    srun --kill-on-bad-exit=1 bash -c "$node" &
    ranks_pid=$!
    if [ -n "$ended" ]; then kill -TERM "$ranks_pid" 2>/dev/null; fi  # it came before the id was known
    looks=0
    while kill -0 "$ranks_pid" 2>/dev/null; do
        sleep 1 &  # never one long wait: the clock is looked at, too
        wait $!
        looks=$(( looks + 1 ))
        if [ -z "$ended" ] && limit_is_near; then end_ranks USR1; fi
        if [ -n "$ended" ] && [ $(( looks % 20 )) -eq 0 ]; then end_ranks "$ended"; fi  # said again, if it was missed
    done
    wait "$ranks_pid"
    code=$?
    ranks_pid=""
    if [ "$code" -eq 0 ] || [ -n "$ended" ]; then break; fi
    echo "attempt $attempt ended with exit code $code"
done
if [ "$ended" = USR1 ] && [ ! -e "$folder/result.json" ]; then
    echo "the time limit is near: the job is queued again, and goes on from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
"""
