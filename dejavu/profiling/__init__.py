"""Measuring: layers, kernels, links, collectives and what the pipeline runtime takes, as rows of the database."""

from __future__ import annotations

import dejavu.runtime  # noqa: F401  (the first import of torch.distributed, without garbage collection)
