"""A Llama-like model of 10 million parameters on 20 MB of tokens: `dejavu run` beside plain torch on as many cores.

Plain torch is one process with as many threads as there are ranks, without microbatches; half of its steps come before
the pipeline's and half after, since the machine drifts. One thread says what ideal ranks would do.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from dejavu.init import Draw
from dejavu.runtime.optimizer import make_optimizer, set_learning_rate
from dejavu.runtime.training import build_layers
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.loader import load_workload
from dejavu.workload.models import model_of

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
TEXT_BYTES, VOCABULARY = 20_000_000, 4096
MODEL = {"num_blocks": 10, "width": 256, "num_heads": 8, "num_kv_heads": 4, "feedforward": 704}
SEQUENCE, BATCH = 128, 16
WARMUP_STEPS = 3
ONE_THREAD_STEPS = 12
SHOWN = 10  # rows of the loss curves


def measure(
    steps: int, microbatches: int, tokens: Path | None, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train both; return the loss curves and the rates.

    Raises:
        RuntimeError: `dejavu run` failed; the message has the end of what it said.
    """
    with tempfile.TemporaryDirectory(prefix="dejavu-throughput-") as folder:
        project = Path(folder)
        path = tokens.resolve() if tokens else made_tokens(project)
        written = written_workload(project, path, steps, microbatches, seed)
        workload = load_workload(written)
        plain = Plain(workload, RANKS)
        plain.train(steps // 2)
        result = by_dejavu(project, written)
        plain.train(steps - steps // 2)
        alone = Plain(workload, 1)
        alone.train(ONE_THREAD_STEPS)
    per_step = workload.batch_size * workload.sequence_length
    ours, theirs, one = (per_step / seconds for seconds in (result["step_seconds"], plain.median, alone.median))
    ideal = RANKS * one * microbatches / (microbatches + RANKS - 1)
    places = sorted({round(k) for k in np.linspace(0, steps - 1, SHOWN)})
    rows = [
        {"step": step + 1, "loss_pipeline": result["losses"][step], "loss_plain_torch": plain.losses[step]}
        for step in places
    ]
    return rows, {
        "parameters": plain.num_parameters,
        "tokens_in_a_step": per_step,
        "microbatches": microbatches,
        "pipeline_tokens_per_second": ours,
        "plain_tokens_per_second": theirs,
        "one_thread_tokens_per_second": one,
        "ideal_tokens_per_second": ideal,
        "throughput_to_plain": ours / theirs,
        "throughput_to_ideal": ours / ideal,
        "ideal": f"{RANKS} × one thread, less the bubble of 1F1B: m / (m + {RANKS - 1})",
        "worst_loss_difference": max(abs(a - b) for a, b in zip(result["losses"], plain.losses, strict=True)),
        "plan": result["plan"],
    }


def made_tokens(folder: Path) -> Path:
    """Tokens of the source text of Python's library and of installed packages, by a byte-level BPE trained on it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts, size = list[str](), 0
    folders = [Path(sysconfig.get_path(one)) for one in ("stdlib", "purelib")]
    for path in itertools.chain.from_iterable(sorted(folder.rglob("*.py")) for folder in folders):
        try:
            texts.append(path.read_text())
        except (OSError, UnicodeDecodeError):
            continue
        size += len(texts[-1].encode())
        if size >= TEXT_BYTES:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts[::10], trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet))
    found = np.concatenate([np.array(one.ids, dtype=np.uint16) for one in tokenizer.encode_batch(texts)])
    path = folder / "tokens.bin"
    found.tofile(path)
    return path


def written_workload(folder: Path, tokens: Path, steps: int, microbatches: int, seed: int) -> Path:
    """Write the workload of both; the pipeline's plan is searched at this number of microbatches."""
    path = folder / "workload.json"
    path.write_text(
        json.dumps(
            {
                "model": "llama",
                "model_options": MODEL,
                "data": "tokens",
                "tokens": {"path": str(tokens), "vocabulary": VOCABULARY},
                "sequence_length": SEQUENCE,
                "batch_size": BATCH,
                "num_microbatches": microbatches,
                "num_steps": steps,
                "checkpoint_every": steps,
                "optimizer": {"learning_rate": 1e-3, "warmup_steps": 20, "decay": "cosine", "clip_norm": 1.0},
                "compare": False,
                "trials": {"count": 0},
                "seed": seed,
            }
        )
    )
    return path


class Plain:
    """The same model in one process: a batch forward and backward, and torch's optimizer."""

    def __init__(self, workload: Workload, threads: int) -> None:
        self.workload, self.threads = workload, threads
        self.module, self.loss = build_layers(workload, Draw(), torch.device("cpu")), model_of(workload).loss
        self.optimizer = make_optimizer(workload.optimizer, self.module.parameters())
        self.losses, self.seconds = list[float](), list[float]()
        self.num_parameters = sum(one.numel() for one in self.module.parameters())

    def train(self, steps: int) -> None:
        """Train so many steps more."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            for step in range(len(self.losses), len(self.losses) + steps):
                self._step(step)
        finally:
            torch.set_num_threads(before)

    def _step(self, step: int) -> None:
        inputs, targets = dataset_of(self.workload).batch(step, self.workload.batch_size, seed=self.workload.seed)
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss(self.module(inputs), targets)
        loss.backward()
        assert self.workload.optimizer.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.workload.optimizer.clip_norm)
        set_learning_rate(self.optimizer, self.workload, step)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())

    @property
    def median(self) -> float:
        return median(self.seconds[WARMUP_STEPS:] or self.seconds)


def by_dejavu(project: Path, workload: Path) -> dict[str, Any]:
    """Train by `dejavu run` in a project of its own: it measures, plans and trains; return what it wrote."""
    for name in ("prefect.yaml", "cluster.yaml", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, project / name)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    choice = ["--microbatches", str(load_workload(workload).num_microbatches)]
    done = subprocess.run(
        [sys.executable, "-m", "flows", "run", "--workload", str(workload), *choice],
        cwd=project,
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"dejavu run ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    (result,) = _results(project)
    job = json.loads((result.parent / "job.json").read_text())
    found = json.loads(result.read_text())
    plan = job["binding"]["plan"]
    return {
        "losses": found["losses"],
        "step_seconds": found["step_seconds"],
        "plan": f"{plan['schedule']}, {len(plan['stages'])} stages, {plan['num_microbatches']} microbatches",
    }


def _results(project: Path) -> Iterator[Path]:
    return (project / ".dejavu" / "runs").glob("*/result.json")
