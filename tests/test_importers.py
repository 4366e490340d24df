"""Every importer, and each format: from small files in that format, and from the real ones where they are."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import struct
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from dejavu.foundation.errors import InputError
from dejavu.importers import IMPORTERS, DeviceNames, Importer, import_profile, importer_of
from dejavu.importers._base import BATCH_ROWS
from dejavu.importers.alpa import Alpa
from dejavu.importers.alpa.files import pickle_pieces
from dejavu.importers.devices import in_catalogue
from dejavu.importers.metis import Metis
from dejavu.importers.nccl_tests import NcclTests
from dejavu.importers.neusight import NeuSight
from dejavu.importers.restricted_pickle import read_plain
from dejavu.importers.vidur import Vidur
from dejavu.profiles import ProfileDatabase
from dejavu.profiles.collective import Collective
from dejavu.profiles.kernel import Kernel
from dejavu.testing.importers import CASES as EVERY_CASE
from flows import __main__ as command

# Small files in each format


def kernels_frame(num_rows: int = 40) -> pd.DataFrame:
    """NeuSight's columns; softmaxes on two devices at a plausible 200 GB/s."""
    width = 128 * np.arange(1, num_rows + 1)
    return pd.DataFrame(
        {
            "op": "softmax",
            "device": np.where(np.arange(num_rows) % 2, "Tesla T4", "NVIDIA A100 80GB PCIe"),
            "latency_ms": 0.01 + 8 * 16 * width / 200e9 * 1e3,
            "dtype": "fp32",
            "B": 16,
            "H": width,
            "torch": "p2.1.0",
        }
    )


def write_neusight(folder: Path) -> tuple[Path, int]:
    kernels_frame().to_parquet(folder / "kernels.parquet")
    return folder / "kernels.parquet", 40


class MeshProfilingResult:
    """Stands for Alpa's class while a test pickles it."""


def alpa_content(number: Callable[[float], Any] = float) -> dict:
    result = MeshProfilingResult()
    group = ((0, 1, 2, 3),)
    points = [(0, 1.0e-5), (1, 1.1e-5), (64, 9e-5), (128, 1e-4), (256, 2e-4), (1024, 5e-4), (2**20, float("inf"))]
    for operation in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter"):
        costs = defaultdict(list)
        costs[group, "f16"] = [(size, number(seconds)) for size, seconds in points]
        costs[((0,), (1,), (2,), (3,)), "f32"] = [(64, number(1e-5))]
        setattr(result, f"{operation}_cost_dict", costs)
    result.dot_cost_dict = {((), "f16"): [(0, number(1e-5)), (2 * 128**3, number(3e-5))]}
    result.conv_cost_dict, result.op_cost_dict = [], []
    result.available_memory_per_device = 15_000_000_000
    return {("default", (1, 4)): result}


def alpa_pickle(content: Any, protocol: int = 3) -> bytes:
    """As if Alpa had written it: the class has Alpa's name."""
    module = types.ModuleType("alpa.mesh_profiling")
    module.MeshProfilingResult = MeshProfilingResult
    before = MeshProfilingResult.__module__
    sys.modules |= {"alpa": types.ModuleType("alpa"), "alpa.mesh_profiling": module}
    try:
        MeshProfilingResult.__module__ = "alpa.mesh_profiling"
        return pickle.dumps(content, protocol)
    finally:
        MeshProfilingResult.__module__ = before
        del sys.modules["alpa"], sys.modules["alpa.mesh_profiling"]


def write_alpa(folder: Path) -> tuple[Path, int]:
    (folder / "prof_database.pkl").write_bytes(alpa_pickle(alpa_content(np.float64)))
    # Of 7 sizes one failed, (256, 2e-4) is just twice its neighbour, those with fewer elements than ranks do nothing
    # (one of them does something in an all_reduce); and one matrix product.
    return folder / "prof_database.pkl", 4 + 3 * 3 + 1


def vidur_network() -> pd.DataFrame:
    size = 2048 * np.arange(1, 21)
    return pd.DataFrame(
        {
            "median_ms": 0.02 + size / 100e9 * 1e3,
            "num_workers": 4,
            "size": size,
            "collective": "all_reduce",
            "devices_per_node": 2,
            "max_devices_per_node": 8,
            "topology": "a100_dgx",
        }
    )


def write_vidur(folder: Path) -> tuple[Path, int]:
    vidur_network().to_parquet(folder / "network.parquet")
    return folder / "network.parquet", 20


METIS = {
    "model": {
        "model_name": "GPT3",
        "num_layers": 3,
        "parameters": {"total_parameters_bytes": 6, "parameters_per_layer_bytes": [1000, 2000, 3000]},
    },
    "execution_time": {
        "total_time_ms": 45.0,
        "forward_backward_time_ms": 22.5,
        "batch_generator_time_ms": 1.5,
        "optimizer_time_ms": 8.25,
        "layer_compute_total_ms": [1.4, 10.2, 0.34],
    },
    "execution_memory": {"total_memory_mb": 600.0, "layer_memory_total_mb": [100.5, 200.0, 300.0]},
}


