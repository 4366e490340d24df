"""One training iteration of Megatron's GPT as kernels: what each rank computes for one microbatch, shard by shard.

Shapes follow Shoeybi et al., 2019 (tensor parallelism) and Narayanan et al., SC 2021 (eq. 3 counts the same products).
Letters: B = sequences in an iteration, b = in a microbatch, s = tokens in a sequence, h = hidden size, a = heads,
t = tensor-parallel degree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from dejavu.foundation.errors import InputError
from dejavu.profiles.kernel import Kernel

HALF_BYTES, FLOAT_BYTES, MASK_BYTES = 2, 4, 1
STATE_BYTES = 16  # of a parameter: half-precision weight and gradient, float32 weight and two moments (Adam)
GPT2_VOCABULARY_SIZE = 50_257
VOCABULARY_MULTIPLE = 128  # Megatron's default of --make-vocab-size-divisible-by


class IterationError(InputError):
    """Settings of an iteration that Megatron could not run; the message names the setting."""


@dataclass(frozen=True, kw_only=True)
class MegatronIteration:
    """One iteration: `global_batch_size` sequences through a GPT, split over tensor × data × pipeline ranks.

    Attributes:
        vocabulary_size: before padding.
        vocabulary_multiple: each rank's part of the padded vocabulary is a multiple of it.
        recompute: every layer's forward is computed again in the backward pass, as Megatron's full recomputation.
        model_chunks: how many parts of the model each pipeline rank holds; more than 1: the interleaved schedule.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    sequence_length: int
    tensor_parallel: int
    data_parallel: int
    pipeline_parallel: int
    microbatch_size: int
    global_batch_size: int
    vocabulary_size: int = GPT2_VOCABULARY_SIZE
    vocabulary_multiple: int = VOCABULARY_MULTIPLE
    recompute: bool = False
    model_chunks: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and value < 1:
                raise IterationError(f"{field.name} is {value}; wanted 1 or more")
        for name, of, by_name, by in (
            ("hidden_size", self.hidden_size, "num_heads", self.num_heads),
            ("num_heads", self.num_heads, "tensor_parallel", self.tensor_parallel),
            ("hidden_size", self.hidden_size, "tensor_parallel", self.tensor_parallel),
            (
                "num_layers",
                self.num_layers,
                "pipeline_parallel × model_chunks",
                self.pipeline_parallel * self.model_chunks,
            ),
            (
                "global_batch_size",
                self.global_batch_size,
                "microbatch_size × data_parallel",
                self.microbatch_size * self.data_parallel,
            ),
        ):
            if of % by:
                raise IterationError(f"{name} is {of}; wanted a multiple of {by_name}, which is {by}")

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.data_parallel * self.pipeline_parallel

    @property
    def num_microbatches(self) -> int:
        """Of one pipeline, in one iteration."""
        return self.global_batch_size // (self.microbatch_size * self.data_parallel)

    @property
    def padded_vocabulary_size(self) -> int:
        multiple = self.vocabulary_multiple * self.tensor_parallel
        return ceil(self.vocabulary_size / multiple) * multiple

    @property
    def layer_parameters(self) -> int:
        """Of one layer on one rank: the four products' weights, their biases and the two normalizations."""
        h, t = self.hidden_size, self.tensor_parallel
        return 12 * h * h // t + 7 * h // t + 6 * h

    @property
    def embedding_parameters(self) -> int:
        """Of one rank of the first stage; the last stage holds as many words again, tied."""
        return self.padded_vocabulary_size // self.tensor_parallel * self.hidden_size

    @property
    def hidden_bytes(self) -> int:
        """What one microbatch hands to the next stage, and what a tensor-parallel all-reduce carries."""
        return self.microbatch_size * self.sequence_length * self.hidden_size * HALF_BYTES

    @property
    def fullest_stage_bytes(self) -> float:
        """On a device of the first stage, no recomputation: state, and the activations of all microbatches in flight.

        Activations of a layer are those of Korthikanti et al., 2022 (eq. 2, no sequence parallelism).
        """
        b, s, h, t = self.microbatch_size, self.sequence_length, self.hidden_size, self.tensor_parallel
        layer = s * b * h * (10 + 24 / t + 5 * self.num_heads * s / (h * t))
        held = min(self.num_microbatches, self.pipeline_parallel)
        num_layers = self.num_layers // self.pipeline_parallel
        state = STATE_BYTES * (self.layer_parameters * num_layers + self.embedding_parameters)
        words = self.padded_vocabulary_size // t
        logits = b * s * words * (HALF_BYTES + FLOAT_BYTES) if self.pipeline_parallel == 1 else 0
        return state + held * num_layers * layer + logits

    @property
    def model_flops(self) -> float:
        """Of one iteration on all devices, as Narayanan et al. count (SC 2021, eq. 3; 72 for 96 without recompute)."""
        B, s, h, layers = self.global_batch_size, self.sequence_length, self.hidden_size, self.num_layers
        passes = 4 if self.recompute else 3
        return B * s * (layers * passes * (24 * h * h + 4 * s * h) + 6 * h * self.padded_vocabulary_size)


