"""What importers make of bad cells: a bad row, or a refusal that names it, and never a fault of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dejavu.foundation.errors import InputError
from dejavu.importers import Importer, import_profile
from dejavu.importers.alpa import Alpa
from dejavu.importers.alpa.cases import load_case
from dejavu.importers.alpa.files import pickle_pieces
from dejavu.importers.intake import ImportReport, _sound
from dejavu.importers.metis import Metis
from dejavu.importers.nccl_tests import PROGRAMS, NcclTests
from dejavu.importers.neusight import NeuSight
from dejavu.importers.vidur import Vidur
from dejavu.profiles import ProfileDatabase
from dejavu.profiles.plausible import impossible_rows
from tests.conftest import spread
from tests.test_importers import (
    METIS,
    NCCL,
    alpa_content,
    alpa_pickle,
    kernels_frame,
    vidur_lines,
    vidur_network,
    write_alpa,
    write_metis,
)


def taken(importer: Importer, path: Path) -> tuple[set[str], ImportReport]:
    """The rows that an import with --skip-bad writes, and its report."""
    report = ImportReport()
    batches = (batch for file in importer.files(path) for batch in importer.batches(file))
    table = pa.concat_tables([_sound(batch, report, skip_bad=True) for batch in batches])
    assert impossible_rows(table) == {}
    assert report.num_read == table.num_rows + report.skipped.total() + report.num_bad
    return {str(row) for row in table.to_pylist()}, report


def check_that_others_stay(importer: Importer, path: Path, row: int, others: set[str], word: str = "row") -> None:
    found, report = taken(importer, path)
    assert others <= found
    assert {bad.place.split(" (")[0] for bad in report.bad} <= {f"{path}: {word} {row}"}


# CSV

CSV = {
    "mlp.csv": lambda: pd.concat([vidur_lines().filter(regex="^(?!.*min$)")] * 3, ignore_index=True),
    "all_reduce.csv": lambda: (
        vidur_network().rename(columns={"median_ms": "time_stats.all_reduce.median"}).drop(columns="topology")
    ),
}
BAD_TEXTS = ("abc", "", "-1", "0", "1.5", "inf", "9" * 30)


@pytest.mark.parametrize("name", CSV)
def test_a_bad_cell_of_a_csv_file_is_of_its_row_alone(name: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    (folder := tmp_path / "a100").mkdir()
    frame, path = CSV[name]().astype(str), folder / name
    row = int(random.integers(1, len(frame) - 1))
    alone = frame.copy()
    alone.loc[row] = frame.loc[row - 1]
    alone.to_csv(path, index=False)
    others, _ = taken(Vidur(), path)
    for column in frame:
        for text in random.choice(BAD_TEXTS, 3, replace=False):
            spoiled = frame.copy()
            spoiled.loc[row, column] = text
            spoiled.to_csv(path, index=False)
            check_that_others_stay(Vidur(), path, row, others)


@pytest.mark.parametrize("above", ["", "compute", "compute/compute", "compute/of/others"])
@pytest.mark.parametrize("place", ["compute/a100", "compute/a100/llama", "compute/a100/meta/llama"])
def test_the_folder_of_a_csv_names_its_device_wherever_it_lies(above: str, place: str, tmp_path: Path) -> None:
    (folder := tmp_path / above / place).mkdir(parents=True)
    vidur_lines().to_csv(folder / "mlp.csv", index=False)
    rows, report = taken(Vidur(), folder / "mlp.csv")
    assert len(rows) == 14 and not report.num_bad
    assert all("'A100-SXM4-80GB'" in row for row in rows)


@pytest.mark.parametrize("column", ["n_embd", "num_tokens", "num_tensor_parallel_workers"])
def test_the_text_that_was_found_is_told(column: str, tmp_path: Path) -> None:
    (tmp_path / "a100").mkdir()
    frame = vidur_lines().astype({column: object})
    frame.loc[1, column] = "abc"
    frame.to_csv(tmp_path / "a100" / "mlp.csv", index=False)
    with pytest.raises(InputError, match=f"row 1: {column} is 'abc'; wanted a whole number"):
        import_profile(Vidur(), tmp_path / "a100" / "mlp.csv", ProfileDatabase(tmp_path / "db"))


TRUE, FALSE = ("True", "true", " TRUE", "1", "1.0"), ("False", "false", "FALSE ", "0", "0.0")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_whether_an_mlp_is_gated_is_read_however_it_is_written(form: str, seed: int, tmp_path: Path) -> None:
    """A gated one's first product is twice as wide; cells that say neither are bad rows, and never taken for no."""
    rng = np.random.default_rng(seed)
    gated = rng.integers(2, size=2).astype(bool)

    def found(cells: list[Any], where: str) -> set[str]:
        (tmp_path / where / "a100").mkdir(parents=True)
        path = tmp_path / where / "a100" / f"mlp.{form}"
        if form == "csv":
            vidur_lines().assign(use_gated_mlp=cells).to_csv(path, index=False)
        else:
            frame = vidur_operators().drop(columns="model").assign(use_gated_mlp=np.repeat(np.array(cells, object), 3))
            frame.to_parquet(path)
        return taken(Vidur(), path)[0]

    wanted = found(gated.tolist(), "as they are")
    kinds = {kind: sum(f"'elementwise {kind}'" in row for row in wanted) for kind in ("silu_and_mul", "gelu")}
    assert kinds == {"silu_and_mul": gated.sum(), "gelu": 2 - gated.sum()}
    texts = [str(rng.choice(TRUE if one else FALSE)) for one in gated]
    assert found(texts, "texts") == wanted
    if form == "csv":
        for number, cell in enumerate((None, "yes", "2", "nan")):
            others = found([cell, texts[1]], f"bad {number}")
            assert others < wanted and others


