"""How commands end: a one-line message and an exit code instead of a traceback."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from dejavu.foundation.errors import DejavuError, InputError, was_interrupted
from flows.processes import RUN

if TYPE_CHECKING:
    from dejavu.track import Run

TASK_RUNS = "prefect.task_runs"
RUN_LOGGERS = ("prefect.flow_runs", TASK_RUNS)
INPUT_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
INTERRUPT = "Execution was aborted by an interrupt signal"  # Prefect's words
TERMINATION = "Execution was aborted by a termination signal"  # likewise
HANGUP = "ended by SIGHUP, as when its terminal is closed"
ENDED_BY = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM", signal.SIGHUP: HANGUP}
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG}  # for the user to fix, not a bug
DISK |= {errno.EISDIR, errno.ENOTDIR, errno.EEXIST}  # a folder where a file belongs, or the other way round


def ending(command: Callable[[], None], project: Path) -> None:
    """Run a command; a mistake in the user's input prints one sentence and exits with code 2, a failure with code 1.

    A full or read-only disk is a failure, too, and a folder in the place of a file.
    On an interrupt, SIGTERM or SIGHUP, print what is kept, and the line that goes on.
    """
    try:
        command()
    except KeyboardInterrupt:
        _say_interrupted(project)
        sys.exit(_interrupts.code)
    except Exception as error:
        if _termination(error) is not None:  # Prefect took it, and failed before it handed it on
            _interrupts.number = _interrupts.number or signal.SIGTERM
        if _interrupts.came or was_interrupted(error):  # what is interrupted may fail in its own words
            _say_interrupted(project)
            sys.exit(_interrupts.code)
        sentence = _sentence_of(error, project)
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        sys.exit(INPUT_ERROR if isinstance(error, InputError) else FAILURE)
    except SystemExit as ended:  # typer makes an exit code of an interrupt
        if ended.code != INTERRUPTED:
            raise
        _say_interrupted(project)
        sys.exit(_interrupts.code)


def _sentence_of(error: Exception, project: Path) -> str | None:
    """Return what a user is told of a failure; nothing of a bug, which keeps its traceback."""
    if isinstance(error, DejavuError):
        return str(error)
    if _is_of_the_disk(error):
        return _of_the_disk(error, project)
    if _is_unreachable(error):
        return f"{_unreachable(error)}; what was measured, tried and saved is kept"
    return None


def _is_of_the_disk(error: object) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in DISK


def _of_the_disk(error: OSError, project: Path) -> str:
    return f"{error.filename or project}: {error.strerror}; what was written before is kept"


def _is_unreachable(error: object) -> bool:
    """Return whether Prefect's client got no answer from its server: it says so in httpx's words."""
    httpx = sys.modules.get("httpx")
    return httpx is not None and isinstance(error, httpx.TransportError)


def may_pass(error: Exception) -> bool:
    """Return whether a run failed at what the same run may not meet: an interrupt, a disk, Prefect's server."""
    ended = was_interrupted(error) or _termination(error) is not None
    return ended or _is_of_the_disk(error) or _is_unreachable(error)


def _is_of_parameters(error: object) -> bool:
    """Return whether Prefect says that a flow does not take what was typed: a value of a field, or the name of one."""
    prefect = sys.modules.get("prefect.exceptions")
    return prefect is not None and isinstance(error, prefect.ParameterTypeError | prefect.SignatureMismatchError)


def _unreachable(error: object) -> str:
    return f"Prefect's server at {os.environ.get('PREFECT_API_URL', 'its address')} does not answer ({error})"


_trainings: list[Path] = []  # of this process


