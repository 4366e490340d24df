"""The kernel predictor on devices whose law is known, and on a sample of published measurements where they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor

from benchmarks.cost import fp16
from benchmarks.cost.device_table import device_of, device_types
from dejavu.cluster import DeviceType, catalogue
from dejavu.cluster.records import Kind
from dejavu.cost import CostError
from dejavu.cost.kernels import learned as learning
from dejavu.cost.kernels.features import FEATURES, KernelWork, bounds
from dejavu.cost.kernels.learned import SHIPPED, Learned, Prediction, drawn_order, shipped
from dejavu.cost.kernels.power import (
    ISSUED_SHARE,
    has_wide_multiprocessors,
    matrix_units_share,
    sustained_fraction,
)
from dejavu.cost.kernels.trees import Trees
from dejavu.foundation.errors import InputError
from dejavu.importers.neusight.kernels import NeuSightError, bmm, kernel_of_operation, kernels_of, linear, row_wise
from dejavu.profiles.kernel import Kernel
from tests.conftest import some

NEUSIGHT = Path(__file__).resolve().parents[2] / "shared" / "data" / "neusight"
needs_data = pytest.mark.skipif(not NEUSIGHT.exists(), reason="no shared data")
LAUNCH = 8e-6
SPREAD = 0.06  # of the synthetic law, as a standard deviation of the logarithm


def device(name: str, teraflops: float, gigabytes: float, multiprocessors: int) -> DeviceType:
    return DeviceType(
        name=name,
        kind="cuda",
        peak_flops_per_second={"float32": teraflops * 1e12, "float16": 8e12 * teraflops},
        memory_bytes=2**34,
        memory_bytes_per_second=gigabytes * 1e9,
        num_multiprocessors=multiprocessors,
        cache_bytes=2**22,
        source="test",
    )


SEEN = [device("a", 8, 700, 50), device("b", 14, 900, 80), device("c", 9, 320, 40), device("d", 20, 1500, 100)]
UNSEEN = device("unseen", 30, 2000, 120)


def sample(count: int, seed: int) -> list[Kernel]:
    random = np.random.default_rng(seed)
    sizes = np.exp2(random.uniform(3, 12, size=(count, 3))).astype(int).tolist()
    products = [linear(m, k, n) for m, k, n in sizes[: count // 3]]
    rows = [row_wise("add", m * 8, n) for m, n, _ in sizes[count // 3 : 2 * count // 3]]
    return products + rows + [row_wise("softmax", m, n) for m, n, _ in sizes[2 * count // 3 :]]


def law(kernels: list[Kernel], on: DeviceType, seed: int) -> np.ndarray:
    """Products reach 0.8 of what tiles allow, the rest 0.75 of the memory's peak; a launch is added."""
    random = np.random.default_rng(seed)
    seconds = []
    for kernel in kernels:
        found = bounds(kernel.family, KernelWork.of([kernel]), on, "float32")
        assert found is not None
        work = found.expected_K[0] / 0.8 if kernel.family == "matmul" else found.memory_K[0] / 0.75
        seconds.append(LAUNCH + work)
    return np.array(seconds) * np.exp(random.normal(0, SPREAD, len(kernels)))


@pytest.fixture(scope="module")
def learned() -> Learned:
    kernels, devices, seconds = [], [], []
    for seed, on in enumerate(SEEN):
        drawn = sample(600, seed)
        kernels += drawn
        devices += [on] * len(drawn)
        seconds.append(law(drawn, on, seed))
    return Learned.fit(kernels, devices, np.concatenate(seconds), source="a known law")


def test_finds_the_law_on_an_unseen_device(learned: Learned) -> None:
    kernels = sample(1500, 99)
    predicted = learned.predict(kernels, UNSEEN).seconds_K
    errors = np.abs(predicted / law(kernels, UNSEEN, 99) - 1)
    assert np.median(errors) < 0.1
    assert errors.mean() < 0.15


def test_intervals_cover_what_they_say(learned: Learned) -> None:
    kernels = sample(1500, 98)
    prediction, truth = learned.predict(kernels, UNSEEN), law(kernels, UNSEEN, 98)
    assert np.all(prediction.low_seconds_K <= prediction.seconds_K)
    assert np.all(prediction.seconds_K <= prediction.high_seconds_K)
    inside = (prediction.low_seconds_K <= truth) & (truth <= prediction.high_seconds_K)
    assert 0.85 <= inside.mean() <= 1.0


