"""The cluster: what a cluster.yaml means, and what is refused with its line."""

import itertools
import json
import os
import pickle
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import RootModel

from dejavu import cluster as clusters
from dejavu.cluster import Cluster, Link, catalogue, load_cluster, this_machine
from dejavu.cluster.__main__ import main
from dejavu.cluster.catalogue import catalogue_rows
from dejavu.cluster.form import DeviceForm, LinkForm, NodesForm
from dejavu.cluster.this_machine import VISIBLE, gpus_by_type, visible_gpus
from dejavu.foundation import strict_yaml, units
from dejavu.foundation.errors import InputError
from dejavu.launch.preflight import check_cluster
from dejavu.profiling import profiler

ROOT = Path(__file__).parent.parent
EXAMPLES = [ROOT / "cluster.yaml", *sorted((ROOT / "examples" / "clusters").glob("*.yaml"))]
few = settings(
    max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

TWO_KINDS = """\
name: two-kinds
nodes:
  - name: a100
    count: 2
    devices: {type: A100-SXM4-80GB, count: 8}
    link: {bandwidth: 300 GB/s, latency: 5 us}
  - name: mixed
    hosts: [node1, node2]
    devices: [{type: T4, count: 2}, {type: MyAccel}]
    link: {bandwidth: 12 GB/s, latency: 8 us}
links:
  default: {bandwidth: 25 Gbit/s, latency: 10 us}
  pairs:
    - {between: [mixed, a100], bandwidth: 10 Gbit/s, latency: 20 us}
devices:
  MyAccel: {kind: cuda, memory: 32 GiB, bandwidth: 1 TB/s, float32: 20 TFLOP/s, bfloat16: 100 TFLOP/s}
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(text: str) -> Cluster:
        Path("cluster.yaml").write_text(text)
        return load_cluster(Path("cluster.yaml"))

    return read


@pytest.fixture
def refusal(read):
    def refusal(text: str) -> str:
        with pytest.raises(InputError) as caught:
            read(text)
        return str(caught.value)

    return refusal


def nodes(device: str = "T4", count: int = 1, bandwidth: str = "1 GB/s", rest: str = "") -> str:
    return f"""\
nodes:
  - name: a
    count: {count}
    devices: {{type: {device}, count: 8}}
    link: {{bandwidth: {bandwidth}, latency: 5 us}}
{rest}"""


def test_two_kinds_is_resolved(read):
    cluster = read(TWO_KINDS)
    assert cluster.name == "two-kinds"
    assert cluster.num_devices == 22
    assert cluster.device_counts == {"A100-SXM4-80GB": 16, "T4": 4, "MyAccel": 2}
    assert list(cluster.device_types) == ["A100-SXM4-80GB", "MyAccel", "T4"]
    mine = cluster.device_types["MyAccel"]
    assert (mine.memory_bytes, mine.memory_bytes_per_second, mine.source) == (32 * 2**30, 1e12, "cluster.yaml")
    assert mine.peak_flops_per_second == {"float32": 20e12, "bfloat16": 100e12}
    devices = cluster.devices()
    assert len(devices) == len(set(devices)) == 22
    assert [(d.host, d.index, d.type_name) for d in devices[15:20]] == [
        ("a100-1", 7, "A100-SXM4-80GB"),
        ("node1", 0, "T4"),
        ("node1", 1, "T4"),
        ("node1", 2, "MyAccel"),
        ("node2", 0, "T4"),
    ]
    first, neighbour, other_node, other_group = devices[0], devices[1], devices[8], devices[-1]
    assert cluster.link(first, neighbour) == Link(300e9, 5e-6)
    assert cluster.link(first, other_node) == Link(3.125e9, 10e-6)
    assert cluster.link(first, other_group) == cluster.link(other_group, first) == Link(1.25e9, 20e-6)
    assert cluster.link(first, neighbour).transfer_seconds(300_000_000) == pytest.approx(1.005e-3)
    with pytest.raises(ValueError, match="to itself"):
        cluster.link(first, first)


def test_each_default_is_told(read):
    cluster = read("nodes: [{name: a, count: 2, devices: {type: T4, count: 4}}]\nlinks: {default: {bandwidth: 1 GB/s}}")
    inside, latency, between = cluster.assumptions
    assert "Inside a node of 'a' the link is the catalogue's for T4, PCIe 3.0 x16: 15.8 GB/s one way, 5 µs" in inside
    assert "`links: default` has no latency in the file: 14 µs is assumed" in latency
    assert "`links: default` (1 GB/s one way, 14 µs) is used between the nodes of 'a'" in between
    assert cluster.groups[0].link.assumed
    assert not cluster.links_between["a", "a"].assumed  # its bandwidth was declared
    assert read(nodes(count=1)).assumptions == ()


def test_the_fingerprint_is_of_the_content(read):
    cluster = read(TWO_KINDS)
    lines = TWO_KINDS.splitlines()
    shuffled = "\n".join(["# a comment", *lines[10:], *lines[1:10]])
    same = read(shuffled.replace("25 Gbit/s", "3.125 GB/s").replace("[mixed, a100]", "[a100, mixed]"))
    assert same.name == "cluster"
    assert same.fingerprint == cluster.fingerprint == read(TWO_KINDS).fingerprint
    assert len(cluster.fingerprint) == 64
    for old, new in [
        ("count: 2", "count: 3"),
        ("20 us", "21 us"),
        ("node2", "node3"),
        ("32 GiB", "33 GiB"),
        ("mixed", "b"),
    ]:
        assert read(TWO_KINDS.replace(old, new)).fingerprint != cluster.fingerprint


def test_a_cluster_outlives_its_file(read):
    cluster = read(TWO_KINDS)
    before = cluster.fingerprint
    Path("cluster.yaml").write_text("nodes: auto")
    assert cluster.fingerprint == before
    again = Cluster.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert again == cluster == pickle.loads(pickle.dumps(cluster))
    assert again.fingerprint == before
    assert again.assumptions == cluster.assumptions


def test_a_broken_record_is_an_input_error():
    with pytest.raises(InputError, match="no record of a cluster"):
        Cluster.from_dict({"name": "x"})
    with pytest.raises(InputError, match="no record of a cluster"):
        Cluster.from_dict(this_machine().to_dict() | {"links_between": [{"between": ["a"], "link": {}}]})


group = st.fixed_dictionaries(
    {
        "count": st.integers(1, 5),
        "devices": st.lists(
            st.fixed_dictionaries({"type": st.sampled_from(sorted(catalogue())), "count": st.integers(1, 8)}),
            min_size=1,
            max_size=3,
            unique_by=lambda entry: entry["type"],
        ),
    }
)


@few
@given(
    groups=st.lists(group, min_size=1, max_size=5), rate=st.integers(1, 400), order=st.randoms(use_true_random=False)
)
def test_any_cluster_of_the_catalogue(read, groups, rate, order):
    content = {
        "nodes": [{"name": f"g{index}", **entry} for index, entry in enumerate(groups)],
        "links": {"default": {"bandwidth": f"{rate} Gbit/s", "latency": "10 us"}},
    }
    cluster = read(json.dumps(content))
    devices = cluster.devices()
    assert cluster.num_devices == len(devices) == sum(cluster.device_counts.values())
    for name, count in cluster.device_counts.items():
        assert count == sum(device.type_name == name for device in devices)
    if len(devices) > 1:
        a, b = order.sample(devices, 2)
        assert cluster.link(a, b) == cluster.link(b, a)
        assert (cluster.link(a, b).bytes_per_second == rate * 1e9 / 8) == (a.host != b.host)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    shuffled = dict(order.sample(sorted(content.items()), 2))
    assert read(json.dumps(shuffled, indent=2)).fingerprint == cluster.fingerprint


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        ("H10O", "; did you mean 'H100-SXM5-80GB'?"),
        ("h100-sxm5-80gb", "; did you mean 'H100-SXM5-80GB'?"),
        ("H100", "; did you mean 'H100-SXM5-80GB' or 'H100-PCIE-80GB'?"),
        ("V100-SXM2", "; did you mean 'V100-SXM2-16GB' or 'V100-SXM2-32GB'?"),
        ("H200-SXM-141G", "; did you mean 'H200-SXM-141GB'?"),
        ("abacus", "; wanted one of dejavu/devices.csv, or one defined under `devices:`"),
    ],
)
def test_unknown_devices(refusal, device, hint):
    assert refusal(nodes(device)) == f"cluster.yaml:4:21: unknown device {device!r}{hint}"


@pytest.mark.parametrize(
    "bandwidth", ["-1 GB/s", "0 GB/s", ".nan", ".inf", "nan GB/s", "inf GB/s", "300", "1e9", "5 Gb/s", ""]
)
def test_senseless_bandwidths(refusal, bandwidth):
    message = refusal(nodes(bandwidth=bandwidth))
    assert message.startswith("cluster.yaml:5:2")
    assert message.endswith("; wanted a rate such as '300 GB/s' or '25 Gbit/s'")
    assert message.count("\n") == 0


ONE_EACH = "nodes: [{name: a, devices: {type: T4}}, {name: b, count: 3, devices: {type: L4}}]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nodes(count=2), "1:1: no link between the nodes of 'a', and no `links: default`"),
        (nodes(count=2, rest="links: {pairs: []}"), "6:1: no link between the nodes of 'a', and no `links: default`"),
        (ONE_EACH, "1:1: no link between 'a' and 'b', between the nodes of 'b', and no `links: default`"),
        (
            ONE_EACH + "links:\n  default: {bandwidth: 1 GB/s}\n  pairs:\n"
            "  - {between: [a, b], bandwidth: 1 GB/s}\n  - {between: [b, a], bandwidth: 2 GB/s}",
            "6:15: the link between 'a' and 'b' is on line 5 already",
        ),
        (
            ONE_EACH + "links: {default: {bandwidth: 1 GB/s}, pairs: [{between: [a, a], bandwidth: 1 GB/s}]}",
            "2:57: a link of 'a' to itself, but the group has one node",
        ),
        (
            ONE_EACH + "links: {default: {bandwidth: 1 GB/s}, pairs: [{between: [a, B], bandwidth: 1 GB/s}]}",
            "2:61: unknown group 'B'; did you mean 'b'?",
        ),
        (
            "nodes: [{name: a, devices: {type: T4}},\n {name: a, devices: {type: T4}}]",
            "2:9: the group 'a' is on line 1",
        ),
        ("nodes: [{name: a, hosts: [n1, n2,\n N1], devices: {type: T4}}]", "2:2: the host 'N1' is on line 1 already"),
        (
            "nodes: [{name: a, hosts: [n1], devices: {type: T4}},\n {name: b, hosts: [n1], devices: {type: T4}}]",
            "2:20: the host 'n1' is on line 1 already",
        ),
        (
            "nodes: [{name: a, hosts: [b-1], devices: {type: T4}},\n {name: b, count: 2, devices: {type: T4}}]",
            "1:27: the host 'b-1' has the name that a node of the group 'b' gets",
        ),
        ("nodes:\n- name: a\n  name: b", "3:3: the key 'name' is here again; it is on line 2 already"),
        ("nodes: [{name: a, hosts: ['x; rm -rf /'], devices: {type: T4}}]", "1:27: 'x; rm -rf /' is not a host name"),
        ("nodes: [{name: a, hosts: ['$(reboot)'], devices: {type: T4}}]", "1:27: '$(reboot)' is not a host name"),
        (
            "nodes: [{name: a, hosts: [-oProxyCommand=x], devices: {type: T4}}]",
            "1:27: '-oProxyCommand=x' is not a host",
        ),
        ("nodes: [{name: a, hosts: ['n1\n'], devices: {type: T4}}]", "1:27: 'n1 ' is not a host name"),
        ('nodes: [{name: a, hosts: ["n1\\n"], devices: {type: T4}}]', "1:27: 'n1\\n' is not a host name"),
        ("nodes: [{name: a, hosts: [n..1], devices: {type: T4}}]", "1:27: 'n..1' is not a host name"),
        ("nodes: [{name: a/b, devices: {type: T4}}]", "1:16: the group name 'a/b' is not made of"),
        ("nodes: [{name: a, count: 012, devices: {type: T4}}]", "1:26: the number '012' has a leading zero"),
        ("nodes: [{name: a, count: no, devices: {type: T4}}]", "1:26: count: found 'no', wanted a whole number"),
        ("nodes: [{name: a, count: 0, devices: {type: T4}}]", "1:26: count: found 0, wanted at least 1"),
        ("nodes: [{name: a, count: 2.0, devices: {type: T4}}]", "1:26: count: found 2.0, wanted a whole number"),
        ("nodes: [{name: a, count: 1, hosts: [n], devices: {type: T4}}]", "1:9: nodes: both count and hosts are given"),
        ("nodes: [{name: a, cuont: 1, devices: {type: T4}}]", "1:19: unknown key 'cuont'; did you mean 'count'?"),
        ("nodes: [{name: a, devices: {typ: T4}}]", "1:29: unknown key 'typ'; did you mean 'type'?"),
        (
            "nodes: [{name: a, devices: [{type: T4},\n {type: T4}]}]",
            "2:9: 'T4' is on line 1 already; add up the counts",
        ),
        (
            "nodes: [{name: a, count: 100000, devices: {type: T4, count: 2}}]",
            "1:1: 200,000 devices in all; the limit is",
        ),
        ("nodes: all", "1:8: nodes: found 'all', wanted a list of node groups, or `auto` for this machine"),
        ("nodes: auto\ndevices: {}", "2:1: 'devices' has no meaning beside `nodes: auto`"),
        (
            nodes("M", rest="devices:\n  M: {kind: cuda, memory: 1 GiB, bandwidth: 1 TB/s}"),
            "7:6: M: no peak is given; wanted one of float32, tfloat32, float16, bfloat16",
        ),
        (
            nodes(rest="devices:\n  t4: {kind: cuda, memory: 1 GiB, bandwidth: 1 TB/s, float32: 1 TFLOP/s}"),
            "7:3: the catalogue has 'T4' already; give this device another name",
        ),
        (
            "nodes: [{name: a, devices: {type: M, count: 2}}]\n"
            "devices: {M: {kind: cpu, memory: 1 GiB, bandwidth: 1 TB/s, float32: 1 TFLOP/s}}",
            "1:9: the nodes of 'a' need a `link`: the catalogue has no interconnect for 'M'",
        ),
    ],
)
def test_refuses_and_names_the_place(refusal, text, message):
    assert f"cluster.yaml:{message}" in refusal(text)


def test_all_problems_are_listed(refusal):
    message = refusal("nodes:\n- {name: a, devices: {type: A1000}}\n- {name: a, hosts: ['?'], devices: {type: T44}}")
    assert [line.split(": ")[0] for line in message.splitlines()] == [
        "cluster.yaml:3:10",
        "cluster.yaml:3:21",
        "cluster.yaml:2:29",
        "cluster.yaml:3:43",
    ]


def test_a_million_hosts_are_refused(refusal, read):
    listed = "nodes:\n- name: a\n  devices: {type: T4}\n  hosts:\n" + "".join(f"  - n{i}\n" for i in range(1_000_000))
    assert "write equal hosts as a count" in refusal(listed)
    assert "the limit is 1,048,576" in refusal(listed)
    fewer = "nodes:\n- name: a\n  devices: {type: T4}\n  hosts:\n" + "".join(f"  - n{i}\n" for i in range(10_001))
    assert "cluster.yaml:2:1: more than 10,000 hosts are listed; write equal hosts as a count" in refusal(fewer)
    tracemalloc.start()
    assert "found 1000000, wanted at most 100000" in refusal("nodes: [{name: a, count: 1000000, devices: {type: T4}}]")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    counted = "nodes: [{name: a, count: 12500, devices: {type: T4, count: 8}}]\nlinks: {default: {bandwidth: 1 GB/s}}"
    assert read(counted).num_devices == clusters.MAX_DEVICES


def test_the_catalogue_makes_sense():
    types = catalogue()
    assert len(types) == len({name.casefold() for name in types}) >= 30
    for device_type in types.values():
        peaks = device_type.peak_flops_per_second
        assert 1e12 < peaks["float32"] < 1e15
        assert list(peaks) == [dtype for dtype in clusters.DTYPES if dtype in peaks]
        assert all(peak >= peaks["float32"] for peak in peaks.values())
        assert 4 * 2**30 < device_type.memory_bytes < 2**39
        assert 1e11 < device_type.memory_bytes_per_second < 2e13
    for name, device_type in types.items():
        if name.startswith(("P100", "P4", "V100", "T4")):
            assert not {"tfloat32", "bfloat16"} & set(device_type.peak_flops_per_second)
    assert types["A100-SXM4-80GB"].peak_flops_per_second["bfloat16"] == 312e12
    reported = [name for row in catalogue_rows() for name in row.reported_names]
    assert len(reported) == len(set(reported))


def test_this_machine_is_the_same_twice():
    cluster = this_machine()
    assert cluster.fingerprint == this_machine().fingerprint
    assert cluster.assumptions
    assert {device.host for device in cluster.devices()} == {"localhost"}


def test_without_cuda_the_cores_are_the_devices(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cluster = this_machine()
    (core,) = cluster.device_types.values()
    assert core.kind == "cpu"
    assert core.name.startswith("cpu-core-")
    assert cluster.num_devices == len(os.sched_getaffinity(0))
    assert core.memory_bytes * cluster.num_devices <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_cuda_devices_are_found_by_their_reported_names(monkeypatch):
    reported = [("NVIDIA H200", 139 << 30, 132), ("NVIDIA H200", 140 << 30, 132), ("NVIDIA Prototype X", 24 << 30, 50)]
    properties = [
        SimpleNamespace(name=name, total_memory=memory, multi_processor_count=count, major=9)
        for name, memory, count in reported
    ]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(properties))
    monkeypatch.setattr("torch.cuda.get_device_properties", properties.__getitem__)
    cluster = this_machine()
    assert cluster.device_counts == {"H200-SXM-141GB": 2, "nvidia-prototype-x": 1}
    known, unknown = cluster.device_types["H200-SXM-141GB"], cluster.device_types["nvidia-prototype-x"]
    assert known == replace(catalogue()["H200-SXM-141GB"], memory_bytes=139 << 30, source="this machine")
    assert unknown.peak_flops_per_second["bfloat16"] == 2 * 50 * 64 * 2 * 1.2e9
    assert "NVIDIA Prototype X" in cluster.assumptions[0]


def _gpus(monkeypatch, names):
    """A machine with these GPUs, in CUDA's order."""
    properties = [
        SimpleNamespace(name=name, total_memory=24 << 30, multi_processor_count=50, major=9, L2_cache_size=0)
        for name in names
    ]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(properties))
    monkeypatch.setattr("torch.cuda.get_device_properties", properties.__getitem__)


