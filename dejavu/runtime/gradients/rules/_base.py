"""What a rule of combining gradients is: replicas' gradients go in, one gradient and a view of each replica come out.

A rule judges replicas by numbers that add up over parts of the gradient (squared distances, products), so the parts may
lie on different devices, and one judgement may be of a layer or of all layers of a stage.

Shape suffixes: N = replicas, P = numbers of a part of the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Judgement:
    """What a rule holds of the replicas in one step, all in float64.

    Attributes:
        weights_N: by which `join` adds up their gradients; 0: left out.
        suspicion_N: the larger, the less the replica is like the others; infinite: its gradient is not finite.
        trust_N: by which the gradient is weighted that replicas are compared with in the next step; sums to 1.
    """

    weights_N: torch.Tensor
    suspicion_N: torch.Tensor
    trust_N: torch.Tensor


class Rule:
    """A way to make one gradient of N that all estimate the same one. It holds settings only.

    As it stands it takes the mean of all gradients that are finite, and suspects by the distance to it.
    """

    def measure(self, gradients_NP: torch.Tensor, centre_P: torch.Tensor) -> torch.Tensor:
        """Return what the judgement needs of a part of the gradient; such numbers are added up over parts.

        Args:
            gradients_NP: finite; zeros in place of a gradient that is not.
            centre_P: what replicas are compared with: their sum by trust, or the gradient of held-out examples.

        Returns:
            (N, …) in float64.
        """
        return lengths(gradients_NP - centre_P).square()

    def judge(self, measured: torch.Tensor, trust_N: torch.Tensor) -> Judgement:
        """Judge replicas by what was measured of all parts; infinite in each row whose gradient is not finite."""
        suspicion_N = measured.sqrt()
        return Judgement(shares(suspicion_N.isfinite()), suspicion_N, torch.full_like(trust_N, 1 / len(trust_N)))

    def join(self, gradients_NP: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
        """Make one gradient of a part of all."""
        return weights_N.to(gradients_NP.dtype) @ gradients_NP


def lengths(rows_NP: torch.Tensor) -> torch.Tensor:
    """Return the rows' norms in float64: (N,).

    They are added up in the rows' own type, several times as fast on CPUs, unless squares leave its range.
    """
    found_N: torch.Tensor = torch.linalg.vector_norm(rows_NP, dim=1)
    if not bool(((found_N > 0) & found_N.isfinite()).all()):
        found_N = torch.linalg.vector_norm(rows_NP, dim=1, dtype=torch.float64)
    return found_N.double()


def finite_rows(rows_NP: torch.Tensor) -> torch.Tensor:
    """Return which rows are finite: (N,). A finite norm is of finite numbers; others are looked at one by one."""
    norms_N = torch.linalg.vector_norm(rows_NP, dim=1)
    return norms_N.isfinite() if bool(norms_N.isfinite().all()) else rows_NP.isfinite().all(dim=1)


def shares(counted_N: torch.Tensor) -> torch.Tensor:
    """Return equal weights for those that count, which sum to 1; NaN for all where none does."""
    return counted_N.double() / counted_N.sum()


def largest(suspicion_N: torch.Tensor, count: int) -> torch.Tensor:
    """Return which `count` replicas are the most suspected; of equal ones the first."""
    places = torch.argsort(suspicion_N, descending=True, stable=True)[:count]
    return torch.zeros(len(suspicion_N), dtype=torch.bool, device=suspicion_N.device).index_fill(0, places, True)


def sorted_rows(gradients_NP: torch.Tensor) -> list[torch.Tensor]:
    """Sort each coordinate over the replicas: N rows, the least first.

    Odd-even transposition (Knuth, The Art of Computer Programming 3, section 5.3.4): N rounds of comparisons of whole
    rows, 10 times as fast as `torch.sort` along a short dimension on CPUs.
    """
    rows, count = list(gradients_NP.unbind()), len(gradients_NP)
    for round_ in range(count):
        for n in range(round_ % 2, count - 1, 2):
            rows[n], rows[n + 1] = torch.minimum(rows[n], rows[n + 1]), torch.maximum(rows[n], rows[n + 1])
    return rows
