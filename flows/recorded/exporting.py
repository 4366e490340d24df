"""`dejavu export`: from a run's name to files with its weights."""

from __future__ import annotations

from pathlib import Path

from dejavu.foundation.errors import InputError
from dejavu.runtime.job.export import Exported, export, kept_checkpoint
from dejavu.track import RunSummary
from flows.recorded.naming import run_named

LOADING = {
    "safetensors": "module.load_state_dict(safetensors.torch.load_file({file!r}))",
    "state_dict": "module.load_state_dict(torch.load({file!r}, weights_only=True))",
    "hf": "transformers.AutoModelForCausalLM.from_pretrained({folder!r})",
}


def exported(project: Path, run: str, to: str, out: Path | None, step: int | None, *, best: bool = False) -> Exported:
    """Write the weights of a run's training.

    Args:
        run: as `find_run` takes it, or the folder of a training.
        step, best: which checkpoint, as `kept_checkpoint` takes them.

    Raises:
        InputError: as `export`; or the run has trained nothing, or both a step and the best are wanted.
    """
    if best and step is not None:
        raise InputError(f"--best and --step {step} both say which checkpoint; wanted one of them")
    training = _training_of(project, run)
    checkpoint = kept_checkpoint(training, step, best=best)
    return export(training, checkpoint, to, out or Path("exported") / f"{training.name}-{checkpoint.name}")


def _training_of(project: Path, run: str) -> Path:
    if (project / run / "job.json").is_file():
        return project / run
    found = run_named(project, run, has_trained, "trains")
    if not found.folder:
        raise InputError(f"run {found.name} has trained nothing, so it has no weights")
    return Path(found.folder)


def has_trained(run: RunSummary) -> bool:
    """Return whether a run has trained, and its training is kept."""
    return bool(run.folder) and (Path(run.folder) / "job.json").is_file()


def sentence(found: Exported, to: str) -> str:
    """Say what was written, and how it is read."""
    loss = "" if found.loss is None else f", loss {found.loss:.4f}"
    loss += "" if found.held_out_loss is None else f", {found.held_out_loss:.4f} on what is held out"
    reading = LOADING[to].format(file=str(found.files[0]), folder=str(found.folder))
    return f"{found.num_weights} weights after step {found.step}{loss}: {found.folder}\n  {reading}"