@pytest.mark.parametrize("seed", range(3))
def test_flags_of_alpas_points_are_read_however_they_are_written(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    path, frame = tmp_path / "points.parquet", alpa_points(tmp_path)
    frame.to_parquet(path)
    wanted, report = taken(Alpa(), path)
    for flag in ("is_noop", "is_monotone_clamped", "failed"):
        frame[flag] = [str(rng.choice(TRUE if one else FALSE)) for one in frame[flag]]
    frame.to_parquet(path)
    again, found = taken(Alpa(), path)
    assert again == wanted and found.skipped == report.skipped and not found.num_bad
    row = int(rng.integers(len(frame)))
    frame.loc[row, "failed"] = str(rng.choice(["maybe", "2"]))
    frame.to_parquet(path)
    _, found = taken(Alpa(), path)
    assert [bad.place.split(" (")[0] for bad in found.bad] == [f"{path}: point {row}"]
    assert "wanted true or false" in found.bad[0].problem


# Parquet


def convolutions() -> pd.DataFrame:
    sizes = {"B": 8, "cin": 3, "cout": 8, "ksize": 3, "insize": 32, "stride": 1, "pad": [0, 1]}
    return pd.DataFrame({"op": "conv", "device": "Tesla T4", "latency_ms": 0.05, "dtype": "fp32", **sizes})


def alpa_points(folder: Path) -> pd.DataFrame:
    path, _ = write_alpa(folder)
    return pd.concat([frame for _, frame in pickle_pieces(path)], ignore_index=True).drop(columns="cluster")


def vidur_operators() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "device": "a100",
            "model": "m",
            "op": ["mlp_up_proj", "mlp_act", "add", "mlp_up_proj", "mlp_act", "add"],
            "M": [64, 64, 64, 128, 128, 128],
            "N": 1024,
            "K": [8192, 4096, 1024] * 2,
            "median_ms": 0.05,
        }
    )


PARQUET: dict[str, tuple[Importer, Callable[[Path], pd.DataFrame]]] = {
    "kernels": (NeuSight(), lambda folder: pd.concat([kernels_frame(6), convolutions()], ignore_index=True)),
    "points": (Alpa(), alpa_points),
    "network": (Vidur(), lambda folder: vidur_network()),
    "compute": (Vidur(), lambda folder: vidur_operators()),
}


def as_texts(values: pd.Series) -> pd.Series:
    return (values.astype(int) if values.dtype == bool else values).astype(object).map(str, na_action="ignore")


