"""Each device left out in turn: under whatever names, with whatever broken rows, nothing of it is learned from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.cost import kernels as benchmark
from benchmarks.cost.device_table import device_of, device_types, meant, one_spelling
from benchmarks.cost.kernels import KERNEL_COLUMNS, MODEL_COLUMNS, run
from dejavu.cost.kernels import learned as learning
from dejavu.foundation.errors import InputError
from dejavu.importers.neusight import problems_of
from dejavu.importers.neusight.kernels import SIZE_COLUMNS
from tests.conftest import some

SPELLINGS = {
    "Tesla T4": ("tesla t4", "Tesla_T4", "T4", "T4 (2)"),
    "NVIDIA L4": ("nvidia_l4", "L4", "NVIDIA-L4"),
    "Tesla V100-PCIE-32GB": ("V100-PCIE", "Tesla_V100-PCIE-32GB", "V100 PCIe 32GB", "V100-PCIE-32"),
    "NVIDIA H100 80GB HBM3": ("H100-SXM5-80GB", "H100-SXM", "nvidia_h100_80gb_hbm3"),
}
FLOPS = {"Tesla T4": 8e12, "NVIDIA L4": 31e12, "Tesla V100-PCIE-32GB": 14e12, "NVIDIA H100 80GB HBM3": 67e12}
DEVICES = """Device,Dev_Mem,Mem_Bw,Num_Sm,Core_Per_SM,Freq,L2Cache,file,SingleFLOPs
Tesla T4,15,320,40,64,1590,4,Tesla_T4,8141
NVIDIA L4,24,300,60,128,2040,48,NVIDIA_L4,31334
Tesla V100-PCIE-32GB,32,900,80,64,1370,6,Tesla_V100-PCIE-32GB,14029
NVIDIA H100 80GB HBM3,80,3430,132,128,1980,50,NVIDIA_H100_80GB_HBM3,66908
"""


def kernels(rng: np.random.Generator, names: list[str], count: int = 60) -> pd.DataFrame:
    frames = []
    for name in names:
        m, n, k = (2 ** rng.integers(6, 12, count) for _ in range(3))
        milliseconds = 1e3 * (2.0 * m * n * k / (0.7 * FLOPS[name]) + 5e-6) * np.exp(rng.normal(0, 0.05, count))
        frames.append(
            pd.DataFrame({"op": "linear", "device": name, "M": m, "N": n, "K": k, "latency_ms": milliseconds})
        )
    return pd.concat(frames, ignore_index=True).assign(dtype="fp32")


def models(names: list[str]) -> pd.DataFrame:
    """One traced product, and what a whole model of it takes; and a model that was not traced."""
    layer = {"kind": "op", "device": names[0], "num_layer": 1.0, "idx": 0.0, "name": "x", "op": "Linear"}
    layer |= {"in_shapes": "[[512, 512]]", "out_shape": "(512, 512)", "fw_ops": "[['Linear', (512, 512, 512)]]"}
    layer |= {"bw_ops": "[]", "acc_ops": "[]", "option": None, "model": "one", "mode": "inf", "seq": 512, "batch": 1}
    total = {"kind": "total", "model": "one", "mode": "inf", "seq": 512, "batch": 1, "option": None, "bwall_ms": 0.0}
    totals = [total | {"device": name, "e2e_ms": 0.1, "fw_ms": 0.1} for name in names]
    totals += [total | {"device": name, "e2e_ms": 0.1, "fw_ms": 0.1, "model": "two"} for name in names]
    return pd.DataFrame([layer, *totals], columns=list(MODEL_COLUMNS))


def found(folder: Path, rows: pd.DataFrame, totals: pd.DataFrame, train: str = "", test: str = ""):
    rows.to_parquet(folder / "kernels.parquet")
    totals.to_parquet(folder / "models.parquet")
    (folder / "devices.csv").write_text(DEVICES)
    files = (folder / "kernels.parquet", folder / "models.parquet", folder / "devices.csv")
    _, table, summary = run(*files, train, test)
    json.dumps([table, summary], allow_nan=False)
    return table, summary


@pytest.mark.parametrize("seed", range(4))
def test_other_names_of_a_device_change_nothing(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [str(name) for name in rng.permutation(list(SPELLINGS))[:3]]
    rows, totals = kernels(rng, names), models(names)
    other = rows.copy()
    for name in names:
        own = np.flatnonzero(rows["device"] == name)[1:]  # the first is spelled as before: the same name stands for all
        other.loc[own, "device"] = rng.choice([name, *SPELLINGS[name]], len(own))
    other_totals = totals.assign(device=[str(rng.choice([name, *SPELLINGS[name]])) for name in totals["device"]])
    wanted, again = found(tmp_path, rows, totals), found(tmp_path, other, other_totals)
    assert again[0] == wanted[0]
    assert again[1] == wanted[1]
    assert all(one["models"] == 1 for one in again[1]["left_out"].values())
    assert all(name in again[1]["tuned"] for name in ("V100", "T4", "L4", "H200"))
    assert len(again[1]["models_without_operators"]) == len(names)
    spelled = SPELLINGS[names[0]][0]
    with pytest.raises(InputError, match="is in --train and in --test"):
        found(tmp_path, other.replace({"device": {names[0]: spelled}}), totals, train=spelled, test=names[0])


@pytest.mark.parametrize("seed", some(range(4), [0]))
@pytest.mark.parametrize("train, test", [("", ""), ("Tesla T4,Tesla V100-PCIE-32GB", "NVIDIA L4")])
def test_rows_in_any_order_predict_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, train: str, test: str
) -> None:
    """Some of the rows are drawn to learn from."""
    monkeypatch.setattr(benchmark, "SOME_ROWS", 150)
    monkeypatch.setattr(learning, "MOST_ROWS", 150)
    names = list(SPELLINGS)[:3]
    rng = np.random.default_rng(seed)
    rows, totals = kernels(rng, names, 250), models(names)
    predicted = []
    for order in (np.arange(len(rows)), rng.permutation(len(rows))):
        table, _ = found(tmp_path, rows.iloc[order], totals, train, test)
        predicted.append({row["device"]: row for row in table if row["table"] == "model"})
    assert predicted[0] == predicted[1]


@pytest.mark.parametrize("seed", range(4))
def test_every_row_of_kernels_and_models_is_used_or_counted(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = list(SPELLINGS)[:3]
    rows, totals = kernels(rng, names).astype({"M": object, "latency_ms": object}), models(names)
    broken = rng.choice(len(rows), 40, replace=False)
    for row in broken:
        column, values = [
            ("M", ["", "many", 0, -1, 7.5, "1e400", None]),
            ("latency_ms", ["", "soon", 0, -1, None, "nan", "inf", 1e9]),
            ("device", [None, " ", ""]),
            ("op", [None, "flash", "BMM "]),
            ("dtype", ["fp16", None, "tf32"]),
        ][int(rng.integers(5))]
        rows.loc[row, column] = values[int(rng.integers(len(values)))]
    alone = rows.drop(index=broken).infer_objects()
    times = totals["e2e_ms"].astype(object)
    bad = rng.choice(np.flatnonzero(totals["kind"] == "total"), 2, replace=False)
    times.iloc[bad] = [["none", None, "0", "-1", "inf"][int(rng.integers(5))] for _ in bad]
    texts = {name: rows[name].map(lambda cell: None if pd.isna(cell) else str(cell)) for name in rows}
    table, summary = found(
        tmp_path, rows.assign(**texts), totals.assign(e2e_ms=times.map(lambda cell: cell and str(cell)))
    )
    wanted, _ = found(tmp_path, alone, totals.drop(index=bad))
    assert table == wanted
    assert sum(row.get("rows", 0) for row in table) + sum(summary["dropped_rows"].values()) == len(rows)
    whole = sum(row["table"] == "model" for row in table) + len(summary["models_without_operators"])
    assert whole + summary["dropped_models"]["no time above 0"] == (totals["kind"] == "total").sum()


def test_a_file_without_a_kernel_is_refused(tmp_path: Path) -> None:
    names = list(SPELLINGS)[:2]
    rows = kernels(np.random.default_rng(0), names)
    with pytest.raises(InputError, match="kernels of no device; wanted two devices or more"):
        found(tmp_path, rows[:0], models(names))


@pytest.mark.parametrize("name", list(SPELLINGS))
def test_a_short_name_in_the_list_of_devices_is_as_good(tmp_path: Path, name: str) -> None:
    """The board's power, which only the catalogue knows, is found by whatever name means one device of it."""
    path = tmp_path / "devices.csv"
    path.write_text(DEVICES)
    wanted = device_types(path)[name]
    assert not isinstance(wanted, InputError) and wanted.board_watts
    clear = [short for short in SPELLINGS[name] if meant(short) == wanted.name]
    assert clear
    for short in clear:
        path.write_text(DEVICES.replace(name, short))
        assert device_types(path)[short] == wanted