class Nothing:
    """A function that has learned nothing: what is measured is its error."""

    def predict(self, features: np.ndarray) -> np.ndarray:
        return np.zeros(len(features))


@pytest.mark.parametrize("shared", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("count", [3, 5, 8])
def test_limits_hold_for_the_next_device_of_the_same_kind(
    monkeypatch: pytest.MonkeyPatch, shared: float, count: int
) -> None:
    """Devices whose kernels share an error: nine in ten of the next one's lie inside, over many such devices."""
    monkeypatch.setattr(learning, "_function", lambda name, tables, seed: Nothing())
    random, covered = np.random.default_rng(0), []
    for _ in range(60):
        means = shared * random.normal(size=count + 1)
        errors = [mean + 0.2 * random.normal(size=200) for mean in means]
        features = np.zeros((200, len(FEATURES["matmul"])))
        tables = [
            learning._Table("matmul", str(k), "cuda", features, errors[k], features, errors[k]) for k in range(count)
        ]
        model = learning._fitted("matmul", tables, 0, True)
        bin_0 = np.digitize(0.0, learning.SIZE_BIN_EDGES)
        covered.append(np.mean((model.low_B[bin_0] <= errors[-1]) & (errors[-1] <= model.high_B[bin_0])))
        assert 0 <= model.shared_log <= -model.low_B[bin_0]
    assert 0.85 <= np.mean(covered) <= 0.99


def test_each_kind_of_devices_is_learned_from_its_own() -> None:
    """Where it has no measurements, from the other; with too few devices it has the ranges of the kind with most."""
    theirs = dataclasses.replace(device("x", 12, 1000, 100), kind="rocm", cache_bytes=None)
    unseen = dataclasses.replace(UNSEEN, kind="rocm")
    kernels, devices, seconds = [], [], []
    for seed, on in enumerate(SEEN[:3]):
        drawn = sample(300, seed)
        kernels += drawn
        devices += [on] * len(drawn)
        seconds.append(law(drawn, on, seed))
    own = [one for one in sample(600, 9) if one.family != "softmax"]
    slower = 3.0 * law(own, theirs, 9)
    both = Learned.fit([*kernels, *own], [*devices, *[theirs] * len(own)], np.concatenate([*seconds, slower]))
    asked = [one for one in sample(300, 11) if one.flops > 1e9 and one.family == "matmul"]
    for predicted, factor in ((both.predict(asked, UNSEEN), 1.0), (both.predict(asked, unseen), 3.0)):
        truth = factor * law(asked, UNSEEN if factor == 1.0 else unseen, 12)
        assert abs(np.median(np.log(predicted.seconds_K / truth))) < 0.4, "log 3 is 1.1"
    softmax = [one for one in sample(300, 13) if one.family == "softmax"]
    assert both.predict(softmax, unseen).known_K.all()
    wider = np.sqrt((1 + 1 / 1) / (1 + 1 / 2))  # of one device, beside three of which each was left out
    assert both.models["rocm", "matmul"].shared_log == pytest.approx(wider * both.models["cuda", "matmul"].shared_log)
    assert both.models["rocm", "matmul"].devices == ("x",)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *(("h100", "H100-SXM5-80GB"), ("H100", "H100-SXM5-80GB"), ("H100-SXM", "H100-SXM5-80GB")),
        *(("GH200", "GH200-96GB"), ("NVIDIA H100 PCIe", "H100-PCIE-80GB"), ("h200", "H200-SXM-141GB")),
        *(("v100", "V100-SXM2-16GB"), ("H100-80GB", "H100-SXM5-80GB"), ("A100 80GB", "A100-SXM4-80GB")),
        *(("a100", "A100-SXM4-80GB"), ("A40", "A40"), ("Tesla T4", "T4"), ("L40S", "L40S")),
    ],
)
def test_devices_are_known_by_names_that_mean_one(name: str, wanted: str) -> None:
    assert fp16.device_name(name, Path("file")) == wanted


@pytest.mark.parametrize("name", ["h800", "H100-NVL", "rtx", "mi", "a41", "", "nvidia"])
def test_devices_that_nobody_knows_are_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=f"unknown device '{name}'"):
        fp16.device_name(name, Path("file"))


