"""A call as the kernels read it: contiguous tensors, its plan, and where chunks and packed sequences begin."""

from typing import Any

import torch
from torch import Tensor

from deltazoo.ops.call import RuleCall
from deltazoo.ops.triton.plan import Card, Plan, card_of, plan_for
from deltazoo.ops.triton.tiles import CHUNK

__all__ = ["Problem", "contiguous", "fake_plan"]


class Problem:
    """A call's tensors, contiguous, and its plan.

    Args:
        whole_segments: as of `Plan`.
    """

    __slots__ = (
        "beta", "chunk_offsets", "erase_key", "initial_state", "k", "log_decay", "plan", "q", "sequence_offsets", "v",
    )  # fmt: skip

    def __init__(self, call: RuleCall, whole_segments: int | None = None) -> None:
        self.q, self.k, self.v, beta, log_decay, _, initial_state, cu_seqlens, _, erase_key, _, steps = call
        self.plan = plan = plan_for(*sizes_of(call, card_of(self.q.device), whole_segments))
        self.q, self.k, self.v = contiguous(self.q, plan), contiguous(self.k, plan), contiguous(self.v, plan)
        self.beta = None if beta is None else beta.contiguous()
        self.log_decay = None if log_decay is None else log_decay.contiguous()
        self.erase_key = None if erase_key is None else contiguous(erase_key, plan)
        """None: the key."""
        self.initial_state = None if initial_state is None else initial_state.float().contiguous()
        self.chunk_offsets: tuple[Tensor | None, ...] = (None, None, None)
        self.sequence_offsets: tuple[Tensor | None, ...] = (None, None)
        """Chunk and sequence offsets, the last tensors of the kernels per chunk and of the serial scans."""
        if cu_seqlens is not None:
            rows = cu_seqlens if steps == 1 else cu_seqlens * steps
            sequence, offsets = chunk_table(rows, plan.NT)
            self.chunk_offsets, self.sequence_offsets = (rows, sequence, offsets), (rows, offsets)

    def float32(self, *shape: int) -> Tensor:
        """An uninitialised float32 tensor of this shape."""
        return self.q.new_empty(*shape, dtype=torch.float32)


def sizes_of(call: RuleCall, card: Card, whole_segments: int | None) -> tuple[Any, ...]:
    """The arguments of `Plan`."""
    q, _, v, beta, log_decay, scale, _, cu_seqlens, strict, erase_key, undecayed, num_micro_steps = call
    decay = 0 if log_decay is None else log_decay.ndim - 2
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        q.shape, v.shape, q.dtype, decay, beta is not None, sequences, strict, erase_key is not None,
        undecayed and decay > 0, num_micro_steps, scale, card, whole_segments,
    )  # fmt: skip


def fake_plan(call: RuleCall, whole_segments: int | None = None) -> Plan:
    """The plan of a call with tensors without data, whose sizes may be symbolic."""
    return Plan(*sizes_of(call, card_of(call.q.device), whole_segments))


def contiguous(x: Tensor, plan: Plan) -> Tensor:
    """x contiguous, at a multiple of 16 bytes for the copy engine, or of 4 for reads of 16-bit values in pairs."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % (16 if plan.gluon else 4) else x


def chunk_table(cu_seqlens: Tensor, NT: int) -> tuple[Tensor, Tensor]:
    """The sequence of each of NT chunks, and the first chunk of each sequence, int32 (see `chunk.address`).

    Built on the device, so that the host never waits for the entries of `cu_seqlens`.
    """
    N = cu_seqlens.shape[0] - 1
    offsets = torch.zeros(N + 1, dtype=torch.int32, device=cu_seqlens.device)
    torch.cumsum((cu_seqlens.diff() + (CHUNK - 1)) // CHUNK, 0, dtype=torch.int32, out=offsets[1:])
    chunks = torch.arange(NT, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(offsets, chunks, right=True, out_int32=True) - 1
    return sequence.clamp_(max=N - 1), offsets
