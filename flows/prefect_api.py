"""Configure the Prefect server of `dejavu up` through its REST interface.

Importing Prefect here instead would use the settings of the caller, whose server may be another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx
from httpx_retries import Retry, RetryTransport

from dejavu.foundation.errors import DejavuError

WORK_POOL = "dejavu"
HEARTBEAT_SECONDS = 30  # the least that Prefect allows
SILENCE_SECONDS = 4 * HEARTBEAT_SECONDS  # after which a run counts as crashed

CANCEL_SECONDS = 60  # Prefect's worker ends a process within 30
ANSWER_SECONDS = 180.0  # a write waits up to 60 for SQLite's lock, then is asked again; and cores may be all taken

# The server answers 503 when two requests met in its SQLite database; nothing was written then.
BUSY = Retry(
    total=10,
    allowed_methods=Retry.RETRYABLE_METHODS | {"POST", "PATCH"},
    status_forcelist=[httpx.codes.SERVICE_UNAVAILABLE],
    retry_on_exceptions=[httpx.ConnectError],
    backoff_factor=0.2,
    max_backoff_wait=5,
)


def connect(api_url: str, headers: Mapping[str, str] | None = None) -> httpx.Client:
    """Open a connection that bypasses the user's proxies, and asks a busy server again for half a minute."""
    return httpx.Client(
        base_url=api_url, headers=headers, trust_env=False, timeout=ANSWER_SECONDS, transport=RetryTransport(retry=BUSY)
    )


def ensure_work_pool(api: httpx.Client) -> None:
    """Create the work pool here, so that the deployments need not wait for the worker."""
    response = api.get(f"/work_pools/{WORK_POOL}")
    if response.status_code == httpx.codes.NOT_FOUND:
        _post(api, "/work_pools/", {"name": WORK_POOL, "type": "process", "description": "processes on this machine"})


def ensure_automations(api: httpx.Client) -> None:
    """Create what ends runs that nobody else does, which would keep their deployment's slot.

    One whose process was killed stays Running for ever, and one that is cancelled before its process began stays
    Cancelling for minutes: Prefect's worker has then nothing to end.
    """
    _ensure_automation(
        api,
        "dejavu: a silent run has crashed",
        f"A run that sent heartbeats and then nothing for {SILENCE_SECONDS} s was killed.",
        after="prefect.flow-run.heartbeat",
        expect=["prefect.flow-run.*"],
        within_seconds=SILENCE_SECONDS,
        state="CRASHED",
        message=f"no heartbeat for {SILENCE_SECONDS} s: its process was killed",
    )
    _ensure_automation(
        api,
        "dejavu: a run that is cancelled ends",
        f"A run that is still Cancelling after {CANCEL_SECONDS} s had no process to end.",
        after="prefect.flow-run.Cancelling",
        expect=[f"prefect.flow-run.{name}" for name in ("Cancelled", "Crashed", "Failed", "Completed")],
        within_seconds=CANCEL_SECONDS,
        state="CANCELLED",
        message=f"cancelled, and its worker had nothing to end within {CANCEL_SECONDS} s",
    )


def _ensure_automation(
    api: httpx.Client,
    name: str,
    description: str,
    *,
    after: str,
    expect: list[str],
    within_seconds: int,
    state: str,
    message: str,
) -> None:
    """Create or renew an automation: a run with this event and none of the others in time is put into a state."""
    automation = {
        "name": name,
        "description": description,
        "enabled": True,
        "trigger": {
            "type": "event",
            "posture": "Proactive",
            "match": {"prefect.resource.id": ["prefect.flow-run.*"]},
            "for_each": ["prefect.resource.id"],
            "after": [after],
            "expect": expect,
            "threshold": 1,
            "within": within_seconds,
        },
        "actions": [{"type": "change-flow-run-state", "state": state, "message": message}],
    }
    found = _post(api, "/automations/filter", {"automations": {"name": {"any_": [name]}}})
    if found:
        api.put(f"/automations/{found[0]['id']}", json=automation).raise_for_status()
    else:
        _post(api, "/automations/", automation)