def _matmul(name: str, m: int, n: int, k: int, batch: int = 1) -> Kernel:
    return Kernel(
        family="matmul",
        name=name,
        dtype="float16",
        batch=batch,
        m=m,
        n=n,
        k=k,
        flops=2.0 * batch * m * n * k,
        read_bytes=float(HALF_BYTES * batch * (m * k + k * n)),
        written_bytes=float(HALF_BYTES * batch * m * n),
    )


def _pass(family: str, name: str, m: int, n: int, read: float, written: float, dtype: str = "float16") -> Kernel:
    """A kernel bound by memory: m rows of n elements; `read` and `written` are bytes for each element."""
    return Kernel(
        family=family,
        name=name,
        dtype=dtype,
        m=m if family in ("softmax", "normalization", "reduction") else m * n,
        n=n if family in ("softmax", "normalization", "reduction") else 1,
        read_bytes=read * m * n,
        written_bytes=written * m * n,
    )


def _accumulate(elements: int) -> Kernel:
    """A weight's gradient is added to what earlier microbatches left."""
    return _pass("elementwise", "add", elements, 1, 2 * HALF_BYTES, HALF_BYTES)


def attention_forward(it: MegatronIteration) -> tuple[Kernel, ...]:
    """Normalization, attention and its projection: ends in a tensor-parallel all-reduce, then dropout and residual."""
    b, s, h, t = it.microbatch_size, it.sequence_length, it.hidden_size, it.tensor_parallel
    tokens, products, width = b * s, b * it.num_heads // t, h // it.num_heads
    scores = products * s
    return (
        _pass("normalization", "layer_norm", tokens, h, 2, 2),
        _matmul("qkv", tokens, 3 * h // t, h),
        _matmul("scores", s, s, width, products),
        _pass("softmax", "causal_softmax", scores, s, 2, 2),
        _pass("elementwise", "dropout", scores, s, 2, 2 + MASK_BYTES),
        _matmul("context", s, width, s, products),
        _pass("copy", "contiguous", tokens, h // t, 2, 2),
        _matmul("projection", tokens, h, h // t),
        _pass("elementwise", "bias_dropout_add", tokens, h, 4, 2 + MASK_BYTES),
    )


def mlp_forward(it: MegatronIteration) -> tuple[Kernel, ...]:
    """Normalization and the two products of width 4h: ends in a tensor-parallel all-reduce, dropout and residual."""
    tokens, h, t = it.microbatch_size * it.sequence_length, it.hidden_size, it.tensor_parallel
    return (
        _pass("normalization", "layer_norm", tokens, h, 2, 2),
        _matmul("mlp_up", tokens, 4 * h // t, h),
        _pass("elementwise", "bias_gelu", tokens, 4 * h // t, 2, 2),
        _matmul("mlp_down", tokens, h, 4 * h // t),
        _pass("elementwise", "bias_dropout_add", tokens, h, 4, 2 + MASK_BYTES),
    )


def _linear_backward(name: str, tokens: int, out: int, into: int) -> tuple[Kernel, ...]:
    """Gradients to the input and to the weight, and the sum into earlier microbatches' gradient."""
    return (
        _matmul(f"{name}_input_gradient", tokens, into, out),
        _matmul(f"{name}_weight_gradient", out, into, tokens),
        _accumulate(out * into),
    )


def _bias_backward(tokens: int, width: int) -> tuple[Kernel, ...]:
    return (_pass("reduction", "sum", width, tokens, 2, 0), _accumulate(width))


def _normalization_backward(tokens: int, h: int) -> tuple[Kernel, ...]:
    """Gradients to the input; to scale and shift; the sums into earlier gradients; and the residual's gradient."""
    return (
        _pass("normalization", "layer_norm_backward", tokens, h, 4, 2),
        _pass("reduction", "layer_norm_weight_gradient", h, tokens, 4, 0),
        _accumulate(h),
        _accumulate(h),
        _pass("elementwise", "add", tokens, h, 4, 2),
    )


def mlp_backward(it: MegatronIteration) -> tuple[Kernel, ...]:
    tokens, h, t = it.microbatch_size * it.sequence_length, it.hidden_size, it.tensor_parallel
    return (
        _pass("elementwise", "dropout_backward", tokens, h, 2 + MASK_BYTES, 2),
        *_bias_backward(tokens, h),
        *_linear_backward("mlp_down", tokens, h, 4 * h // t),
        _pass("elementwise", "bias_gelu_backward", tokens, 4 * h // t, 4, 2),
        *_bias_backward(tokens, 4 * h // t),
        *_linear_backward("mlp_up", tokens, 4 * h // t, h),
        *_normalization_backward(tokens, h),
    )


def attention_backward(it: MegatronIteration) -> tuple[Kernel, ...]:
    b, s, h, t = it.microbatch_size, it.sequence_length, it.hidden_size, it.tensor_parallel
    tokens, products, width = b * s, b * it.num_heads // t, h // it.num_heads
    scores = products * s
    return (
        _pass("elementwise", "dropout_backward", tokens, h, 2 + MASK_BYTES, 2),
        *_bias_backward(tokens, h),
        *_linear_backward("projection", tokens, h, h // t),
        _pass("copy", "contiguous", tokens, h // t, 2, 2),
        _matmul("context_probability_gradient", s, s, width, products),
        _matmul("context_value_gradient", s, width, s, products),
        _pass("elementwise", "dropout_backward", scores, s, 2 + MASK_BYTES, 2),
        _pass("softmax", "softmax_backward", scores, s, 4, 2),
        _matmul("scores_query_gradient", s, width, s, products),
        _matmul("scores_key_gradient", s, width, s, products),
        _pass("copy", "cat", tokens, 3 * h // t, 2, 2),
        *_bias_backward(tokens, 3 * h // t),
        *_linear_backward("qkv", tokens, 3 * h // t, h),
        *_normalization_backward(tokens, h),
    )


def embedding_forward(it: MegatronIteration) -> tuple[Kernel, ...]:
    """Words looked up (others' words masked where t > 1), positions added, dropout."""
    tokens, h = it.microbatch_size * it.sequence_length, it.hidden_size
    return (
        _pass("gather", "embedding", tokens, h, 2, 2),
        _pass("gather", "embedding", tokens, h, 2, 2),
        _pass("elementwise", "add", tokens, h, 4, 2),
        _pass("elementwise", "dropout", tokens, h, 2, 2 + MASK_BYTES),
    )


def embedding_backward(it: MegatronIteration) -> tuple[Kernel, ...]:
    """The words' gradient is dense: zeroed, scattered into, and added to earlier microbatches'."""
    tokens, h, words = it.microbatch_size * it.sequence_length, it.hidden_size, it.embedding_parameters
    return (
        _pass("elementwise", "dropout_backward", tokens, h, 2 + MASK_BYTES, 2),
        _pass("copy", "zero", words, 1, 0, HALF_BYTES),
        _pass("gather", "embedding_backward", tokens, h, 4, 2),
        _accumulate(words),
        _pass("gather", "embedding_backward", tokens, h, 4, 2),
        _accumulate(it.sequence_length * h),
    )


def head_forward(it: MegatronIteration) -> tuple[Kernel, ...]:
    """The last normalization, logits, and Megatron's cross entropy over the vocabulary's shards, in float32."""
    tokens, h, words = it.microbatch_size * it.sequence_length, it.hidden_size, it.embedding_parameters
    shard = words // h
    return (
        _pass("normalization", "layer_norm", tokens, h, 2, 2),
        _matmul("logits", tokens, shard, h),
        _pass("elementwise", "to_float", tokens, shard, HALF_BYTES, FLOAT_BYTES),
        _pass("reduction", "max", tokens, shard, FLOAT_BYTES, 0, "float32"),
        _pass("elementwise", "sub", tokens, shard, FLOAT_BYTES, FLOAT_BYTES, "float32"),
        _pass("elementwise", "exp", tokens, shard, FLOAT_BYTES, FLOAT_BYTES, "float32"),
        _pass("reduction", "sum", tokens, shard, FLOAT_BYTES, 0, "float32"),
        _pass("elementwise", "div", tokens, shard, FLOAT_BYTES, FLOAT_BYTES, "float32"),
        # The masks, look-ups and sums over one number a token: comparisons, two masked fills, two looks, logarithm,
        # difference, and the mean under the loss mask.
        *(_pass("elementwise", "by_token", tokens, 1, FLOAT_BYTES, FLOAT_BYTES, "float32") for _ in range(14)),
    )


def head_backward(it: MegatronIteration) -> tuple[Kernel, ...]:
    tokens, h, words = it.microbatch_size * it.sequence_length, it.hidden_size, it.embedding_parameters
    shard = words // h
    return (
        *(_pass("elementwise", "by_token", tokens, 1, FLOAT_BYTES, FLOAT_BYTES, "float32") for _ in range(6)),
        _pass("elementwise", "mul", tokens, shard, FLOAT_BYTES, FLOAT_BYTES, "float32"),
        _pass("elementwise", "to_half", tokens, shard, FLOAT_BYTES, HALF_BYTES, "float32"),
        *_linear_backward("logits", tokens, shard, h),
        *_normalization_backward(tokens, h)[:-1],
    )


def optimizer_step(it: MegatronIteration, parameters: int) -> tuple[Kernel, ...]:
    """Mixed-precision Adam, fused (Micikevicius et al., ICLR 2018; apex): 20 bytes of state for each parameter.

    Gradients are zeroed, turned to float32 and unscaled, checked for overflow and measured for clipping; Adam reads and
    writes weight, two moments, and reads the gradient; the new weights are copied to float16.
    """
    return (
        _pass("copy", "zero", parameters, 1, 0, HALF_BYTES),
        _pass("elementwise", "unscale", parameters, 1, HALF_BYTES, FLOAT_BYTES),
        _pass("reduction", "norm", 1, parameters, FLOAT_BYTES, 0, "float32"),
        _pass("elementwise", "adam", parameters, 1, 4 * FLOAT_BYTES, 3 * FLOAT_BYTES, "float32"),
        _pass("elementwise", "to_half", parameters, 1, FLOAT_BYTES, HALF_BYTES, "float32"),
    )
