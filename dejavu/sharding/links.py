"""Which options of two nodes agree on the tensor between them: what linkage groups are made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dejavu.graphs.dtensor import REPLICATED
from dejavu.sharding.assembly import Option, Placement, Sharded
from dejavu.sharding.problem import Pair
from dejavu.sharding.solvers.groups import AGREE, CONFLICT, SILENT, Along, Links

Known = dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], NDArray[np.int8]]


def links_of(sharded: Sharded, *, with_sums: bool = False) -> Links:
    """Return the links of all edges: splits that stay agree, splits that have to be moved conflict.

    What is whole says nothing, nor does a sum whose parts are still to be added: splitting the one and adding up the
    other is no conflict.

    Args:
        with_sums: parts of a sum that stay parts agree, too. Then chains of operators that had better add up at their
            end are found; but what is implied goes further, into conflicts that nobody meant.
    """
    found: dict[Pair, NDArray[np.int8]] = {}
    known: Known = {}
    for maker, output, user, place in sharded.flows:
        made = tuple(one.outputs[output] for one in sharded.options[maker])
        wanted = tuple(one.outputs[0] if place is None else one.inputs[place] for one in sharded.options[user])
        if (made, wanted) not in known:
            known[made, wanted] = np.array([[_says(a, b, with_sums) for b in wanted] for a in made], np.int8)
        says = known[made, wanted]
        says = says if maker < user else says.T
        pair = (min(maker, user), max(maker, user))
        found[pair] = _both(found[pair], says) if pair in found else says
    return found


def links_along(sharded: Sharded, *, with_sums: bool = False) -> tuple[Along, ...]:
    """Return for each dimension of the mesh what options do along it, and its links; `with_sums`: see `links_of`."""
    dims = range(len(sharded.options[0][0].outputs[0]))
    return tuple(_along(sharded, dim, with_sums) for dim in dims)


def _along(sharded: Sharded, dim: int, with_sums: bool) -> Along:
    does_N, distinct = [], list[tuple[Option, ...]]()
    for own in sharded.options:
        numbers: dict[Option, int] = {}
        does_N.append(np.array([numbers.setdefault(_on(one, dim), len(numbers)) for one in own]))
        distinct.append(tuple(numbers))
    return Along(tuple(does_N), links_of(replace(sharded, options=distinct), with_sums=with_sums))


def _on(option: Option, dim: int) -> Option:
    """Return what an option does along one dimension of the mesh."""
    inputs, outputs = (tuple((place[dim],) for place in some) for some in option)
    return Option(inputs, outputs)


def _says(made: Placement, wanted: Placement, with_sums: bool) -> int:
    of_dims = [_says_along(one, other, with_sums) for one, other in zip(made, wanted, strict=True)]
    return CONFLICT if CONFLICT in of_dims else max(of_dims)


def _says_along(made: int, wanted: int, with_sums: bool) -> int:
    """Return what two placements say to each other along one dimension of the mesh."""
    if made == REPLICATED or (made < REPLICATED and not with_sums):
        return SILENT
    if made == wanted:
        return AGREE
    return CONFLICT if made >= 0 else SILENT


def _both(one: NDArray[np.int8], other: NDArray[np.int8]) -> NDArray[np.int8]:
    """Return what two tensors between the same nodes say together: a conflict of one is one of both."""
    return np.where(np.minimum(one, other) == CONFLICT, CONFLICT, np.maximum(one, other)).astype(np.int8)
