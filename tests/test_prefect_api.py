"""What `dejavu up` tells Prefect's server of runs whose processes have ended, and to a busy one."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from flows.prefect_api import connect, crash_lost_runs

RUNS = {  # two that were submitted, each with the flow that it calls
    "full": None,
    "train": "full",
    "other": None,
    "plan": "other",
}


def crashed(alive: set[str], unknown_callers: set[str]) -> set[str]:
    """Return which of RUNS are said to have crashed, when the server has forgotten who calls some of them."""
    said = set()

    def answer(request: httpx.Request) -> httpx.Response:
        _, kind, name, *_ = request.url.path.split("/")
        if request.method == "GET" and kind == "task_runs":
            caller = name.removeprefix("calls-")
            return httpx.Response(404) if caller in unknown_callers else httpx.Response(200, json=task(caller))
        if request.method == "GET":
            return httpx.Response(200, json=run(name))
        if name == "filter":
            return httpx.Response(200, json=[run(one) for one in RUNS])
        said.add(name)
        return httpx.Response(201, json={})

    def run(name: str) -> dict[str, Any]:
        return {"id": name, "parent_task_run_id": RUNS[name] and f"calls-{name}"}

    def task(name: str) -> dict[str, Any]:
        return {"flow_run_id": RUNS[name]}

    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)) as api:
        crash_lost_runs(api, "why", alive)
    return said


@pytest.mark.parametrize("alive", [set(), {"full"}, {"other"}, {"full", "other"}])
@pytest.mark.parametrize("unknown", [set(), {"train"}, {"plan"}, {"train", "plan"}])
def test_only_what_is_known_to_have_ended_has_crashed(alive: set[str], unknown: set[str]) -> None:
    """A server that was killed may not have written down yet who calls a flow; then it may belong to any that lives."""
    known = {name for name, caller in RUNS.items() if not (caller and name in unknown)}
    lives = alive | {name for name, caller in RUNS.items() if caller in alive}
    expected = {name for name in known if name not in lives} | (set() if alive else set(RUNS))
    assert crashed(alive, unknown) == expected


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH"])
def test_a_busy_server_is_asked_again(method: str) -> None:
    """Two requests that meet in its SQLite database get 503, and nothing was written."""
    asked = []

    class Busy(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self.send_response(503 if len(asked) < 3 else 200)
            self.end_headers()

        do_GET = do_POST = do_PATCH = answer

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with connect(f"http://127.0.0.1:{server.server_port}") as api:
                content = None if method == "GET" else {"a": 1}
                assert api.request(method, "/x", json=content).status_code == 200
        finally:
            server.shutdown()
    assert len(asked) == 3 and len(set(asked)) == 1