def test_blanks_after_commas_of_a_list_of_devices_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_text(DEVICES)
    wanted = device_types(path)
    path.write_text(DEVICES.replace(",", ", ").replace("\n", "\r\n"), newline="")
    assert device_types(path) == wanted


@pytest.mark.parametrize("cell", ["none", "-3", "0", "inf"])
def test_a_bad_figure_of_a_device_is_told_with_file_device_and_column(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "devices.csv"
    path.write_text(DEVICES.replace("Tesla T4,15,320", f"Tesla T4,15,{cell}"))
    fault = device_types(path)["Tesla T4"]
    assert isinstance(fault, InputError)
    assert all(part in str(fault) for part in ("devices.csv", "'Tesla T4'", "Mem_Bw", "above 0"))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"devices\.csv is no CSV file"):
        device_types(path)


def test_names_of_nobody_are_told_apart_by_their_words(tmp_path: Path) -> None:
    (tmp_path / "devices.csv").write_text(DEVICES)
    table = device_types(tmp_path / "devices.csv")
    names = ["XPU 9", "xpu-9", "YPU"]
    assert one_spelling(names, table, tmp_path) == {"XPU 9": "XPU 9", "xpu-9": "XPU 9", "YPU": "YPU"}


def test_files_that_cannot_be_read_are_told_by_name(tmp_path: Path) -> None:
    names = list(SPELLINGS)[:2]
    rows, totals = kernels(np.random.default_rng(0), names), models(names)
    with pytest.raises(InputError, match=r"wanted two devices.*120 rows were dropped \(no float32 kernel; .*fp16"):
        found(tmp_path, rows.assign(dtype="fp16"), totals)
    halves = rows.assign(dtype=["fp16" if name == names[0] else "fp32" for name in rows["device"]])
    unusable = rf"{names[0]} has no row that can be used; 60 rows were dropped \(no float32 kernel; .*fp16"
    with pytest.raises(InputError, match=f"--train {unusable}"):
        found(tmp_path, halves, totals, train=names[0], test=names[1])
    with pytest.raises(InputError, match=f"--test {unusable}"):
        found(tmp_path, halves, totals[totals["device"] != names[0]], train=names[1], test=names[0])
    found(tmp_path, halves, totals, train=names[1], test=names[0])  # whole models of it are predicted
    with pytest.raises(InputError, match=r"models\.parquet: expected columns fw_ops"):
        found(tmp_path, rows, totals.drop(columns="fw_ops"))
    broken = totals.assign(fw_ops=totals["fw_ops"].replace("[['Linear', (512, 512, 512)]]", "[["))
    with pytest.raises(InputError, match=r"models\.parquet: an operator of model one, mode inf, .* cannot be read"):
        found(tmp_path, rows, broken)
    for name in ("kernels", "models"):
        found(tmp_path, rows, totals)
        (tmp_path / f"{name}.parquet").write_bytes(b"no")
        with pytest.raises(InputError, match=rf"{name}\.parquet is no whole Parquet file"):
            run(*(tmp_path / file for file in ("kernels.parquet", "models.parquet", "devices.csv")), "", "")