@pytest.mark.parametrize("name", PARQUET)
@pytest.mark.parametrize("cell", [None, "abc"])
def test_a_bad_cell_of_a_parquet_file_is_of_its_row_alone(name: str, cell: str | None, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    importer, make = PARQUET[name]
    frame, path = make(tmp_path), tmp_path / "rows.parquet"
    word = "point" if isinstance(importer, Alpa) else "row"
    for column in frame:
        row = int(random.integers(1, len(frame)))
        alone = frame.copy()
        alone.loc[row] = frame.loc[row - 1]
        alone.to_parquet(path)
        others, _ = taken(importer, path)
        values = as_texts(frame[column]) if cell else frame[column].astype(object)
        values[row] = cell
        frame.assign(**{column: values}).to_parquet(path)
        check_that_others_stay(importer, path, row, others, word)


@pytest.mark.parametrize("name", PARQUET)
@pytest.mark.parametrize(
    "cell", spread([1, -1.5, "x", None, [1], b"\xff", {"a": 1}, True, pd.Timestamp(0)], 3), ids=str
)
def test_a_column_of_another_type_is_no_fault_of_ours(name: str, cell: Any, tmp_path: Path) -> None:
    importer, make = PARQUET[name]
    frame, path = make(tmp_path), tmp_path / "rows.parquet"
    for column in frame:
        frame.assign(**{column: pd.Series([cell] * len(frame))}).to_parquet(path)
        taken(importer, path)


def test_a_convolution_is_one_where_its_filter_fits_the_padded_image(tmp_path: Path) -> None:
    sizes = list(product(range(1, 6), range(1, 6), range(1, 4), range(3)))
    columns = dict(zip(("ksize", "insize", "stride", "pad"), np.array(sizes).T, strict=True))
    frame = pd.concat([convolutions()[:1]] * len(sizes), ignore_index=True).assign(**columns)
    frame.to_parquet(tmp_path / "kernels.parquet")
    batch = next(NeuSight().batches(tmp_path / "kernels.parquet"))
    widths = [len(range(-pad, insize + pad - ksize + 1, stride)) for ksize, insize, stride, pad in sizes]
    assert batch.positions.tolist() == [row for row, width in enumerate(widths) if width > 0]
    assert [json.loads(extra)["m"] for extra in batch.table["extra"].to_pylist()] == [8 * w**2 for w in widths if w]
    assert {bad.problem.split(" is ")[0] for bad in batch.bad} == {"ksize of 'conv'"}


# Text


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a100").mkdir()
    texts = {
        "DeviceType.T4_tp1_bs4.json": (Metis(model="m"), json.dumps(METIS)),
        "log.txt": (NcclTests(), NCCL),
        "mlp.csv": (Vidur(), vidur_lines().to_csv(index=False)),
    }
    for name, (importer, text) in texts.items():
        path = tmp_path / "a100" / name
        path.write_text(text, encoding="utf-8")
        expected, _ = taken(importer, path)
        path.write_text(text, encoding="utf-8-sig")
        assert taken(importer, path)[0] == expected, name


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_a_number_that_no_float_holds_is_named_in_metis(number: int, tmp_path: Path) -> None:
    for name, value in METIS["execution_time"].items():
        times = {**METIS["execution_time"], name: [1.0, number, 2.0] if isinstance(value, list) else number}
        write_metis(tmp_path, {**METIS, "execution_time": times})
        with pytest.raises(InputError, match=rf"tp1_bs4.json: .*{name}.* is -?1000.*; wanted a number"):
            taken(Metis(), tmp_path)


def test_a_name_that_no_file_can_hold_is_refused_in_metis(tmp_path: Path) -> None:
    write_metis(tmp_path, {**METIS, "model": {"model_name": "GPT\ud800"}})
    with pytest.raises(InputError, match=r"tp1_bs4.json: the model's name is 'GPT.*'; wanted"):
        taken(Metis(), tmp_path)


def test_a_time_that_no_float_holds_is_refused_in_a_pickle(tmp_path: Path) -> None:
    content = alpa_content()
    content["default", (1, 4)].dot_cost_dict[(), "f16"].append((2 * 64**3, 10**400))
    (tmp_path / "prof_database.pkl").write_bytes(alpa_pickle(content))
    with pytest.raises(InputError, match=r"dot_cost_dict: found a point .*; wanted"):
        taken(Alpa(), tmp_path)


@pytest.mark.parametrize("size", [2**61, 2**62, 2**63 - 1, 2**63, 10**30])
@pytest.mark.parametrize("program", sorted(set(PROGRAMS) - {"sendrecv"}))
def test_a_size_that_no_link_sends_is_a_bad_row(program: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(NCCL.replace("all_gather_perf", f"{program}_perf"))
    expected, _ = taken(NcclTests(), path)
    path.write_text(path.read_text().replace(" 1024 ", f" {size} "))
    found, report = taken(NcclTests(), path)
    assert (len(found), found < expected) == (2, True)
    assert [bad.place.split(" (")[0] for bad in report.bad] == [f"{path}: line 16"]


def test_more_iterations_than_a_column_holds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(NCCL.replace("iters: 20", f"iters: {2**63}"))
    with pytest.raises(InputError, match=r"log.txt: line 2: iters is 9223372036854775808; wanted"):
        taken(NcclTests(), tmp_path)


# What the database rejects


def nccl_lines(sizes: Any, times_us: Any) -> str:
    head = NCCL[: NCCL.index("           0             0")]
    return head + "".join(
        f"{size} {size} float none -1 {time} 0 0 0\n" for size, time in zip(sizes, times_us, strict=True)
    )


def test_rows_that_the_database_rejects_are_bad_rows(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    path = tmp_path / "log.txt"
    for trial in range(20):
        sizes, times = 2 ** random.integers(3, 50, 30), 10 ** random.uniform(-2, 8, 30)
        path.write_text(nccl_lines([1024, *sizes], [30.0, *times]))
        database = ProfileDatabase(tmp_path / str(trial))
        report = import_profile(NcclTests(), path, database, skip_bad=True)
        assert report.num_new + report.num_bad + report.num_known == 31


@pytest.mark.parametrize("place", [0, 17, 39])
def test_nothing_is_written_of_a_file_with_a_bad_row_in_any_piece(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("intake", "nccl_tests"):
        monkeypatch.setattr(f"dejavu.importers.{module}.BATCH_ROWS", 10)
    sizes = 2**20 + 8 * np.arange(40)
    sizes[place] = 2**40
    path, database = tmp_path / "log.txt", ProfileDatabase(tmp_path / "db")
    path.write_text(nccl_lines(sizes, [50.0] * 40))
    with pytest.raises(InputError, match=rf"log.txt: line {place + 13} .*no link is as fast; nothing was imported"):
        import_profile(NcclTests(), path, database)
    assert not database.path.exists()
    report = import_profile(NcclTests(), path, database, skip_bad=True)
    assert (report.num_new, report.num_bad) == (39, 1)


# Alpa's planner problems

CASE: dict[str, Any] = {
    "compute_cost": np.ones((2, 2, 1, 3)),
    "max_n_succ_stages": np.ones((2, 2, 1, 3), dtype=int),
    "submesh_choices": [[1, 2]],
    "num_devices": 2,
}


@pytest.mark.parametrize("name", CASE)
@pytest.mark.parametrize(
    "value", [np.ones((2, 2)), np.ones((2, 3, 1, 3)), np.ones((0, 0, 1, 3)), [[0, 1]], [1, 2, 3], -1, "x", [None], 1j]
)
def test_a_case_of_another_form_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    if name == "max_n_succ_stages" and isinstance(value, int):
        return  # where memory does not bind
    np.savez(path := tmp_path / "case.npz", **{**CASE, name: value})
    with pytest.raises(InputError, match=r"case\.npz"):
        load_case(path, 4)


def test_a_damaged_case_is_refused_or_read(tmp_path: Path) -> None:
    np.savez_compressed(path := tmp_path / "case.npz", **CASE)
    good, random = path.read_bytes(), np.random.default_rng(3)
    contents = [b"", b"hello", b"PK\x03\x04abc", b"\x93NUMPY", *(good[:end] for end in range(0, len(good), 50))]
    for _ in range(300):
        data = bytearray(good)
        for position in random.integers(0, len(data), 3):
            data[position] = random.integers(0, 256)
        contents.append(bytes(data))
    for content in contents:
        path.write_bytes(content)
        try:
            load_case(path, 4)
        except InputError as error:
            assert str(path) in str(error)
    np.save(array := tmp_path / "case.npy", np.ones(3))
    for absent in (array, tmp_path / "absent.npz", tmp_path):
        with pytest.raises(InputError, match=r"no whole \.npz file"):
            load_case(absent, 4)
