"""How commands end: a one-line message and an exit code instead of a traceback."""

from __future__ import annotations

import errno
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.foundation.errors import DejavuError, InputError

if TYPE_CHECKING:
    from dejavu.track import Run

RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")
INPUT_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}  # for the user to fix, not a bug


def ending(command: Callable[[], None], project: Path) -> None:
    """Run a command; a mistake in the user's input prints one sentence and exits with code 2, a failure with code 1.

    A full or read-only disk is a failure, too. On an interrupt, print what is kept, and how to resume a training that
    had started.
    """
    began = time.time()
    try:
        command()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(INPUT_ERROR)
    except DejavuError as error:
        print(error, file=sys.stderr)
        sys.exit(FAILURE)
    except OSError as error:
        if error.errno not in DISK:
            raise
        print(f"{error.filename or project}: {error.strerror}; what was written before is kept", file=sys.stderr)
        sys.exit(FAILURE)
    except KeyboardInterrupt:
        _say_interrupted(project, began)
        sys.exit(INTERRUPTED)
    except SystemExit as ended:  # typer makes an exit code of an interrupt
        if ended.code == INTERRUPTED:
            _say_interrupted(project, began)
        raise


def _say_interrupted(project: Path, began: float) -> None:
    print("interrupted; what was measured, tried and saved is kept", file=sys.stderr)
    folder = begun_training(project, began)
    if folder is not None:
        print(f"to resume the training: dejavu run --resume {folder.relative_to(project)}", file=sys.stderr)


def begun_training(project: Path, since: float) -> Path | None:
    """Return the project's last prepared training, if it was prepared after `since` (seconds since the epoch)."""
    jobs = [path for path in (project / ".dejavu" / "runs").glob("*/job.json") if path.stat().st_mtime >= since]
    return max(jobs, key=lambda path: path.stat().st_mtime).parent if jobs else None


class Sentences(logging.Filter):
    """Log an error that users can act on, or an interrupt, once: one sentence where it was raised, and no traceback.

    Nor is a task's end logged, where it only completed.

    Prefect would log it again for every enclosing flow, and once more as that flow's final state.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, DejavuError | KeyboardInterrupt):
            if error is self._said:
                return False
            self._said = error
            interrupted = isinstance(error, KeyboardInterrupt)
            record.msg, record.args = ("interrupted", ()) if interrupted else ("failed: %s", (error,))
            record.exc_info, record.exc_text = None, None
        elif isinstance(record.msg, str) and record.msg.startswith("Finished in state"):
            said = record.getMessage()
            # A line for every completed task says nothing that the next line does not.
            return not (self._said is not None and "Failed" in said) and said != "Finished in state Completed()"
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
        handler.close()
        run.artifact_file(path, "logs/flow.log")


def without_tracebacks() -> None:
    """Install `Sentences` on the loggers of Prefect's flow and task runs."""
    for name in RUN_LOGGERS:
        logging.getLogger(name).addFilter(_SENTENCES)
