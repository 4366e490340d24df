"""What is to be trained: the model, its data, one step's batch, and how it goes through the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    StrictBool,
    ValidationInfo,
    field_validator,
)

from dejavu.foundation.units import plural
from dejavu.plans.schedule import CHIMERA, SCHEDULES
from dejavu.workload.data_settings import (
    ExamplesSettings,
    ImageFolderSettings,
    ParquetSettings,
    SyntheticSettings,
    TokenizerSettings,
    TokensSettings,
)
from dejavu.workload.gradient_settings import GradientSettings
from dejavu.workload.record import AbsentError, GivenPath, Number, Positive, Record, Whole
from dejavu.workload.training_settings import COMPARED_PART, OptimizerSettings, ReplanSettings, TrialSettings

AUTO = "auto"
MOST_COUNTED = 999_999_999  # examples of a step, positions of one: more is a mistake, and their product overflows
HAVE_A_TEST_PART = ("cifar10", "examples")  # data that may be evaluated where nothing is held out


# a key: the data that it is for, and its description where that data needs it
_OF_DATA = {
    "text": ("text", ""),
    "images": ("cifar10", "the folder with CIFAR-10's binary files"),
    "synthetic": ("synthetic", "the shape of random examples, as {num_classes: 10}"),
    "tokens": ("tokens", "the file, as {path: my.bin, vocabulary: 32000}"),
    "parquet": ("parquet", "the file and its columns, as {path: my.parquet, features: [a, b], target: c}"),
    "image_folder": ("image_folder", "the folder and its images' shape, as {path: photographs, shape: [3, 64, 64]}"),
    "examples": ("examples", "the factory of a torch Dataset, as {factory: mydata:make, num_classes: 10}"),
}


def whole_backward_schedules() -> tuple[str, ...]:
    """Return the schedules that run each backward pass as one."""
    return tuple(name for name, schedule in SCHEDULES.items() if not schedule.splits_backward)


class Workload(Record):
    """What is to be trained.

    Attributes:
        model: a name of the zoo, `package.module:factory` that returns a module or a `Model`, or `hf:config.json`.
        model_options: settings of that model.
        data: a name of `dejavu.workload.data.DATASETS`, as `text` (characters), `digits` (scikit-learn's images),
            `cifar10`, `tokens` (a file of them), `parquet`, `image_folder`, `examples` (a Dataset of torch's) or
            `synthetic` (random, of any shape).
        text: a file or folder of text; None: the text of Python's own standard library found on this machine.
        images: the folder of CIFAR-10's binary files, exactly where data is cifar10.
        synthetic: the shape of random examples.
        tokens: the file of tokens, exactly where data is tokens.
        held_out: share of the examples that are never trained on, to test with; which ones depends on `seed`. Of a text
            or of tokens it is whole 64ths. cifar10 has test examples of its own, which are taken where this is 0.
        sequence_length: characters or tokens in one example, where the data is no images.
        mixed_precision: layers compute in `bfloat16` (`true`: likewise) or `float16` where torch's autocast holds that
            safe; weights, gradients and what crosses a cut stay float32. With float16 the loss is scaled.
        batch_size: examples in one step, over all devices.
        schedule: which pipeline schedule; `auto`: the one whose simulated step is shortest. `chimera` is 1F1B with
            `both_ways`.
        both_ways: half of the microbatches go down the ranks, and half up through a second copy of the model.
        accumulate: how often the schedule runs in a step, each time with an equal part of the batch: gradients add up
            beyond its microbatches, and what it holds of them (messages, activations) is that of one run.
        slices: into how many slices, alike but for one position, each sequence of a causal decoder is cut, or their
            lengths in order: a stage runs one while the one before is in the next stage (TeraPipe). 1: it is whole;
            `auto`: as is predicted to be faster where `schedule` is `auto`, too, and whole elsewhere.
        num_microbatches: into how many equal parts each run of the schedule is split (gradient accumulation, too).
        dtype: of the weights, gradients and activations.
        optimizer: which one, and its settings.
        gradients: by which rule those of a stage's replicas become one: `mean`, or one that withstands faulty devices,
            as `suspicion` or `{rule: suspicion, num_suspected: 2, per: layer}`.
        num_steps: length of the whole training, the winning trial's own steps included.
        checkpoint_every: steps between two checkpoints; the last two are kept, and the best of those evaluated. `auto`:
            so many, 10 or more, that a checkpoint takes about a fiftieth of the time from one to the next.
        compare: measure the plan's gain: some steps of it and of the best baseline in turn. None: where that is
            expected to take no longer than 20 s.
        seed: of the order of the data, the split and the trials; two equal runs train the same.
        pretrained: start from saved weights (safetensors): true is the folder that `hf:PATH` names; else a folder or
            a file, with the names of the plain module or of transformers. No initial weights are tried then.
        trials: which initial weights are tried before the training, and for how long.
        replan: what happens when a rank, host or link goes, slows down or comes while the training runs.
        evaluate_every: steps between two evaluations of the loss on what is held out; one follows the last step.
            0: none.
        evaluation_examples: how many held-out examples that loss is the mean of, in whole batches.
        tokenizer: makes tokens of the text, which may then be JSON lines, too; None: characters are trained on.
        parquet: the file and its columns, exactly where data is parquet.
        image_folder: the folder and the shape of its images, exactly where data is image_folder.
        examples: the factory of a torch Dataset, exactly where data is examples.
        compile: each layer is compiled (torch.compile) by the rank that trains it; for schedules that run whole
            backward passes.
        checkpoints: where complete checkpoints are copied beside the project's folder, each training into a folder of
            its own: a URL that fsspec writes, as `s3://bucket/runs` or `file:///shared/runs`; None: nowhere.
    """

    model: str = "gpt"
    model_options: dict[str, Any] = Field({})
    data: str = "text"
    text: GivenPath | None = None
    images: GivenPath | None = None
    synthetic: SyntheticSettings | None = None
    tokens: TokensSettings | None = None
    held_out: Number = Field(0.0, ge=0, lt=1)
    sequence_length: Whole = Field(128, ge=2, le=MOST_COUNTED)
    batch_size: Whole = Field(32, ge=1, le=MOST_COUNTED)
    accumulate: Whole = Field(1, ge=1)
    num_microbatches: Whole = Field(8, ge=1)
    slices: Literal["auto"] | Positive | tuple[Positive, ...] = "auto"
    schedule: str = AUTO
    both_ways: StrictBool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    mixed_precision: bool | Literal["bfloat16", "float16"] = False
    optimizer: OptimizerSettings = OptimizerSettings()
    gradients: GradientSettings = GradientSettings()
    num_steps: Whole = Field(160, ge=1)
    checkpoint_every: Literal["auto"] | Positive = "auto"
    compare: bool | None = None
    seed: Whole = Field(0, ge=0, lt=2**31)
    pretrained: StrictBool | GivenPath = False
    trials: TrialSettings = TrialSettings()
    replan: ReplanSettings = ReplanSettings()
    evaluate_every: Whole = Field(0, ge=0)
    evaluation_examples: Whole = Field(256, ge=1)
    tokenizer: TokenizerSettings | None = None
    parquet: ParquetSettings | None = None
    image_folder: ImageFolderSettings | None = None
    examples: ExamplesSettings | None = None
    compile: StrictBool = False
    checkpoints: str | None = Field(None, pattern=r"^[0-9a-z+.-]+://.+")

    @field_validator("both_ways")
    @classmethod
    def _chimera_goes_both_ways(cls, both_ways: bool, info: ValidationInfo) -> bool:
        return both_ways or info.data.get("schedule") == CHIMERA

    @field_validator("optimizer")
    @classmethod
    def _masters_are_wider(cls, optimizer: OptimizerSettings, info: ValidationInfo) -> OptimizerSettings:
        if optimizer.master_weights and info.data.get("dtype") != "bfloat16":
            raise ValueError(
                f"master_weights is for bfloat16 weights, and dtype is {info.data.get('dtype')!r}: float32 weights are "
                "their own masters; wanted dtype: bfloat16, or no master_weights"
            )
        return optimizer

    @field_validator("mixed_precision")
    @classmethod
    def _scaled_gradients_are_wide(cls, found: bool | str, info: ValidationInfo) -> bool | str:
        if found == "float16" and info.data.get("dtype") != "float32":
            raise ValueError(
                f"mixed_precision float16 keeps weights and gradients in float32, and dtype is "
                f"{info.data.get('dtype')!r}; wanted dtype: float32, or mixed_precision: bfloat16"
            )
        return found

    @field_validator("gradients")
    @classmethod
    def _an_overflow_is_no_fault(cls, gradients: GradientSettings, info: ValidationInfo) -> GradientSettings:
        if gradients.gathers and info.data.get("mixed_precision") == "float16":
            raise ValueError(
                f"gradients {gradients.rule} leaves out replicas whose gradients are not finite, and with "
                "mixed_precision float16 the scale of the loss is found by gradients that are not; wanted "
                "mixed_precision: bfloat16, or gradients: mean"
            )
        if gradients.rule == "zeno" and not info.data.get("held_out") and info.data.get("data") not in HAVE_A_TEST_PART:
            raise ValueError(
                f"gradients zeno scores by held-out examples, but held_out is 0 and data {info.data.get('data')!r} has "
                "no test part of its own; wanted a share of the examples, as held_out: 0.1"
            )
        return gradients

    @field_validator(*_OF_DATA)
    @classmethod
    def _belongs_to_the_data(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject a key with data that it is not for, and where a needed one is absent."""
        key, found = info.field_name or "", info.data.get("data")
        if found is None:  # it is invalid itself, and reported
            return value
        data, needed = _OF_DATA[key]
        if value is not None and found != data:
            raise ValueError(f"{key} is given, but data is {found!r}; wanted data: {data}, or no {key}")
        if value is None and found == data and needed:
            raise ValueError(f"data is {found!r}, but the key {key} is missing; wanted {needed}")
        return value

    @field_validator("text")
    @classmethod
    def _text_is_there(cls, text: Path | None) -> Path | None:
        if text is not None and not text.exists():
            raise AbsentError(f"there is no file or folder {text}")
        return text

    @field_validator("images")
    @classmethod
    def _images_are_there(cls, images: Path | None) -> Path | None:
        if images is not None and not images.is_dir():
            raise AbsentError(f"there is no folder {images}; wanted the one with CIFAR-10's binary files")
        return images

    @field_validator("tokens")
    @classmethod
    def _tokens_are_there(cls, tokens: TokensSettings | None) -> TokensSettings | None:
        if tokens is not None and not tokens.path.is_file():
            raise AbsentError(f"there is no file {tokens.path}")
        return tokens

    @field_validator("tokenizer")
    @classmethod
    def _has_a_text(cls, tokenizer: TokenizerSettings | None, info: ValidationInfo) -> TokenizerSettings | None:
        data = info.data.get("data")
        if tokenizer is not None and data not in (None, "text", "parquet"):
            raise ValueError(f"tokenizer is given, but data is {data!r}; wanted data: text or parquet, or no tokenizer")
        if tokenizer is not None and data == "text" and info.data.get("text") is None:
            raise ValueError("tokenizer is given, but no text; wanted the file or folder, as text: corpus.jsonl")
        return tokenizer

    @field_validator("parquet")
    @classmethod
    def _columns_are_there(cls, parquet: ParquetSettings | None, info: ValidationInfo) -> ParquetSettings | None:
        if parquet is not None and "tokenizer" in info.data and (parquet.text is None) != (not info.data["tokenizer"]):
            raise ValueError("a column of text and a tokenizer belong together; wanted both, or neither")
        return parquet

    @field_validator("evaluate_every")
    @classmethod
    def _something_is_held_out(cls, evaluate_every: int, info: ValidationInfo) -> int:
        if evaluate_every and info.data.get("held_out") == 0 and info.data.get("data") not in HAVE_A_TEST_PART:
            raise ValueError(
                f"evaluate_every is {evaluate_every}, but held_out is 0 and data {info.data.get('data')!r} has no test "
                "part of its own; wanted a share of the examples to evaluate with, as held_out: 0.1"
            )
        return evaluate_every

    @field_validator("num_microbatches")
    @classmethod
    def _parts_are_equal(cls, num_microbatches: int, info: ValidationInfo) -> int:
        batch_size, runs = info.data.get("batch_size", 0), info.data.get("accumulate", 1)
        if batch_size % (runs * num_microbatches):
            among = f"{runs} runs of " if runs > 1 else ""
            raise ValueError(
                f"batch_size {batch_size} does not divide into {among}{num_microbatches} equal microbatches"
            )
        return num_microbatches

    @field_validator("schedule")
    @classmethod
    def _schedule_is_known(cls, schedule: str) -> str:
        if schedule not in (AUTO, CHIMERA, *SCHEDULES):
            raise ValueError(SCHEDULES.unknown(schedule, AUTO, CHIMERA))
        return schedule

    @field_validator("pretrained")
    @classmethod
    def _weights_are_somewhere(cls, pretrained: bool | Path, info: ValidationInfo) -> bool | Path:
        model = info.data.get("model", "")
        if pretrained is True and not model.startswith("hf:"):
            raise ValueError(
                f"true is for the folder of a model by hf:PATH, and model is {model!r}; wanted a folder or a file with "
                "weights as safetensors, such as `dejavu export` writes"
            )
        return pretrained

    @field_validator("trials")
    @classmethod
    def _trials_leave_something(cls, trials: TrialSettings, info: ValidationInfo) -> TrialSettings:
        num_steps = info.data.get("num_steps")
        if not num_steps or not trials.count or info.data.get("pretrained"):
            return trials
        if trials.steps is None and num_steps < COMPARED_PART:
            raise ValueError(
                f"num_steps {num_steps} is too short for trials, whose steps are part of it; "
                f"wanted num_steps of at least {COMPARED_PART}, or trials: {{count: 0}}"
            )
        if trials.longest(num_steps) >= num_steps:
            raise ValueError(
                f"trials: steps {trials.steps} leaves nothing of num_steps {num_steps} to train as a pipeline; "
                f"wanted steps of at most {num_steps - 1}, or trials: {{count: 0}}"
            )
        return trials

    @field_validator("compile")
    @classmethod
    def _backward_is_whole(cls, found: bool, info: ValidationInfo) -> bool:
        schedule = info.data.get("schedule", AUTO)
        if found and schedule in SCHEDULES and SCHEDULES[schedule].splits_backward:
            raise ValueError(
                f"schedule {schedule} runs the backward pass in two parts, and a compiled one is a single piece; "
                f"wanted one of {', '.join(whole_backward_schedules())}, auto, or compile: false"
            )
        return found

    @property
    def autocast(self) -> Literal["bfloat16", "float16"] | None:
        """The type in which layers compute where that is safe; None: that of the weights."""
        if isinstance(self.mixed_precision, bool):
            return "bfloat16" if self.mixed_precision else None
        return self.mixed_precision

    @property
    def num_trials(self) -> int:
        """How many initial weights are tried: none where the training starts from saved ones."""
        return 0 if self.pretrained else self.trials.count

    @property
    def trial_steps(self) -> int:
        """Steps of the longest trials."""
        return self.trials.longest(self.num_steps)

    @property
    def odd(self) -> str:
        """What is allowed here and yet hardly meant, in a sentence; empty: nothing is."""
        warmup, steps = self.optimizer.warmup_steps, self.num_steps
        if warmup <= steps:
            return ""
        return (
            f"optimizer: warmup_steps is {warmup:,}, and the training has {plural(steps, 'step')}: its learning rate "
            f"still rises when it ends, at {steps / warmup:.0%} of {self.optimizer.learning_rate:g}"
        )

    @property
    def in_slices(self) -> bool:
        """Whether it says that sequences are cut."""
        return self.slices not in (AUTO, 1)

    @property
    def planned_schedule(self) -> str:
        """The schedule that a plan has: that of either direction, where microbatches go in both."""
        return "1f1b" if self.schedule == CHIMERA else self.schedule

    @property
    def searched_schedule(self) -> str:
        """The schedule, with one stage per rank, by which searches price plans for this workload."""
        return "1f1b" if self.schedule == AUTO else SCHEDULES[self.planned_schedule].searched_as

    @property
    def run_size(self) -> int:
        """Examples in one run of the schedule."""
        return self.batch_size // self.accumulate

    @property
    def microbatch_size(self) -> int:
        """Examples in one microbatch."""
        return self.run_size // self.num_microbatches

    @property
    def microbatches_in_a_step(self) -> int:
        """Microbatches of all runs of the schedule."""
        return self.accumulate * self.num_microbatches
