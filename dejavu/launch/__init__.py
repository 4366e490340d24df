"""Starting ranks and watching them: preflight checks, hosts, agents, restarts."""

from __future__ import annotations

import dejavu.runtime  # noqa: F401  (the first import of torch.distributed, without garbage collection)
