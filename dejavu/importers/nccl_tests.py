"""The text that nccl-tests (and rccl-tests) print: one table of sizes and times of one collective.

Which columns there are is read from the table's own head, because versions differ. The out-of-place time in
microseconds is taken; nccl-tests gives it as the mean of its iterations. The size is that of the full tensor, except
for all_to_all, where it is what one rank sends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from dejavu.foundation.errors import InputError
from dejavu.importers._base import BATCH_ROWS, BadRow, Batch, Importer, counted, option
from dejavu.importers.sources import files_of
from dejavu.profiles.collective import Collective

_WANTED = "the output of nccl-tests, such as `all_reduce_perf -b 8 -e 1G -f 2 -g 8 > all_reduce.txt`"
PROGRAMS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}
_DTYPES = {
    "float": "float32",
    "half": "float16",
    "bfloat16": "bfloat16",
    "double": "float64",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "uint64": "uint64",
    **dict.fromkeys(("f8e4m3", "fp8_e4m3", "fp8e4m3"), "float8_e4m3fn"),
    **dict.fromkeys(("f8e5m2", "fp8_e5m2", "fp8e5m2"), "float8_e5m2"),
}
_RANK = re.compile(
    r"#\s+Rank\s+(?P<rank>\d+)(?:\s+Group\s+(?P<group>\d+))?\s+Pid\s+\d+\s+on\s+(?P<host>\S+)\s+device\s+\d+\s+"
    r"\[\S+\]\s+(?P<device>\S.*?)\s*$"
)
_PROGRAM = re.compile(r"\b([a-z_]+)_perf(?:_mpi)?\b")
_ITERATIONS = re.compile(r"\biters: (\d+)")
_MOST_LINE_BYTES = 64 * 1024
_MOST_READ = 4096  # of a line; rows and heads have 200 characters, a launcher's command line more
_MOST_RANKS = 65_536
_MOST_INTEGER = 2**63 - 1  # the database's columns hold no more


@dataclass
class _Head:
    """The information of the lines before the table."""

    programs: list[str] = field(default_factory=list)
    iterations: int = 1
    ranks: list[tuple[int, int, str, str]] = field(default_factory=list)  # rank, group, host, device
    columns: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class NcclTests(Importer):
    """Collectives as NCCL runs them, over the ranks that the file's head lists."""

    name: ClassVar[str] = "nccl-tests"

    collective: str | None = option("what was run, as all_reduce, where the file does not say which program printed it")
    num_ranks: int | None = option("where the file does not list its ranks")
    num_nodes: int | None = option("likewise; otherwise 1")

    def files(self, path: Path) -> list[Path]:
        return files_of(path, ("*.txt", "*.log", "*.out"), _WANTED)

    def batches(self, file: Path) -> Iterator[Batch]:
        head = _Head()
        lines: list[tuple[int, list[str]]] = []
        told = None
        for number, line in _lines(file):
            if (words := _words_of_row(line)) is None:
                if told is not None and ("Collective test starting" in line or _RANK.search(line)):
                    raise InputError(f"{file}: line {number} begins a second test; wanted one test's output in a file")
                _read_head(head, line, f"{file}: line {number}")
                continue
            if told is None:
                told = self._told(file, head)
            lines.append((number, words))
            if len(lines) == BATCH_ROWS:
                yield self._batch(file, head, told, lines)
                lines = []
        if told is None:
            raise InputError(f"{file} has no row of sizes and times; wanted {_WANTED}")
        if lines:
            yield self._batch(file, head, told, lines)

    def _told(self, path: Path, head: _Head) -> tuple[Collective, str]:
        """Return the collective and the device of a file, once its head is read."""
        if head.columns is None or not {"size", "type", "time"} <= set(head.columns):
            raise InputError(f"{path}: expected a head with the columns size, type and time; found {head.columns}")
        devices = {device for _, _, _, device in head.ranks}
        if len(devices) > 1 and self.devices.every is None:
            raise InputError(
                f"{path}: ranks on {', '.join(sorted(devices))}; wanted one kind of device (--device NAME)"
            )
        device = self.devices.resolve(*devices) if len(devices) == 1 else self.devices.every
        if device is None:
            raise InputError(f"{path} does not list its ranks' devices; say which with --device NAME")
        try:
            groups, nodes, each = self._mesh(path, head)
            name = self._collective(path, head)
            return Collective(name=name, replica_groups=groups, mesh_nodes=nodes, devices_per_node=each), device
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error

    def _collective(self, path: Path, head: _Head) -> str:
        if self.collective is not None:
            if self.collective not in PROGRAMS.values():
                raise InputError(f"--collective {self.collective}: wanted one of {', '.join(PROGRAMS.values())}")
            return self.collective
        named = dict.fromkeys(head.programs or _PROGRAM.findall(path.name))
        programs = [program for program in named if program in PROGRAMS] or list(named)
        if len(programs) > 1:
            raise InputError(f"{path} has the output of {', '.join(programs)}; wanted one program's in a file")
        for program in programs:
            if program in PROGRAMS:
                return PROGRAMS[program]
            raise InputError(f"{path} is of {program}_perf, which no plan needs; wanted {', '.join(PROGRAMS)}")
        raise InputError(f"{path} does not say which program printed it; say which with --collective all_reduce")

    def _mesh(self, path: Path, head: _Head) -> tuple[tuple[tuple[int, ...], ...], int, int]:
        """Return the groups of ranks, counted node by node, the nodes, and the devices on each."""
        if not head.ranks:
            if self.num_ranks is None:
                raise InputError(f"{path} does not list its ranks; say how many with --num-ranks (and --num-nodes)")
            nodes = self.num_nodes or 1
            if self.num_ranks % nodes or not 1 <= self.num_ranks <= _MOST_RANKS:
                raise InputError(f"{self.num_ranks} ranks on {nodes} nodes; wanted equally many on each")
            return (tuple(range(self.num_ranks)),), nodes, self.num_ranks // nodes
        hosts = list(dict.fromkeys(host for _, _, host, _ in head.ranks))
        seats = {host: [rank for rank, _, there, _ in head.ranks if there == host] for host in hosts}
        if len({len(ranks) for ranks in seats.values()}) > 1 or len({rank for rank, *_ in head.ranks}) < len(
            head.ranks
        ):
            counts = ", ".join(f"{len(ranks)} on {host}" for host, ranks in seats.items())
            raise InputError(f"{path}: ranks are {counts}; wanted equally many on each node, and each rank once")
        each = len(seats[hosts[0]])
        place = {rank: node * each + seat for node, host in enumerate(hosts) for seat, rank in enumerate(seats[host])}
        groups: dict[int, list[int]] = {}
        for rank, group, _, _ in sorted(head.ranks):
            groups.setdefault(group, []).append(place[rank])
        return tuple(tuple(sorted(ranks)) for ranks in groups.values()), len(hosts), each

    def _batch(
        self, path: Path, head: _Head, told: tuple[Collective, str], lines: list[tuple[int, list[str]]]
    ) -> Batch:
        collective, device = told
        columns = {name: (head.columns or []).index(name) for name in ("size", "type", "time")}
        wrong = (head.columns or []).index("#wrong") if "#wrong" in (head.columns or []) else None
        rows: list[tuple[int, int, str, float]] = []
        bad: list[BadRow] = []
        empty = 0
        sent_by_all = collective.num_ranks if collective.name == "all_to_all" else 1
        for number, words in lines:
            place = f"{path}: line {number}"
            try:
                size, seconds = int(words[columns["size"]]), float(words[columns["time"]]) / 1e6
                dtype = _DTYPES[words[columns["type"]]]
                errors = words[wrong] if wrong is not None else "0"
            except (ValueError, LookupError) as error:
                bad.append(BadRow(place, f"{' '.join(words)[:120]!r} is no row of the table ({error})"))
                continue
            if errors not in ("0", "N/A"):
                bad.append(BadRow(place, f"#wrong is {errors}; wanted 0: the collective gave wrong results"))
            elif not 0 <= size * sent_by_all <= _MOST_INTEGER:
                bad.append(BadRow(place, f"size is {size:.12g}; wanted 0 to {_MOST_INTEGER // sent_by_all:,}"))
            elif size == 0:
                empty += 1
            else:
                rows.append((number, size, dtype, seconds))
        table = self.table(
            len(rows),
            kind="collective",
            subject=collective.subject,
            name=collective.name,
            device_type=device,
            dtype=[dtype for _, _, dtype, _ in rows],
            num_ranks=collective.num_ranks,
            size_bytes=[size * sent_by_all for _, size, _, _ in rows],
            seconds=[seconds for _, _, _, seconds in rows],
            repeats=max(head.iterations, 1),
            how="nccl-tests: mean out-of-place time",
            extra=collective.to_json(),
        )
        return Batch(
            file=path,
            table=table,
            positions=np.array([number for number, *_ in rows], dtype=np.int64),
            num_read=len(lines),
            time_name="time (us)",
            time_seconds=1e-6,
            place_word="line",
            skipped=counted([("nothing to send", np.ones(empty, dtype=bool))]),
            bad=tuple(bad),
        )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield its lines and their numbers from 1; a file with absurdly long lines is rejected."""
    with path.open(encoding="utf-8", errors="replace") as file:
        number = 0
        while line := file.readline(_MOST_LINE_BYTES):
            number += 1
            if len(line) == _MOST_LINE_BYTES:
                raise InputError(
                    f"{path}: line {number} is longer than {_MOST_LINE_BYTES} characters; wanted {_WANTED}"
                )
            yield number, line[:_MOST_READ]


def _words_of_row(line: str) -> list[str] | None:
    """Split a row of the table into words; launchers may put the rank in front, as in `[1,0]<stdout>:`."""
    words = re.sub(r"^\s*\[[^\]]*\](?:<\w+>)?:?", "", line).split()
    is_row = len(words) >= 6 and words[0].lstrip("-").isdigit() and words[1].lstrip("-").isdigit()
    return words if is_row else None


def _read_head(head: _Head, line: str, place: str) -> None:
    if match := _RANK.search(line):
        if len(head.ranks) < _MOST_RANKS:
            head.ranks.append((int(match["rank"]), int(match["group"] or 0), match["host"], match["device"]))
        return
    if "#" in line and re.search(r"\bsize\b.*\bcount\b.*\btime\b", line):
        head.columns = line[line.index("#") + 1 :].split()
        return
    if match := _ITERATIONS.search(re.sub(r"warmup iters: \d+|agg iters: \d+", "", line)):
        head.iterations = int(match[1])
        if head.iterations > _MOST_INTEGER:
            raise InputError(f"{place}: iters is {match[1]:.60}; wanted at most {_MOST_INTEGER:,}")
    if "Collective test starting" in line:
        head.programs[:] = _PROGRAM.findall(line)  # surer than a command line or a path
    elif head.columns is None and not any(program in PROGRAMS for program in head.programs):
        head.programs.extend(_PROGRAM.findall(line))
