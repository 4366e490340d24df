"""Of how many devices on how many nodes a stage may be, so that the stages of a plan can be placed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from dejavu.cluster.islands import Island, told_apart, whole_types
from dejavu.cluster.records import Cluster

LEAST_SHARE = 2 / 3  # of a type's devices, that widths have to leave for stages


@dataclass(frozen=True)
class Share:
    """How stages may take devices of one type: blocks of equal width, each on one node.

    Attributes:
        widths: devices that a stage of one block may have, rising.
        repeated: those widths of which a stage may take several blocks.
        num_blocks: how many blocks of each repeated width the nodes hold.
        num_devices: which stages of these may take together, and can then be placed.
    """

    widths: tuple[int, ...]
    repeated: tuple[int, ...]
    num_blocks: tuple[int, ...]
    num_devices: int

    @property
    def meshes(self) -> tuple[tuple[int, int], ...]:
        """The (nodes, devices per node) of a stage, small ones first; of a number of devices the fewest nodes."""
        found = {width: (1, width) for width in self.widths}
        for width, most in zip(self.repeated, self.num_blocks, strict=True):
            for blocks in range(2, min(most, self.num_devices // width) + 1):
                found.setdefault(blocks * width, (blocks, width))
        return tuple(found[size] for size in sorted(found))


@dataclass(frozen=True)
class AnyShare:
    """Meshes that stages may have, without regard to whether all can then be placed.

    Attributes:
        meshes, num_devices: as of `Share`.
    """

    meshes: tuple[tuple[int, int], ...]
    num_devices: int


Part = Mapping[Island, Share]  # what the stages of one plan may take of each type, or of each of its islands


def parts_of(cluster: Cluster) -> tuple[Part, ...]:
    """Return the ways in which plans may take devices of the cluster; the one with most devices is the first.

    Stages of one part that take no more devices than it has can be placed with no block across a node's border, without
    looking at other stages: `bind` gives out blocks in the cluster's order, wide ones first. Proof: in a chain of
    widths each divides the next. So a block of width w begins in its node where all before it took a multiple of w,
    and the nodes have room for Σ ⌊n / w⌋ blocks of that width and wider ones, counted in blocks of w, wherever those
    went. No more are needed as long as all devices taken are fewer than w times one more. On a single node whatever
    there is room for can be placed.

    Where nodes differ, widths that all nodes are multiples of leave no device idle, and wide ones may leave some.
    Types are varied together. Where types fall into islands, parts of these come after those of whole types.
    """
    return tuple(part for islands in (whole_types(cluster), told_apart(cluster)) for part in _parts(cluster, islands))


def _parts(cluster: Cluster, islands: Sequence[Island]) -> Iterator[Part]:
    shares = {island: _shares(on_nodes(cluster, island)) for island in islands}
    for k in range(max(map(len, shares.values()), default=0)):
        yield {island: own[min(k, len(own) - 1)] for island, own in shares.items()}


def every_part(cluster: Cluster) -> Mapping[Island, AnyShare]:
    """Return what stages of all parts together may have, where types fall into islands; empty: none does.

    A stage on one node is on an island. One on several is on an island or, of its whole type, on nodes of any: the
    type's count holds for all of them together (`StageConfiguration.uses`).
    """
    islands = told_apart(cluster)
    found = dict[Island, AnyShare]()
    for whole in whole_types(cluster) if islands else ():
        of_type = meshes(cluster, whole)
        own = [island for island in islands if island.device_type == whole.device_type]
        if own != [whole]:
            found[whole] = AnyShare(tuple(mesh for mesh in of_type if mesh[0] > 1), sum(on_nodes(cluster, whole)))
        for island in own:
            nodes = on_nodes(cluster, island)
            alone = {mesh for mesh in of_type if mesh[0] == 1 and mesh[1] <= max(nodes)}
            sizes = sorted(alone | set(meshes(cluster, island)), key=lambda mesh: (mesh[0] * mesh[1], mesh))
            found[island] = AnyShare(tuple(sizes) if own != [whole] else of_type, sum(nodes))
    return found


def counts_of(part: Mapping[Island, Share | AnyShare]) -> dict[str, int]:
    """Return how many devices of each type, or island, stages may take together."""
    return {str(island): share.num_devices for island, share in part.items()}


def meshes(cluster: Cluster, island: Island) -> tuple[tuple[int, int], ...]:
    """Return the (nodes, devices per node) that a stage on these may have in any part, small ones first."""
    found = {mesh: None for share in _shares(on_nodes(cluster, island)) for mesh in share.meshes}
    return tuple(sorted(found, key=lambda mesh: (mesh[0] * mesh[1], mesh)))


def most_placed(widths: Iterable[int], nodes: Sequence[int]) -> int:
    """Return how many devices blocks of these widths may take together, so that they can be placed whatever they are.

    Args:
        widths: each a part of the next wider one, unless there is one node.
        nodes: how many devices each has.
    """
    if len(nodes) == 1:
        return nodes[0]
    return min(sum(nodes), *(width * (sum(count // width for count in nodes) + 1) - 1 for width in widths))


def widths_left_out(parts: Sequence[Part], cluster: Cluster, of: Part | None = None) -> str:
    """Say how stages may take devices where not every power of two may be taken of every node; else "".

    Args:
        of: the part whose ways are said; None: those of all.
    """
    said = []
    for island in dict.fromkeys(island for part in (parts if of is None else [of]) for island in part):
        shares = list(dict.fromkeys(part[island] for part in parts if island in part))
        nodes = on_nodes(cluster, island)
        powers = {2**k for k in range(max(nodes).bit_length())}
        if len(shares) > 1 or not powers <= set(shares[0].widths):
            told = shares if of is None else [of[island]]
            said.append(f"{'; or '.join(_said(share, sum(nodes)) for share in told)} of {island}")
    return f"the stages of a plan take {'; and '.join(said)}" if said else ""


def _said(share: Share, total: int) -> str:
    of_all = f" and up to {share.num_devices} in all" if share.num_devices < total else ""
    devices = "device" if share.widths == (1,) else "devices"
    return f"{_either(share.widths)} {devices} of a node{of_all}"


def _either(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def on_nodes(cluster: Cluster, island: Island) -> list[int]:
    """Return how many of these devices each node has that has any."""
    each = ((island.on(group), group.count) for group in cluster.groups)
    return [count for count, number in each for _ in range(number if count else 0)]


def _shares(nodes: Sequence[int]) -> list[Share]:
    """Return the shares with most devices first, but those that another one has everything of."""
    common, widest = gcd(*nodes), max(nodes)
    if len(nodes) == 1:
        widths = {*_chain(widest), *_chain(_power(widest))}
        return [Share(tuple(sorted(widths)), (), (), widest)]
    tops = [common, *sorted({_power(count) for count in nodes})]
    if common == widest and widest % 2:
        tops.append(widest - 1)
    shares = [_share(top, common, nodes) for top in dict.fromkeys(tops) if top]
    shares.sort(key=lambda share: (-share.num_devices, -len(share.widths)))
    kept = list[Share]()
    for share in shares:
        needless = any(set(share.widths) <= set(other.widths) for other in kept)
        if not needless and share.num_devices >= LEAST_SHARE * sum(nodes):
            kept.append(share)
    return kept


def _share(top: int, common: int, nodes: Sequence[int]) -> Share:
    widths = tuple(_chain(top))
    room = {width: sum(count // width for count in nodes) for width in widths}
    most = most_placed(widths, nodes)
    repeated = (top, common) if common in widths and common != top else (top,)
    return Share(widths, repeated, tuple(room[width] for width in repeated), most)


def _chain(size: int) -> list[int]:
    """From 1 up to `size`, each a part of the next, by its smallest primes first: powers of two stay longest."""
    return list(accumulate(_primes(size), int.__mul__, initial=1))


def _primes(number: int) -> Iterator[int]:
    """Yield the prime factors, rising."""
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
            yield factor


def _power(number: int) -> int:
    """Return the largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1)
