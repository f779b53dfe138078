"""What the operator over many ranks asks of a backend, on segments of tokens: pairs, outputs and gradients."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.ops import reference
from deltazoo.ops.call import RuleCall
from deltazoo.ops.chunkwise import form
from deltazoo.ops.dtypes import wide_dtype

__all__ = ["SegmentBackend", "SegmentGradients", "SegmentInputs", "backend_for"]


Kept = tuple[Tensor | None, ...]
"""What a backend keeps of a call besides its inputs."""


class SegmentInputs(NamedTuple):
    """Arguments of the operator with segments as sequences: rows, or packed into one row."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_decay: Tensor | None
    erase_key: Tensor | None
    scale: float
    cu_seqlens: Tensor | None
    undecayed: bool
    num_micro_steps: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that get gradients, the first six fields."""
        return self[:6]

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> "SegmentInputs":
        """With others in their place."""
        return SegmentInputs._make([*tensors, *self[6:]])

    def arguments(self, initial: Tensor | None) -> RuleCall:
        """In the order of `RuleCall`."""
        q, k, v, beta, log_decay, erase_key, scale, cu_seqlens, *update = self
        return RuleCall(q, k, v, beta, log_decay, scale, initial, cu_seqlens, None, erase_key, *update)

    def without_values(self) -> "SegmentInputs":
        """With values of K channels that are all zero: from the identity such a sequence leaves its transition."""
        return self._replace(v=self.v.new_zeros(*self.v.shape[:3], self.k.shape[3]))


class SegmentGradients(NamedTuple):
    """Gradients of the inputs, None for those not given, and of the states that segments start from."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_decay: Tensor | None
    erase_key: Tensor | None
    start: Tensor


class SegmentBackend(ABC):
    """How a backend computes on S segments. States are `[S, HV, K, V]` float32, or float64 for float64 inputs."""

    @abstractmethod
    def pairs(self, x: SegmentInputs) -> tuple[Tensor, Tensor, Kept]:
        """M `[S, HV, K, K]` and X of every segment, and what the methods below take as `kept`."""

    @abstractmethod
    def outputs(self, x: SegmentInputs, kept: Kept, starts: Tensor, keep: bool) -> tuple[Tensor, Tensor, Kept]:
        """The output, the segments' last states, and what else is kept: with `keep` as much as spares a second scan."""

    @abstractmethod
    def start_gradients(self, x: SegmentInputs, kept: Kept, starts: Tensor, d_output: Tensor, d_end: Tensor) -> Tensor:
        """Gradients of the segments' first states from their outputs and last states."""

    def before_gradients(self, x: SegmentInputs, kept: Kept, starts: Tensor) -> Kept:
        """What is kept, completed by what `gradients` needs and `d_end` does not decide."""
        return kept

    @abstractmethod
    def gradients(
        self, x: SegmentInputs, kept: Kept, starts: Tensor, d_output: Tensor, d_end: Tensor
    ) -> SegmentGradients:
        """All gradients."""


def identities(x: SegmentInputs) -> Tensor:
    """The identity for every segment and value head `[S, HV, K, K]`."""
    segments = len(x.q) if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    K = x.k.shape[3]
    return torch.eye(K, dtype=wide_dtype(x.v), device=x.v.device).expand(segments, x.v.shape[2], K, K)


class TorchBackend(SegmentBackend):
    """A backend in plain torch, whose functions take whole sequences: here segments."""

    @abstractmethod
    def run(self, x: SegmentInputs, initial: Tensor | None) -> tuple[Tensor, ...]:
        """The output, the segments' last states, and what is kept for the gradients, from states or zero (None)."""

    def pairs(self, x: SegmentInputs) -> tuple[Tensor, Tensor, Kept]:
        """See `SegmentBackend`."""
        return self.run(x.without_values(), identities(x))[1], self.run(x, None)[1], ()

    def outputs(self, x: SegmentInputs, kept: Kept, starts: Tensor, keep: bool) -> tuple[Tensor, Tensor, Kept]:
        """See `SegmentBackend`."""
        output, ends, *kept_here = self.run(x, starts)
        return output, ends, tuple(kept_here)

    def start_gradients(self, x: SegmentInputs, kept: Kept, starts: Tensor, d_output: Tensor, d_end: Tensor) -> Tensor:
        """See `SegmentBackend`."""
        return self.gradients(x, kept, starts, d_output, d_end).start