class _Interrupts:
    """The first Ctrl-C, SIGTERM or SIGHUP is an exception, the second the end."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None  # of the first; None: none came

    @property
    def came(self) -> bool:
        return self.number is not None

    @property
    def how(self) -> str:
        return ENDED_BY[self.number or signal.SIGINT]

    @property
    def code(self) -> int:
        """The exit code that shells give to a process that such a signal ended."""
        return 128 + (self.number or signal.SIGINT)

    def first(self, number: int, frame: object) -> None:
        self.number = self.number or signal.Signals(number)
        for one in ENDED_BY:
            if signal.getsignal(one) == self.first:
                # Of a terminal that is closed both the kernel and the shell tell: that is one hangup.
                signal.signal(one, signal.SIG_IGN if one == signal.SIGHUP else self.second)
        raise KeyboardInterrupt(self.how)

    def second(self, number: int, frame: object) -> None:
        said = f"{ENDED_BY[signal.Signals(number)]} again: ended at once; what was measured, tried and saved is kept\n"
        with suppress(OSError):  # its terminal is closed
            os.write(sys.stderr.fileno(), said.encode())
        os._exit(self.code)

    def unheard(self, what: sys.UnraisableHookArgs) -> None:
        """Raise an interrupt once more that came where Python drops exceptions, as in a library's callback."""
        if not issubclass(what.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(what)
            return
        signal.signal(signal.SIGINT, self.first)
        main = threading.main_thread().ident
        again = threading.Timer(0.1, lambda: signal.pthread_kill(main or 0, signal.SIGINT))
        again.daemon = True
        again.start()


_interrupts = _Interrupts()


def end_at_once_when_interrupted_again() -> None:
    """Let only the first Ctrl-C be an exception: all that a command started ends with its process, however it ends.

    So is the first SIGTERM, by which a batch system or `kill` ends a command: Prefect's flows, which have a handler of
    their own, hand it on to this one. And SIGHUP, of a terminal that is closed, unless `nohup` has it ignored.

    While Python takes itself down, after all threads and what was to be done at the end, a Ctrl-C changes nothing: the
    exit code is that of the first.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, _interrupts.first)
        sys.unraisablehook = _interrupts.unheard
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the first to be registered is done last
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _interrupts.first)
        atexit.register(signal.signal, number, signal.SIG_DFL)  # what hangs there can be ended
    if ours:
        os.register_at_fork(after_in_child=_as_before)


def _as_before() -> None:
    """End a fork by SIGTERM or SIGHUP as any process: what it would raise is of its parent."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (_interrupts.first, _interrupts.second):
            signal.signal(number, signal.SIG_DFL)


def how_interrupted() -> str:
    """Return what ended this process, in words; an interrupt, where no signal came that is known."""
    return _interrupts.how


def _say_interrupted(project: Path) -> None:
    goes_on = "the same command goes on from there"
    if _trainings:
        folder = Path(os.path.relpath(_trainings[-1], project))
        line = shlex.join(["dejavu", *_without_resume(sys.argv[1:]), "--resume", str(folder)])
        goes_on = f"to resume the training: {line}"
        if _is_complete(_trainings[-1]):
            export = f"{folder}; to write its weights to a file: dejavu export {folder.name}"
            goes_on = "the training is complete" + (
                f"; to make its page and summary: {line}" if _page_is_due(_trainings[-1]) else f": {export}"
            )
    with suppress(OSError):  # its terminal is closed: nobody reads it
        print(f"{_interrupts.how}; what was measured, tried and saved is kept\n{goes_on}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python would try again at its end, and make 120 of the exit code
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def _is_complete(training: Path) -> bool:
    """Return whether all steps are trained; what is left is to be recorded."""
    from dejavu.launch.running import training_in  # with torch, which a process that trains has

    with suppress(InputError):
        found = training_in(training)
        return found.checkpoint is not None and found.checkpoint >= found.of
    return False


def _page_is_due(training: Path) -> bool:
    from dejavu.runtime.job.resume import PAGE_IS_DUE  # likewise

    return (training / PAGE_IS_DUE).is_file()


def _without_resume(words: list[str]) -> list[str]:
    places = [k for k, word in enumerate(words) if word == "--resume" or word.startswith("--resume=")]
    dropped = {j for k in places for j in ((k, k + 1) if words[k] == "--resume" else (k,))}
    return [word for k, word in enumerate(words) if k not in dropped]


def trains_in(folder: Path) -> None:
    """Take note of a training that this process begins: an interrupt says how to resume it, and none of another's."""
    _trainings.append(folder)


@contextmanager
def interrupts_as_such() -> Iterator[None]:
    """Raise what became of an interrupt as an interrupt, so that Prefect calls the flow Crashed by it, not Failed.

    One of which nothing became, as in a library that tries an import and drops every exception, ends what begins next.
    """
    if _interrupts.came:
        raise KeyboardInterrupt(_interrupts.how)
    try:
        yield
    except Exception as error:
        if was_interrupted(error):
            raise KeyboardInterrupt(_interrupts.how) from error
        if (terminated := _termination(error)) is not None:
            raise terminated from None  # as which Prefect takes it, and hands it on
        raise


def _termination(error: BaseException | None) -> BaseException | None:
    """Return Prefect's exception for a SIGTERM that this one was raised upon: it may fail at it in its own words."""
    prefect = sys.modules.get("prefect.exceptions")
    while error is not None and not (prefect is not None and isinstance(error, prefect.TerminationSignal)):
        error = error.__context__
    return error


class Sentences(logging.Filter):
    """Log an error that users can act on, or an interrupt, once: one sentence where it was raised, and no traceback.

    So are SIGTERM, a full or read-only disk, a server of Prefect that does not answer any more, and parameters that a
    flow does not take.

    Nor is a task's end logged, where it only completed.

    Prefect would log it again for every enclosing flow, and once more as that flow's final state.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said: BaseException | None = None
        self._said_in: object = None  # which flow run's log
        self._is_ended = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        unreachable, interrupted = _is_unreachable(error), was_interrupted(error)
        of_the_disk = _of_the_disk(error, Path.cwd()) if _is_of_the_disk(error) else ""
        if isinstance(error, DejavuError) or of_the_disk or _is_of_parameters(error) or unreachable or interrupted:
            # Of a worker's run each flow's log is a page of its own, and `--watch` shows the outermost one's alone.
            log = getattr(record, "flow_run_id", None) if os.environ.get(RUN) else None
            is_said = error is self._said or (unreachable and _is_unreachable(self._said))
            if is_said and log == self._said_in:
                return False
            self._said, self._said_in = error, log
            if interrupted:
                record.msg, record.args = _interrupts.how, ()
            else:
                record.msg, record.args = "failed: %s", (_unreachable(error) if unreachable else of_the_disk or error,)
            record.exc_info, record.exc_text = None, None
        elif isinstance(record.msg, str) and INTERRUPT in record.getMessage():
            return False  # each task and flow says it twice, and the command says it at the end
        elif isinstance(record.msg, str) and TERMINATION in record.getMessage():
            is_first, self._is_ended = not self._is_ended, True
            record.msg, record.args = ENDED_BY[signal.SIGTERM], ()
            return is_first
        elif isinstance(record.msg, str) and record.msg.startswith("Finished in state"):
            said = record.getMessage()
            # A line for every completed task says nothing that the next line does not. Of one that failed its flow says
            # why: where it is not tried again, Prefect has said nothing of its error yet.
            is_told = self._said is not None or record.name == TASK_RUNS
            return not (is_told and "Failed" in said) and said != "Finished in state Completed()"
        return True


_SENTENCES = Sentences()


@contextmanager
def recorded_log(run: Run, path: Path) -> Iterator[None]:
    """Keep what flows and tasks log until the end in a file, and record it with the run, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in RUN_LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        with suppress(OSError):  # the end of it has no room on a full disk, of which the run says what matters
            handler.close()
        if path.is_file():  # gone with its project: how the run ended says so
            run.artifact_file(path, "logs/flow.log")


def without_waiting_for_heartbeats() -> None:
    """Let flows that are called end without waiting for their heartbeats' thread, as Prefect's asynchronous ones do.

    The thread looks once a second whether it should end, so that each of them would end up to a second later.
    """
    from prefect import flow_engine

    if not isinstance(flow_engine._send_heartbeats, partial):
        flow_engine._send_heartbeats = partial(flow_engine._send_heartbeats, join_on_exit=False)


def without_a_reader() -> None:
    """Let a run go on whose output nobody reads any more: that is Prefect's worker, which may be killed.

    rich, by which Prefect prints each line of the log, would end the process (`Console.on_broken_pipe`).
    """
    from rich.console import Console

    def be_quiet(console: Console) -> None:
        console.quiet = True

    Console.on_broken_pipe = be_quiet  # type: ignore[method-assign,assignment]


def without_tracebacks() -> None:
    """Install `Sentences` on the loggers of Prefect's flow and task runs.

    What is only lost to a server that is away, each record and event of a run, is not told one by one; nor that a
    connection to it is lost, which Prefect opens again. Nor what Dask's scheduler does for the trials, step by step.
    """
    for name in (*RUN_LOGGERS, "prefect.engine"):  # its engine, of a run that was interrupted before it had a record
        logging.getLogger(name).addFilter(_SENTENCES)
    for name in ("prefect._internal.concurrency", "prefect.events.clients", "websockets.client", "distributed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.raiseExceptions = False
