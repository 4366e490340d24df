"""How long tests wait for what ends soon on an idle machine."""

from __future__ import annotations

PATIENCE_SECONDS = 900.0  # only a hang takes so long: on a busy machine a second may become a minute