def write_metis(folder: Path, content: dict = METIS) -> tuple[Path, int]:
    for degree in (1, 2):
        (folder / f"DeviceType.T4_tp{degree}_bs4.json").write_text(json.dumps(content))
    return folder, 2 * (3 + 3)


NCCL = """\
# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid  10101 on      node1 device  0 [0x07] NVIDIA A100-SXM4-40GB
#  Rank  1 Group  0 Pid  10102 on      node1 device  1 [0x0f] NVIDIA A100-SXM4-40GB
#  Rank  2 Group  0 Pid  20101 on      node2 device  0 [0x07] NVIDIA A100-SXM4-40GB
#  Rank  3 Group  0 Pid  20102 on      node2 device  1 [0x0f] NVIDIA A100-SXM4-40GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float    none      -1    12.10    0.00    0.00      0    12.22    0.00    0.00      0
          64             4     float    none      -1    32.14    0.00    0.00      0    31.52    0.00    0.00      0
         128             8     float    none      -1    32.50    0.00    0.00      0    31.60    0.00    0.00      0
        1024            64     half     none      -1    40.25    0.03    0.02    N/A    31.60    0.03    0.02    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.0125
"""


def write_nccl(folder: Path) -> tuple[Path, int]:
    (folder / "log.txt").write_text(NCCL)
    return folder / "log.txt", 3


@dataclass(frozen=True)
class Sample:
    importer: Importer
    write: Callable[[Path], tuple[Path, int]]


SAMPLES = {
    "neusight": Sample(NeuSight(), write_neusight),
    "alpa": Sample(Alpa(), write_alpa),
    "vidur": Sample(Vidur(), write_vidur),
    "metis": Sample(Metis(), write_metis),
    "nccl-tests": Sample(NcclTests(), write_nccl),
}
every_importer = pytest.mark.parametrize("name", IMPORTERS)


@pytest.fixture
def database(tmp_path: Path) -> ProfileDatabase:
    return ProfileDatabase(tmp_path / "profiles_db")


def rows(database: ProfileDatabase, **filters: Any) -> pd.DataFrame:
    return database.read(**filters).to_pandas()


# The whole family


@every_importer
@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.__name__)
def test_every_importer_does_what_it_says(
    name: str, case: Callable[[Importer, Path, Path], None], tmp_path: Path
) -> None:
    (theirs := tmp_path / "theirs").mkdir()
    path, _ = SAMPLES[name].write(theirs)
    case(SAMPLES[name].importer, path, tmp_path)


@every_importer
def test_every_measurement_of_the_sample_is_taken(name: str, tmp_path: Path, database: ProfileDatabase) -> None:
    path, expected = SAMPLES[name].write(tmp_path)
    assert import_profile(SAMPLES[name].importer, path, database).num_new == len(rows(database)) == expected


OWN_NAMES = {"neusight": "Tesla T4", "alpa": "default", "vidur": "a100_dgx", "metis": "T4"}
OWN_NAMES["nccl-tests"] = "NVIDIA A100-SXM4-40GB"


@every_importer
def test_a_device_that_the_source_does_not_have_is_not_left_out_of_account(
    name: str, tmp_path: Path, database: ProfileDatabase
) -> None:
    """Rows would be of the device that they are taken for without the option, which the user thinks they are not."""
    path, _ = SAMPLES[name].write(tmp_path)
    own = OWN_NAMES[name]
    said = f"--device Nowhere=L4: the source has no device 'Nowhere'; it has .*{own}"
    for devices in (["Nowhere=L4"], ["Nowhere=L4", f"{own}=A40"], ["Nowhere=L4", "A40"]):
        with pytest.raises(InputError, match=said):
            import_profile(replace(SAMPLES[name].importer, devices=DeviceNames.of(devices)), path, database)
        assert not database.path.exists()
    for devices in ([f"{own}=A40"], [f"{own}=A40", "L4"]):
        import_profile(replace(SAMPLES[name].importer, devices=DeviceNames.of(devices)), path, database)
    assert "A40" in set(rows(database)["device_type"])


def test_the_registry_has_a_sample_of_each() -> None:
    assert set(SAMPLES) == set(IMPORTERS)
    for name, class_ in IMPORTERS.items():
        assert class_.name == name


def test_large_files_are_read_in_pieces(tmp_path: Path, database: ProfileDatabase) -> None:
    path = tmp_path / "kernels.parquet"
    kernels_frame(BATCH_ROWS + 10_000).to_parquet(path)
    sizes = [batch.table.num_rows for batch in NeuSight().batches(path)]
    assert sizes == [BATCH_ROWS, 10_000]
    seen: list[tuple[str, int, int | None]] = []
    report = import_profile(NeuSight(), path, database, progress=lambda *step: seen.append(step))
    assert report.num_new == BATCH_ROWS + 10_000
    assert [step for step in seen if step[0] == "reading"] == [
        ("reading", BATCH_ROWS, BATCH_ROWS + 10_000),
        ("reading", BATCH_ROWS + 10_000, BATCH_ROWS + 10_000),
    ]


