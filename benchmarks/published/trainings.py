"""Published trainings: what was trained, on what, how it was spread, and how fast it was said to be.

Sources. Megatron-LM: Narayanan et al., SC 2021 (arXiv:2104.04473), table 1, as recalled and found equal in three
independent copies of the table (2026-11-23); Korthikanti et al., 2022, as recalled (`benchmarks.cost.iterations`).
torchtitan: its repository's docs/performance.md (commit 0413364) and benchmarks/llama3_h100_202412_torchtitan.md
(commit 31a17bf), read 2026-11-23, which are the tables of Liang et al., 2024 (arXiv:2410.06511), taken again; and its
benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md (commit c720cb8), bfloat16, with plain tensor parallelism read
2026-11-23, with asynchronous 2026-11-25.
MosaicML: `benchmarks.published.mpt`. NVIDIA, Llama 3, MLPerf, torchtitan's 405B: `benchmarks.published.hopper`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.cost import iterations
from benchmarks.published import PUBLISHED, Published, hopper, mpt
from dejavu.cluster import Cluster, DeviceType, Link, NodeGroup, catalogue

GIB = 2**30
DEVICES_PER_NODE = 8
NODE = "node"
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Training:
    """One published training.

    Attributes:
        tensor_parallel, pipeline_parallel: degrees; replicas take the rest of the devices.
        context_parallel: so many of the replicas share examples, each with a part of the sequence.
        microbatch_size: of one replica, or of those that share it; None: not published.
        zero_level: what replicas shard.
        sequence_parallel: tensor-parallel devices split the sequence between their products. torchtitan's always do
            (its models/llama3/infra/parallelize.py); Megatron-LM of 2021 could not.
        chunks: stages on each pipeline rank, where the source had more, as many as a schedule of this project has.
        tokens_per_second: of one device; derived from the source's FLOP/s where it gives these.
        memory_gib: the most that a device had reserved; None: not published.
        comparable: False: the source's products were in 8 bits, which are predicted here in 16.
        mfu_percent: the source's own figure, whose formula may round; None: it states none.
        beside_products: tensor-parallel devices send part by part beside the products that make or need it.
    """

    name: str
    model: Published
    device: DeviceType
    num_devices: int
    batch_size: int
    tokens_per_second: float
    source: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    microbatch_size: int | None = None
    recompute: Recompute = "full"
    zero_level: int = 0
    sequence_parallel: bool = False
    chunks: int = 1
    memory_gib: float | None = None
    comparable: bool = True
    context_parallel: int = 1
    mfu_percent: float | None = None
    beside_products: bool = False

    @property
    def attention(self) -> Literal["written out", "first", "fused"]:
        """How attention was computed: two products with a softmax between, FlashAttention's first version, or later."""
        if self.source in (MEGATRON, KORTHIKANTI):
            return "written out"
        return "first" if self.source == mpt.SOURCE else "fused"

    @property
    def overlaps_sums(self) -> bool:
        """Whether gradients of replicas were summed beside computing: Megatron-LM did so from 2023 on."""
        return self.source not in (MEGATRON, KORTHIKANTI)

    @property
    def data_parallel(self) -> int:
        """How many devices have the same part of the weights, those that share examples too."""
        return self.num_devices // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def example_parts(self) -> int:
        """Into how many parts the replicas split a batch."""
        return self.data_parallel // self.context_parallel

    @property
    def pipelines(self) -> bool:
        """Whether the source's software has schedules of interleaved stages and replicas that share examples."""
        return self.pipeline_parallel > 1 or self.source == hopper.NVIDIA

    @property
    def flops_per_token(self) -> float:
        """Of the model: 6 for each weight of a product and 12 for each element of attention's rows, nothing twice.

        As Chowdhery et al. (PaLM, 2022, appendix B) count, and torchtitan since 2024-12 (before, the embedding's table
        was in it: its 58.2 % of an A100 are 55.2 % so); of Megatron's eq. 3 what is not recomputed.
        """
        options = self.model.options
        table = self.model.synthetic["num_classes"] * options["width"]
        positions = self.model.sequence_length * options["width"] if self.model.model == "gpt" else 0
        tied = table if self.model.model == "gpt" else 0
        products = self.model.num_parameters + tied - table - positions
        return 6.0 * products + 12.0 * options["num_blocks"] * options["width"] * self.model.sequence_length

    def utilization_percent(self, tokens_per_second: float) -> float:
        """Return the model FLOP/s of one device as a share of its peak (MFU)."""
        return 100.0 * self.flops_per_token * tokens_per_second / self.device.peak_flops_per_second["bfloat16"]

    def step_seconds(self, tokens_per_second: float) -> float:
        return self.batch_size * self.model.sequence_length / (tokens_per_second * self.num_devices)

    def cluster(self) -> Cluster:
        """Nodes of eight, with a network card for each device."""
        count = min(self.num_devices, DEVICES_PER_NODE)
        inside, card = LINKS[self.device.name]
        inside_link, between = Link(inside, 4e-6), Link(card, 5e-6)
        nodes = self.num_devices // count
        group = NodeGroup(NODE, nodes, (), ((self.device.name, count),), inside_link, cards=count)
        return Cluster(self.name, (group,), {self.device.name: self.device}, {(NODE, NODE): between})


