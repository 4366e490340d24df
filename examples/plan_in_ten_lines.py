"""Plan, explain and draw: a GPT of 400 million parameters on two generations of GPUs, in ten lines and without a GPU.

    python examples/plan_in_ten_lines.py

Writes `step.png`, the simulated step, into the current folder.
"""

from pathlib import Path

import dejavu

cluster = dejavu.load_cluster(Path(__file__).parent / "clusters" / "two-generations.yaml")
gpt = {"model": "gpt", "model_options": {"num_blocks": 24, "width": 1024, "num_heads": 16}, "sequence_length": 1024}
workload = dejavu.Workload(**gpt, data="synthetic", synthetic={"num_classes": 50257}, batch_size=32)
choice = dejavu.plan(workload, cluster, microbatches=(16,), parallelism=dejavu.Parallelism.one_device())
print(dejavu.explain(choice))
for stage, seconds in zip(choice.plan.stages, choice.chosen.price.stage_seconds, strict=True):
    print(f"layers {stage.start:2}–{stage.stop - 1:2} on {stage.configuration}: {1e3 * seconds:5.1f} ms a microbatch")
step = dejavu.simulate(choice.priced, choice.plan)
print(f"Devices wait for {step.bubble_fraction:.0%} of the step.")
dejavu.draw(step).savefig("step.png")
