"""Published trainings on many H100: pipelines of interleaved stages, split sequences, bfloat16, and three in 8 bits.

All but the last was read on 2026-11-25, when the predictor was finished; nothing was fitted on any of it.

NVIDIA: NVIDIA/dgxc-benchmarking, seconds of a step in bfloat16 and "model flops utilization". GPT-3 175B:
nemo_megatron/README_175b.md (commit 0b71cfd) and gpt3_175b_hydra.yaml (35a9aec). Llama 3.1: llama3.1/README_8b.md,
README_70b.md, README_405b.md and configure.sh (all 143b90d), with NVIDIA/NeMo-Framework-Launcher,
launcher_scripts/conf/training/llama/llama3_1_8b.yaml (2ac7cee), llama3_1_70b.yaml (1ab2c78), llama3_1_405b.yaml
(072ecc4): nothing recomputed, split sequences, an optimizer whose state replicas share, sums beside computing, and what
tensor-parallel devices send beside products (`ub_tp_comm_overlap`). Their 405B has 16 heads of keys and values and
GPT-2's tokens "as a proxy"; its utilization is counted with Llama's 128,256 tokens (0.3 % more). On 2,048 H100 the
source's seconds and its utilization of 70B differ by 0.4 %; the seconds are taken. Of its network it says nothing: each
device is taken to have a card of 400 Gbit/s.

Llama 3: Dubey et al., 2024 (arXiv:2407.21783), table 4 and section 3.3.2, read in a text of the paper: 8,192 tokens,
nothing recomputed, interleaved stages of one block, one block fewer in the first and the last; FSDP that shards
gradients and moments. How often gradients are scattered it does not say. FSDP in torch's own pipelines does so once a
step, after the last microbatch (torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`), which is what
ZeRO 1 sends here; so it is priced. Tokens a second follow from its FLOP/s (given to ten TFLOP/s), counted as Chowdhery
et al. do. The size of microbatches it does not say.

In 8 bits, so they stand beside a prediction in 16 and are not compared. torchtitan: its repository's
benchmarks/llama3_h100_202412_torchtitan.md (commit 31a17bf), table 5; FSDP in torch's pipelines as above, and that it
keeps gathered weights there is recalled. MLPerf: mlcommons/training_results_v4.0, NVIDIA's GPT-3 on 64 nodes,
NVIDIA/benchmarks/gpt3/implementations/nemo/config_DGXH100_64x8x128x4x8_mbs2.sh and
NVIDIA/results/eos_n64_ngc24.04_nemo/gpt3/result_0.txt (commit 62f111b): 51,904,512 tokens in 119.92 s between two
evaluations, the mean of the last five (119.86 to 119.95).

Left out:
- Llama 3 405B with 131,072 tokens (16,384 H100, sequences split in 16, 38 %): attention stops at documents there, how
  long they are is not said, and attention is most of the work.
- NVIDIA's Llama of 7, 21 and 42 blocks (no model that anyone trains), Nemotron-4 15B and 340B (feed-forward networks
  without a gate beside grouped heads, which no model here has) and Grok-1 (its plan splits experts beside replicas).
- NVIDIA/Megatron-LM's README.md (commit 0010ab7), weak and strong scaling on up to 6,144 H100: its table is a picture,
  which could not be read; the text gives 41 to 48 % and, of 175B from 96 to 4,608 devices, 47 to 42 %.
- NVIDIA/NeMo, docs/source/performance/performance_summary.md (commit 070a0bb), and NVIDIA-NeMo/Megatron-Bridge,
  docs/performance-summary.md (00b7660): of dense models on H100 in 8 bits only.
- Other rows of MLPerf: GPT-3 and Llama 2 70B with low-rank adapters train in 8 bits too, and of BERT the logs give a
  time to train whose sequences are packed, not the length of any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.published import PUBLISHED, Published

NVIDIA, LLAMA3, MLPERF = "NVIDIA dgxc-benchmarking", "Llama 3, table 4", "MLPerf v4.0"
DEPTHS = (4, 2)  # of interleaved stages, as this project's schedules have them

# Its own count, and NVIDIA's with twice the heads of keys and values and GPT-2's tokens, padded to 51,200.
LLAMA_405B = Published(
    "llama",
    {"num_blocks": 126, "width": 16384, "num_heads": 128, "num_kv_heads": 8, "feedforward": 53248},
    {"num_classes": 128_256},
    8192,
    405_853_388_800,
    True,
    LLAMA3,
)
_PROXY_405B = replace(
    LLAMA_405B,
    options={**LLAMA_405B.options, "num_kv_heads": 16},
    synthetic={"num_classes": 51_200},
    num_parameters=407_556_276_224,
    source=NVIDIA,
)
# As NVIDIA's scripts have it: positions learned, the head tied, 50,257 tokens padded to 51,200.
GPT_175B = replace(
    PUBLISHED["gpt3-175b"], synthetic={"num_classes": 51_200}, num_parameters=174_615_846_912, exact=True, source=NVIDIA
)


@dataclass(frozen=True)
class Recipe:
    """One model and plan, trained on several numbers of devices, all in microbatches of one example.

    Attributes:
        tensor_parallel, pipeline_parallel, context_parallel: degrees.
        depth: stages on each pipeline rank in the source; 1: not interleaved.
        table: of each training: devices, examples of a step, seconds of a step, and the source's utilization in %.
    """

    name: str
    model: Published
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    depth: int
    table: str

    def rows(self) -> Iterator[tuple[int, int, float, float]]:
        """Yield devices, examples of a step, seconds of a step, and utilization in %."""
        for row in self.table.split(","):
            devices, batch, seconds, percent = row.split()
            yield int(devices), int(batch), float(seconds), float(percent)


RECIPES = (
    Recipe(
        "GPT 175B, NeMo", GPT_175B, 4, 8, 1, 12,
        "128 256 8.309 53.54, 256 512 8.408 52.91, 512 1024 8.42 52.84, 1024 2048 8.453 52.63, 2048 4096 8.49 52.40",
    ),
    Recipe(
        "Llama 3.1 8B, NeMo", PUBLISHED["llama3-8b"], 1, 1, 2, 1,
        "8 128 12.91 59.37, 16 256 13.00 58.96, 32 512 13.05 58.73, 64 1024 13.08 58.60, 128 2048 13.10 58.51",
    ),
    Recipe(
        "Llama 3.1 70B, NeMo", PUBLISHED["llama3-70b"], 4, 4, 2, 5,
        "64 128 14.72 54.10, 128 256 14.73 54.06, 256 512 14.8 53.81, 512 1024 14.89 53.48, 1024 2048 14.92 53.38, "
        "2048 4096 14.98 53.38",
    ),
    Recipe(
        "Llama 3.1 405B, NeMo", _PROXY_405B, 8, 9, 2, 7,
        "576 252 17.20 55.78, 1152 504 17.52 54.76, 2304 1008 17.62 54.45",
    ),
)  # fmt: skip


def chunks_of(depth: int, pipeline_parallel: int, num_blocks: int) -> int:
    """Return the deepest of this project's interleaved schedules that is no deeper, with as many layers in each stage.

    Embedding and head count as a block each where blocks alone do not go into equal parts.
    """
    for chunks in DEPTHS:
        stages = chunks * pipeline_parallel
        if chunks <= depth and 0 in (num_blocks % stages, (num_blocks + 2) % stages):
            return chunks
    return 1
