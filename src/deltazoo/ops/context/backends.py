"""Backends on segments of tokens: pairs of transitions and states, outputs and gradients.

A call of segments is a `RuleCall` in which sequences are segments, rows or packed into one row, and `initial_state` the
states that they start from, `[S, HV, K, V]` float32, or float64 for float64 inputs.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from deltazoo.ops.call import RuleCall
from deltazoo.ops.chunkwise import form
from deltazoo.ops.dtypes import wide_dtype
from deltazoo.ops.reference import gradients_of_loop, recurrent_loop

__all__ = ["Gradients", "Kept", "SegmentBackend", "backend_for"]

Kept = tuple[Tensor | None, ...]
"""Tensors that a backend keeps of a call besides its inputs."""

Gradients = tuple[Tensor | None, ...]
"""Gradients of `RuleCall.differentiable`, None for what is not given."""


class SegmentBackend(Protocol):
    """The computation of one backend on S segments."""

    def pairs(self, call: RuleCall) -> tuple[Tensor, Tensor, Kept]:
        """M `[S, HV, K, K]` and X of every segment, from calls without starts, and `kept` of the methods below."""

    def outputs(self, call: RuleCall, kept: Kept, keep: bool) -> tuple[Tensor, Tensor, Kept]:
        """The output, the segments' last states, and what else is kept: with `keep` as much as spares a second scan."""

    def start_gradients(self, call: RuleCall, kept: Kept, d_output: Tensor, d_end: Tensor) -> Tensor:
        """Gradients of the segments' first states from their outputs and last states."""

    def before_gradients(self, call: RuleCall, kept: Kept) -> Kept:
        """What is kept, completed by what `gradients` needs and `d_end` does not decide."""

    def gradients(self, call: RuleCall, kept: Kept, d_output: Tensor, d_end: Tensor) -> Gradients:
        """All gradients."""


class _TorchBackend:
    """A backend in plain torch, whose functions take whole sequences: here segments.

    Args:
        run: gives the output, the last states, and what is kept for the gradients.
        gradients: of a call, what is kept, and the gradients of the output and the last states.
    """

    def __init__(
        self,
        run: Callable[[RuleCall], tuple[Tensor, ...]],
        gradients: Callable[[RuleCall, Kept, Tensor, Tensor], Gradients],
    ) -> None:
        self.run, self.gradients = run, gradients

    def pairs(self, call: RuleCall) -> tuple[Tensor, Tensor, Kept]:
        segments = len(call.q) if call.cu_seqlens is None else len(call.cu_seqlens) - 1
        K, HV = call.k.shape[3], call.v.shape[2]
        # Without values a segment leaves its transition from the identity.
        identity = torch.eye(K, dtype=wide_dtype(call.v), device=call.v.device).expand(segments, HV, K, K)
        without_values = call._replace(v=call.v.new_zeros(*call.v.shape[:3], K), initial_state=identity)
        return self.run(without_values)[1], self.run(call)[1], ()

    def outputs(self, call: RuleCall, kept: Kept, keep: bool) -> tuple[Tensor, Tensor, Kept]:
        output, ends, *kept_here = self.run(call)
        return output, ends, tuple(kept_here)

    def start_gradients(self, call: RuleCall, kept: Kept, d_output: Tensor, d_end: Tensor) -> Tensor:
        d_start = self.gradients(call, kept, d_output, d_end)[5]
        assert d_start is not None  # segments have starts
        return d_start

    def before_gradients(self, call: RuleCall, kept: Kept) -> Kept:
        return kept


def _gradients_of_loop(call: RuleCall, kept: Kept, d_output: Tensor, d_end: Tensor) -> Gradients:
    leaves = [None if x is None else x.detach().requires_grad_() for x in call.differentiable]
    return gradients_of_loop(RuleCall.of(leaves, call.cu_seqlens, call.options), d_output, d_end)


def backend_for(name: str, whole_segments: int) -> SegmentBackend:
    """The backend of a name.

    Args:
        name: "reference", "chunkwise" or "triton".
        whole_segments: segments of all ranks, by which the triton backend chooses kernels.
    """
    if name == "triton":
        from deltazoo.ops.triton.segments import TritonBackend

        return TritonBackend(whole_segments)
    if name == "reference":
        return _TorchBackend(recurrent_loop, _gradients_of_loop)
    return _TorchBackend(lambda call: form.forward.overload(*call), form.gradients)
