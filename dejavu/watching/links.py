"""Hosts whose links have become slower, by messages between their Dask workers."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Container, Mapping
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from dejavu.cluster import Cluster, Link, NodeGroup, pair
from dejavu.timing.interference import waited_seconds

MESSAGE_BYTES = 8 * 2**20
REPEATS = 3  # of each message
NEIGHBOURS = 3  # that each host hears from: a slow host is slow from all of them
MOST_SECONDS = 20.0  # a message that takes longer is broken off, and counts as this long
SLOW_LINK, RECOVERED_LINK = 3.0, 1.7  # times as long as usual: a message's time varies more than a pass's
WAITED = struct.Struct("<d")  # after the bytes of a message: how long its sender waited for a core
OTHER_LINK = 2.0  # times as long as is known of a slow link, or as short: it is another slowness

Tried = Mapping[str, Mapping[str, float]]  # by host: the seconds of a message from each of some other hosts


class Messages(NamedTuple):
    """What messages between hosts took.

    Attributes:
        took: by the clock, the least of each.
        moved: without what the sender or the receiver, whichever more, waited for a core that other programs had, the
            median of each. Now and then the kernel counts more waiting than there was, so what is slow is judged by
            this, and what is usual, the least ever seen, is not.
    """

    took: dict[str, dict[str, float]]
    moved: dict[str, dict[str, float]]


def try_links(client: Any, workers: Mapping[str, str]) -> Messages:
    """Time a message of `MESSAGE_BYTES` to each host from its next `NEIGHBOURS`, one host after another.

    The bytes are zeros, sent in the open on a port of its own that is closed again.

    Args:
        client: a synchronous `distributed.Client`.
        workers: by host, the address of its Dask worker.

    Returns:
        Seconds by receiving and by sending host; a host that has gone meanwhile is absent.
    """
    hosts = sorted(workers)
    offered = client.run(_offer, workers=list(workers.values()), on_error="return")
    places = {host: offered[address] for host, address in workers.items() if isinstance(offered.get(address), tuple)}
    tried = Messages({}, {})
    try:
        for k, host in enumerate(hosts):
            around = [hosts[(k + step) % len(hosts)] for step in range(1, min(NEIGHBOURS, len(hosts) - 1) + 1)]
            senders = {other: places[other] for other in around if other in places}
            found = client.run(_receive, senders, workers=[workers[host]], on_error="return")[workers[host]]
            for by_host, seconds in zip(tried, found if isinstance(found, tuple) else ({}, {}), strict=True):
                by_host[host] = seconds
    finally:
        client.run(_withdraw, workers=list(workers.values()), on_error="ignore")
    return tried


async def _offer(dask_worker: Any) -> tuple[str, int]:
    """Send `MESSAGE_BYTES` to whoever connects, until `_withdraw`."""

    async def send(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waited = waited_seconds(all_threads=False)
        with contextlib.suppress(OSError):  # nobody listens any more
            writer.write(bytes(MESSAGE_BYTES))
            await writer.drain()
            writer.write(WAITED.pack(waited_seconds(all_threads=False) - waited))
        writer.close()

    await _withdraw(dask_worker)  # of a look that was killed
    dask_worker.dejavu_messages = server = await asyncio.start_server(send, dask_worker.ip, 0)
    host, port, *_ = server.sockets[0].getsockname()
    return host, port


async def _receive(senders: Mapping[str, tuple[str, int]]) -> tuple[dict[str, float], dict[str, float]]:
    took, moved = dict[str, float](), dict[str, float]()
    for name, place in senders.items():
        with contextlib.suppress(OSError):  # it has gone meanwhile
            tries = [await _message_seconds(*place)]
            while len(tries) < REPEATS and tries[0][0] < MOST_SECONDS:
                tries.append(await _message_seconds(*place))
            took[name], moved[name] = min(one[0] for one in tries), median(one[1] for one in tries)
    return took, moved


async def _message_seconds(host: str, port: int) -> tuple[float, float]:
    """Time one message; also without what its ends waited for a core."""
    began, waited, end = time.perf_counter(), waited_seconds(all_threads=False), b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MOST_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=2**22)
            with contextlib.closing(writer):
                while part := await reader.read(2**22):
                    end = (end + part)[-WAITED.size :]
    seconds, waited = time.perf_counter() - began, waited_seconds(all_threads=False) - waited
    sender_waited = WAITED.unpack(end)[0] if len(end) == WAITED.size else 0.0
    return seconds, max(0.0, seconds - max(waited, sender_waited))


async def _withdraw(dask_worker: Any) -> None:
    server = getattr(dask_worker, "dejavu_messages", None)
    if server is not None:
        server.close()


def fastest(usual: Tried, tried: Tried) -> dict[str, dict[str, float]]:
    """Return the least seconds of each message that were ever seen: what is usual."""
    hosts = {*usual, *tried}
    return {
        host: {
            other: min(one[host][other] for one in (usual, tried) if other in one.get(host, {}))
            for other in {*usual.get(host, {}), *tried.get(host, {})}
        }
        for host in hosts
    }


def slow_links(usual: Tried, tried: Tried, known: Mapping[str, float]) -> dict[str, float]:
    """Return the hosts whose links to all others have become slower, less slow, or as fast as usual.

    A host is slow that hears all others slowly, or that all others hear slowly: it may not have answered in time
    itself. Messages with a host that is known to be slow say nothing of the other end; of two hosts, one is named.

    Args:
        known: by host, how many times as long as usual its messages were known to take; absent: 1.

    Returns:
        By host whose links have changed: times as long as usual now, to one digit; 1 as usual.
    """
    found: dict[str, float] = {}
    for host in sorted({*tried} | {other for heard in tried.values() for other in heard}):
        slow = {other for other, factor in {**known, **found}.items() if factor != 1} - {host}
        factor = _factor_of(host, usual, tried, slow)
        if factor is None:
            continue
        changed = _changed(known.get(host, 1.0), factor)
        if changed is not None:
            found[host] = changed
    return found


def _changed(known: float, factor: float) -> float | None:
    """Return the new slowness of a host's links; None: it is the known one, as far as messages can tell."""
    if known != 1 and factor < RECOVERED_LINK:
        return 1.0
    is_other = factor > SLOW_LINK if known == 1 else not known / OTHER_LINK <= factor <= known * OTHER_LINK
    return float(f"{factor:.1g}") if is_other else None


