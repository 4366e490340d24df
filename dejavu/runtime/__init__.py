"""Running for real: measuring, stages, ranks, the launcher, checkpoints. The only place with process groups."""

from __future__ import annotations

from dejavu.foundation.gc_frozen import gc_frozen

with gc_frozen():  # here, because every process that the runtime starts comes by
    import torch.distributed  # noqa: F401