def test_a_row_that_lacks_a_figure_is_a_fault_where_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_text("Device,Mem_Bw,SingleFLOPs,Num_Sm\nTesla T4,320,8141,40\nMy GPU,,9000,50\n")
    table = device_types(path)
    assert device_of("Tesla_T4", table, path).name == "T4"
    assert device_of("GH200", table, path) == catalogue()["GH200-96GB"], "not in the file, but in the catalogue"
    with pytest.raises(InputError, match="'My GPU' lacks its float32 peak or its memory bandwidth"):
        device_of("My_GPU", table, path)
    with pytest.raises(InputError, match="no row for 'other', nor has"):
        device_of("other", table, path)
    path.write_text("Device,Num_Sm\nTesla T4,40\n")
    with pytest.raises(InputError, match="lacks its float32 peak or its memory bandwidth"):
        device_of("T4", device_types(path), path)


@pytest.mark.parametrize("most_rows", [learning.MOST_ROWS, 80])
@pytest.mark.parametrize("seed", some(range(3), [0]))
def test_rows_in_any_order_teach_the_same(monkeypatch: pytest.MonkeyPatch, most_rows: int, seed: int) -> None:
    """Where all rows of a device are learned from, and where they are too many."""
    monkeypatch.setattr(learning, "MOST_ROWS", most_rows)
    monkeypatch.setitem(learning.BOOSTING, "max_iter", 20)
    drawn, rows = sample(360, seed), []
    for on in SEEN:
        rows += [(kernel, on, seconds) for kernel, seconds in zip(drawn, law(drawn, on, seed).tolist(), strict=True)]
    asked = sample(300, 99)
    wanted, again = (
        Learned.fit(*zip(*[rows[row] for row in order], strict=True))
        for order in (range(len(rows)), np.random.default_rng(seed).permutation(len(rows)))
    )
    for field in dataclasses.fields(Prediction):
        one, other = (getattr(learned.predict(asked, UNSEEN), field.name) for learned in (wanted, again))
        np.testing.assert_array_equal(one, other, err_msg=field.name)


@pytest.mark.parametrize("seed", range(3))
def test_the_first_rows_are_the_same_kernels_of_each_device(seed: int) -> None:
    random, kernels = np.random.default_rng(seed), sample(200, seed)
    first = []
    for _ in range(2):
        seconds, order = random.uniform(1e-5, 1e-3, len(kernels)), random.permutation(len(kernels))
        shuffled = [kernels[row] for row in order]
        first.append([shuffled[row] for row in drawn_order(shuffled, seconds)[:50]])
    assert first[0] == first[1]


def of_both(seed: int, one: Learned, other: Learned, key: tuple[Kind, str]) -> tuple[np.ndarray, np.ndarray]:
    """Features far to both sides of what was learned from, and the mean of what two predictors say of them."""
    features_KF = np.random.default_rng(seed).normal(0, 6, size=(400, len(FEATURES[key[1]])))
    return features_KF, np.mean([each.models[key].function.predict(features_KF) for each in (one, other)], axis=0)


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_two_predictors_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int) -> None:
    """With as many knots and nodes as both need; saved and loaded, too."""
    monkeypatch.setitem(learning.BOOSTING, "max_iter", 20)
    one, other = (
        Learned.fit(drawn, [on] * len(drawn), law(drawn, on, seed))
        for drawn, on in ((sample(300, seed), SEEN[seed]), (sample(1500, seed + 1), SEEN[seed + 1]))
    )
    one.averaged(other).save(tmp_path / "both.npz")
    both = Learned.load(tmp_path / "both.npz")
    assert both.launch_seconds == (one.launch_seconds + other.launch_seconds) / 2
    assert set(both.models) == {("cuda", name) for name in ("matmul", "elementwise", "softmax")}
    for key, model in both.models.items():
        features_KF, wanted_K = of_both(seed, one, other, key)
        np.testing.assert_allclose(model.function.predict(features_KF), wanted_K, rtol=1e-9, atol=1e-9)
        assert model.devices == one.models[key].devices