def _factor_of(host: str, usual: Tried, tried: Tried, left_out: Container[str]) -> float | None:
    """Return how slow what it hears is, or what is heard of it, each by the fastest message; None: it is not known."""
    ratios: tuple[list[float], list[float]] = [], []
    for receiver, heard in tried.items():
        for sender, seconds in heard.items():
            other = sender if receiver == host else receiver
            if host in (receiver, sender) and other not in left_out and sender in usual.get(receiver, {}):
                ratios[receiver == host].append(seconds / usual[receiver][sender])
    return max((min(ways) for ways in ratios if ways), default=None)


def with_slow_links(cluster: Cluster, slowness: Mapping[str, float]) -> Cluster:
    """Return the cluster with these hosts in groups of their own, whose links to all others are so many times slower.

    Links inside a node stay as they are.
    """
    groups: list[NodeGroup] = []
    like: dict[str, tuple[str, float]] = {}  # of each group: the one it was part of, and how slow its links are
    for group in cluster.groups:
        hosts = [group.host(node) for node in range(group.count)]
        usual = tuple(host for host in hosts if slowness.get(host, 1.0) == 1)
        if len(usual) == group.count:
            parts = [(group, 1.0)]
        else:
            parts = [(replace(group, count=len(usual), hosts=usual), 1.0)] if usual else []
            parts += [
                (replace(group, name=f"{group.name} ({host})", count=1, hosts=(host,)), slowness[host])
                for host in hosts
                if host not in usual
            ]
        groups += [part for part, _ in parts]
        like |= {part.name: (group.name, factor) for part, factor in parts}
    return replace(cluster, groups=tuple(groups), links_between=slower_links(cluster, like))


def slower_links(cluster: Cluster, like: Mapping[str, tuple[str, float]]) -> dict[tuple[str, str], Link]:
    """Return the links between groups that a cluster's groups were split into.

    Args:
        like: by group, the one of the cluster that it was part of, and how many times slower its links are.
    """
    found = {}
    for a, (was_a, slow_a) in like.items():
        for b, (was_b, slow_b) in like.items():
            link = cluster.links_between.get(pair(was_a, was_b))
            if link is not None:
                slow = link.bytes_per_second / max(slow_a, slow_b)
                found[pair(a, b)] = replace(link, bytes_per_second=slow)
    return found