@pytest.mark.parametrize("told", [None, "numbers", "ids"])
@pytest.mark.parametrize("order", sorted({*itertools.permutations("AAB"), *itertools.permutations("AABBC")}))
def test_a_device_of_this_machine_is_the_gpu_of_its_number(order, told, monkeypatch):
    """CUDA may number GPUs of one type before and after others; the variable that helps is said."""
    types = {"A": "NVIDIA H200", "B": "NVIDIA Prototype X", "C": "Tesla T4"}
    shown = {"numbers": [str(9 - k) for k in range(len(order))], "ids": [f"GPU-{k}f" for k in range(len(order))]}.get(
        told
    )
    monkeypatch.delenv(VISIBLE, raising=False)
    if shown:
        monkeypatch.setenv(VISIBLE, ",".join(shown))
    _gpus(monkeypatch, [types[one] for one in order])
    by_name = dict(zip(shown or map(str, range(len(order))), order, strict=True))
    if list(order) == sorted(order, key=order.index):
        assert [device.index for device in this_machine().devices()] == [*range(len(order))]
    else:
        with pytest.raises(InputError, match=r"wanted those of a type one after another, as with") as caught:
            this_machine()
        (names,) = re.findall(rf"{VISIBLE}=(\S+) in the", str(caught.value))
        monkeypatch.setenv(VISIBLE, names)
        _gpus(monkeypatch, [types[by_name[name]] for name in names.split(",")])
    devices, gpus = this_machine().devices(), gpus_by_type()
    listed = [gpu for own in gpus.values() for gpu in own]
    assert listed == visible_gpus(len(order)), "type by type, as CUDA numbers them"
    assert [device.type_name for device in devices] == [name for name, own in gpus.items() for _ in own]
    for own in gpus.values():
        assert len({by_name[name] for name in own}) == 1