def crash_lost_runs(api: httpx.Client, why: str, alive: Collection[str], *, worker_lives: bool = False) -> None:
    """Mark runs as crashed whose processes are known to have ended.

    Args:
        alive: ids of the runs that have a process; the flows that these call are theirs.
        worker_lives: a worker may be starting the processes of pending runs just now.
    """
    states = ["RUNNING", "CANCELLING", *(() if worker_lives else ["PENDING"])]
    wanted = {"flow_runs": {"state": {"type": {"any_": states}}}}
    for run in _post(api, "/flow_runs/filter", wanted):
        outermost = _outermost(api, run)
        if outermost in alive or (outermost is None and alive):
            continue
        state = {"type": "CRASHED", "name": "Crashed", "message": why}
        _post(api, f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})


@dataclass(frozen=True)
class Watch:
    """What `replan/on-change` looks at, and how often.

    Attributes:
        parameters: of the flow, where they are not its defaults.
    """

    every_seconds: float
    parameters: dict[str, str | bool]


def watching(api: httpx.Client) -> Watch | None:
    """Return what the schedule of `replan/on-change` looks at; None: it is not active, or not deployed."""
    found = api.get("/deployments/name/replan/on-change")
    if found.status_code == httpx.codes.NOT_FOUND:
        return None
    deployment = found.raise_for_status().json()
    active = [one["schedule"] for one in deployment["schedules"] if one["active"] and "interval" in one["schedule"]]
    return Watch(active[0]["interval"], deployment["parameters"]) if active else None


def start_watching(api: httpx.Client, watch: Watch) -> None:
    """Activate the schedule of `replan/on-change`; its runs by an event have the same parameters."""
    found = api.get("/deployments/name/replan/on-change")
    if found.status_code == httpx.codes.NOT_FOUND:
        raise DejavuError("prefect.yaml has no deployment replan/on-change; take it from the repository's prefect.yaml")
    deployment = found.raise_for_status().json()
    path = f"/deployments/{deployment['id']}"
    _patch(api, path, {"parameters": watch.parameters})
    for schedule in deployment["schedules"]:
        content = {"active": True, "schedule": {"interval": watch.every_seconds}}
        _patch(api, f"{path}/schedules/{schedule['id']}", content)


def _outermost(api: httpx.Client, run: dict[str, Any]) -> str | None:
    """Return the id of the run whose process this one runs in: its own, or that of the flow that called it.

    None if the server does not know the caller: it writes task runs down seconds after they begin, and was killed.
    """
    while run["parent_task_run_id"]:
        caller = api.get(f"/task_runs/{run['parent_task_run_id']}")
        if caller.status_code == httpx.codes.NOT_FOUND:
            return None
        run = api.get(f"/flow_runs/{caller.raise_for_status().json()['flow_run_id']}").raise_for_status().json()
    return str(run["id"])


def worker_is_online(api: httpx.Client, since: datetime) -> bool:
    """Return whether a worker has sent a heartbeat since then; an earlier one may still be listed as online."""
    workers = _post(api, f"/work_pools/{WORK_POOL}/workers/filter", {})
    return any(
        worker["status"] == "ONLINE" and datetime.fromisoformat(worker["last_heartbeat_time"]) >= since
        for worker in workers
    )


def _patch(api: httpx.Client, path: str, content: dict[str, Any]) -> None:
    response = api.patch(path, json=content)
    if response.is_error:
        raise DejavuError(f"Prefect refused {path} ({response.status_code}): {response.text[:1000]}")


def _post(api: httpx.Client, path: str, content: dict[str, Any]) -> Any:
    response = api.post(path, json=content)
    if response.is_error:
        raise DejavuError(f"Prefect refused {path} ({response.status_code}): {response.text[:1000]}")
    return response.json() if response.content else None
