"""Models that others have published: how they are written as workloads, and how many parameters their papers count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dejavu.workload import Workload

IMAGES = {"num_classes": 1000, "image_shape": (3, 224, 224)}


@dataclass(frozen=True)
class Published:
    """One published model.

    Attributes:
        num_parameters: what the source counts, tied weights once.
        exact: whether the source gives every digit; otherwise it is rounded, and it holds to 3 %.
    """

    model: str
    options: dict[str, Any]
    synthetic: dict[str, Any]
    sequence_length: int
    num_parameters: int
    exact: bool
    source: str

    def workload(self, microbatch_size: int = 1, num_microbatches: int = 8, **fields: Any) -> Workload:
        return Workload(
            model=self.model,
            model_options=self.options,
            data="synthetic",
            synthetic=self.synthetic,
            sequence_length=self.sequence_length,
            batch_size=microbatch_size * num_microbatches,
            num_microbatches=num_microbatches,
            **fields,
        )


def _heads(num_blocks: int, width: int, num_heads: int, **more: Any) -> dict[str, Any]:
    return {"num_blocks": num_blocks, "width": width, "num_heads": num_heads, **more}


def _t5(num_blocks: int, width: int, num_heads: int, head_width: int, feedforward: int) -> dict[str, Any]:
    return _heads(num_blocks, width, num_heads, head_width=head_width, feedforward=feedforward)


def _moe(num_blocks: int, width: int, num_experts: int) -> dict[str, Any]:
    return _heads(num_blocks, width, 16, num_experts=num_experts)


def _grouped(num_blocks: int, width: int, num_heads: int, feedforward: int) -> dict[str, Any]:
    return _heads(num_blocks, width, num_heads, num_kv_heads=8, feedforward=feedforward)


def _alpa(blocks: tuple[int, ...], width: int, width_factor: int) -> dict[str, Any]:
    return {"blocks": blocks, "width": width, "width_factor": width_factor, "widened": "output"}


_50, _101 = (3, 4, 6, 3), (3, 4, 23, 3)
_GPT2, _BERT, _T5, _MOE, _LLAMA3 = ({"num_classes": size} for size in (50257, 30522, 32128, 32000, 128256))
_HF = "transformers, counted from its config"
_VISION = "torchvision's table of models"
_DAPPLE = "Fan et al., PPoPP 2021"
_ALPA = "Zheng et al., OSDI 2022, and Alpa's benchmark suite"

PUBLISHED: dict[str, Published] = {
    "gpt2": Published("gpt", _heads(12, 768, 12), _GPT2, 1024, 124_439_808, True, _HF),
    "gpt2-xl": Published("gpt", _heads(48, 1600, 25), _GPT2, 1024, 1_557_611_200, True, _HF),
    "gpt3-175b": Published(
        "gpt", _heads(96, 12288, 96), _GPT2, 2048, 174_600_000_000, False, "Brown et al., 2020, table D.1"
    ),
    "llama3-8b": Published("llama", _grouped(32, 4096, 32, 14336), _LLAMA3, 8192, 8_030_261_248, True, _HF),
    "llama3-70b": Published("llama", _grouped(80, 8192, 64, 28672), _LLAMA3, 8192, 70_553_706_496, True, _HF),
    "mixtral-8x7b": Published("mixtral", _grouped(32, 4096, 32, 14336), _MOE, 4096, 46_702_792_704, True, _HF),
    "bert-base": Published("bert", _heads(12, 768, 12), _BERT, 512, 109_514_298, True, _HF),
    "bert-large": Published("bert", _heads(24, 1024, 16), _BERT, 512, 335_174_458, True, _HF),
    "bert-48": Published("bert", _heads(48, 1024, 16), _BERT, 512, 640_000_000, False, _DAPPLE),
    "t5-base": Published("t5", _t5(12, 768, 12, 64, 3072), _T5, 1024, 222_903_552, True, _HF),
    "t5-3b": Published("t5", _t5(24, 1024, 32, 128, 16384), _T5, 1024, 2_851_598_336, True, _HF),
    "t5-11b": Published("t5", _t5(24, 1024, 128, 128, 65536), _T5, 1024, 11_307_321_344, True, _HF),
    "moe-380m": Published("moe", _moe(8, 768, 8), _MOE, 1024, 380_000_000, False, _ALPA),
    "moe-2.4b": Published("moe", _moe(16, 1024, 16), _MOE, 1024, 2_400_000_000, False, _ALPA),
    "moe-70b": Published("moe", _moe(32, 2048, 64), _MOE, 1024, 70_000_000_000, False, _ALPA),
    "vgg-16": Published("vgg", {"convolutions": (2, 2, 3, 3, 3)}, IMAGES, 128, 138_357_544, True, _VISION),
    "vgg-19": Published("vgg", {}, IMAGES, 128, 143_667_240, True, _VISION),
    "wide-resnet-50-2": Published("wide_resnet", {}, IMAGES, 128, 68_883_240, True, _VISION),
    "wide-resnet-101-2": Published("wide_resnet", {"blocks": _101}, IMAGES, 128, 126_886_696, True, _VISION),
    "wide-resnet-1b": Published("wide_resnet", _alpa(_50, 320, 2), IMAGES, 128, 1_000_000_000, False, _ALPA),
    "wide-resnet-13b": Published("wide_resnet", _alpa(_101, 320, 16), IMAGES, 128, 13_000_000_000, False, _ALPA),
}