@pytest.mark.parametrize("here", ["AAB", "ABB", "AA", "AABB"])
@pytest.mark.parametrize("listed", [(("A", 2), ("B", 1)), (("A", 1), ("B", 1)), (("B", 1), ("A", 1)), (("A", 1),)])
def test_a_file_of_this_machine_lists_its_gpus_as_cuda_numbers_them(here, listed, tmp_path, monkeypatch):
    """A rank takes the GPU of its device's number in the node."""
    types = {"A": "NVIDIA H200", "B": "Tesla T4"}
    _gpus(monkeypatch, [types[one] for one in here])
    names = dict(zip("AB", ("H200-SXM-141GB", "T4"), strict=True))
    devices = ", ".join(f"{{type: {names[one]}, count: {count}}}" for one, count in listed)
    path = tmp_path / "c.yaml"
    path.write_text(f"nodes: [{{name: a, hosts: [localhost], devices: [{devices}], link: {{bandwidth: 1 GB/s}}}}]")
    wanted = "".join(one * count for one, count in listed)
    if here.startswith(wanted):
        check_cluster(load_cluster(path))
    else:
        has_all = all(here.count(one) >= count for one, count in listed)
        with pytest.raises(
            InputError, match="in CUDA's order" if has_all else "the cluster says that this machine has"
        ):
            check_cluster(load_cluster(path))


