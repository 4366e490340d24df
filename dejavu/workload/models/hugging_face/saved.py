"""Under which names files of transformers' models have our weights: today's, and those that older files have."""

from __future__ import annotations

from typing import Any

from dejavu.workload.models._base import Source
from dejavu.workload.models.hugging_face.experts import published
from dejavu.workload.models.hugging_face.families import Family


def sources(family: Family, config: Any, name: str) -> tuple[Source, ...]:
    """Return where a weight of the whole model may be.

    A head that the config ties to the embedding gets a copy of that where the files have none, as in transformers.
    Files that were saved from the model without its head lack the first part of the names (as GPT-2's published ones).
    """
    names = [name]
    head, embedding = family.tied
    if name == head and config.tie_word_embeddings:
        names.append(embedding)
    names += [one.replace(new, old) for one in names for new, old in family.in_files.items() if new in one]
    names += [one.removeprefix(f"{family.base}.") for one in names if one.startswith(f"{family.base}.")]
    found = tuple(Source((one,)) for one in dict.fromkeys(names))
    if family.has_experts:
        found += published(name, config.num_local_experts)
    return found
