"""What a forked rank runs in tests/test_zygote.py: says what it is, and ends as it is told."""

from __future__ import annotations

import json
import os
import signal
import sys


def prepare(argument: str) -> None:
    """As a zygote is asked to; kept where every fork finds it, which runs this module anew.

    `cuda`: as if an import had asked CUDA, which forks then cannot use.
    """
    if argument == "cuda":
        import torch

        torch.cuda._is_in_bad_fork = lambda: True
    sys.prepared = argument  # type: ignore[attr-defined]


about = {
    "number": os.environ["NUMBER"],
    "inherited": os.environ.get("INHERITED"),
    "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
    "prepared": getattr(sys, "prepared", None),
    "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}
if __name__ == "__main__":
    print(json.dumps(about))  # no flush: a line is written when it is whole
    if sys.argv[1] == "fail":
        raise ValueError("as told")
    if sys.argv[1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "sleep":
        signal.pause()
    sys.exit(int(sys.argv[1]))
