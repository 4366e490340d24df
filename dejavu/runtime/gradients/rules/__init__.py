"""Rules by which the gradients of a stage's replicas become one: pure functions of N gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dejavu.runtime.gradients.rules._base import Judgement, Rule, finite_rows, largest, shares
from dejavu.runtime.gradients.rules.krum import Krum
from dejavu.runtime.gradients.rules.mean import Mean
from dejavu.runtime.gradients.rules.median import Median
from dejavu.runtime.gradients.rules.suspicion import Suspicion
from dejavu.runtime.gradients.rules.trimmed_mean import TrimmedMean
from dejavu.runtime.gradients.rules.zeno import Zeno
from dejavu.workload import GradientSettings

COLUMNS = 2**18  # worked on at a time: what rules hold besides the gradients stays within some megabytes
RULES: dict[str, type[Rule]] = {
    "mean": Mean,
    "suspicion": Suspicion,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "zeno": Zeno,
}


def rule_of(settings: GradientSettings) -> Rule:
    """Return the rule with those of the settings that it has."""
    member = RULES[settings.rule]
    known = {name: getattr(settings, name) for name in getattr(member, "__dataclass_fields__", ())}
    return member(**known)


class Part(NamedTuple):
    """A run of columns that is judged in one section.

    Attributes:
        start, stop: its columns, `stop` not included.
        section: its number; what is measured of a section's parts is added up.
        share: by which it counts; below 1 where several devices hold the same.
    """

    start: int
    stop: int
    section: int = 0
    share: float = 1.0


@dataclass(frozen=True, eq=False)
class Combined:
    """One gradient, and what the rule holds of each replica.

    Shape suffixes: S = sections (layers, or one for all), N = replicas, P = numbers.
    """

    gradient_P: torch.Tensor
    suspicion_SN: torch.Tensor
    trust_SN: torch.Tensor


def _blocks(part: Part) -> Iterator[Part]:
    for start in range(part.start, part.stop, COLUMNS):
        yield part._replace(start=start, stop=min(start + COLUMNS, part.stop))


def _as_it_is(measured: torch.Tensor) -> torch.Tensor:
    return measured


def combine(
    rule: Rule,
    gradients_NP: torch.Tensor,
    parts: Sequence[Part],
    trust_SN: torch.Tensor,
    *,
    add_up: Callable[[torch.Tensor], torch.Tensor] = _as_it_is,
    held_out_P: torch.Tensor | None = None,
) -> Combined:
    """Combine N estimates of one gradient by a rule, section by section. Equal input gives equal output on any rank.

    Args:
        parts: cover all columns, in order.
        trust_SN: of the step before, 1 / N at first.
        add_up: adds up what was measured over the devices that hold other columns of the same replicas.
        held_out_P: the gradient of held-out examples, which `Zeno` compares with; None: the sum by trust.
    """
    # A gradient with garbage in any part counts as such in all of them.
    finite_N = add_up((~finite_rows(gradients_NP)).double()) == 0
    usable_NP = gradients_NP if bool(finite_N.all()) else torch.where(finite_N[:, None], gradients_NP, 0.0)
    blocks = [block for part in parts for block in _blocks(part)]
    by_section: list[torch.Tensor | None] = [None] * len(trust_SN)
    for part in blocks:
        own_NP = usable_NP[:, part.start : part.stop]
        if held_out_P is None:
            trusted_N = trust_SN[part.section] * finite_N
            trusted_N = trusted_N / trusted_N.sum() if trusted_N.any() else shares(finite_N)
            centre_P = trusted_N.to(own_NP.dtype) @ own_NP
        else:
            centre_P = held_out_P[part.start : part.stop]
        found, before = part.share * rule.measure(own_NP, centre_P), by_section[part.section]
        by_section[part.section] = found if before is None else before + found
    measured = torch.stack([one for one in by_section if one is not None])
    measured[:, ~finite_N] = torch.inf
    judged = [
        rule.judge(own, trust_N) for own, trust_N in zip(add_up(measured).unbind(), trust_SN.unbind(), strict=True)
    ]
    joined = [rule.join(usable_NP[:, part.start : part.stop], judged[part.section].weights_N) for part in blocks]
    return Combined(
        torch.cat(joined),
        torch.stack([one.suspicion_N for one in judged]),
        torch.stack([one.trust_N for one in judged]),
    )


__all__ = ["RULES", "Combined", "Judgement", "Part", "Rule", "combine", "largest", "rule_of"]
