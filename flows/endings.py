"""How commands end: a sentence and an exit code, in place of tracebacks."""

from __future__ import annotations

import errno
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dejavu.foundation.errors import DejavuError, InputError

INPUT_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}  # the user's to mend, not a defect


def ending(command: Callable[[], None], project: Path) -> None:
    """Run a command; a mistake in what was typed or written is one sentence and exit code 2, a failure code 1.

    A disk that is full or cannot be written is one, too. Interrupted, it says what is kept, and how a training that
    was begun goes on.
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
        print(f"the training goes on with: dejavu run --resume {folder.relative_to(project)}", file=sys.stderr)


def begun_training(project: Path, since: float) -> Path | None:
    """The training of this project that was prepared last, if it was after this second since the epoch."""
    jobs = [path for path in (project / ".dejavu" / "runs").glob("*/job.json") if path.stat().st_mtime >= since]
    return max(jobs, key=lambda path: path.stat().st_mtime).parent if jobs else None


class Sentences(logging.Filter):
    """Of errors that users can act on, and of interrupts: one sentence where they arose first, and no traceback.

    Prefect logs each again for every flow around it, and once more as the state in which that ended.
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
        elif self._said is not None and isinstance(record.msg, str) and record.msg.startswith("Finished in state"):
            return "Failed" not in record.getMessage()
        return True


_SENTENCES = Sentences()


def without_tracebacks() -> None:
    """From here on the loggers of Prefect's runs say such errors in a sentence."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_SENTENCES)
