"""Fitting the few parameters of a roofline to measured kernels: least mean relative error, devices weighted equally.

Shape suffix: K = kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from dejavu.cluster import DeviceType
from dejavu.cost.kernels.power import matrix_units_share
from dejavu.cost.kernels.roofline import PRODUCTS, Columns, KernelLaw, has_matrix_units, peak_flops_per_second
from dejavu.foundation.errors import DejavuError
from dejavu.profiles.kernel import Kernel

Floats = NDArray[np.float64]

MOST_KERNELS = 2000  # of one device and family: more did not move the parameters by more than 3 %
FIRST_STEP = 0.3  # of a logarithm, of the simplex that walks
OUTSIDE_PENALTY = 0.1  # for each unit of a logarithm outside the limits
# What is physically possible, and the start of the walk: (least, first, most).
LIMITS = {
    "compute_efficiency": (0.2, 0.85, 1.0),
    "memory_efficiency": (0.2, 0.77, 1.0),
    "launch_seconds": (1e-7, 3e-6, 5e-5),
    "tile_seconds": (1e-8, 1e-6, 1e-5),
    "split_seconds": (1e-8, 1e-6, 2e-5),
    "overlap": (1.2, 3.0, 20.0),
    "convolution_efficiency": (0.2, 1.0, 3.0),  # above 1: Winograd multiplies less than is counted
    "attention_efficiency": (0.1, 0.7, 1.0),
}
MATMUL_FIELDS = tuple(LIMITS)[:6]


class FitError(DejavuError):
    """There is nothing that a law could be fitted to."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Kernels of one family and dtype, measured on one device."""

    columns: Columns
    family: str
    peak_flops_per_second: float
    device: DeviceType
    seconds_K: Floats
    is_on_matrix_units: bool = False

    @classmethod
    def of(cls, kernels: Sequence[Kernel], seconds: Sequence[float] | Floats, device: DeviceType) -> Sample:
        """Make a sample.

        Raises:
            FitError: kernels of several families or dtypes, or a time that is not positive.
        """
        kinds = {(kernel.family, kernel.dtype) for kernel in kernels}
        if len(kinds) != 1:
            raise FitError(f"{len(kinds)} families and dtypes of kernels on {device.name!r}; wanted one")
        ((family, dtype),) = kinds
        peak, seconds_K = peak_flops_per_second(device, dtype), np.asarray(seconds, dtype=float)
        if peak is None and family in PRODUCTS:
            raise FitError(f"no peak FLOP/s of {device.name!r} in {dtype}")
        if not (np.isfinite(seconds_K) & (seconds_K > 0)).all():
            raise FitError(f"a kernel on {device.name!r} took no positive number of seconds")
        return cls(Columns.of(kernels), family, peak or 1.0, device, seconds_K, has_matrix_units(device, dtype))

    def some(self, most: int, seed: int) -> Sample:
        """Draw at most this many of them at random."""
        if len(self.seconds_K) <= most:
            return self
        chosen = np.random.default_rng(seed).choice(len(self.seconds_K), most, replace=False)
        return replace(self, columns=self.columns.at(chosen), seconds_K=self.seconds_K[chosen])

    def predicted_K(self, law: KernelLaw) -> Floats:
        """Predict the seconds by the law, on matrix units at the power of this board."""
        law = law.limited(matrix_units_share(self.device)) if self.is_on_matrix_units else law
        return law.seconds(self.columns, self.family, self.peak_flops_per_second, self.device)

    def mape(self, law: KernelLaw) -> float:
        """Return the mean absolute relative error."""
        return float(np.mean(np.abs(self.predicted_K(law) / self.seconds_K - 1)))


def fit(
    law: KernelLaw,
    samples: Sequence[Sample],
    fields: Sequence[str] = MATMUL_FIELDS,
    *,
    limits: Mapping[str, tuple[float, float, float]] = LIMITS,
    seed: int = 0,
) -> KernelLaw:
    """Fit these fields of the law with Nelder and Mead's simplex over their logarithms.

    Raises:
        FitError: no sample.
    """
    if not samples:
        raise FitError("no measured kernels to fit a roofline to")
    some = [sample.some(MOST_KERNELS, seed) for sample in samples]
    least, first, most = (np.log([limits[field][column] for field in fields]) for column in range(3))

    def law_at(x: Floats) -> KernelLaw:
        return replace(law, **dict(zip(fields, np.exp(np.clip(x, least, most)).tolist(), strict=True)))

    def loss(x: Floats) -> float:
        outside = np.abs(x - np.clip(x, least, most)).sum()
        return float(np.mean([sample.mape(law_at(x)) for sample in some]) + OUTSIDE_PENALTY * outside)

    x, step = first, FIRST_STEP
    for _ in range(2):  # the second walk starts afresh where the first stopped, in the other direction
        simplex = np.vstack([x, x + step * np.eye(len(fields))])
        options = {
            "maxfev": 200 * len(fields),
            "xatol": 1e-3,
            "fatol": 1e-5,
            "adaptive": True,
            "initial_simplex": simplex,
        }
        x, step = minimize(loss, x, method="Nelder-Mead", options=options).x, -step / 2
    return law_at(x)
