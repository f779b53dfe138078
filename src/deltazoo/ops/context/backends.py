"""Backends on segments of tokens: pairs of transitions and states, outputs and gradients.

A call of segments is a `RuleCall` in which sequences are segments, rows or packed into one row, and `initial_state`
their first states, `[S, HV, K, V]` float32, or float64 for float64 inputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deltazoo.ops.call import RuleCall
from deltazoo.ops.chunkwise import form
from deltazoo.ops.dtypes import wide_dtype
from deltazoo.ops.reference import gradients_of_loop, recurrent_loop

KeptTensors = tuple[Tensor | None, ...]
"""Tensors that a backend keeps of a call besides its inputs."""

Gradients = tuple[Tensor | None, ...]
"""Gradients of `RuleCall.differentiable`, None for arguments that were not given."""


class SegmentBackend:
    """The computation of a backend on S segments. This class uses functions of plain torch for whole sequences.

    Args:
        run: function that gives the output, the last states, and tensors kept for the gradients.
        gradients_of: function that gives the gradients of a call, from the kept tensors and the gradients of the
            output and the last states.
    """

    def __init__(
        self,
        run: Callable[[RuleCall], tuple[Tensor, ...]],
        gradients_of: Callable[[RuleCall, KeptTensors, Tensor, Tensor], Gradients],
    ) -> None:
        self.run, self.gradients_of = run, gradients_of

    def pairs(self, call: RuleCall) -> tuple[Tensor, Tensor, KeptTensors]:
        """M `[S, HV, K, K]` and X of every segment, from calls without first states; `kept` for the methods below."""
        segments = len(call.q) if call.cu_seqlens is None else len(call.cu_seqlens) - 1
        K, HV = call.k.shape[3], call.v.shape[2]
        # Without values a segment leaves its transition from the identity.
        identity = torch.eye(K, dtype=wide_dtype(call.v), device=call.v.device).expand(segments, HV, K, K)
        without_values = call._replace(v=call.v.new_zeros(*call.v.shape[:3], K), initial_state=identity)
        return self.run(without_values)[1], self.run(call)[1], ()

    def outputs(self, call: RuleCall, kept: KeptTensors, keep: bool) -> tuple[Tensor, Tensor, KeptTensors]:
        """The output, the segments' last states, and further kept tensors: with `keep` no scan runs twice."""
        output, ends, *kept_here = self.run(call)
        return output, ends, tuple(kept_here)

    def start_gradients(self, call: RuleCall, kept: KeptTensors, d_output: Tensor, d_end: Tensor) -> Tensor:
        """Gradients of the segments' first states from their outputs and last states."""
        d_start = self.gradients(call, kept, d_output, d_end)[5]
        assert d_start is not None  # segments have first states
        return d_start

    def before_gradients(self, call: RuleCall, kept: KeptTensors) -> KeptTensors:
        """The kept tensors for `gradients`, completed by those that do not depend on `d_end`."""
        return kept

    def gradients(self, call: RuleCall, kept: KeptTensors, d_output: Tensor, d_end: Tensor) -> Gradients:
        """All gradients of a call."""
        return self.gradients_of(call, kept, d_output, d_end)


class _TritonBackend(SegmentBackend):
    """The computation by the GPU kernels.

    Args:
        whole_segments: number of segments of all ranks, by which kernels are chosen.
    """

    def __init__(self, whole_segments: int) -> None:
        from deltazoo.ops.triton import segments

        self.operators, self.whole_segments = segments, whole_segments

    def pairs(self, call: RuleCall) -> tuple[Tensor, Tensor, KeptTensors]:
        M, X, *kept = self.operators.segment_pairs(*call, self.whole_segments)
        return M, X, tuple(kept)

    def outputs(self, call: RuleCall, kept: KeptTensors, keep: bool) -> tuple[Tensor, Tensor, KeptTensors]:
        output, ends, *states = self.operators.segment_outputs(*call, self.whole_segments, *kept, keep)
        return output, ends, tuple(states)

    def start_gradients(self, call: RuleCall, kept: KeptTensors, d_output: Tensor, d_end: Tensor) -> Tensor:
        return self.operators.segment_start_gradients(*call, self.whole_segments, *kept[:-2], d_output, d_end)

    def before_gradients(self, call: RuleCall, kept: KeptTensors) -> KeptTensors:
        *prepared, U, states = kept
        if U is None or not U.numel():  # the forward pass has not kept them
            U, states = self.operators.segment_states(*call, self.whole_segments, *prepared)
        return *prepared, U, states

    def gradients(self, call: RuleCall, kept: KeptTensors, d_output: Tensor, d_end: Tensor) -> Gradients:
        found = self.operators.segment_gradients(*call, self.whole_segments, *kept, d_output, d_end)
        return tuple(None if x is None else d for x, d in zip(call.differentiable, found, strict=True))


def _gradients_of_loop(call: RuleCall, kept: KeptTensors, d_output: Tensor, d_end: Tensor) -> Gradients:
    leaves = [None if x is None else x.detach().requires_grad_() for x in call.differentiable]
    return gradients_of_loop(RuleCall.of(leaves, call.cu_seqlens, call.options), d_output, d_end)


def backend_for(name: str, whole_segments: int) -> SegmentBackend:
    """The backend of a name: "reference", "chunkwise" or "triton"; `whole_segments` are those of all ranks."""
    if name == "triton":
        return _TritonBackend(whole_segments)
    if name == "reference":
        return SegmentBackend(recurrent_loop, _gradients_of_loop)
    return SegmentBackend(lambda call: form.forward.overload(*call), form.gradients)
