"""`dejavu up --foreground`: services that live as long as one process, for systemd and containers."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from flows import service_record, services
from flows.prefect_api import Watch

LOOK_SECONDS = 5.0


def stay_up(project: Path, start: Callable[..., Any], watch: Watch | None, say: service_record.Say) -> None:
    """Start the services, start again what ends, and stop everything on SIGTERM, SIGHUP, Ctrl-C or `dejavu down`.

    Args:
        start: `services.up` with everything but what is watched, whether it starts again, and who is told.

    Raises:
        DejavuError: a service did not start, or not again; everything is stopped.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the same way as Ctrl-C
    try:
        start(watch=watch, say=say)
        tell_systemd("READY=1")
        while (found := service_record.recorded(project)) is not None:
            if found.dead and start(again=True, say=say) is None:
                break
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        tell_systemd("STOPPING=1")
    finally:
        for number in (signal.SIGINT, *before):
            signal.signal(number, signal.SIG_IGN)
        services.down(project, say=partial(_say_if_heard, say))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_if_heard(say: service_record.Say, text: str) -> None:
    with suppress(OSError):  # its terminal is closed
        say(text)


def tell_systemd(state: str) -> None:
    """Report a state to systemd, where it started this process with `Type=notify`; see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