@pytest.mark.parametrize("seed", range(4))
def test_repeated_and_shuffled_rows_of_models_change_nothing(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = list(SPELLINGS)[:2]
    rows, totals = kernels(rng, names), models(names)
    layer, *others = totals.to_dict("records")
    places = rng.choice(40, 12, replace=False)
    inside = [f"h_h_{int(rng.integers(2))}_x" for _ in places]  # a first layer among them: its rows count thrice
    trace = [
        layer | {"idx": float(at), "name": name, "num_layer": 3.0} for at, name in zip(places, inside, strict=True)
    ]
    once = pd.DataFrame([*trace, *others], columns=list(MODEL_COLUMNS))
    again = pd.concat([once, once[once["kind"] == "op"].sample(7, random_state=seed)]).sample(frac=1, random_state=seed)
    wanted, found_again = found(tmp_path, rows, once), found(tmp_path, rows, again)

    def ours(table):
        return {(row["device"], row["what"]): row["ours_ms"] for row in table if row["table"] == "model"}

    assert ours(found_again[0]) == pytest.approx(ours(wanted[0]))
    texts = again.assign(idx=again["idx"].map(lambda cell: None if pd.isna(cell) else f"{cell:.0f}"))
    assert ours(found(tmp_path, rows, texts)[0]) == pytest.approx(ours(wanted[0]))


def test_of_traces_that_differ_one_is_taken_in_any_order_of_rows(tmp_path: Path) -> None:
    """Another version of torch traced one device's model: twice the product."""
    names = list(SPELLINGS)[:2]
    rows, totals = kernels(np.random.default_rng(0), names), models(names)
    wider = {"in_shapes": "[[512, 1024]]", "fw_ops": "[['Linear', (512, 512, 1024)]]", "device": names[1]}
    both = pd.concat([totals, totals[totals["kind"] == "op"].assign(**wider)], ignore_index=True)
    predicted = [
        {(row["device"], row["what"]): row["ours_ms"] for row in found(tmp_path, rows, one)[0] if "ours_ms" in row}
        for one in (both, both[::-1])
    ]
    assert predicted[0] == pytest.approx(predicted[1])
    assert len(predicted[0]) == 2


@pytest.mark.parametrize("number", [np.nan, -1.0])
def test_a_layer_of_which_the_number_is_missing_is_refused(tmp_path: Path, number: float) -> None:
    """It was counted once: a model of 24 layers was predicted to take a tenth of its time."""
    names = list(SPELLINGS)[:2]
    rows, totals = kernels(np.random.default_rng(0), names), models(names)
    inside = totals.assign(name=totals["name"].replace("x", "h_h_0_x"), num_layer=number)
    with pytest.raises(InputError, match=r"models\.parquet: .* of model one.*num_layer is .*wanted how often"):
        found(tmp_path, rows, inside)
    found(tmp_path, rows, inside.assign(num_layer=0.0))  # as of models whose layers are all traced


def test_what_neusight_learned_from_is_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = list(SPELLINGS)
    totals = models(names)
    totals["pred_neusight_ms"] = np.where(totals["device"] == "Tesla T4", 0.1, 0.2)
    _, summary = found(tmp_path, kernels(rng, names), totals)
    assert summary["neusight_learned_from"] == ["T4", "V100-PCIE-32GB"]
    beside = summary["models_beside"]
    assert beside["neusight"]["models"] == 4 and beside["neusight"]["peer_mape_percent"] == pytest.approx(75.0)
    assert beside["neusight, unseen"]["models"] == 2
    assert beside["neusight, unseen"]["peer_mape_percent"] == pytest.approx(100.0)


@pytest.mark.parametrize("column", [*KERNEL_COLUMNS, "M"])
def test_a_column_that_kernels_lack_is_told_with_the_file_or_counted(tmp_path: Path, column: str) -> None:
    rows = kernels(np.random.default_rng(0), list(SPELLINGS)[:2]).drop(columns=column)
    with pytest.raises(InputError, match=column) as told:
        found(tmp_path, rows, models(list(SPELLINGS)[:2]))
    assert (str(tmp_path / "kernels.parquet") in str(told.value)) == (column != "M")


@pytest.mark.parametrize("column", SIZE_COLUMNS["conv"])
def test_convolutions_that_lack_a_column_are_bad_rows(column: str) -> None:
    sizes = dict.fromkeys(SIZE_COLUMNS["conv"], 3) | {"insize": 9}
    rows = pd.DataFrame([{"op": "conv", "latency_ms": 1.0, **sizes}] * 3).drop(columns=column)
    assert all(f"no column {column!r}" in problem for problem in problems_of(rows))


@pytest.mark.parametrize("order", ["as it is", "the pair first"])
def test_two_rows_of_one_name_are_two_devices_where_their_files_say_so(tmp_path: Path, order: str) -> None:
    """NeuSight's list has a pair of H100 under the name of one; what a pair took is no time of one."""
    rng = np.random.default_rng(0)
    names = ["Tesla T4", "NVIDIA H100 80GB HBM3"]
    pair = "NVIDIA H100 80GB HBM3,160,6860,132,128,1980,100,NVIDIA_H100_80GB_HBM3_TP,1979000\n"
    head, *rows = DEVICES.splitlines(keepends=True)
    (path := tmp_path / "devices.csv").write_text(
        "".join([head, *([pair, *rows] if order != "as it is" else [*rows, pair])])
    )
    table = device_types(path)
    for name in ("H100", *SPELLINGS[names[1]], names[1]):
        assert device_of(name, table, path).memory_bytes_per_second == 3430e9
    both = device_of("NVIDIA_H100_80GB_HBM3_TP", table, path)
    assert both.memory_bytes_per_second == 6860e9 and both.name == "NVIDIA_H100_80GB_HBM3_TP"
    totals = models(names)
    of_pair = totals[totals["device"] == names[1]].assign(device="NVIDIA_H100_80GB_HBM3_TP")
    kernels(rng, names).to_parquet(tmp_path / "kernels.parquet")
    pd.concat([totals, of_pair]).to_parquet(tmp_path / "models.parquet")
    _, found_rows, summary = run(tmp_path / "kernels.parquet", tmp_path / "models.parquet", path, "", "")
    assert sum(row["table"] == "model" for row in found_rows) == 2
    assert summary["models_of_devices_without_kernels"] == {"NVIDIA_H100_80GB_HBM3_TP": 2}
