"""Measuring layers, kernels, links, collectives and the pipeline runtime's own overhead, as rows of the database."""

from __future__ import annotations

import dejavu.runtime  # noqa: F401  (the first import of torch.distributed, without garbage collection)
