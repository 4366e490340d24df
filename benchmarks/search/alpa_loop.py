"""Alpa's search as its paper gives it, for comparison: a dynamic program for every candidate of the slowest stage.

Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022, section
5.2 and Algorithm 1. F(s, k, d; t_max) is the least sum of stage latencies with which layers k to the last run in s
stages on exactly d devices, no stage slower than t_max (eq. 3); a stage fits if its memory holds the activations of as
many microbatches as there are stages from it on (eq. 5). Candidates t_max grow; once B · t_max is no less than the best
step found, no later one can be better; those closer to the last one tried than ε are left out, which costs B · ε at
most.

Letters: L = layers, L1 = L + 1, D1 = devices + 1, M = submeshes, C = configurations of a submesh.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numba import njit

EPSILON_SECONDS = 1e-6  # the paper leaves ε open; Alpa's code has this value


@dataclass(frozen=True, eq=False)
class AlpaArrays:
    """A problem in Alpa's form; the letters as above."""

    seconds_LLMC: np.ndarray
    max_successors_LLMC: np.ndarray
    devices_M: np.ndarray
    num_devices: int

    @classmethod
    def load(cls, path: Path) -> AlpaArrays:
        with np.load(path, allow_pickle=False) as data:
            seconds = data["compute_cost"].astype(np.float64)
            return cls(
                seconds_LLMC=seconds,
                max_successors_LLMC=np.broadcast_to(data["max_n_succ_stages"].astype(np.int64), seconds.shape).copy(),
                devices_M=data["submesh_choices"].prod(axis=1).astype(np.int64),
                num_devices=int(data["num_devices"]),
            )

    @property
    def num_layers(self) -> int:
        return self.seconds_LLMC.shape[0]

    def candidates(self, epsilon_seconds: float) -> np.ndarray:
        """The values of t_max worth trying, growing."""
        values = np.unique(self.seconds_LLMC[np.isfinite(self.seconds_LLMC)])
        kept: list[float] = []
        for value in values:
            if not kept or value - kept[-1] >= epsilon_seconds:
                kept.append(float(value))
        if kept and kept[-1] < values[-1]:
            kept.append(float(values[-1]))  # the last one stands for those left out before it
        return np.array(kept)

    @property
    def num_steps(self) -> float:
        """Innermost steps of the dynamic programs of all candidates, at most."""
        L, _, M, C = self.seconds_LLMC.shape
        per_program = 0.5 * min(L, self.num_devices) * L * L * self.num_devices * M * C
        return per_program * len(self.candidates(EPSILON_SECONDS))


@dataclass(frozen=True)
class AlpaAnswer:
    """The best step, infinite if nothing fits, and what it took."""

    step_seconds: float
    num_programs: int
    cpu_seconds: float


def alpa_loop(arrays: AlpaArrays, num_microbatches: int, epsilon_seconds: float = EPSILON_SECONDS) -> AlpaAnswer:
    """Algorithm 1, lines 14 to 26, for costs that are given."""
    _load_compiled_loop()
    best, programs = np.inf, 0
    cpu = time.process_time()
    for slowest in arrays.candidates(epsilon_seconds):
        if num_microbatches * slowest >= best:
            break
        total, bottleneck = _program(
            arrays.seconds_LLMC, arrays.max_successors_LLMC, arrays.devices_M, arrays.num_devices, slowest
        )
        best = min(best, total + (num_microbatches - 1) * bottleneck)
        programs += 1
    return AlpaAnswer(float(best), programs, time.process_time() - cpu)


@cache
def _load_compiled_loop() -> None:
    one = np.ones((1, 1, 1, 1))
    _program(one, one.astype(np.int64), np.ones(1, dtype=np.int64), 1, 1.0)


@njit(cache=True, nogil=True)
def _program(
    seconds_LLMC: np.ndarray, max_successors_LLMC: np.ndarray, devices_M: np.ndarray, num_devices: int, slowest: float
) -> tuple[float, float]:
    """Equation 3 for one t_max: the least sum over any number of stages, and the slowest stage of that plan."""
    L, _, M, C = seconds_LLMC.shape
    most_stages = min(L, num_devices)
    least_SL1D1 = np.full((most_stages + 1, L + 1, num_devices + 1), np.inf)
    slowest_SL1D1 = np.zeros((most_stages + 1, L + 1, num_devices + 1))
    least_SL1D1[0, L, 0] = 0.0
    for s in range(1, most_stages + 1):
        for start in range(L - 1, -1, -1):
            for d in range(1, num_devices + 1):
                for stop in range(L, start, -1):
                    for m in range(M):
                        if devices_M[m] > d:
                            continue
                        rest = least_SL1D1[s - 1, stop, d - devices_M[m]]
                        for c in range(C):
                            t = seconds_LLMC[start, stop - 1, m, c]
                            fits = max_successors_LLMC[start, stop - 1, m, c] >= s - 1
                            if fits and t <= slowest and rest + t < least_SL1D1[s, start, d]:
                                least_SL1D1[s, start, d] = rest + t
                                slowest_SL1D1[s, start, d] = max(t, slowest_SL1D1[s - 1, stop, d - devices_M[m]])
    total, bottleneck = np.inf, 0.0
    for s in range(1, most_stages + 1):
        if least_SL1D1[s, 0, num_devices] < total:
            total, bottleneck = least_SL1D1[s, 0, num_devices], slowest_SL1D1[s, 0, num_devices]
    return total, bottleneck
