"""The two forms of vidur's files, as frames of one form.

Its own CSV files (`compute/<device>/<model>/mlp.csv` and `network/<nodes>/all_reduce.csv`; the columns are those that
its `vidur/profiling` writes) have all operators of one number of tokens in a line; in Parquet each has a row. Where a
number is wanted and none was found, a cell is its text, or None.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dejavu.importers import sources
from dejavu.importers.cells import cells_of, flags_of, not_flags, not_whole, numbers_of, texts_of

PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
OPERATORS = (*PRODUCTS, *NORMS, "mlp_act", "add", "emb", "attn_rope")

FILE_NAMES = ("*.parquet", "mlp.csv", "all_reduce.csv", "allreduce.csv", "send_recv.csv")
WANTED = "vidur's compute or network profile: Parquet, or its mlp.csv, all_reduce.csv or send_recv.csv"
_COMPUTE = ("device", "op", "M", "N", "K", "median_ms")
_DEGREE = "num_tensor_parallel_workers"
_SIZES = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "num_tokens", _DEGREE)
_GATED = "use_gated_mlp"
_COMPUTE_CSV = (*_SIZES, _GATED)
_COUNTS = ("num_workers", "devices_per_node", "size")
_NETWORK = ("collective", *_COUNTS)


def columns_of(path: Path) -> list[str]:
    """Return the names of a file's columns. Raises InputError where it is no such file."""
    return sources.csv_columns(path, WANTED) if path.suffix == ".csv" else sources.parquet_columns(path, WANTED)


def holds_collectives(found: list[str]) -> bool:
    return "collective" in found or "num_workers" in found


def network_frames(path: Path, found: list[str]) -> Iterator[pd.DataFrame]:
    """Yield a row for each message: row, device, collective, num_workers, devices_per_node, size (bytes), ms.

    Raises:
        InputError: other columns, or a file that breaks off.
    """
    operations = [name.split(".")[1] for name in found if name.startswith("time_stats.") and name.endswith(".median")]
    time = "median_ms" if path.suffix != ".csv" else f"time_stats.{(operations or ['all_reduce'])[0]}.median"
    sources.check_columns(path, found, (*_NETWORK, time))
    nodes = "topology" if "topology" in found else None
    columns = [*_NETWORK, time, *([nodes] if nodes else [])]
    for start, frame in _pieces(path, columns):
        device = texts_of(frame[nodes]) if nodes else path.resolve().parent.name
        counts = {column: cells_of(frame[column]) for column in _COUNTS}
        names = texts_of(frame["collective"])
        yield frame.assign(**counts, row=start + np.arange(len(frame)), device=device, collective=names, ms=frame[time])


def compute_frames(path: Path, found: list[str]) -> Iterator[pd.DataFrame]:
    """Yield a row for each operator: row, device, op, M tokens, N wide in, K wide out, gated (or None), ms, problem.

    `gated` says whether the model multiplies its activation with a second product, as Llama does; `problem` why the
    line's shapes are unknown, or is empty.

    Raises:
        InputError: other columns, or a file that breaks off.
    """
    if path.suffix == ".csv":
        yield from _lines(path, found)
        return
    sources.check_columns(path, found, _COMPUTE)
    gated = _gated(path) if "model" in found else {}
    columns = [*_COMPUTE, *(column for column in ("model", _GATED) if column in found)]
    for start, frame in _pieces(path, columns):
        models = texts_of(frame["model"]).tolist() if "model" in frame else [""] * len(frame)
        yield frame.assign(
            **{column: texts_of(frame[column]) for column in ("device", "op")},
            **{column: cells_of(frame[column]) for column in ("M", "N", "K")},
            row=start + np.arange(len(frame)),
            gated=[
                gated.get(model) if said != said else bool(said)  # NaN: the line does not say
                for model, said in zip(models, _said_of(frame), strict=True)
            ],
            ms=frame["median_ms"],
            problem="",
        )


def _said_of(frame: pd.DataFrame) -> NDArray[np.float64]:
    return flags_of(frame[_GATED]) if _GATED in frame else np.full(len(frame), np.nan)


def _pieces(path: Path, columns: list[str]) -> Iterator[tuple[int, pd.DataFrame]]:
    return sources.csv_frames(path, columns) if path.suffix == ".csv" else sources.parquet_frames(path, columns)


def _gated(path: Path) -> dict[str, bool]:
    """Return by model whether its MLP is gated: its first product is twice as wide as its activation."""
    found = []
    for _, frame in sources.parquet_frames(path, ("model", "op", "K")):
        texts = {column: texts_of(frame[column]) for column in ("model", "op")}
        piece = pd.DataFrame({**texts, "K": numbers_of(frame["K"])})
        found.append(piece[piece["op"].isin(["mlp_up_proj", "mlp_act"]) & (piece["model"] != "")])
    if not found:
        return {}
    widest = pd.concat(found).groupby(["model", "op"])["K"].max().unstack()
    if set(widest.columns) != {"mlp_up_proj", "mlp_act"}:
        return {}
    known = widest.dropna()
    return {str(model): bool(wide == 2 * act) for model, act, wide in known[["mlp_act", "mlp_up_proj"]].itertuples()}


def _lines(path: Path, found: list[str]) -> Iterator[pd.DataFrame]:
    """A line of mlp.csv has one number of tokens; its operators' shapes follow from the model's."""
    times = {name: f"time_stats.{name}.median" for name in OPERATORS if f"time_stats.{name}.median" in found}
    sources.check_columns(path, found, (*_COMPUTE_CSV, *(times.values() or ["time_stats.mlp_up_proj.median"])))
    *above, folder, _ = path.resolve().parts  # the last folder named compute: others may lie above it
    places = [place for place, part in enumerate(above) if part == "compute"]
    device = [*above, folder][places[-1] + 1] if places else folder
    for start, frame in sources.csv_frames(path, (*_COMPUTE_CSV, *times.values())):
        problems = _wrong_sizes(frame)
        number = {column: numbers_of(frame[column]) for column in _SIZES}
        hidden, degree, heads = number["n_embd"], number[_DEGREE], number["n_head"]
        with np.errstate(divide="ignore", invalid="ignore"):
            inner = number["n_expanded_embd"] / degree
            queries_keys_values = hidden / heads * (heads + 2 * number["n_kv_head"]) / degree
            own_hidden = hidden / degree
        gated = flags_of(frame[_GATED]) == 1
        wide = {
            "attn_pre_proj": (hidden, queries_keys_values),
            "attn_post_proj": (own_hidden, hidden),
            "mlp_up_proj": (hidden, inner * np.where(gated, 2, 1)),
            "mlp_down_proj": (inner, hidden),
            "mlp_act": (np.nan, inner),
        }
        pieces = []
        for operation, time in times.items():
            n, k = wide.get(operation, (np.nan, hidden))
            piece = {"row": start + np.arange(len(frame)), "device": device, "op": operation, "problem": problems}
            shape = {"M": number["num_tokens"], "N": n, "K": k}
            pieces.append(pd.DataFrame({**piece, **shape, "gated": gated, "ms": frame[time]}))
        yield pd.concat(pieces, ignore_index=True)


def _wrong_sizes(frame: pd.DataFrame) -> list[str]:
    """Return for each line what of its model's shape cannot be read; empty where all can."""
    problems = [""] * len(frame)
    for column in _SIZES:
        for row, problem in not_whole(column, frame[column]).items():
            problems[row] = problems[row] or problem
    for row, problem in not_flags(_GATED, frame[_GATED]).items():
        problems[row] = problems[row] or problem
    return problems