_A100 = catalogue()["A100-SXM4-80GB"]
# Grand Teton's: 96 GB of HBM2e, 500 W. Its peak is lower than the H100's that torchtitan divides by, nobody says how.
_H100 = replace(
    catalogue()["H100-SXM5-80GB"],
    name="H100-HBM2e-96GB",
    memory_bytes=96 * 10**9,
    memory_bytes_per_second=2.4e12,
    board_watts=500.0,
    source="torchtitan's benchmark",
)
# One way, bytes per second: between two devices of a node, and of a device's own network card (200 and 400 Gbit/s).
_H100_700 = catalogue()["H100-SXM5-80GB"]
LINKS = {_A100.name: (300e9, 25e9), _H100.name: (450e9, 50e9), _H100_700.name: (450e9, 50e9)}

MEGATRON, KORTHIKANTI = "Megatron-LM, SC'21 table 1", "Korthikanti et al., 2022 (recalled)"
TITAN_A100, TITAN_H100 = "torchtitan docs/performance.md", "torchtitan, 2024-12"
TITAN_2025 = "torchtitan, 2025-06"
_VOCABULARY = 51_200


def gpt(num_blocks: int, width: int, num_heads: int) -> Published:
    """Megatron's: 2,048 tokens of 51,200 words; parameters as eq. 2 counts them, the head tied."""
    h, words = width, _VOCABULARY
    parameters = num_blocks * (12 * h * h + 13 * h) + (words + 2048) * h + 2 * h
    options = {"num_blocks": num_blocks, "width": width, "num_heads": num_heads}
    return Published("gpt", options, {"num_classes": words}, 2048, parameters, True, MEGATRON)


def _megatron(billions: str, heads: int, width: int, blocks: int, *rest: int) -> Training:
    """A row of the table: tensor and pipeline degree, devices, batch, TFLOP/s of a device with recomputation."""
    tensor, pipeline, devices, batch, teraflops = rest
    model = gpt(blocks, width, heads)
    # Eq. 3 counts a recomputed forward pass of the blocks, and none of the head.
    once = Training(billions, model, _A100, devices, batch, 0.0, MEGATRON).flops_per_token
    head = 6.0 * _VOCABULARY * width
    return Training(
        f"GPT {billions}",
        model,
        _A100,
        devices,
        batch,
        teraflops * 1e12 / (head + (once - head) * 4 / 3),
        MEGATRON,
        tensor,
        pipeline,
        # The source interleaves; with how many chunks it does not say.
        chunks=2 if pipeline > 1 and blocks % (2 * pipeline) == 0 else 1,
    )


def _recalled(case: iterations.Published) -> Training:
    it = case.iteration
    tokens = it.global_batch_size * it.sequence_length / case.seconds / it.num_devices
    return Training(
        f"GPT {case.name}, full recomputation",
        gpt(it.num_layers, it.hidden_size, it.num_heads),
        _A100,
        it.num_devices,
        it.global_batch_size,
        tokens,
        KORTHIKANTI,
        it.tensor_parallel,
        it.pipeline_parallel,
        it.microbatch_size,
        chunks=2 if it.model_chunks > 1 and it.num_layers % (2 * it.pipeline_parallel) == 0 else 1,
    )


def _titan(model: str, device: DeviceType, num_devices: int, each: int, tokens: float, **more: Any) -> Training:
    """FSDP, which shards weights, gradients and moments; `each`: examples of a replica, all in one microbatch."""
    replicas = num_devices // more.get("tensor_parallel", 1)
    source = TITAN_A100 if device is _A100 else TITAN_H100
    settings = {"source": source, "microbatch_size": each, "zero_level": 3, "recompute": "selective", **more}
    settings["sequence_parallel"] = more.get("tensor_parallel", 1) > 1
    return Training(
        f"Llama 3 {model.removeprefix('llama3-').upper()}",
        PUBLISHED[model],
        device,
        num_devices,
        each * replicas,
        tokens,
        **settings,
    )


def _beside(name: str, training: Training) -> Training:
    """The same, sent beside products."""
    return replace(training, name=f"Llama 3 {name}, async", beside_products=True)


