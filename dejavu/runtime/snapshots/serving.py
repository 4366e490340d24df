"""A host's memory for other hosts: over HTTP, with a token that only this launch knows.

The agent of a host serves it, so it outlives the host's ranks.
"""

from __future__ import annotations

import http.client
import re
import secrets
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dejavu.runtime.snapshots.files import Shard, Taken, packed, read_layers, unpacked, write
from dejavu.runtime.state import State

TOKEN = "X-Dejavu-Token"
TIMEOUT_SECONDS = 60.0  # without a byte
PROBE, PROBE_BYTES = "/probe", 2**20
_PATH = re.compile(r"/(\d+)/(\d+)/(\d+)")  # attempt, step, rank


class MemoryServer:
    """Serves a folder of snapshots until it is closed.

    Args:
        address: of this host, by which others reach it.
    """

    def __init__(self, folder: Path, address: str, token: str) -> None:
        class Handler(_Handler):
            memory, known = folder, token

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{address}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="memory", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    memory: Path
    known: str

    def do_GET(self) -> None:
        """Send some layers of a snapshot, or as many zeros as a probe wants."""
        asked = urllib.parse.urlsplit(self.path)
        if not self._is_allowed():
            return
        if asked.path == PROBE:
            self._send(bytes(PROBE_BYTES))
        elif (path := self._path(asked.path)) is not None:
            layers = urllib.parse.parse_qs(asked.query).get("layer", [])
            try:
                state, shards = read_layers(path, layers)
            except OSError:  # it is not there, or damaged
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self._send(packed(state, shards))

    def _send(self, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_PUT(self) -> None:
        """Keep a copy of another host's snapshot, if all of it arrives: its rank may be killed while it sends."""
        if self._is_allowed() and (path := self._path(self.path)) is not None:
            wanted = int(self.headers["Content-Length"])
            content = self.rfile.read(wanted)
            if len(content) < wanted:
                self.close_connection = True
                return
            try:
                write(path, content)
            except OSError as error:  # no room, which its sender can do without
                self.send_error(HTTPStatus.INSUFFICIENT_STORAGE, error.strerror)
                return
            self.send_response(HTTPStatus.NO_CONTENT)
            self.end_headers()

    def _is_allowed(self) -> bool:
        known = secrets.compare_digest(self.headers.get(TOKEN, ""), self.known)
        if not known:
            self.send_error(HTTPStatus.FORBIDDEN)
        return known

    def _path(self, asked: str) -> Path | None:
        match = _PATH.fullmatch(asked)
        if match is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        return Taken(*map(int, match.groups())).path(self.memory)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a training asks for many."""


def _url(base: str, taken: Taken) -> str:
    return f"{base}/{taken.attempt}/{taken.step}/{taken.rank}"


def fetch(base: str, token: str, taken: Taken, layers: Collection[str]) -> tuple[State, dict[str, Shard]]:
    """Get some layers of a snapshot from another host's memory.

    Raises:
        OSError: it does not answer, or does not have it.
    """
    query = urllib.parse.urlencode([("layer", layer) for layer in sorted(layers)])
    asked = urllib.request.Request(f"{_url(base, taken)}?{query}", headers={TOKEN: token})
    try:
        with _open(asked) as answer:
            return unpacked(answer.read())
    except (http.client.HTTPException, SafetensorError) as error:  # it ended while it sent
        raise OSError(f"the answer of {base} is damaged: {error}") from error


def leave_copy(base: str, token: str, taken: Taken, content: bytes) -> None:
    """Leave a copy of a snapshot in another host's memory.

    Raises:
        OSError: it does not answer.
    """
    with _open(urllib.request.Request(_url(base, taken), content, {TOKEN: token}, method="PUT")):
        pass


def probe_seconds(base: str, token: str) -> float:
    """Measure a message of `PROBE_BYTES` from another host.

    Raises:
        OSError: it does not answer.
    """
    began = time.perf_counter()
    with _open(urllib.request.Request(f"{base}{PROBE}", headers={TOKEN: token})) as answer:
        answer.read()
    return time.perf_counter() - began


def _open(asked: urllib.request.Request) -> Any:
    # Hosts talk to each other directly, whatever proxy the user's environment names.
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=TIMEOUT_SECONDS)