@pytest.mark.parametrize("told", [None, "3,1,2"])
@pytest.mark.parametrize("kinds", [{}, {"a": ["3", "1", "2"]}, {"a": ["3"], "b": ["1", "2"]}])
def test_a_type_of_gpus_is_measured_on_gpus_of_that_type(kinds, told, monkeypatch):
    """Measuring processes take the first ones that they see."""
    monkeypatch.setattr(profiler, "gpus_by_type", lambda: kinds)
    monkeypatch.delenv(VISIBLE, raising=False)
    if told:
        monkeypatch.setenv(VISIBLE, told)
    for name, gpus in kinds.items():
        with pytest.raises(KeyboardInterrupt), profiler._gpus_of(name):
            assert os.environ.get(VISIBLE) == (",".join(gpus) if len(kinds) > 1 else told)
            raise KeyboardInterrupt
        assert os.environ.get(VISIBLE) == told


@pytest.mark.gpu
def test_this_machine_has_its_gpus():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device here")
    cluster = this_machine()
    assert cluster.num_devices == torch.cuda.device_count()
    assert {device_type.kind for device_type in cluster.device_types.values()} <= {"cuda", "rocm"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load_and_fit_the_schema(path):
    assert load_cluster(path).num_devices > 0
    written = strict_yaml.load(path, RootModel[Any]).value.root
    schema = json.loads((ROOT / "dejavu" / "cluster.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(written)
    named = path.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == ROOT / "dejavu" / "cluster.schema.json"


QUANTITIES = {
    "memory": (DeviceForm, units.parse_bytes),
    "bandwidth": (DeviceForm, units.parse_bytes_per_second),
    "float32": (DeviceForm, units.parse_flops_per_second),
    "latency": (LinkForm, units.parse_seconds),
    "price": (NodesForm, units.parse_price),
}
NUMBERS = ("1", "+2", "-3", "3.", ".5", "1.25", "1e3", "1E+2", "01", "1_0", "1,5", "", "nan", "0x10", "1e100")
UNITS = (
    *("B", "kB", "KB", "GB", "GiB", "EiB", "Gb", "b", "bit", "Gbit", "B/s", "GB/s", "Gbit/s", "Gibit/s", "Gbps", "bps"),
    *("Gb/s", "KiB/s", "ns", "us", "µs", "μs", "ms", "s", "min", "h", "S", "TFLOP/s", "TFLOPS", "TFLOPs", "FLOP/s", ""),
    *("USD/hour", "EUR/hour", "usd/hour", "US/hour", "XUSD/hour", "USD/h", "USD / hour", "USD"),
)


@pytest.mark.parametrize("key", QUANTITIES)
def test_the_schema_takes_the_texts_that_the_loader_takes(key: str) -> None:
    """Each number with each unit, spaced in each way; ranges are the loader's alone."""
    form, parse = QUANTITIES[key]
    found = form.model_json_schema()["properties"][key]
    pattern = next(one["pattern"] for one in (found, *found.get("anyOf", ())) if "pattern" in one)
    for number, space, unit in itertools.product(NUMBERS, ("", " ", "  "), UNITS):
        for text in (f"{number}{space}{unit}", f" {number}{space}{unit} "):
            try:
                parse(text)
                taken = True
            except ValueError as error:
                taken = "is not between" in str(error)
            assert bool(re.search(pattern, text)) == taken, text


def test_the_shipped_schema_is_the_generated_one(capsys):
    jsonschema.Draft202012Validator.check_schema(clusters.json_schema())
    main(["--schema"])
    shipped = (ROOT / "dejavu" / "cluster.schema.json").read_text()
    assert capsys.readouterr().out == shipped, "run `python -m dejavu.cluster --schema > dejavu/cluster.schema.json`"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {"nodes": [{"name": "a", "devices": {"type": "T4"}, "link": {"bandwidth": "5"}}]}, json.loads(shipped)
        )


ABSURD = {  # a place in a file, and what nobody means there
    "link: {{bandwidth: 300 GB/s, latency: {}}}": ["1e30 s", "11 s", "1 h", "05 us", "-1 us", "~", "", "5"],
    "link: {{bandwidth: {}, latency: 5 us}}": ["1e30 GB/s", "1 B/s", "012 GB/s", "00.5 GB/s", "~", "2 PB/s", "0 GB/s"],
    "count: {}": ["~", "", "null", "0", "1e3", "012", "2.0"],
    "hosts: {}": ["~", "[]", "[~]", "7"],
}


@pytest.mark.parametrize(("place", "text"), [(place, text) for place, texts in ABSURD.items() for text in texts])
def test_what_nobody_means_is_refused_with_its_place(place: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "nodes:\n- name: a\n  devices: {type: T4, count: 2}\n  " + place.format(text) + "\n"
        "links: {default: {bandwidth: 25 Gbit/s, latency: 1 us}}\n"
    )
    with pytest.raises(InputError, match=rf"^{path}:4:[0-9]+: .*wanted|^{path}:4:[0-9]+: .*leading zero") as refused:
        load_cluster(path)
    assert "None" not in str(refused.value)


DEVICE = {
    "memory": "16 GiB",
    "bandwidth": "900 GB/s",
    "float32": "15 TFLOP/s",
    "float16": "30 TFLOP/s",
    "cache": "6 MiB",
}


@pytest.mark.parametrize("key", DEVICE)
def test_a_device_s_figures_have_a_range_and_are_there(key: str, tmp_path: Path) -> None:
    number, unit = DEVICE[key].split()
    path = tmp_path / "cluster.yaml"
    for value in (f"{number}e15 {unit}", f"{number}e-15 {unit}", f"0{number} {unit}", "~"):
        figures = ", ".join(f"{name}: {text}" for name, text in {**DEVICE, key: value}.items())
        path.write_text(
            "nodes: [{name: a, devices: {type: mine, count: 2}, link: {bandwidth: 1 GB/s, latency: 1 us}}]\n"
            f"devices:\n  mine: {{kind: cuda, {figures}}}\n"
        )
        with pytest.raises(InputError, match=rf"^{path}:3:[0-9]+: {key}: .*wanted"):
            load_cluster(path)
    path.write_text(path.read_text().replace("~", DEVICE[key]))
    load_cluster(path)
