"""Starting ranks and watching over them: hosts, agents, checks before the start, restarts."""

from __future__ import annotations

import dejavu.runtime  # noqa: F401  (the first import of torch.distributed, without garbage collection)