def _recipe(recipe: hopper.Recipe) -> Iterator[Training]:
    """Yield NVIDIA's trainings of one model: nothing recomputed, and replicas share the optimizer's state."""
    sequence = recipe.model.sequence_length
    for devices, batch, seconds, percent in recipe.rows():
        yield Training(
            recipe.name,
            recipe.model,
            _H100_700,
            devices,
            batch,
            batch * sequence / (seconds * devices),
            hopper.NVIDIA,
            recipe.tensor_parallel,
            recipe.pipeline_parallel,
            microbatch_size=1,
            recompute="none",
            zero_level=1,
            sequence_parallel=recipe.tensor_parallel > 1,
            beside_products=recipe.tensor_parallel > 1,
            chunks=hopper.chunks_of(recipe.depth, recipe.pipeline_parallel, recipe.model.options["num_blocks"]),
            context_parallel=recipe.context_parallel,
            mfu_percent=percent,
        )


def _llama3(num_devices: int, teraflops: float, percent: float) -> Training:
    """2,048 examples of 8,192 tokens a step; `teraflops`: of one device each second.

    As its messages are, ZeRO 1: weights gathered and gradients scattered once a step (`hopper`).
    """
    one = Training(
        "Llama 3 405B",
        hopper.LLAMA_405B,
        _H100_700,
        num_devices,
        2048,
        0.0,
        hopper.LLAMA3,
        tensor_parallel=8,
        pipeline_parallel=16,
        recompute="none",
        zero_level=1,
        sequence_parallel=True,
        chunks=hopper.chunks_of(8, 16, 126),
        mfu_percent=percent,
    )
    return replace(one, tokens_per_second=teraflops * 1e12 / one.flops_per_token)


def _titan_405b(chunks: int, tokens: float, gib: float) -> Training:
    """On 512 devices, in 8 bits, microbatches of a size that is not published."""
    return Training(
        "Llama 3 405B",
        hopper.LLAMA_405B,
        _H100,
        512,
        256,
        tokens,
        TITAN_H100,
        tensor_parallel=8,
        pipeline_parallel=8,
        zero_level=1,
        sequence_parallel=True,
        chunks=chunks,
        memory_gib=gib,
        comparable=False,
    )


_MLPERF = Training(
    "GPT 175B, MLPerf",
    hopper.GPT_175B,
    _H100_700,
    512,
    2048,
    51_904_512 / (119.92 * 512),
    hopper.MLPERF,
    tensor_parallel=4,
    pipeline_parallel=8,
    microbatch_size=2,
    recompute="none",
    zero_level=1,
    sequence_parallel=True,
    chunks=4,
    comparable=False,
)


def _mpt(device: DeviceType, table: str) -> tuple[Training, ...]:
    return tuple(
        Training(
            f"MPT {name.upper()}, {tokens} tokens",
            mpt.model_of(name, tokens),
            device,
            devices,
            devices * microbatch * count,
            speed,
            mpt.SOURCE,
            microbatch_size=microbatch,
            recompute="full" if recompute else "none",
            zero_level=3,
        )
        for name, tokens, devices, microbatch, count, recompute, speed in mpt.rows_of(table)
    )


TRAININGS: tuple[Training, ...] = (
    _megatron("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    _megatron("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
    _megatron("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
    _megatron("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
    _megatron("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
    _megatron("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
    _megatron("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
    _megatron("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
    _megatron("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
    _megatron("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
    *(_recalled(case) for case in iterations.PUBLISHED),
    _titan("llama3-8b", _A100, 64, 1, 2973),
    _titan("llama3-70b", _A100, 64, 1, 331, recompute="full"),
    _titan("llama3-8b", _H100, 8, 2, 5762, memory_gib=82.4),
    _titan("llama3-8b", _H100, 128, 2, 5605, memory_gib=67.0),
    _titan("llama3-70b", _H100, 256, 16, 829, tensor_parallel=8, recompute="full", memory_gib=71.9, comparable=False),
    _titan("llama3-70b", _H100, 256, 16, 597.3, tensor_parallel=8, recompute="full", source=TITAN_2025),
    replace(_titan("llama3-8b", _H100, 64, 12, 4378, tensor_parallel=8, source=TITAN_2025), name="Llama 3 8B, TP 8"),
    _beside("70B", _titan("llama3-70b", _H100, 256, 16, 652.4, tensor_parallel=8, recompute="full", source=TITAN_2025)),
    _beside("8B, TP 8", _titan("llama3-8b", _H100, 64, 12, 4809.4, tensor_parallel=8, source=TITAN_2025)),
    *(one for recipe in hopper.RECIPES for one in _recipe(recipe)),
    _llama3(8192, 430, 43),
    _llama3(16384, 400, 41),
    _titan_405b(1, 100, 82.5),
    _titan_405b(2, 128, 72.7),
    _MLPERF,
    *_mpt(_H100_700, mpt.H100),
    *_mpt(_A100, mpt.A100),
)