# Bad rows

WRONG_TIMES = {
    "nan": lambda ms: float("nan"),
    "negative": lambda ms: -ms,
    "zero": lambda ms: 0.0,
    "infinite": lambda ms: float("inf"),
    "1000 times as long": lambda ms: 1000 * ms,
    "1000 times as short": lambda ms: ms / 1000,
}


@pytest.mark.parametrize("wrong", WRONG_TIMES)
@pytest.mark.parametrize("name", ["neusight", "vidur"])
def test_one_wrong_time_refuses_the_file_and_is_named(
    name: str, wrong: str, tmp_path: Path, database: ProfileDatabase
) -> None:
    path, expected = SAMPLES[name].write(tmp_path)
    column = {"neusight": "latency_ms", "vidur": "median_ms"}[name]
    frame = pd.read_parquet(path)
    frame.loc[17, column] = WRONG_TIMES[wrong](frame.loc[17, column])
    frame.to_parquet(path)
    with pytest.raises(InputError, match=r"row 17 .*; wanted .*nothing was imported"):
        import_profile(SAMPLES[name].importer, path, database)
    assert not database.path.exists()
    report = import_profile(SAMPLES[name].importer, path, database, skip_bad=True)
    assert (report.num_new, report.num_bad, report.num_read) == (expected - 1, 1, expected)
    assert "row 17" in str(report.bad[0])
    assert "1 bad rows skipped" in str(report)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("op", "sofmax", "unknown operator 'sofmax'; wanted one of"),
        ("H", 0, "H of 'softmax' is 0; wanted a whole number"),
        ("H", None, "wanted a whole number"),
        ("dtype", "fp16", "dtype is 'fp16'; wanted fp32"),
        ("device", "H10O", "unknown device 'H10O'; did you mean 'H100-SXM5-80GB'"),
    ],
)
def test_a_row_that_is_no_kernel_is_named(
    column: str, value: Any, message: str, tmp_path: Path, database: ProfileDatabase
) -> None:
    frame = kernels_frame().astype({"H": "Int64"})
    frame.loc[3, column] = value
    frame.to_parquet(tmp_path / "kernels.parquet")
    with pytest.raises(InputError, match=f"row 3: .*{message}"):
        import_profile(NeuSight(), tmp_path / "kernels.parquet", database)


def test_all_rows_bad_is_an_error_even_when_bad_rows_are_skipped(tmp_path: Path, database: ProfileDatabase) -> None:
    kernels_frame().assign(latency_ms=-1.0).to_parquet(tmp_path / "kernels.parquet")
    with pytest.raises(InputError, match=r"no measurement.*40 bad rows"):
        import_profile(NeuSight(), tmp_path / "kernels.parquet", database, skip_bad=True)


def test_a_column_of_another_unit_is_told_with_what_was_expected(tmp_path: Path, database: ProfileDatabase) -> None:
    path = tmp_path / "kernels.parquet"
    kernels_frame().rename(columns={"latency_ms": "latency_us"}).to_parquet(path)
    with pytest.raises(InputError, match="expected columns latency_ms; found 'latency_us' instead"):
        import_profile(NeuSight(), path, database)
    vidur_network().rename(columns={"median_ms": "median_us"}).to_parquet(path)
    with pytest.raises(InputError, match="expected columns median_ms; found 'median_us' instead"):
        import_profile(Vidur(), path, database)


def test_truncated_parquet_is_refused(tmp_path: Path, database: ProfileDatabase) -> None:
    path, _ = write_neusight(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="no whole Parquet file"):
        import_profile(NeuSight(), path, database)


# Devices


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ("Tesla V100-PCIE-32GB", "V100-PCIE-32GB"),
        ("Tesla_V100-PCIE-32GB", "V100-PCIE-32GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("nvidia a100-sxm4-40gb", "A100-SXM4-40GB"),
        ("AMD_Instinct_MI100", "MI100"),
        ("L4", "L4"),
        ("A100", None),
    ],
)
def test_devices_go_by_the_names_that_drivers_report(found: str, name: str | None) -> None:
    assert in_catalogue(found) == name


def test_what_the_user_says_of_a_device_comes_first() -> None:
    names = DeviceNames.of(["A100=A100-SXM4-40GB", "T4=NVIDIA L4"])
    assert [names.resolve(found) for found in ("A100", "T4", "Tesla T4")] == ["A100-SXM4-40GB", "L4", "T4"]
    assert DeviceNames.of(["A40"]).resolve("anything") == "A40"
    with pytest.raises(InputError, match=r"did you mean .*A100-SXM4-80GB.*--device 'A100=NAME'"):
        DeviceNames().resolve("A100")
    with pytest.raises(InputError, match="there is another --device"):
        DeviceNames.of(["A40", "T4"])


