"""Ranks as forks of one process that has imported what they run, so that a host pays for it once.

Importing torch's pipelining takes seconds of a core, for every rank and again for every attempt. The agent's zygote
does it once, during the rendezvous, and forks a rank when the agent wants one. A rank is the agent's own child, like
one that was started by a command: the zygote forks twice, and the agent is the subreaper of orphans. Wherever a rank
cannot be forked, it is started by its command.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from dejavu.runtime.process import die_with_parent

REPLY_SECONDS = 60.0  # for a fork, which takes milliseconds
POLL_SECONDS = 0.01
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Zygote:
    """A child of the agent that forks ranks.

    Args:
        module: what ranks run as their main module; imported before the first one is wanted.
    """

    def __init__(self, module: str) -> None:
        self.module, agent = module, os.getpid()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        own, theirs = socket.socketpair()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            own.close()
            _Nest(theirs, module, agent).serve()
            sys.exit()
        theirs.close()
        self._channel: socket.socket | None = own
        self._replies = own.makefile()
        self._is_ready = False

    def fork(self, words: Sequence[str], environment: Mapping[str, str]) -> Forked | None:
        """Start a rank as this command would; None: it has to be started by the command.

        Args:
            words: of the command, its program among them.
        """
        arguments = _arguments(words, self.module)
        if self._channel is None or arguments is None:
            return None
        try:
            self.wait()
            self._channel.settimeout(REPLY_SECONDS)
            request = {"arguments": arguments, "environment": dict(environment)}
            self._channel.sendall(json.dumps(request).encode() + b"\n")
            pid = int(self._replies.readline() or 0)
        except OSError:
            pid = 0
        if not pid:
            self.end()
            return None
        return Forked(pid, words)

    def wait(self) -> None:
        """Wait for its imports, which have no time limit."""
        if not self._is_ready:
            self._is_ready = bool(self._replies.readline())

    def prepare(self, module: str, argument: str) -> None:
        """Let the zygote call `module.prepare(argument)`, and wait: what that keeps, later ranks need not compute."""
        if self._channel is not None:
            try:
                self.wait()
                self._channel.settimeout(None)
                self._channel.sendall(json.dumps({"module": module, "argument": argument}).encode() + b"\n")
                self._replies.readline()
            except OSError:
                self.end()

    def end(self) -> None:
        """End the zygote; the ranks that it forked keep running."""
        if self._channel is not None:
            self._channel.close()
            self._replies.close()
            self._channel = None
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def module_of(words: Sequence[str]) -> str | None:
    """Return the module that torchrun's arguments run in every rank; None: they run something else."""
    return words[words.index("-m") + 1] if "-m" in words[:-1] else None


def _arguments(words: Sequence[str], module: str) -> list[str] | None:
    """Return the command's arguments of the module; None: it runs something else."""
    start = [sys.executable, "-u", "-m", module]
    return [*words[len(start) :]] if [*words[: len(start)]] == start else None


def _num_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


class _Nest:
    """The zygote itself.

    Args:
        channel: one line of JSON for each rank that is wanted; its answer is the rank's process id, or 0.
        agent: its process id.
    """

    def __init__(self, channel: socket.socket, module: str, agent: int) -> None:
        self.channel, self.module, self.agent = channel, module, agent
        self.requests = channel.makefile()

    def serve(self) -> None:
        """Fork ranks until the agent ends; returns only in a rank, when that has finished."""
        die_with_parent(signal.SIGKILL)
        interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)
        importlib.import_module(self.module)
        del sys.modules[self.module]  # each rank runs it as its main module
        gc.freeze()
        self.channel.sendall(b"ready\n")
        for line in self.requests:
            request = json.loads(line)
            if "module" in request:
                self._prepare(**request)
            elif _num_threads() > 1:  # a lock held by another thread would stay locked in a fork
                self.channel.sendall(b"0\n")
            elif not (child := os.fork()):
                signal.signal(signal.SIGINT, interrupts)
                self._rank(**request)
                return
            else:
                os.waitpid(child, 0)
        os._exit(0)

    def _prepare(self, module: str, argument: str) -> None:
        try:
            importlib.import_module(module).prepare(argument)
            gc.freeze()
        except Exception:  # each rank will try itself, and tell
            traceback.print_exc()
        self.channel.sendall(b"prepared\n")

    def _rank(self, arguments: list[str], environment: dict[str, str]) -> None:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        os.setsid()
        while os.getppid() == between:
            time.sleep(POLL_SECONDS / 10)
        if os.getppid() != self.agent:  # which has ended, or is no subreaper
            self.channel.sendall(b"0\n")
            os._exit(1)
        os.environ.clear()
        os.environ.update(environment)
        for stream in (sys.stdout, sys.stderr):
            cast(TextIO, stream).reconfigure(line_buffering=True)  # type: ignore[attr-defined]
        self.channel.sendall(b"%d\n" % os.getpid())
        self.requests.close()
        self.channel.close()
        if torch.cuda._is_in_bad_fork():  # an import asked CUDA in the zygote: forks cannot use it any more
            os.execve(sys.executable, [sys.executable, "-u", "-m", self.module, *arguments], environment)
        sys.argv = ["", *arguments]
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)


class Forked:
    """A rank that was forked, with what torch's agent asks of a `subprocess.Popen`."""

    def __init__(self, pid: int, words: Sequence[str]) -> None:
        self.pid, self.args = pid, words
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative where a signal ended it; None: it still runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once there is one.

        Raises:
            subprocess.TimeoutExpired: there is none yet.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code


def handler_of(zygote: Zygote | None) -> type[SubprocessHandler]:
    """What torch's agent is to start ranks with."""

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            goes_elsewhere = self._stdout or self._stderr
            forked = zygote.fork(args, env) if zygote and not goes_elsewhere else None
            return forked or super()._popen(args, env)

    return Handler
