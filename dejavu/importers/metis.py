"""Metis' profiles of a model's layers: a folder of `DeviceType.<T>_tp<k>_bs<b>.json`, or one such file.

A file has the forward and backward time of each layer at one tensor-parallel degree and microbatch
(`execution_time.layer_compute_total_ms`), the memory it takes (`execution_memory.layer_memory_total_mb`: activations,
gradients and optimizer states together) and, in most, times of the whole iteration.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dejavu.foundation.errors import InputError
from dejavu.foundation.hashing import stable_hash
from dejavu.importers._base import UNKNOWN, Batch, Importer, option
from dejavu.importers.sources import files_of

_WANTED = "a folder of Metis' DeviceType.<T>_tp<k>_bs<b>.json"
_FILE_NAME = re.compile(r"DeviceType\.(?P<device>.+)_tp(?P<tp>[1-9]\d{0,5})_bs(?P<bs>[1-9]\d{0,8})\.json")
_MOST_BYTES = 64 * 2**20  # of one file: a model of a million layers has less
_MIB = 2**20  # its memory is max_memory_reserved, which people print in MiB as MB
# Times of the whole model: (kind, direction). An iteration is one microbatch, so all of them are of that size.
_TOTALS = {
    "total_time_ms": ("step", "both"),
    "forward_backward_time_ms": ("stage", "both"),
    "optimizer_time_ms": ("stage", "optimizer"),
}
_BESIDES = ("batch_generator_time_ms", "layernorm_grads_all_reduce_time_ms", "embedding_grads_all_reduce_time_ms")


@dataclass(frozen=True, kw_only=True)
class Metis(Importer):
    """Whole layers, forward and backward in one number, by tensor-parallel degree and microbatch.

    Its names of devices are short (`A100`): say which are meant with `--device A100=A100-SXM4-40GB`. It does not say
    the dtype; give it, or rows have `unknown`. A layer is known by the model's name, its number and how many there are.
    See [Um et al., USENIX ATC 2024](https://www.usenix.org/conference/atc24/presentation/um).
    """

    name: ClassVar[str] = "metis"
    published: ClassVar[datetime] = datetime(2024, 7, 10, tzinfo=UTC)  # the first day of USENIX ATC 2024

    dtype: str = option("what was trained in, by torch's name, such as float16", UNKNOWN)
    model: str | None = option("the model's name, for all files; otherwise the files' or the folder's")

    def files(self, path: Path) -> list[Path]:
        return files_of(path, ("DeviceType.*.json",), _WANTED)

    def batches(self, file: Path) -> Iterator[Batch]:
        match = _FILE_NAME.fullmatch(file.name)
        if not match:
            raise InputError(f"{file}: expected a name like DeviceType.A100_tp1_bs4.json")
        profile = _profile(file)
        settings = {
            "device_type": self._device(file, match["device"]),
            "dtype": self.dtype,
            "microbatch_size": int(match["bs"]),
            "tensor_parallel": int(match["tp"]),
            "repeats": 1,
        }
        model = self.model or profile.model or file.parent.resolve().name
        try:
            model.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{file}: the model's name is {model!r}; wanted Unicode without surrogates") from error
        yield self._layers(profile, model, settings)
        if profile.totals_ms:
            yield self._totals(profile, model, settings)

    def _device(self, file: Path, found: str) -> str:
        try:
            return self.devices.resolve(found)
        except InputError as error:
            raise InputError(f"{file}: {error}") from error

    def _layers(self, profile: _Profile, model: str, settings: dict[str, Any]) -> Batch:
        L = len(profile.layers_ms)
        extras = [{"model": model, "layer": layer, "num_layers": L} for layer in range(L)]
        if profile.parameter_bytes is not None:
            for extra, size in zip(extras, profile.parameter_bytes, strict=True):
                extra["parameter_bytes"] = int(size)
        table = self.table(
            L,
            **settings,
            kind="layer",
            direction="both",
            subject=[stable_hash(["metis", model, layer, L]) for layer in range(L)],
            name=[f"{model} layer {layer} of {L}" for layer in range(L)],
            seconds=profile.layers_ms / 1e3,
            peak_bytes=None if profile.memory_mb is None else np.rint(profile.memory_mb * _MIB).astype(np.int64),
            how="Metis: hooks around each layer, forward + backward",
            extra=[json.dumps(extra, sort_keys=True) for extra in extras],
        )
        return Batch(
            file=profile.file,
            table=table,
            positions=np.arange(L),
            num_read=L,
            time_name="layer_compute_total_ms",
            time_seconds=1e-3,
            place_word="layer",
        )

    def _totals(self, profile: _Profile, model: str, settings: dict[str, Any]) -> Batch:
        L, names = len(profile.layers_ms), list(profile.totals_ms)
        table = self.table(
            len(names),
            **settings,
            kind=[_TOTALS[name][0] for name in names],
            direction=[_TOTALS[name][1] for name in names],
            subject=[stable_hash(["metis", model, name, L]) for name in names],
            name=[f"{model} {name.removesuffix('_time_ms')}" for name in names],
            seconds=[milliseconds / 1e3 for milliseconds in profile.totals_ms.values()],
            how="Metis: Megatron's timers",
            extra=json.dumps({"model": model, "num_layers": L, **profile.besides_ms}, sort_keys=True),
        )
        return Batch(
            file=profile.file,
            table=table,
            positions=np.arange(len(names)),
            num_read=len(names),
            time_name="the time in ms",
            time_seconds=1e-3,
            place_word="total",
        )


@dataclass(frozen=True, eq=False)
class _Profile:
    """One file. Times in milliseconds and memory in MB, as it has them; layers in order."""

    file: Path
    model: str | None
    layers_ms: NDArray[np.float64]
    memory_mb: NDArray[np.float64] | None
    parameter_bytes: NDArray[np.float64] | None
    totals_ms: dict[str, float]
    besides_ms: dict[str, float]


def _profile(file: Path) -> _Profile:
    content = _content(file)
    times = _section(file, content, "execution_time")
    layers_ms = _numbers(file, times, "execution_time", "layer_compute_total_ms")
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    memory_mb = _per_layer(
        file, content.get("execution_memory"), "execution_memory", "layer_memory_total_mb", len(layers_ms)
    )
    parameter_bytes = _per_layer(
        file, model.get("parameters"), "model.parameters", "parameters_per_layer_bytes", len(layers_ms)
    )
    besides = {name: _number(file, name, times[name]) for name in _BESIDES if times.get(name) is not None}
    return _Profile(
        file=file,
        model=str(model["model_name"]) if model.get("model_name") else None,
        layers_ms=layers_ms,
        memory_mb=memory_mb,
        parameter_bytes=parameter_bytes,
        totals_ms={name: _number(file, name, times[name]) for name in _TOTALS if times.get(name) is not None},
        besides_ms={name: value for name, value in besides.items() if math.isfinite(value)},
    )


def _content(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    if size > _MOST_BYTES:
        raise InputError(f"{file} has {size:,} bytes; wanted at most {_MOST_BYTES:,}")
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file} holds a {type(content).__name__}; wanted an object with execution_time")
    return content


def _section(file: Path, content: dict[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    if not isinstance(section, dict):
        raise InputError(f"{file}: expected {name}, an object; found {', '.join(map(str, content)) or 'nothing'}")
    return section


def _numbers(file: Path, section: dict[str, Any], place: str, name: str) -> Any:
    values = section.get(name)
    if not isinstance(values, list) or not values:
        found = f"{values!r:.60}" if name in section else ", ".join(section) or "nothing"
        raise InputError(f"{file}: expected {place}.{name}, a list of numbers; found {found}")
    return np.array([_number(file, f"{place}.{name}[{i}]", value) for i, value in enumerate(values)])


def _per_layer(file: Path, section: Any, place: str, name: str, num_layers: int) -> Any:
    """Read `_numbers` that are finite, 0 or more, one for each layer; None where the file has none."""
    if not isinstance(section, dict) or section.get(name) is None:
        return None
    values = _numbers(file, section, place, name)
    if len(values) != num_layers:
        raise InputError(
            f"{file}: {place}.{name} has {len(values)} numbers; wanted one for each of {num_layers} layers"
        )
    for layer, value in enumerate(values):
        if not 0 <= value < 2**62 / _MIB:
            raise InputError(f"{file}: layer {layer}: {place}.{name} is {value}; wanted a finite number, 0 or more")
    return values


def _number(file: Path, place: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{file}: {place} is {value!r:.60}; wanted a number")
    try:
        return float(value)
    except OverflowError as error:
        raise InputError(
            f"{file}: {place} is {value!r:.60}…; wanted a number, at most {sys.float_info.max:g}"
        ) from error