# Alpa


@pytest.mark.parametrize("form", ["pickle", "parquet"])
@pytest.mark.parametrize("names", [("a", "b"), ("z", "default", "m")], ids=str)
def test_clusters_of_one_file_of_alpa_are_imported_one_at_a_time(
    names: tuple[str, ...], form: str, tmp_path: Path
) -> None:
    """The chosen one's rows are those of a file of its own; without a choice nothing is imported."""

    def write(name: str, kept: tuple[str, ...]) -> Path:
        contents: dict[Any, Any] = {}
        for factor, cluster in enumerate(names, 1):
            one = alpa_content(lambda seconds, factor=factor: seconds * factor)
            contents |= {(cluster, mesh): value for (_, mesh), value in one.items() if cluster in kept}
        path = tmp_path / f"{name}.{'pkl' if form == 'pickle' else 'parquet'}"
        path.write_bytes(alpa_pickle(contents))
        if form == "parquet":
            frame = pd.concat([piece for _, piece in pickle_pieces(path)], ignore_index=True)
            frame.sample(frac=1.0, random_state=len(names)).to_parquet(path)
        return path

    def imported(importer: Alpa, path: Path, name: str) -> list[tuple[Any, ...]]:
        database = ProfileDatabase(tmp_path / name)
        import_profile(importer, path, database)
        columns = ["kind", "name", "subject", "dtype", "size_bytes", "seconds"]
        return sorted(map(tuple, rows(database)[columns].fillna(0).to_numpy().tolist()), key=str)

    whole = write("whole", names)
    with pytest.raises(InputError, match=f"has the clusters {', '.join(map(repr, sorted(names)))}; name one with"):
        import_profile(Alpa(), whole, ProfileDatabase(tmp_path / "none"))
    with pytest.raises(InputError, match="has no cluster 'q'; it has the clusters"):
        import_profile(Alpa(cluster="q"), whole, ProfileDatabase(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    for name in names:
        own = write("own", (name,))
        assert imported(Alpa(cluster=name), whole, f"whole-{name}") == imported(Alpa(), own, f"own-{name}")


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("number", [float, np.float64, np.float32])
def test_alpas_pickle_is_read_in_every_protocol_that_has_bytes(
    protocol: int, number: Callable, tmp_path: Path, database: ProfileDatabase
) -> None:
    path = tmp_path / "prof_database.pkl"
    path.write_bytes(alpa_pickle(alpa_content(number), protocol))
    report = import_profile(Alpa(), path, database)
    assert report.num_new == 14
    assert report.skipped == {
        "nothing to do or send": 12,
        "failed in Alpa": 4,
        "not measured: Alpa raised it from the next smaller size": 4,
    }
    gathered = rows(database, name="all_gather").set_index("size_bytes")["seconds"]
    # 2 bytes for each element of the full tensor; 512 bytes took just twice as long as 256.
    assert gathered.to_dict() == pytest.approx({128: 9e-5, 256: 1e-4, 2048: 5e-4})
    product = Kernel.from_json(rows(database, kind="operator")["extra"][0])
    assert (product.m, product.n, product.k, product.dtype) == (128, 128, 128, "float16")


class Payload:
    """Leaves a file if any of its code runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (exec, (f"open({str(self.path)!r}, 'w')",))


class Stateful:
    def __setstate__(self, state: Any) -> None:
        raise AssertionError("state was set")


def hostile(trace: Path) -> dict[str, tuple[bytes, str]]:
    """Pickles that try something, and what the refusal says."""
    code = f"open({str(trace)!r}, 'w')".encode()
    argument = b"X" + struct.pack("<I", len(code)) + code
    record = b"calpa.mesh_profiling\nMeshProfilingResult\n"
    return {
        "reduce": (pickle.dumps(Payload(trace), 3), r"byte 2: it names 'builtins.exec'"),
        "reduce, protocol 0": (pickle.dumps(Payload(trace), 0), "it names '__builtin__.exec'"),
        "reduce, protocol 5": (pickle.dumps(Payload(trace), 5), r"it names 'builtins.exec'"),
        "inside a good dict": (alpa_pickle({("default", (1, 1)): Payload(trace)}), "builtins.exec"),
        "inside a good record": (
            alpa_pickle({("default", (1, 1)): types_record(all_gather_cost_dict=Payload(trace))}),
            "builtins.exec",
        ),
        "stack global": (b"\x80\x04\x8c\x02os\x8c\x06system\x93" + argument + b"\x85R.", "it names 'os.system'"),
        "inst": (b"(" + argument + b"i__builtin__\nexec\n.", "opcode INST"),
        "obj": (b"(c__builtin__\nexec\n" + argument + b"o.", "it names '__builtin__.exec'"),
        "obj of a good class": (b"(" + record + argument + b"o.", "opcode OBJ"),
        "newobj with arguments": (b"\x80\x02" + record + argument + b"\x85\x81.", "an object of alpa.mesh"),
        "newobj of a harmless name": (b"\x80\x02cnumpy\ndtype\n)\x81.", "an object of numpy.dtype"),
        "newobj_ex": (b"\x80\x04" + record + b")}\x92.", "opcode NEWOBJ_EX"),
        "call of the record": (b"\x80\x02" + record + argument + b"\x85R.", "it calls alpa.mesh_profiling"),
        "call of a list": (b"\x80\x02cbuiltins\nlist\n" + argument + b"\x85R.", "it calls builtins.list"),
        "defaultdict of something else": (
            b"\x80\x02ccollections\ndefaultdict\ncnumpy\ndtype\n\x85R.",
            r"it calls collections.defaultdict with \(numpy.dtype\)",
        ),
        "object dtype": (b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00O8\x85R.", "it calls numpy.dtype"),
        "setstate": (pickle.dumps(Stateful(), 2), "test_importers"),
        "build of a dict": (b"\x80\x02}}b.", "it sets the state of dict"),
        "build with slots": (b"\x80\x02" + record + b")\x81N}\x86b.", "the state of"),
        "build of __class__": (
            b"\x80\x02" + record + b")\x81}X\x09\x00\x00\x00__class__" + record + b"sb.",
            "wanted a dict of meshes|attributes",
        ),
        "extension code": (b"\x80\x02\x82\x01.", "opcode EXT1"),
        "persistent id": (b"Pnothing\n.", "opcode PERSID"),
        "binary persistent id": (b"\x80\x02K\x01Q.", "opcode BINPERSID"),
        "dotted name": (b"\x80\x04\x8c\x0bcollections\x8c\x16defaultdict.__reduce__\x93.", "it names 'collections.def"),
        "a pickle after the pickle": (b"\x80\x02}." + pickle.dumps(Payload(trace), 2), "more data after"),
        "a text of 2 GB that is not there": (b"\x80\x02T\xff\xff\xff\x7fabc.", "broken"),
        "bytes of 2^60": (b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"abc.", "broken"),
        "memo of 2^31": (b"\x80\x02K\x01r\xff\xff\xff\x7f.", "wanted a dict of meshes"),
        "memo that was never set": (b"\x80\x02j\xff\xff\xff\x7f.", "nothing was remembered as 2147483647"),
        "deep lists": (b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", "wanted a dict of meshes"),
        "deep key": (b"\x80\x02})" + b"\x85" * 100_000 + b"K\x01s.", "a key of more than"),
        "wide key": (b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.", "a key of more than"),
        "list as a key": (b"\x80\x02}]K\x01s.", "a key is list"),
        "a list in itself": (b"\x80\x02]q\x00h\x00a.", "wanted a dict of meshes"),
        "marks only": (b"\x80\x02((((.", "values are left"),
        "no stop": (b"\x80\x02}", "broken"),
        "no pickle": (b"\x00\x01\x02", "broken"),
        "a number as mesh": (pickle.dumps({("default", (1, 1)): 3}), "wanted a alpa.mesh_profiling"),
    }


def types_record(**attributes: Any) -> MeshProfilingResult:
    record = MeshProfilingResult()
    vars(record).update(attributes)
    return record


@pytest.mark.parametrize("attack", hostile(Path("trace")))
def test_a_hostile_pickle_is_refused_and_leaves_no_trace(
    attack: str, tmp_path: Path, database: ProfileDatabase, capfd: pytest.CaptureFixture
) -> None:
    trace = tmp_path / "trace"
    data, message = hostile(trace)[attack]
    path = tmp_path / "prof_database.pkl"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        import_profile(Alpa(), path, database)
    assert not trace.exists()
    assert not database.path.exists()


def test_the_payload_of_these_tests_would_leave_a_trace(tmp_path: Path) -> None:
    data, _ = hostile(tmp_path / "trace")["reduce"]
    pickle.loads(data)
    assert (tmp_path / "trace").exists()


def test_random_damage_is_refused_or_read_but_never_anything_else() -> None:
    good = bytearray(alpa_pickle(alpa_content(np.float64)))
    random = np.random.default_rng(0)
    for _ in range(400):
        data = bytearray(good)
        for position in random.integers(0, len(data), 3):
            data[position] = random.integers(0, 256)
        try:
            read_plain(bytes(data), "alpa.mesh_profiling.MeshProfilingResult", "damaged")
        except InputError:
            continue


@every_importer
@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_damaged_file_is_imported_or_refused_but_never_a_fault_of_ours(
    name: str, skip_bad: bool, tmp_path: Path
) -> None:
    """Bytes of a few places are others, missing or doubled: also in what pandas noted, and inside a text."""
    random = np.random.default_rng([len(name), skip_bad])
    for number in range(60):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, _ = SAMPLES[name].write(folder)
        file = next(one for one in sorted(folder.rglob("*")) if one.is_file())
        data = bytearray(file.read_bytes())
        for position in random.integers(0, len(data) - 20, random.integers(1, 4)):
            match random.integers(0, 4):
                case 0:
                    del data[position : position + random.integers(1, 9)]
                case 1:
                    data[position:position] = data[position : position + random.integers(1, 20)]
                case _:
                    data[position] = random.integers(0, 256)
        file.write_bytes(data)
        with contextlib.suppress(InputError):
            import_profile(SAMPLES[name].importer, path, ProfileDatabase(folder / "db"), skip_bad=skip_bad)
        assert {one.remedy for one in ProfileDatabase(folder / "db").check()} == set()


def test_pickle_and_parquet_of_the_real_profile_are_the_same_rows(shared_data: Path, database: ProfileDatabase) -> None:
    first = import_profile(Alpa(), shared_data / "alpa" / "prof_database.parquet", database)
    assert first.num_read == 8828
    assert first.skipped["failed in Alpa"] == 65
    second = import_profile(Alpa(), shared_data / "alpa" / "prof_database.pkl", database)
    assert (second.num_new, second.num_known, second.skipped) == (0, first.num_new + first.num_known, first.skipped)
    assert set(rows(database)["device_type"]) == {"V100-SXM2-16GB"}


# NeuSight and vidur


def test_real_kernels_in_a_slice(shared_data: Path, tmp_path: Path, database: ProfileDatabase) -> None:
    frame = pd.read_parquet(shared_data / "neusight" / "kernels.parquet").iloc[::60]
    frame.to_parquet(tmp_path / "kernels.parquet")
    report = import_profile(NeuSight(), tmp_path, database)  # a folder that has it
    assert report.num_new + report.num_known == len(frame)
    found = rows(database)
    assert set(found["torch_version"]) == {"2.1.0", "2.4.1"}
    assert found["seconds"].sum() == pytest.approx(frame["latency_ms"].astype(float).sum() / 1e3, rel=1e-6)


def test_whole_models_are_refused_with_the_reason(shared_data: Path, database: ProfileDatabase) -> None:
    with pytest.raises(InputError, match="holds whole models"):
        import_profile(NeuSight(), shared_data / "neusight" / "models.parquet", database)


def test_vidurs_collectives_count_ranks_node_by_node(tmp_path: Path, database: ProfileDatabase) -> None:
    path, _ = write_vidur(tmp_path)
    import_profile(Vidur(), path, database)
    row = rows(database).iloc[0]
    collective = Collective.from_json(row["name"], row["extra"])
    assert (collective.mesh_nodes, collective.devices_per_node, collective.crosses_nodes) == (2, 2, True)
    assert (row["device_type"], row["dtype"], row["num_ranks"]) == ("A100-SXM4-80GB", "float16", 4)


def vidur_lines() -> pd.DataFrame:
    """Two lines of an mlp.csv of Llama-2-70b at 2 devices: a median for each operator, in ms."""
    operators = ("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "mlp_up_proj", "mlp_act")
    times = {f"time_stats.{name}.median": [0.1, 1.0] for name in (*operators, "mlp_down_proj", "add")}
    others = {f"time_stats.{name}.min": [0.1, 0.9] for name in operators}
    return pd.DataFrame(
        {
            **times,
            **others,
            "n_head": 64,
            "n_kv_head": 8,
            "n_embd": 8192,
            "n_expanded_embd": 28672,
            "vocab_size": 32768,
            "use_gated_mlp": True,
            "num_tokens": [64, 1024],
            "num_tensor_parallel_workers": 2,
        }
    )


def test_vidurs_own_csv_and_the_parquet_form_agree_on_shapes(
    shared_data: Path, tmp_path: Path, database: ProfileDatabase
) -> None:
    folder = tmp_path / "compute" / "a100" / "meta-llama" / "Llama-2-70b-hf"
    folder.mkdir(parents=True)
    vidur_lines().to_csv(folder / "mlp.csv", index=False)
    report = import_profile(Vidur(), tmp_path / "compute", database)
    assert (report.num_new, report.skipped.total()) == (14, 4)
    frame = pd.read_parquet(shared_data / "vidur" / "compute_a100_a40.parquet")
    part = frame[(frame.model == "Llama-2-70b-hf") & (frame.tp == 2) & (frame.M.isin([64, 1024]))]
    part.to_parquet(tmp_path / "part.parquet")
    other = ProfileDatabase(tmp_path / "other")
    import_profile(Vidur(), tmp_path / "part.parquet", other)
    assert set(rows(database)["subject"]) <= set(rows(other)["subject"])


def test_a_zero_that_vidur_left_for_a_missing_time_is_named(tmp_path: Path, database: ProfileDatabase) -> None:
    lines = vidur_lines()
    lines.loc[1, "time_stats.attn_post_proj.median"] = 0.0
    (tmp_path / "a100").mkdir()
    lines.to_csv(tmp_path / "a100" / "mlp.csv", index=False)
    with pytest.raises(InputError, match=r"row 1 \(operator 'matmul mm' on A100-SXM4-80GB\): the median in ms is 0"):
        import_profile(Vidur(), tmp_path / "a100" / "mlp.csv", database)


# Metis


def test_metis_layers_have_time_memory_and_degree(tmp_path: Path, database: ProfileDatabase) -> None:
    write_metis(tmp_path)
    import_profile(Metis(dtype="bfloat16"), tmp_path, database)
    layers = rows(database, kind="layer", tensor_parallel=2).sort_values("name")
    assert layers["seconds"].tolist() == pytest.approx([1.4e-3, 10.2e-3, 0.34e-3])
    assert layers["peak_bytes"].tolist() == [100.5 * 2**20, 200 * 2**20, 300 * 2**20]
    assert set(layers["direction"]) == {"both"}
    assert (set(layers["microbatch_size"]), set(layers["dtype"])) == ({4}, {"bfloat16"})
    assert json.loads(layers["extra"].iloc[1])["parameter_bytes"] == 2000
    assert set(layers["subject"]) == set(rows(database, kind="layer", tensor_parallel=1)["subject"])
    optimizer = rows(database, direction="optimizer", tensor_parallel=1)
    assert optimizer["seconds"].tolist() == pytest.approx([8.25e-3])
    assert rows(database, kind="step")["seconds"].tolist() == pytest.approx([45e-3, 45e-3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"execution_time": {"layer_compute_total_us": [1.0]}}, "expected execution_time.layer_compute_total_ms"),
        *(
            (
                {"execution_time": {"layer_compute_total_ms": found}},
                f"a list of numbers; found {re.escape(repr(found))}$",
            )
            for found in ([], {}, None, 3.5, "1.0")
        ),
        ({"execution_time": {"layer_compute_total_ms": [1.0, "x"]}}, r"layer_compute_total_ms\[1\] is 'x'"),
        ({"execution_time": {"layer_compute_total_ms": [1.0, float("nan"), 2.0]}}, "layer 1 .* is nan"),
        ({"execution_time": {"layer_compute_total_ms": [1.0, -3.0, 2.0]}}, "layer 1 .* is -3"),
        ({"execution_time": {"layer_compute_total_ms": [1.0, 1.5, 2000.0, 1.0]}}, "layer 2 .* is 2000"),
        ({"execution_memory": {"layer_memory_total_mb": [1.0]}}, "has 1 numbers; wanted one for each of 3"),
        ({"execution_time": None}, "expected execution_time, an object"),
    ],
)
def test_metis_faults_are_named(change: dict, message: str, tmp_path: Path, database: ProfileDatabase) -> None:
    content = {**METIS, **change}
    if "execution_time" in change:
        content["execution_memory"], content["model"] = {}, {}
    write_metis(tmp_path, content)
    with pytest.raises(InputError, match=message):
        import_profile(Metis(), tmp_path, database)


def test_metis_device_must_be_known_or_said(tmp_path: Path, database: ProfileDatabase) -> None:
    path = tmp_path / "DeviceType.A100_tp1_bs1.json"
    path.write_text(json.dumps(METIS))
    with pytest.raises(InputError, match=r"unknown device 'A100'; did you mean .*--device 'A100=NAME'"):
        import_profile(Metis(), path, database)
    import_profile(Metis(devices=DeviceNames.of(["A100=A100-SXM4-40GB"])), path, database)
    assert set(rows(database)["device_type"]) == {"A100-SXM4-40GB"}


# nccl-tests


def test_nccl_table_gives_out_of_place_seconds_over_the_listed_ranks(tmp_path: Path, database: ProfileDatabase) -> None:
    path, _ = write_nccl(tmp_path)
    report = import_profile(NcclTests(), path, database)
    assert report.skipped == {"nothing to send": 1}
    found = rows(database).sort_values("size_bytes")
    assert found["seconds"].tolist() == pytest.approx([32.14e-6, 32.5e-6, 40.25e-6])
    assert found["size_bytes"].tolist() == [64, 128, 1024]
    assert found["dtype"].tolist() == ["float32", "float32", "float16"]
    assert set(found["repeats"]) == {20}
    collective = Collective.from_json("all_gather", found["extra"].iloc[0])
    assert collective == Collective(name="all_gather", replica_groups=((0, 1, 2, 3),), mesh_nodes=2, devices_per_node=2)


def test_all_to_all_counts_the_whole_tensor(tmp_path: Path, database: ProfileDatabase) -> None:
    path = tmp_path / "log.txt"
    path.write_text(NCCL.replace("all_gather_perf", "alltoall_perf"))
    import_profile(NcclTests(), path, database)
    assert sorted(rows(database)["size_bytes"]) == [256, 512, 4096]


def test_an_old_table_without_ranks_takes_options(tmp_path: Path, database: ProfileDatabase) -> None:
    lines = [line for line in NCCL.splitlines() if "Rank" not in line and "starting" not in line]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines).replace(" redop    root", " redop").replace("none      -1", "none"))
    with pytest.raises(InputError, match="say which with --device"):
        import_profile(NcclTests(), path, database)
    device = DeviceNames.of(["V100-SXM2-32GB"])
    with pytest.raises(InputError, match="say how many with --num-ranks"):
        import_profile(NcclTests(devices=device), path, database)
    with pytest.raises(InputError, match="say which with --collective"):
        import_profile(NcclTests(devices=device, num_ranks=8), path, database)
    import_profile(NcclTests(devices=device, num_ranks=8, num_nodes=2, collective="all_reduce"), path, database)
    found = rows(database)
    assert (set(found["name"]), set(found["num_ranks"]), len(found)) == ({"all_reduce"}, {8}, 3)
    path.rename(tmp_path / "reduce_scatter_perf.txt")
    report = import_profile(NcclTests(devices=device, num_ranks=8), tmp_path / "reduce_scatter_perf.txt", database)
    assert report.num_new == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("all_gather_perf", "broadcast_perf", "is of broadcast_perf, which no plan needs"),
        ("all_gather_perf", "sendrecv_perf", "send_recv among 4 ranks; wanted 2"),
        ("    32.50 ", "   -32.50 ", r"line 15 .*time \(us\) is -32.5"),
        ("    32.50 ", " 32500000.0 ", r"line 15 .* what its neighbours allow"),
        ("    32.50 ", "   banana ", "line 15: .* is no row of the table"),
        ("   0.00      0    31.60", "   0.00      7    31.60", "line 15: #wrong is 7"),
        ("node2 device  1", "node1 device  2", "wanted equally many on each node"),
        ("Rank  3 Group  0 Pid  20102 on      node2 device  1 [0x0f] NVIDIA A100-SXM4-40GB", "x", "equally many"),
        ("#       size", "#       sice", "expected a head with the columns"),
    ],
)
def test_nccl_faults_are_named(old: str, new: str, message: str, tmp_path: Path, database: ProfileDatabase) -> None:
    assert old in NCCL
    path = tmp_path / "log.txt"
    path.write_text(NCCL.replace(old, new))
    with pytest.raises(InputError, match=message):
        import_profile(NcclTests(), path, database)


def test_two_tests_in_one_file_are_refused(tmp_path: Path, database: ProfileDatabase) -> None:
    path = tmp_path / "log.txt"
    path.write_text(NCCL + NCCL.replace("all_gather", "all_reduce"))
    with pytest.raises(InputError, match="line 19 begins a second test"):
        import_profile(NcclTests(), path, database)


# The command


def test_the_command_imports_and_says_what_became_of_the_rows(tmp_path: Path) -> None:
    path, _ = write_alpa(tmp_path)
    arguments = ["import", "alpa", str(path), "--database", str(tmp_path / "db"), "--device", "V100-SXM2-32GB"]
    first = CliRunner().invoke(command.app, arguments)
    assert first.exit_code == 0, first.output
    assert "34 rows read: 14 new, 0 already known, 4 skipped (failed in Alpa)" in first.output
    assert "34 rows read: 0 new, 14 already known" in CliRunner().invoke(command.app, arguments).output
    assert set(rows(ProfileDatabase(tmp_path / "db"))["device_type"]) == {"V100-SXM2-32GB"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["alpha", "x"], "unknown format 'alpha'; did you mean 'alpa'"),
        (["alpa", "x", "--num-ranks", "4"], "--num-ranks is not for alpa; it is for nccl-tests"),
        (["alpa", "x", "--device", "H10O"], "unknown device 'H10O'; did you mean 'H100-SXM5-80GB'?"),
        (
            ["alpa", "x", "--device", "abacus"],
            "unknown device 'abacus'; wanted one of dejavu/devices.csv, or a new row there",
        ),
        (["alpa", "hostile.pkl"], "it names 'builtins.exec'"),
    ],
)
def test_the_command_ends_with_2_on_bad_input(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.pkl").write_bytes(pickle.dumps(Payload(tmp_path / "trace")))
    monkeypatch.setattr(sys, "argv", ["dejavu", "import", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as exit_:
        command.main()
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "trace").exists()


def test_bad_rows_that_are_skipped_are_listed(tmp_path: Path) -> None:
    frame = kernels_frame()
    frame.loc[5, "latency_ms"] = -1.0
    frame.to_parquet(tmp_path / "kernels.parquet")
    arguments = ["import", "neusight", str(tmp_path / "kernels.parquet"), "--database", str(tmp_path / "db")]
    output = CliRunner().invoke(command.app, [*arguments, "--skip-bad"]).output
    assert "skipped" in output
    assert "row 5" in output
    assert "39 new" in output


def test_options_make_the_importer() -> None:
    importer = importer_of("metis", DeviceNames(), {"dtype": "float16", "model": None, "collective": None})
    assert importer == Metis(dtype="float16")


def test_nothing_reads_a_pickle_by_pickle() -> None:
    folder = Path(__file__).resolve().parents[1] / "dejavu"
    for path in folder.rglob("*.py"):
        assert "pickle.load" not in path.read_text(), path
