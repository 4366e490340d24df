"""Ports for servers that tests start seconds later."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 20_000


def free_port() -> int:
    """A port that nobody has, below those that the kernel gives to connections, which would soon have it."""
    highest = int(RANGE.read_text().split()[0]) if RANGE.is_file() else 32_768
    while True:
        port = LOWEST + secrets.randbelow(max(highest - LOWEST, 10_000))
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