class ReferenceBackend(TorchBackend):
    """The token loop; autograd derives its gradients."""

    def run(self, x: SegmentInputs, initial: Tensor | None) -> tuple[Tensor, ...]:
        """See `TorchBackend`."""
        return reference.recurrent_loop(x.arguments(initial))

    def gradients(
        self, x: SegmentInputs, kept: Kept, starts: Tensor, d_output: Tensor, d_end: Tensor
    ) -> SegmentGradients:
        """See `SegmentBackend`."""
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_() for t in (*x.tensors, starts)]
            results = self.run(x.with_tensors(leaves[:-1]), leaves[-1])
            wanted = [leaf for leaf in leaves if leaf is not None]
            found = iter(torch.autograd.grad(results, wanted, (d_output, d_end), materialize_grads=True))
        return SegmentGradients._make(None if leaf is None else next(found) for leaf in leaves)


class ChunkwiseBackend(TorchBackend):
    """The chunk form in plain torch."""

    def run(self, x: SegmentInputs, initial: Tensor | None) -> tuple[Tensor, ...]:
        """See `TorchBackend`."""
        return form.forward.overload(*x.arguments(initial))

    def gradients(
        self, x: SegmentInputs, kept: Kept, starts: Tensor, d_output: Tensor, d_end: Tensor
    ) -> SegmentGradients:
        """See `SegmentBackend`."""
        found = iter(form.backward.overload(*x.arguments(starts), *kept, d_output, d_end))
        q, k, v = (next(found) for _ in range(3))
        beta, log_decay = (None if t is None else next(found) for t in (x.beta, x.log_decay))
        start = next(found)
        return SegmentGradients(q, k, v, beta, log_decay, None if x.erase_key is None else next(found), start)


class TritonBackend(SegmentBackend):
    """The GPU kernels.

    Args:
        strict: precision, as of `triton_delta_rule`.
        whole_segments: segments of all ranks.
    """

    def __init__(self, strict: bool | None, whole_segments: int) -> None:
        from deltazoo.ops.triton import segment_operators

        self.operators, self.strict, self.whole_segments = segment_operators, strict, whole_segments

    def _arguments(self, x: SegmentInputs, starts: Tensor | None, kept: Kept = ()) -> tuple[Any, ...]:
        return *x.arguments(starts)._replace(strict=self.strict), self.whole_segments, *kept

    def pairs(self, x: SegmentInputs) -> tuple[Tensor, Tensor, Kept]:
        """See `SegmentBackend`."""
        M, X, *kept = self.operators.segment_pairs(*self._arguments(x, None))
        return M, X, tuple(kept)

    def outputs(self, x: SegmentInputs, kept: Kept, starts: Tensor, keep: bool) -> tuple[Tensor, Tensor, Kept]:
        """See `SegmentBackend`."""
        output, ends, *states = self.operators.segment_outputs(*self._arguments(x, starts, kept), keep)
        return output, ends, tuple(states)

    def start_gradients(self, x: SegmentInputs, kept: Kept, starts: Tensor, d_output: Tensor, d_end: Tensor) -> Tensor:
        """See `SegmentBackend`."""
        return self.operators.segment_start_gradients(*self._arguments(x, starts, kept[:-2]), d_output, d_end)

    def before_gradients(self, x: SegmentInputs, kept: Kept, starts: Tensor) -> Kept:
        """U, and the states that enter the chunks, unless the forward pass has kept them."""
        *prepared, U, states = kept
        if U is None or not U.numel():
            U, states = self.operators.segment_states(*self._arguments(x, starts, tuple(prepared)))
        return *prepared, U, states

    def gradients(
        self, x: SegmentInputs, kept: Kept, starts: Tensor, d_output: Tensor, d_end: Tensor
    ) -> SegmentGradients:
        """See `SegmentBackend`."""
        found = self.operators.segment_gradients(*self._arguments(x, starts, kept), d_output, d_end)
        given = (*x.tensors, starts)
        return SegmentGradients._make(None if t is None else d for t, d in zip(given, found, strict=True))


def backend_for(name: str, strict: bool | None, whole_segments: int) -> SegmentBackend:
    """The backend of a name.

    Args:
        name: "reference", "chunkwise" or "triton".
        strict: precision of the triton backend.
        whole_segments: segments of all ranks, by which the triton backend chooses kernels.
    """
    if name == "triton":
        return TritonBackend(strict, whole_segments)
    return ReferenceBackend() if name == "reference" else ChunkwiseBackend()