@pytest.mark.parametrize("seed", some(range(2), [0]))
@pytest.mark.parametrize("most_rows", some([60, 130, 300], [130]))
def test_of_many_rows_the_first_and_the_last_are_learned_from(
    monkeypatch: pytest.MonkeyPatch, most_rows: int, seed: int
) -> None:
    """Of 200 of each model and device: apart, with some in both, and all of them once."""
    monkeypatch.setattr(learning, "MOST_ROWS", most_rows)
    monkeypatch.setattr(learning, "_launch_seconds", lambda groups: LAUNCH)
    monkeypatch.setitem(learning.BOOSTING, "max_iter", 20)
    kernels, devices = sample(600, seed) * 3, [on for on in SEEN[:3] for _ in range(600)]
    seconds = np.concatenate([law(kernels[:600], on, seed) for on in SEEN[:3]])
    alike: dict[tuple[str, str], list[int]] = {}
    for row in drawn_order(kernels, seconds).tolist():
        alike.setdefault((kernels[row].family, devices[row].name), []).append(row)
    found, first, last = (
        Learned.fit([kernels[row] for row in rows], [devices[row] for row in rows], seconds[rows])
        for rows in (
            list(range(len(kernels))),
            [row for rows in alike.values() for row in rows[:most_rows]],
            [row for rows in alike.values() for row in rows[-most_rows:]],
        )
    )
    for key, model in found.models.items():
        features_KF, wanted_K = of_both(seed, first, last, key)
        np.testing.assert_allclose(model.function.predict(features_KF), wanted_K, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(model.low_B, first.models[key].low_B)
        np.testing.assert_array_equal(model.high_B, first.models[key].high_B)


def test_the_shipped_predictor_predicts_what_it_did() -> None:
    """Recorded before a predictor was the mean of two draws, in the mean of all logarithms; a refit has others."""
    asked = [*sample(600, 0), *[dataclasses.replace(kernel, family="convolution") for kernel in sample(60, 1)[:20]]]
    asked += [dataclasses.replace(kernel, family="normalization") for kernel in sample(60, 1)[40:]]
    recorded: dict[Kind, tuple[float, float, float]] = {
        "cuda": (-10.057786322531399, -10.505229487244941, -9.51387193326596),
        "rocm": (-9.943456083051112, -10.44924463473069, -9.329338487718168),
    }
    for kind, wanted in recorded.items():
        found = shipped().predict(asked, dataclasses.replace(UNSEEN, kind=kind))
        assert found.known_K.all()
        means = [np.log(each).mean() for each in (found.seconds_K, found.low_seconds_K, found.high_seconds_K)]
        np.testing.assert_allclose(means, wanted, rtol=1e-9)


def test_of_two_devices_all_of_the_interval_is_shared() -> None:
    drawn = sample(200, 0)
    few = Learned.fit(drawn, [SEEN[0]] * len(drawn), law(drawn, SEEN[0], 0))
    assert np.all(np.isinf(few.predict(drawn, UNSEEN).shared_log_K))


@pytest.mark.parametrize("on", [UNSEEN, *SEEN], ids=lambda on: on.name)
def test_is_never_faster_than_the_peaks(learned: Learned, on: DeviceType) -> None:
    kernels = [*sample(300, 5), linear(1, 1, 1), linear(65536, 65536, 65536), row_wise("relu", 2**20, 2**14)]
    prediction = learned.predict(kernels, on)
    assert np.all(prediction.seconds_K >= prediction.least_seconds_K)
    assert np.all(prediction.low_seconds_K >= prediction.least_seconds_K)
    assert np.all(np.isfinite(prediction.high_seconds_K))
    assert np.all(prediction.queued_seconds_K <= prediction.seconds_K)


def test_more_elements_never_take_less_time(learned: Learned) -> None:
    for predictor in (learned, shipped()):
        kernels = [row_wise("add", int(size), 64) for size in np.geomspace(1, 2**22, 300)]
        assert np.all(np.diff(predictor.predict(kernels, UNSEEN).seconds_K) >= 0)


@pytest.mark.parametrize("predictor", ["synthetic", "shipped"])
def test_a_product_of_twice_the_size_takes_longer(learned: Learned, predictor: str) -> None:
    chosen = learned if predictor == "synthetic" else shipped()
    for size in (256, 512, 1024, 2048, 4096):
        once, twice = chosen.predict([bmm(4, size, size, size), bmm(4, size, 2 * size, size)], UNSEEN).seconds_K
        assert once < twice


def test_exported_trees_equal_scikit_learn() -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(2000, 4))
    target = features[:, 0] * features[:, 1] + np.sin(features[:, 2])
    model = HistGradientBoostingRegressor(max_iter=30, max_leaf_nodes=16, random_state=0).fit(features, target)
    assert np.allclose(Trees.of(model).predict(features), model.predict(features), atol=1e-5)


def test_what_is_saved_predicts_the_same(learned: Learned, tmp_path: Path) -> None:
    learned.save(tmp_path / "learned.npz")
    again = Learned.load(tmp_path / "learned.npz")
    kernels = sample(300, 7)
    first, second = learned.predict(kernels, UNSEEN), again.predict(kernels, UNSEEN)
    assert np.array_equal(first.seconds_K, second.seconds_K)
    assert np.array_equal(first.low_seconds_K, second.low_seconds_K)
    assert np.array_equal(first.shared_log_K, second.shared_log_K)
    assert (again.source, again.notes) == (learned.source, learned.notes)


