"""MosaicML's table of MPT trainings: 98 on A100 and H100, with sequences of 512 to 65,536 tokens.

Source: mosaicml/llm-foundry, scripts/train/benchmarking/README.md (commit 061f2c7), rows in mixed bfloat16, read
2026-11-24, when the predictor was finished: nothing was fitted on them. FSDP shards weights, gradients and moments;
all blocks are recomputed or none. Of the multi-node H100 rows the source does not say the network; each device is
taken to have a card of 400 Gbit/s.

A row: devices, microbatch of a device, microbatches, whether all is recomputed (r), tokens a second of one device.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published import Published

SOURCE = "MosaicML llm-foundry's MPT table"
WORDS = 50_368
# Blocks, width, heads, and the parameters that the source counts at 2,048 tokens, the head tied.
MODELS = {
    "125m": (12, 768, 12, 125_311_488),
    "350m": (24, 1024, 16, 355_985_408),
    "760m": (24, 1536, 12, 760_470_528),
    "1b": (24, 2048, 16, 1_315_950_592),
    "3b": (32, 2560, 20, 2_651_837_440),
    "7b": (32, 4096, 32, 6_658_859_008),
    "13b": (40, 5120, 40, 12_853_954_560),
    "30b": (48, 7168, 56, 29_975_214_080),
    "70b": (80, 8192, 64, 64_862_437_376),
}
H100 = """
70b 2048: 64 8 4 r 1039, 32 2 16 r 882
30b 8192: 8 1 21 r 1384
30b 4096: 8 1 21 r 1802
30b 2048: 32 14 3 r 2308, 16 10 3 r 2263, 8 3 21 r 2002
30b 1024: 8 6 21 r 2084
13b 32768: 8 1 3 r 1976
13b 16384: 8 3 3 r 2985
13b 4096: 8 10 3 r 4717
13b 2048: 64 2 1 - 4800, 32 2 1 - 4811, 16 2 1 - 4767, 8 2 1 - 4792
13b 1024: 8 40 3 r 5502
7b 65536: 8 1 2 r 1956
7b 32768: 8 2 2 r 3318
7b 8192: 8 8 2 r 6935
7b 4096: 8 16 2 r 8611
7b 2048: 8 6 1 - 10643
7b 1024: 8 64 2 r 10203
3b 65536: 8 1 2 r 3262
3b 32768: 8 3 6 r 5873
3b 16384: 8 1 6 - 11152
3b 8192: 8 3 6 - 16578
3b 4096: 8 5 6 - 20964
3b 2048: 64 6 3 - 22525, 32 6 3 - 23021, 16 10 3 - 24142
3b 1024: 8 20 6 - 27046
3b 512: 8 40 6 - 27965
1b 65536: 8 1 2 r 5506
1b 32768: 8 1 4 - 12025
1b 16384: 8 2 4 - 19649
1b 8192: 8 3 4 - 29157
1b 4096: 8 7 4 - 38535
1b 2048: 64 20 1 - 44402, 32 20 1 - 45130, 16 20 1 - 46037, 8 14 1 - 45455
1b 1024: 8 18 4 - 48910
1b 512: 8 56 4 - 52275
760m 32768: 8 1 2 - 16291
760m 16384: 8 3 2 - 27815
760m 8192: 8 6 2 - 41825
760m 4096: 8 12 2 - 55459
760m 2048: 32 24 1 - 67971, 16 24 1 - 68551, 8 24 2 - 63147
760m 1024: 8 48 2 - 78581
760m 512: 8 96 2 - 83749
"""
A100 = """
30b 8192: 8 1 21 r 574
30b 4096: 8 1 21 r 814
30b 2048: 8 3 21 r 916
30b 1024: 8 6 21 r 946
30b 512: 8 12 21 r 967
13b 32768: 8 1 3 r 1016
13b 16384: 8 3 3 r 1431
13b 8192: 8 5 3 r 1795
13b 4096: 8 10 3 r 2060
13b 2048: 8 2 3 - 2262
13b 1024: 8 40 3 r 2330
7b 65536: 8 1 2 r 1013
7b 32768: 8 2 2 r 1672
7b 16384: 8 4 2 r 2453
7b 8192: 8 8 2 r 3206
7b 4096: 8 16 2 r 3684
7b 2048: 8 6 2 - 4641
7b 1024: 8 64 2 r 4357
3b 65536: 8 1 2 r 1767
3b 32768: 8 3 6 r 3029
3b 16384: 8 1 6 - 5529
3b 8192: 8 3 6 - 7695
3b 4096: 8 5 6 - 9457
3b 2048: 8 10 2 - 10811
3b 1024: 8 20 6 - 11580
3b 512: 8 40 6 - 12127
1b 65536: 8 1 2 r 3044
1b 32768: 8 1 4 - 6275
1b 16384: 8 2 4 - 9956
1b 8192: 8 3 4 - 13814
1b 4096: 8 7 4 - 17807
1b 2048: 8 14 4 - 20513
1b 1024: 8 18 4 - 22112
1b 512: 8 56 4 - 23148
760m 65536: 8 1 2 r 4143
760m 32768: 8 1 2 - 8802
760m 16384: 8 3 2 - 14274
760m 8192: 8 6 2 - 20933
760m 4096: 8 12 2 - 27351
760m 2048: 8 24 2 - 32434
760m 1024: 8 48 2 - 29765
760m 512: 8 96 2 - 29446
350m 65536: 8 1 2 - 7524
350m 8192: 8 8 2 - 36569
350m 2048: 8 32 2 - 58782
350m 512: 8 128 2 - 69330
125m 32768: 8 2 2 - 36407
125m 2048: 8 32 2 - 141737
125m 512: 8 128 2 - 165681
"""


def model_of(name: str, sequence_length: int) -> Published:
    """Return an MPT model, whose table of positions is as long as its sequences."""
    num_blocks, width, num_heads, at_2048 = MODELS[name]
    options = {"num_blocks": num_blocks, "width": width, "num_heads": num_heads}
    parameters = at_2048 + (sequence_length - 2048) * width
    return Published("gpt", options, {"num_classes": WORDS}, sequence_length, parameters, True, SOURCE)


def rows_of(table: str) -> Iterator[tuple[str, int, int, int, int, bool, float]]:
    """Yield model, tokens, devices, microbatch, microbatches, whether all is recomputed, and tokens a second."""
    for line in table.strip().splitlines():
        head, rest = line.split(":")
        name, tokens = head.split()
        for row in rest.split(","):
            devices, microbatch, count, recompute, speed = row.split()
            yield name, int(tokens), int(devices), int(microbatch), int(count), recompute == "r", float(speed)
