"""Secrets of a user's environment that no run may write down, and what is kept for its user alone."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from flows.room import open_to_others

_NAMES = ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_KEY", "AWS_SECRET_ACCESS_KEY")
_NAMES = (*_NAMES, "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "DEJAVU_MLFLOW_DATABASE_URL", "DEJAVU_CANARY_SECRET")
CANARIES = {name: f"canary-{number}-5ecret" for number, name in enumerate(_NAMES)}
# "-5ecret" in base64, at each of three places in a group of bytes; the ends depend on what is beside it.
_BASE64 = (b"LTVlY3Jl", b"NWVjcmV0", b"ZWNyZXQ")


def check_nothing_is_given_away(project: Path, before: Iterable[Path], printed: Iterable[str]) -> None:
    """Check that no canary is in any new file, log, database or output, and that others may read none of them."""
    written = sorted({path for path in project.rglob("*") if path.is_file()} - set(before))
    kept = [path for path in written if path.suffix != ".pyc"]
    assert {"mlflow.db", "report.html", "manifest.json", "temporary_server.log"} <= {path.name for path in kept}
    for text in (*(text.encode() for text in printed), *(path.read_bytes() for path in written)):
        assert b"-5ecret" not in text
        assert not any(encoded in text for encoded in _BASE64), "a canary in base64"
    modes = {path: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in kept}
    assert {path: oct(mode) for path, mode in modes.items() if mode} == {}
    assert open_to_others(project) == []