def test_a_file_that_is_no_predictor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"not an archive")
    with pytest.raises(CostError, match="no learned predictor"):
        Learned.load(tmp_path / "x.npz")


def test_times_that_cannot_be_true_are_counted_and_left_out() -> None:
    drawn = sample(600, 1)
    seconds = law(drawn, SEEN[0], 1)
    seconds[:5] = [np.nan, np.inf, 0.0, -1.0, 1e9]
    notes = "; ".join(Learned.fit(drawn, [SEEN[0]] * len(drawn), seconds).notes)
    assert "2 times not finite" in notes
    assert "2 times zero or negative" in notes
    assert "1 times positive and outside" in notes
    with pytest.raises(CostError, match="no usable measurement"):
        Learned.fit(drawn[:3], [SEEN[0]] * 3, [np.nan, 0.0, -1.0])


def test_kernels_without_a_model_are_listed_and_not_free(learned: Learned) -> None:
    attention = Kernel(family="attention", name="flash", dtype="float32", m=512, n=512, k=64, flops=1e9, read_bytes=1e6)
    unknown_peak = dataclasses.replace(linear(64, 64, 64), dtype="bfloat16")
    prediction = learned.predict([attention, unknown_peak, linear(64, 64, 64)], UNSEEN)
    assert prediction.known_K.tolist() == [False, False, True]
    assert prediction.seconds_K[0] >= 1e9 / 30e12
    assert np.isnan(prediction.seconds_K[1])


def test_half_precision_is_priced_at_its_own_peak(learned: Learned) -> None:
    full = linear(4096, 4096, 4096)
    half = dataclasses.replace(
        full, dtype="float16", read_bytes=full.read_bytes / 2, written_bytes=full.written_bytes / 2
    )
    slow, fast = learned.predict([full, half], UNSEEN).seconds_K
    assert fast < slow / 2


def test_the_shipped_predictor_knows_the_whole_catalogue() -> None:
    kernels = [linear(1024, 1024, 4096), row_wise("add", 4096, 1024), row_wise("softmax", 4096, 1024)]
    for on in catalogue().values():
        prediction = shipped().predict(kernels, on)
        assert prediction.known_K.all()
        assert np.all(prediction.seconds_K > 0)
    assert SHIPPED.stat().st_size < 2 * 2**20
    assert "NeuSight" in shipped().source


def test_only_power_limited_boards_are_slowed() -> None:
    devices = catalogue()
    assert sustained_fraction(devices["V100-PCIE-32GB"], "float32") == 1.0
    assert sustained_fraction(devices["T4"], "float32") < 0.6
    assert sustained_fraction(devices["T4"], "float16") == 1.0
    for known in (devices["T4"], devices["A10"], devices["L40S"]):  # by its numbers, not by its name
        mine = dataclasses.replace(known, name="mine")
        most = ISSUED_SHARE if has_wide_multiprocessors(known) else 1.0
        assert sustained_fraction(mine, "float32") == sustained_fraction(known, "float32") < most
        assert sustained_fraction(dataclasses.replace(mine, board_watts=1e6), "float32") == most
        assert sustained_fraction(dataclasses.replace(mine, board_watts=None), "float32") == most
        assert sustained_fraction(dataclasses.replace(mine, process_nanometres=None), "float32") == most
        assert 0 < sustained_fraction(dataclasses.replace(mine, process_nanometres=10), "float32") <= most


def test_power_limits_matrix_units_of_few_boards() -> None:
    devices = catalogue()
    for name in ("A100-SXM4-80GB", "A40", "V100-SXM2-16GB", "RTX3090"):
        assert matrix_units_share(devices[name]) > 0.872, name
    assert matrix_units_share(devices["T4"]) < 0.5
    known = devices["H100-SXM5-80GB"]
    assert 0.74 < matrix_units_share(known) < 0.8
    shares = [matrix_units_share(dataclasses.replace(known, board_watts=watts)) for watts in (300.0, 500.0, 700.0, 1e6)]
    assert shares == sorted(shares)
    assert shares[1] < 0.8
    assert shares[-1] == matrix_units_share(dataclasses.replace(known, board_watts=None)) == 1.0
    assert matrix_units_share(devices["P4"]) == 1.0  # it has none


