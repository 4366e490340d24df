"""Where the stages are: a drawing of hosts, devices and the links between them, and how much each link is used."""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dejavu.binding.binding import Binding
from dejavu.cluster import Cluster, Device, Link
from dejavu.foundation.units import format_bytes_per_second, plural
from dejavu.plans.priced_problem import PricedProblem
from dejavu.simulation import Simulation

MOST_CHARACTERS = 40  # of a line in the drawing
MOST_LABELLED = 12  # links with their use beside them
WIDTH_PIXELS, BOX_PIXELS, RANK_PIXELS, LINE_PIXELS = 400, 270, 44, 26


@dataclass(frozen=True)
class LinkUse:
    """What one step sends between two pipeline ranks.

    Attributes:
        link: between a device of the one and a device of the other.
        cuts: of the plan, which this link carries, by the stage before them; of two copies, those of both.
        bytes_per_step: activations one way and gradients the other, of all microbatches.
        busy: the share of the simulated step in which messages occupy the link, in the busier direction.
    """

    rank: int
    to_rank: int
    link: Link
    cuts: tuple[int, ...]
    bytes_per_step: float
    busy: float


def links_used(
    binding: Binding, cluster: Cluster, priced: PricedProblem, simulation: Simulation
) -> tuple[LinkUse, ...]:
    """Return the links between pipeline ranks that are neighbours under the plan, the busiest first."""
    plan, first = binding.plan, _first_devices(binding)
    copies = len(plan.seats) // len(plan.stages)  # each has its part of the microbatches
    # Of sequences in slices the problem has the bytes of one slice.
    messages = 2.0 * priced.accumulate * plan.num_microbatches * plan.num_slices / copies
    rank_of = {seat: rank for rank, seats in enumerate(plan.seats_of_ranks) for seat in seats}
    seconds: dict[tuple[int, int], float] = defaultdict(float)
    for message in simulation.messages:
        assert message.to_rank is not None
        seconds[message.rank, message.to_rank] += message.seconds
    between: dict[tuple[int, int], list[int]] = {}
    for seat in range(len(plan.seats) - 1):
        stage = seat % len(plan.stages)  # a copy's first has none before it
        if rank_of[seat] != rank_of[seat + 1] and stage < len(plan.stages) - 1:
            pair = sorted((rank_of[seat], rank_of[seat + 1]))
            between.setdefault((pair[0], pair[1]), []).append(stage)
    found = [
        LinkUse(
            rank=a,
            to_rank=b,
            link=cluster.link(first[a], first[b]),
            cuts=tuple(sorted(set(stages))),
            bytes_per_step=sum(messages * float(priced.problem.cut_bytes_L1[plan.stages[s].stop]) for s in stages),
            busy=max(seconds[a, b], seconds[b, a]) / simulation.step_seconds,
        )
        for (a, b), stages in between.items()
    ]
    return tuple(sorted(found, key=lambda use: -use.busy))


def topology_svg(binding: Binding, cluster: Cluster, uses: Sequence[LinkUse]) -> str:
    """Draw hosts as boxes with a line for each pipeline rank on them, and an arc for each link, as an SVG element.

    An arc is the thicker the busier it is. Hosts without a rank are counted, not drawn.
    """
    hosts, plan = _ranks_by_host(binding), binding.plan
    stages = [sorted({seat % len(plan.stages) for seat in seats}) for seats in plan.seats_of_ranks]
    idle = Counter(device.host for device in cluster.devices())
    idle.subtract(placed.device.host for placed in binding.placements)
    parts, y, middle_of = list[str](), 2, dict[int, int]()
    for host, ranks in hosts.items():
        unused = [f"{plural(idle[host], 'device')} unused"] if idle[host] > 0 else []
        height = RANK_PIXELS * len(ranks) + LINE_PIXELS * (1 + len(unused)) + 6
        parts.append(f'<rect class="host" x="1" y="{y}" width="{BOX_PIXELS}" height="{height}" rx="6"/>')
        parts.append(_text(12, y + 19, host, "name"))
        at = y + LINE_PIXELS
        for rank, devices in ranks.items():
            middle_of.setdefault(rank, at + RANK_PIXELS // 2)
            box = f'x="10" y="{at + 2}" width="{BOX_PIXELS - 18}" height="{RANK_PIXELS - 4}"'
            parts.append(f'<rect class="device" {box} rx="4"/>')
            parts.append(_text(18, at + 19, f"rank {rank}: {_stages(stages[rank])}"))
            parts.append(_text(18, at + 35, _devices(devices), "quiet"))
            at += RANK_PIXELS
        parts += [_text(18, at + 17, one, "quiet") for one in unused]
        y += height + 10
    others = [host for host in idle if host not in hosts]
    if others:
        count = sum(idle[host] for host in others)
        said = f"{plural(len(others), 'host')} more, with {plural(count, 'device')}: unused"
        parts.append(_text(12, y + 14, said, "quiet"))
        y += LINE_PIXELS
    labelled = len(uses) <= MOST_LABELLED
    parts += [_arc(use, middle_of[use.rank], middle_of[use.to_rank], labelled) for use in reversed(uses)]
    return (
        f'<svg class="topology" role="img" aria-label="Hosts, devices and links" viewBox="0 0 {WIDTH_PIXELS} {y}" '
        f'width="{WIDTH_PIXELS}" height="{y}">{"".join(parts)}</svg>'
    )


def _arc(use: LinkUse, y: int, to_y: int, labelled: bool) -> str:
    left, bulge = BOX_PIXELS - 8, BOX_PIXELS + 20 + min(60.0, abs(to_y - y) / 5)
    rate = format_bytes_per_second(use.link.bytes_per_second)
    said = html.escape(f"rank {use.rank} to rank {use.to_rank}: {rate}, busy {use.busy:.1%} of the step")
    path, width = f"M{left} {y} C{bulge:.0f} {y} {bulge:.0f} {to_y} {left} {to_y}", 1.5 + 8 * min(1.0, use.busy)
    drawn = f'<path class="link" d="{path}" stroke-width="{width:.1f}"><title>{said}</title></path>'
    if not labelled:
        return drawn
    x, middle = round(left + 0.75 * (bulge - left) + 8), (y + to_y) // 2
    return drawn + _text(x, middle - 2, rate) + _text(x, middle + 12, f"{use.busy:.1%} busy", "quiet")


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    short = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
    title = f"<title>{html.escape(text)}</title>" if short != text else ""
    return f'<text class="{kind}" x="{x}" y="{y}">{html.escape(short)}{title}</text>'


def _stages(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _devices(devices: Sequence[Device]) -> str:
    """Say which devices of a host these are."""
    kind = devices[0].type_name
    return f"device {devices[0].index}, {kind}" if len(devices) == 1 else f"{plural(len(devices), 'device')}, {kind}"


def _ranks_by_host(binding: Binding) -> Mapping[str, dict[int, list[Device]]]:
    found: dict[str, dict[int, list[Device]]] = {}
    for placed in sorted(binding.placements, key=lambda placed: placed.pipeline_rank):
        found.setdefault(placed.device.host, {}).setdefault(placed.pipeline_rank, []).append(placed.device)
    return found


def _first_devices(binding: Binding) -> dict[int, Device]:
    return {placed.pipeline_rank: placed.device for placed in reversed(binding.placements)}
