"""From a cluster.yaml to a `Cluster`: fill in defaults and report them, and report each problem with its line."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from dejavu.cluster.catalogue import (
    NETWORK_LATENCY_SECONDS,
    NODE_LATENCY_SECONDS,
    catalogue,
    catalogue_rows,
    filled_in,
)
from dejavu.cluster.form import (
    MAX_DEVICES,
    MAX_LISTED_HOSTS,
    ClusterForm,
    CountForm,
    LinkForm,
    LinksForm,
    NodesForm,
)
from dejavu.cluster.records import Cluster, DeviceType, HostMemory, Link, NodeGroup, Nvme, pair
from dejavu.cluster.this_machine import this_machine
from dejavu.foundation import strict_yaml, units
from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import Family

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62})")
_HOST_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")  # RFC 1123


def load_cluster(path: Path | str, counts: Mapping[str, int] | None = None) -> Cluster:
    """Read a cluster.yaml.

    Args:
        counts: nodes of each of its groups, in place of the file's; a group that is not named, or of 0, is left out.

    Raises:
        InputError: with `path:line:column` for each problem, or the file says `nodes: auto` and counts are given.

    Example:
        >>> import dejavu
        >>> dejavu.load_cluster("examples/clusters/4x8-v100.yaml").device_counts
        {'V100-SXM2-16GB': 32}
    """
    path = Path(path)
    document = strict_yaml.load(path, ClusterForm, allows_null=False)
    form = document.value
    if form.nodes != "auto":
        whole = _Builder(document).build()
        return whole if counts is None else _Builder(replace(document, value=_with_counts(form, counts))).build()
    if counts is not None:
        raise InputError(f"{path}: found `nodes: auto`, this machine; wanted groups of nodes, whose number can change")
    for key in ("links", "devices"):
        if key in form.model_fields_set:
            raise document.error(
                (key,), f"{key!r} has no meaning beside `nodes: auto`, which describes this machine", key=True
            )
    cluster = this_machine()
    return replace(cluster, name=form.name) if form.name else cluster


def _with_counts(form: ClusterForm, counts: Mapping[str, int]) -> ClusterForm:
    """Return the form with so many nodes of each group, and without the links that are then of no use."""
    nodes = [
        _with_count(node, counts[node.name])
        for node in cast(list[NodesForm], form.nodes)
        if counts.get(node.name, 0) > 0
    ]
    links = form.links or LinksForm()
    pairs = [
        one
        for one in links.pairs
        if all(counts.get(name, 0) > 0 for name in one.between)
        and (one.between[0] != one.between[1] or counts[one.between[0]] > 1)
    ]
    return form.model_copy(update={"nodes": nodes, "links": links.model_copy(update={"pairs": pairs})})


def _with_count(node: NodesForm, count: int) -> NodesForm:
    """Return the group with so many nodes: of its hosts the first ones; of more nodes none has a name of its own."""
    if node.hosts and count <= len(node.hosts):
        return node.model_copy(update={"hosts": node.hosts[:count]})
    return node.model_copy(update={"count": count, "hosts": None})


class _Builder:
    """Builds the records from the validated file; checks what depends on the whole file."""

    def __init__(self, document: strict_yaml.Document[ClusterForm]) -> None:
        self.document = document
        self.form = document.value
        self.node_forms = cast(list[NodesForm], document.value.nodes)
        self.rows = {row.device_type.name: row for row in catalogue_rows()}
        self.device_types = catalogue("one defined under `devices:`")
        self.problems: list[InputError] = []
        self.assumptions: list[str] = []
        self.filled_in: dict[str, str] = {}

    def build(self) -> Cluster:
        self._define_devices()
        self._check_names()
        self._check_devices()
        self._check_currencies()
        self._stop_on_problems()
        groups = tuple(self._group(index, form) for index, form in enumerate(self.node_forms))
        links = self._links_between(groups)
        self._stop_on_problems()
        used = {type_name for group in groups for type_name, _ in group.devices}
        self.assumptions += [said for name, said in self.filled_in.items() if name in used and said]
        return Cluster(
            name=self.form.name or self.document.path.stem,
            groups=groups,
            device_types={name: self.device_types[name] for name in sorted(used)},
            links_between=links,
            assumptions=tuple(self.assumptions),
        )

    def _problem(self, loc: strict_yaml.Location, message: str, *, key: bool = False) -> None:
        self.problems.append(self.document.error(loc, message, key=key))

    def _stop_on_problems(self) -> None:
        if self.problems:
            raise strict_yaml.join_errors(self.problems)

    def _define_devices(self) -> None:
        catalogued = {name.casefold(): name for name in self.rows}
        for name, form in self.form.devices.items():
            loc = ("devices", name)
            if not _NAME.fullmatch(name):
                self._problem(
                    loc, f"the device name {name!r} is not made of letters, digits, '.', '_' and '-'", key=True
                )
            elif name.casefold() in catalogued:
                known = catalogued[name.casefold()]
                self._problem(loc, f"the catalogue has {known!r} already; give this device another name", key=True)
            else:
                self.device_types[name], self.filled_in[name] = filled_in(
                    DeviceType(
                        name=name,
                        kind=form.kind,
                        peak_flops_per_second=form.peaks(),
                        memory_bytes=form.memory,
                        memory_bytes_per_second=form.bandwidth,
                        num_multiprocessors=form.multiprocessors,
                        cache_bytes=form.cache,
                        source="cluster.yaml",
                        board_watts=form.board_watts,
                        process_nanometres=form.process_nanometres,
                        architecture=form.architecture,
                    )
                )

    def _check_names(self) -> None:
        """Check that names of groups and hosts are valid and unique, including those generated for counted nodes."""
        self._check_group_names()
        if sum(len(form.hosts or ()) for form in self.node_forms) > MAX_LISTED_HOSTS:
            self._problem(("nodes",), f"more than {MAX_LISTED_HOSTS:,} hosts are listed; write equal hosts as a count")
        else:
            self._check_host_names()

    def _check_currencies(self) -> None:
        priced = [(index, form.price[1]) for index, form in enumerate(self.node_forms) if form.price is not None]
        for index, currency in priced:
            if currency != priced[0][1]:
                message = f"the price is in {currency}, and an earlier one in {priced[0][1]}; wanted one currency"
                self._problem(("nodes", index, "price"), message)

    def _check_group_names(self) -> None:
        lines: dict[str, int] = {}
        for index, form in enumerate(self.node_forms):
            loc: strict_yaml.Location = ("nodes", index, "name")
            folded = form.name.casefold()
            if not _NAME.fullmatch(form.name):
                self._problem(
                    loc, f"the group name {form.name[:80]!r} is not made of letters, digits, '.', '_' and '-'"
                )
            if folded in lines:
                self._problem(loc, f"the group {form.name!r} is on line {lines[folded]} already")
            lines.setdefault(folded, self.document.mark(loc).line)

    def _check_host_names(self) -> None:
        counts = {form.name.casefold(): form.count or 1 for form in self.node_forms if not form.hosts}
        lines: dict[str, int] = {}
        listed = (
            (("nodes", index, "hosts", place), host)
            for index, form in enumerate(self.node_forms)
            for place, host in enumerate(form.hosts or ())
        )
        for loc, host in listed:
            folded = host.casefold()
            group = _counted_group(folded, counts)
            if not _is_host(host):
                self._problem(loc, f"{host[:80]!r} is not a host name or IPv4 address")
            elif folded in lines:
                self._problem(loc, f"the host {host!r} is on line {lines[folded]} already")
            elif group is not None:
                self._problem(loc, f"the host {host!r} has the name that a node of the group {group!r} gets")
            else:
                lines[folded] = self.document.mark(loc).line

    def _check_devices(self) -> None:
        num_devices = 0
        for index, form in enumerate(self.node_forms):
            listed = isinstance(form.devices, list)
            lines: dict[str, int] = {}
            for place, entry in enumerate(_entries(form)):
                loc: strict_yaml.Location = ("nodes", index, "devices", *([place] if listed else []), "type")
                if entry.type not in self.device_types:
                    self._problem(loc, self.device_types.unknown(entry.type))
                elif entry.type in lines:
                    self._problem(loc, f"{entry.type!r} is on line {lines[entry.type]} already; add up the counts")
                lines.setdefault(entry.type, self.document.mark(loc).line)
                num_devices += entry.count * (len(form.hosts) if form.hosts else form.count or 1)
        if num_devices > MAX_DEVICES:
            self._problem(("nodes",), f"{num_devices:,} devices in all; the limit is {MAX_DEVICES:,}", key=True)

    def _group(self, index: int, form: NodesForm) -> NodeGroup:
        return NodeGroup(
            name=form.name,
            count=len(form.hosts) if form.hosts else form.count or 1,
            hosts=tuple(form.hosts or ()),
            devices=tuple((entry.type, entry.count) for entry in _entries(form)),
            link=self._link_inside(index, form),
            price=form.price,
            host_memory=self._host_memory(form),
            nvme=self._nvme(form),
            cards=form.cards or 1,
        )

    def _nvme(self, form: NodesForm) -> Nvme | None:
        disks = form.nvme
        return Nvme(disks.size, disks.read, disks.write, disks.folder or "") if disks else None

    def _host_memory(self, form: NodesForm) -> HostMemory | None:
        host = form.host_memory
        if host is None:
            return None
        if host.update_bandwidth is None:
            self.assumptions.append(
                f"The processors of a node of {form.name!r} update weights in its memory as fast as all its devices "
                f"copy: {units.format_bytes_per_second(host.bandwidth)} for each."
            )
        return HostMemory(host.size, host.bandwidth, host.update_bandwidth)

    def _link_inside(self, index: int, form: NodesForm) -> Link:
        if form.link is not None:
            return self._link(form.link, f"inside a node of {form.name!r}", NODE_LATENCY_SECONDS)
        types = [self.device_types[entry.type] for entry in _entries(form)]
        if sum(entry.count for entry in _entries(form)) == 1:
            return Link(types[0].memory_bytes_per_second, 0.0, assumed=True)  # to itself; no transfer will use it
        unknown = [device_type.name for device_type in types if device_type.name not in self.rows]
        if unknown:
            message = f"the nodes of {form.name!r} need a `link`: the catalogue has no interconnect for {unknown[0]!r}"
            self._problem(("nodes", index), message)
            return Link(1.0, 0.0, assumed=True)
        slowest = min((self.rows[entry.name] for entry in types), key=lambda row: row.interconnect_bytes_per_second)
        link = Link(slowest.interconnect_bytes_per_second, NODE_LATENCY_SECONDS, assumed=True)
        self.assumptions.append(
            f"Inside a node of {form.name!r} the link is the catalogue's for {slowest.device_type.name}, "
            f"{slowest.interconnect}: {link.describe()}."
        )
        return link

    def _link(self, form: LinkForm, where: str, latency_seconds: float) -> Link:
        if form.latency is not None:
            return Link(form.bandwidth, form.latency)
        self.assumptions.append(
            f"The link {where} has no latency in the file: {units.format_seconds(latency_seconds)} is assumed."
        )
        return Link(form.bandwidth, latency_seconds)

    def _links_between(self, groups: tuple[NodeGroup, ...]) -> dict[tuple[str, str], Link]:
        form = self.form.links or LinksForm()
        listed = self._listed_pairs(form, Family("group", {group.name: group.count for group in groups}))
        needed = [
            pair(a.name, b.name)
            for index, a in enumerate(groups)
            for b in groups[index:]
            if a.name != b.name or a.count > 1
        ]
        missing = [names for names in needed if names not in listed]
        if missing and form.default is not None:
            link = self._link(form.default, "of `links: default`", NETWORK_LATENCY_SECONDS)
            self.assumptions.append(f"`links: default` ({link.describe()}) is used {_some(missing)}.")
            listed |= dict.fromkeys(missing, link)
        elif missing:
            loc: strict_yaml.Location = ("links",) if self.form.links is not None else ("nodes",)
            self._problem(loc, f"no link {_some(missing)}, and no `links: default`", key=True)
        return dict(sorted(listed.items()))

    def _listed_pairs(self, form: LinksForm, counts: Family[int]) -> dict[tuple[str, str], Link]:
        links: dict[tuple[str, str], Link] = {}
        lines: dict[tuple[str, str], int] = {}
        for index, entry in enumerate(form.pairs):
            loc = ("links", "pairs", index)
            unknown = [(place, name) for place, name in enumerate(entry.between) if name not in counts]
            names = pair(*entry.between)
            for place, name in unknown:
                self._problem((*loc, "between", place), counts.unknown(name))
            if unknown:
                continue
            if names[0] == names[1] and counts[names[0]] == 1:
                self._problem((*loc, "between"), f"a link of {names[0]!r} to itself, but the group has one node")
            elif names in lines:
                message = f"the link between {names[0]!r} and {names[1]!r} is on line {lines[names]} already"
                self._problem((*loc, "between"), message)
            else:
                lines[names] = self.document.mark((*loc, "between")).line
                links[names] = self._link(entry, f"between {names[0]!r} and {names[1]!r}", NETWORK_LATENCY_SECONDS)
        return links


def _entries(form: NodesForm) -> list[CountForm]:
    return form.devices if isinstance(form.devices, list) else [form.devices]


def _is_host(text: str) -> bool:
    return len(text) <= 253 and all(_HOST_LABEL.fullmatch(label) for label in text.split("."))


def _counted_group(host: str, counts: Mapping[str, int]) -> str | None:
    """Return the group of so many nodes one of which gets this name, `<group>-<number>`; None: no node does."""
    group, _, number = host.rpartition("-")
    written = re.fullmatch("0|[1-9][0-9]{0,5}", number)
    return group if group in counts and written and int(number) < counts[group] else None


def _some(pairs: list[tuple[str, str]]) -> str:
    shown = [f"between {a!r} and {b!r}" if a != b else f"between the nodes of {a!r}" for a, b in pairs[:4]]
    return ", ".join(shown) + (f" and for {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")