def test_multiprocessors_of_128_lanes_share_their_issue_slots() -> None:
    wide = {name for name, on in catalogue().items() if has_wide_multiprocessors(on)}
    assert {"A10", "A40", "L4", "H100-SXM5-80GB", "RTX3090"} <= wide
    narrow = {"P4", "P100-PCIE-16GB", "V100-SXM2-16GB", "T4", "A30", "A100-SXM4-80GB", "MI210", "MI300X"}
    assert not wide & narrow
    large = [linear(8192, 8192, 8192)]
    for name in wide:  # a wide device's predicted products fall short of its peak, those of other dtypes do not change
        on = catalogue()[name]
        assert sustained_fraction(on, "float32") <= ISSUED_SHARE
        assert sustained_fraction(on, "float16") == 1.0
        unknown = dataclasses.replace(on, num_multiprocessors=None, name="unknown")
        assert shipped().predict(large, on).seconds_K[0] >= large[0].flops / on.peak_flops_per_second["float32"]
        assert sustained_fraction(unknown, "float32") >= sustained_fraction(on, "float32")


def test_rows_and_operations_become_kernels() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"op": ["bmm", "add"], "B": [2, 8], "M": [3, None], "N": [5, None], "K": [7, None], "H": [None, 4]}
    )
    product, added = kernels_of(frame)
    assert (product.batch, product.m, product.k, product.n, product.flops) == (2, 3, 5, 7, 2 * 2 * 3 * 5 * 7)
    assert (added.m, added.read_bytes, added.written_bytes) == (32, 256.0, 128.0)
    assert kernel_of_operation(["BMM", (2, 3, 5, 7)]) == product
    with pytest.raises(NeuSightError, match="unknown operations frobnicate"):
        kernels_of(frame.assign(op="frobnicate"))
    with pytest.raises(NeuSightError, match="unknown operation"):
        kernel_of_operation(["FOO", (1, 2)])


@needs_data
def test_the_benchmark_says_what_others_read(tmp_path: Path) -> None:
    import pandas as pd

    from benchmarks.cost.kernels import run

    rows = pd.read_parquet(NEUSIGHT / "kernels.parquet")
    parts = [
        group.sample(min(len(group), 60), random_state=0) for _, group in rows.groupby(["device", "op"], observed=True)
    ]
    small = pd.concat(parts)
    small.iloc[0, small.columns.get_loc("latency_ms")] = np.nan
    small.to_parquet(tmp_path / "kernels.parquet")
    _, table, summary = run(
        tmp_path / "kernels.parquet",
        NEUSIGHT / "models.parquet",
        NEUSIGHT.parent / "devices.csv",
        "P100,V100,T4,A100-PCIE-40",
        "A100-80,L4",
    )
    assert summary["dropped_rows"]["latency not finite"] == 1
    assert set(summary["models"]) == {"A100-PCIE-80GB", "L4"}
    assert set(summary["models"]["L4"]) == {"train", "inference"}
    assert summary["models"]["L4"]["train"] < 30 > summary["models_mape_percent"]
    assert "bmm" in summary["operators"]["L4"]
    assert {row["table"] for row in table} == {"operator", "model"}
    assert any("switch" in name for name in summary["models_without_operators"])


@needs_data
def test_each_device_is_left_out_where_none_is_named(tmp_path: Path) -> None:
    import pandas as pd

    from benchmarks.cost.kernels import run

    rows = pd.read_parquet(NEUSIGHT / "kernels.parquet")
    rows = rows[rows["device"].astype(str).isin(["Tesla P100-PCIE-16GB", "Tesla T4", "Tesla V100-PCIE-32GB"])]
    parts = [
        group.sample(min(len(group), 60), random_state=0) for _, group in rows.groupby(["device", "op"], observed=True)
    ]
    pd.concat(parts).to_parquet(tmp_path / "kernels.parquet")
    files = (tmp_path / "kernels.parquet", NEUSIGHT / "models.parquet", NEUSIGHT / "devices.csv")
    _, table, summary = run(*files, "", "")
    assert set(summary["left_out"]) == {"P100-PCIE-16GB", "T4", "V100-PCIE-32GB"}
    assert {row["device"] for row in table} == set(summary["left_out"])
    assert sum(one["models"] for one in summary["left_out"].values()) == len(
        [r for r in table if r["table"] == "model"]
    )
    assert 0 < summary["coverage"]["kernels_percent"] <= 100 >= summary["coverage"]["models_percent"] > 0
