"""Training on real ranks: stages, ranks, the training loop, checkpoints. The only package with process groups."""

from __future__ import annotations

from dejavu.foundation.gc_frozen import gc_frozen

with gc_frozen():  # here, because every process that the runtime starts imports this
    import torch.distributed  # noqa: F401
