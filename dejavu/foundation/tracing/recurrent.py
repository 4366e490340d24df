"""What oneDNN's LSTM multiplies, keeps and takes on CPUs, by layer: `aten.mkldnn_rnn_layer` and its backward pass.

Sizes as oneDNN lays them out (`src/cpu/rnn/rnn_utils.hpp`: `get_good_ld`, and the spaces of its workspace), in float32;
equal to torch 2.13's on every one of the shapes that the tests draw.

Letters: T steps, B sequences, I features of the input, H features of the state; a state has four gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GATES, FLOAT_BYTES, PAGE_BYTES = 4, 4, 4096
_VECTOR, _ALIASED = 16, 256  # rows are whole vectors of floats, and never of a length that shares cache lines
_FIXED_BYTES = PAGE_BYTES + 568  # of the scratchpad, at every size


@dataclass(frozen=True)
class RecurrentLayer:
    """One layer of an LSTM in one direction.

    Attributes:
        num_steps, num_sequences, num_inputs, num_states: T, B, I, H.
    """

    num_steps: int
    num_sequences: int
    num_inputs: int
    num_states: int

    @classmethod
    def of(cls, inputs: torch.Tensor, recurrent_weight: torch.Tensor) -> RecurrentLayer:
        """Read it off the kernel's arguments: the input (T, B, I), and the state's weight (4 H, H)."""
        num_steps, num_sequences, num_inputs = inputs.shape
        return cls(num_steps, num_sequences, num_inputs, recurrent_weight.shape[1])

    def forward_flops(self) -> float:
        """Count the products of a forward pass: in each step all gates of what comes in and of the state before."""
        rows = self.num_steps * self.num_sequences
        return 2.0 * rows * GATES * self.num_states * (self.num_inputs + self.num_states)

    def workspace_bytes(self) -> int:
        """Count what is kept for the backward pass: gates, states and their gradients for each step, in pages."""
        wide, narrow = _row(max(self.num_inputs, self.num_states)), self.num_states
        states = 2 * (self.num_steps + 1) * self.num_sequences  # of what the layer receives, and of its own
        hidden = _pages(self.num_steps * self.num_sequences * _row(narrow))
        return self._gates_bytes() + 3 * _pages(states * wide) + 2 * _pages(states * narrow) + hidden

    def forward_bytes(self) -> int:
        """Count what is taken inside going forward: weights as they are multiplied, a bias, and a scratchpad."""
        return self._blocked_weights_bytes() + self._bias_bytes() + self._scratch_bytes()

    def backward_bytes(self) -> int:
        """Count what is taken inside going backward: also the weights' gradients, and zeros for what has none."""
        rows = GATES * self.num_states * (_row(self.num_inputs) + _row(self.num_states))
        zeros = self.num_sequences * (self.num_steps + 2) * self.num_states
        return (rows + zeros) * FLOAT_BYTES + self.forward_bytes() + 2 * self._bias_bytes()

    def _gates_bytes(self) -> int:
        return _pages(self.num_steps * self.num_sequences * _row(GATES * self.num_states))

    def _blocked_weights_bytes(self) -> int:
        return (self.num_inputs + self.num_states) * _row(GATES * self.num_states) * FLOAT_BYTES

    def _bias_bytes(self) -> int:
        return GATES * self.num_states * FLOAT_BYTES

    def _scratch_bytes(self) -> int:
        return self._gates_bytes() + 2 * _pages(self.num_sequences * _row(self.num_states)) + _FIXED_BYTES


def _row(length: int) -> int:
    whole = -(-length // _VECTOR) * _VECTOR
    return whole + _VECTOR if whole % _ALIASED == 0 else whole


def _pages(numbers: int) -> int:
    return -(-numbers * FLOAT_BYTES // PAGE_BYTES) * PAGE_BYTES
