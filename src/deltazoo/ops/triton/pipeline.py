"""Which kernels run in which order, and what is kept for the backward pass.

Forward: prepare (chunk-parallel) -> scan (serial over chunks). Kept besides the inputs: the inverse and P of every
chunk, and per channel the keys and queries with the decay multiplied in. Backward: scan again for the states, reverse
scan, tail (chunk-parallel).

Few heads and long rows leave most of the GPU idle in the serial scans. Rows are then cut into segments: one scan finds
each segment's final state X from a zero state, another its transition M (the final state from the identity, without
values); `S' = M S + X` chained over the segments gives the exact state each of them starts from, and all segments run
at once. Backward the same chain runs transposed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.ops.triton.prepare import prepare_kernel
from deltazoo.ops.triton.prepare_channel import prepare_channel_kernel, prepare_far_kernel
from deltazoo.ops.triton.scan import reverse_scan_kernel, scan_kernel
from deltazoo.ops.triton.segments import chain_kernel
from deltazoo.ops.triton.tail import tail_kernel
from deltazoo.ops.triton.tail_channel import pair_gradients_kernel, tail_channel_kernel
from deltazoo.ops.triton.tiling import CHUNK, shared_memory, tiles_for

__all__ = ["backward", "forward"]

MIN_SEGMENT = 32
"""Chunks in the shortest segment worth its three scans."""

FEW_SCANS = 66
"""Tiles of 128 value channels that leave half of a large GPU's multiprocessors idle: tiles of 64 serve them better."""


def chunk_table(cu_seqlens: Tensor | None, NT: int) -> tuple[Tensor | None, Tensor | None]:
    """The sequence of each of NT chunks, and the first chunk of each sequence, int32 (see `layout`).

    Built on the device, so that the host never waits for the entries of `cu_seqlens`.
    """
    if cu_seqlens is None:
        return None, None
    N = cu_seqlens.shape[0] - 1
    offsets = torch.zeros(N + 1, dtype=torch.int32, device=cu_seqlens.device)
    torch.cumsum((cu_seqlens.diff() + (CHUNK - 1)) // CHUNK, 0, dtype=torch.int32, out=offsets[1:])
    chunks = torch.arange(NT, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(offsets, chunks, right=True, out_int32=True) - 1
    return sequence.clamp_(max=N - 1), offsets


def segments_of(chunks: int, programs: int) -> tuple[int, int]:
    """Into how many segments to cut rows of so many chunks, and how many chunks each has.

    Args:
        programs: what the serial scans would run without a cut; about 256 fill a large GPU.
    """
    if chunks < 2 * MIN_SEGMENT or programs > 128:
        return 1, chunks
    length = -(-chunks // min(-(-256 // programs), chunks // MIN_SEGMENT))
    return -(-chunks // length), length


@dataclass
class Prepared:
    """What `prepare` makes of the inputs, per chunk or per token; see the kernels."""

    AP: Tensor
    beta: Tensor | None
    G: Tensor | None
    """log2-decay: cumulative per chunk `[slots, C]`, or, per channel, over the whole chunk `[slots, K]`."""
    q_in: Tensor
    """Queries; per channel with the decay since the chunk's start."""
    k_in: Tensor
    """Keys, likewise."""
    k_out: Tensor
    """Keys; per channel with the decay to the chunk's end."""


class Shapes:
    """The sizes of one call, from shapes and dtypes alone."""

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        beta: Tensor | None,
        log_decay: Tensor | None,
        cu_seqlens: Tensor | None,
        strict: bool,
    ) -> None:
        self.B, self.T, self.H, self.K = q.shape
        self.HV, self.V = v.shape[2:]
        self.half = q.dtype != torch.float32
        self.decay = 0 if log_decay is None else log_decay.ndim - 2
        self.terms = 0 if beta is None else 3 if strict and self.half else 1
        self.N = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.NT = -(-self.T // CHUNK) if cu_seqlens is None else self.T // CHUNK + self.N
        """Chunks per row of the batch; packed, with room for the last, partial chunk of every sequence."""
        self.slots = self.B * self.NT * self.HV
        self.segments, self.segment_chunks = 1, self.NT
        if cu_seqlens is None:
            self.segments, self.segment_chunks = segments_of(self.NT, self.B * self.HV * -(-self.V // 64))
        self.scans = self.N * self.segments
        """Independent scans: sequences, or their segments."""
        self.crowded = self.scans * self.HV * -(-self.V // 128) > FEW_SCANS


class Problem(Shapes):
    """One call: its inputs made contiguous, and the arguments that its launches share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, scale: float,
        initial_state: Tensor | None, cu_seqlens: Tensor | None, strict: bool,
    ) -> None:  # fmt: skip
        super().__init__(q, v, beta, log_decay, cu_seqlens, strict)
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.beta = None if beta is None else beta.contiguous()
        self.log_decay = None if log_decay is None else log_decay.contiguous()
        self.initial_state = None if initial_state is None else initial_state.float().contiguous()
        self.tiles = tiles_for(self.K, self.V, self.half, self.decay, self.terms, shared_memory(q.device), self.crowded)
        self.precision = "tf32" if self.half else "tf32x3"
        self.inverse_precision = "tf32" if self.half and not strict else "tf32x3"
        self.scale, self.cu_seqlens = scale, cu_seqlens
        self.chunk_sequence, self.chunk_offsets = chunk_table(cu_seqlens, self.NT)
        self.common = dict(
            scale=scale, T=self.T, NT=self.NT, HV=self.HV, K=self.K, C=CHUNK,
            HAS_BETA=beta is not None, PACKED=cu_seqlens is not None, PRECISION=self.precision,
            cu_seqlens=cu_seqlens, chunk_offsets=self.chunk_offsets,
        )  # fmt: skip

    def float32(self, *shape: int) -> Tensor:
        return self.q.new_empty(shape, dtype=torch.float32)

    def chunks(self) -> dict:
        """Where the chunks lie."""
        return dict(
            T=self.T, NT=self.NT, HV=self.HV, C=CHUNK, PACKED=self.cu_seqlens is not None, cu_seqlens=self.cu_seqlens,
            chunk_sequence=self.chunk_sequence, chunk_offsets=self.chunk_offsets,
        )  # fmt: skip

    def per_chunk(self) -> dict:
        """Arguments of the kernels that run one program per chunk and value head, and read keys."""
        return dict(H=self.H, GROUPED=self.H != self.HV, chunk_sequence=self.chunk_sequence, **self.common)

    def per_sequence(self) -> dict:
        """Arguments of the kernels that walk through a sequence."""
        heads = self.HV if self.decay == 2 else self.H
        return dict(
            HK=heads, DECAY=self.decay, TERMS=self.terms, segments=self.segments, chunks=self.segment_chunks,
            **self.common,
        )  # fmt: skip

    def chunk_grid(self, tiles: int = 1) -> tuple[int, int, int]:
        """One program per chunk and value head, or several; heads run fastest."""
        if max(self.NT, self.B) > 65_535:  # CUDA's limit for the second and third dimension of a grid
            raise NotImplementedError(
                f"the triton backend takes up to 65535 rows of up to 65535 chunks of {CHUNK} tokens, "
                f"got {self.B} rows of {self.NT} chunks; use backend='chunkwise'"
            )
        return tiles * self.HV, self.NT, self.B

    def scan_grid(self, V: int, BV: int) -> tuple[int]:
        return (-(-V // BV) * self.HV * self.scans,)


def prepare(p: Problem) -> Prepared:
    """The inverse and P of every chunk; per channel also the keys and queries with the chunk's decay multiplied in."""
    AP = p.q.new_empty(p.slots, p.terms + 1, CHUNK, CHUNK)
    chunk_beta = None if p.beta is None else p.float32(p.slots, CHUNK)
    if p.decay < 2:
        G = p.float32(p.slots, CHUNK) if p.decay else None
        prepare_kernel[p.chunk_grid()](
            p.q, p.k, p.beta, p.log_decay, AP, AP.view(torch.float32), chunk_beta, G, DECAY=p.decay, TERMS=p.terms,
            BK=p.tiles.BK, INVERSE_PRECISION=p.inverse_precision, **p.per_chunk(), **p.tiles.prepare,
        )  # fmt: skip
        return Prepared(AP, chunk_beta, G, p.q, p.k, p.k)
    G = p.float32(p.slots, p.K)
    q_in, k_in, k_out = (p.q.new_empty(p.B, p.T, p.HV, p.K) for _ in range(3))
    far = p.q.new_empty(p.slots, dtype=torch.int32)
    arguments = dict(
        q=p.q, k=p.k, beta=p.beta, log_decay=p.log_decay, AP=AP, scratch=AP.view(torch.float32), chunk_beta=chunk_beta,
        G=G, far=far, q_in=q_in, k_in=k_in, k_out=k_out, TERMS=p.terms, INVERSE_PRECISION=p.inverse_precision,
        **p.per_chunk(),
    )  # fmt: skip
    prepare_channel_kernel[p.chunk_grid()](**arguments | p.tiles.channel)
    chunks = min(max(p.slots // 512, 1), 16)
    level_tiles = p.tiles.far["BK"] // p.tiles.far["LEVEL_BK"]
    prepare_far_kernel[(-(-p.slots // chunks),)](
        chunks=chunks, slots=p.slots, level_tiles=level_tiles, **arguments | p.tiles.far
    )
    return Prepared(AP, chunk_beta, G, q_in, k_in, k_out)


def scan(p: Problem, x: Prepared, initial_state: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """Output and final states; with `keep` instead U and the states that enter the chunks."""
    out = torch.empty_like(p.v)
    states = p.v.new_empty(p.slots, p.V, p.K) if keep else p.float32(p.scans, p.HV, p.K, p.V)
    tiles = p.tiles.keep if keep else p.tiles.scan
    scan_kernel[p.scan_grid(p.V, tiles["BV"])](
        x.q_in, x.k_in, x.k_out, p.v, x.beta, x.G, x.AP, out, out, states if keep else None, initial_state,
        None if keep else states, V=p.V, HAS_V=True, INITIAL=int(initial_state is not None), OUTPUT=not keep, KEEP=keep,
        **p.per_sequence(), **tiles,
    )  # fmt: skip
    return out, states


def scan_segments(p: Problem, x: Prepared) -> tuple[Tensor, Tensor]:
    """State that each segment starts from `[N * segments, HV, K, V]`, and its transition `[N * segments, HV, K, K]`."""

    def run(V: int, v: Tensor | None) -> Tensor:
        final = p.float32(p.scans, p.HV, p.K, V)
        tiles = p.tiles.keep
        scan_kernel[p.scan_grid(V, tiles["BV"])](
            x.q_in, x.k_in, x.k_out, v, x.beta, x.G, x.AP, None, None, None, None, final, V=V,
            HAS_V=v is not None, INITIAL=0 if v is not None else 2, OUTPUT=False, KEEP=False,
            **p.per_sequence(), **tiles,
        )  # fmt: skip
        return final

    added, transitions = run(p.V, p.v), run(p.K, None)
    return chain(p, transitions, added, p.initial_state, reverse=False), transitions


def chain(p: Problem, transitions: Tensor, added: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
    """State that each segment starts from; in reverse the gradient of the state that it ends with."""
    states = torch.empty_like(added)
    BK, BV = min(p.tiles.BK, 64), 32
    chain_kernel[(-(-p.V // BV) * p.HV * p.N,)](
        transitions, added, first, states, p.segments, p.HV, K=p.K, V=p.V, BK=BK, BV=BV, REVERSE=reverse, num_warps=4,
        num_stages=1,
    )  # fmt: skip
    return states


def reverse_scan(
    p: Problem, x: Prepared, d_output: Tensor, d_final: Tensor | None, keep: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Z and the gradients of the states that leave the chunks (None without `keep`), and of the initial states."""
    Z = torch.empty_like(d_output) if keep else None
    d_states = d_output.new_empty(p.slots, p.V, p.K) if keep else None
    d_initial = p.float32(p.scans, p.HV, p.K, p.V)
    tiles = p.tiles.reverse
    reverse_scan_kernel[p.scan_grid(p.V, tiles["BV"])](
        x.q_in, x.k_in, x.k_out, x.beta, x.G, x.AP, d_output, Z, d_states, d_final, d_initial, V=p.V,
        HAS_FINAL=d_final is not None, HAS_INITIAL=True, KEEP=keep, **p.per_sequence(), **tiles,
    )  # fmt: skip
    return Z, d_states, d_initial


def reverse_scan_segments(
    p: Problem, x: Prepared, d_output: Tensor, d_final: Tensor | None, transitions: Tensor
) -> Tensor:
    """Gradient of the state that each segment ends with, `[N * segments, HV, K, V]`."""
    added = reverse_scan(p, x, d_output, None, keep=False)[2]
    return chain(p, transitions, added, d_final, reverse=True)


def tail(
    p: Problem, x: Prepared, U: Tensor, Z: Tensor | None, d_output: Tensor, states: Tensor, d_states: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k (both per value head), v, beta and log_decay."""
    # Value heads that share a key head sum their dq and dk outside, in float32.
    dtype = p.q.dtype if p.H == p.HV else torch.float32
    dq, dk = (p.q.new_empty(p.B, p.T, p.HV, p.K, dtype=dtype) for _ in range(2))
    dv = torch.empty_like(p.v)
    key_tiles, value_tiles = -(-p.K // p.tiles.tail["BK"]), -(-p.V // p.tiles.tail["BV"])
    shares = key_tiles + 1 if p.decay == 2 else 1  # of d_beta
    d_beta = None if p.beta is None else p.float32(shares, *p.beta.shape)
    if p.decay < 2:
        d_log_decay = None if p.log_decay is None else p.float32(*p.log_decay.shape)
        tail_kernel[p.chunk_grid()](
            p.q, p.k, p.v, x.beta, p.log_decay, x.G, U, Z, d_output, states, d_states, dq, dk, dv, d_beta, d_log_decay,
            DECAY=p.decay, TERMS=p.terms, V=p.V, key_tiles=key_tiles, value_tiles=value_tiles,
            **p.per_chunk() | p.tiles.tail,
        )  # fmt: skip
    else:
        W = p.q.new_empty(p.slots, 1 if p.beta is None else 2, CHUNK, CHUNK)
        P_diagonal, d_log_decay = p.float32(p.slots, CHUNK), p.float32(*p.q.shape[:2], p.HV, p.K)
        pair_gradients_kernel[p.chunk_grid()](
            p.v, x.beta, U, Z, d_output, W, P_diagonal, dv, None if d_beta is None else d_beta[key_tiles],
            scale=p.scale, value_tiles=-(-p.V // p.tiles.pairs["BV"]), V=p.V, HAS_BETA=p.beta is not None,
            PRECISION=p.precision, **p.chunks(), **p.tiles.pairs,
        )  # fmt: skip
        sizes = dict(shares_stride=p.B * p.T * p.HV, value_tiles=value_tiles, V=p.V)
        for far, tiles, options in ((False, 1, p.tiles.tail), (True, key_tiles, p.tiles.tail_far)):
            tail_channel_kernel[p.chunk_grid(key_tiles // tiles)](
                p.q, p.k, x.beta, p.log_decay, x.G, U, Z, d_output, states, d_states, W, P_diagonal, dq, dk, d_beta,
                d_log_decay, FAR=far, TILES=tiles, **sizes, **p.per_chunk() | options,
            )  # fmt: skip
    if d_beta is not None:
        d_beta = d_beta.sum(0) if shares > 1 else d_beta[0]
    return dq, dk, dv, d_beta, d_log_decay


def forward(*inputs) -> tuple[Tensor | None, ...]:
    """Output, final state, and the fields of `Kept`. Inputs as `Problem` takes them."""
    p = Problem(*inputs)
    x = prepare(p)
    starts, transitions = p.initial_state, None
    if p.segments > 1:
        starts, transitions = scan_segments(p, x)
    output, final = scan(p, x, starts, keep=False)
    final = final.unflatten(0, (p.N, p.segments))[:, -1].contiguous() if p.segments > 1 else final
    decayed = (x.q_in, x.k_in, x.k_out) if p.decay == 2 else (None, None, None)
    return output, final, x.AP, x.beta, x.G, *decayed, None if transitions is None else starts, transitions


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass: what `prepare` made, and the states of segments."""

    AP: Tensor
    beta: Tensor | None
    G: Tensor | None
    q_in: Tensor
    """As `k_in` and `k_out` only per channel: otherwise the inputs serve."""
    k_in: Tensor
    k_out: Tensor
    starts: Tensor
    """Of a row cut into segments: the state that each starts from."""
    transitions: Tensor


def backward(*inputs, kept: Kept, d_output: Tensor, d_final: Tensor | None) -> list[Tensor | None]:
    """Gradients of q, k, v, beta, log_decay and initial_state; None for those that were not given."""
    p = Problem(*inputs)
    d_output = d_output.contiguous()
    d_final = None if d_final is None else d_final.float().contiguous()
    decayed = kept[3:6] if p.decay == 2 else (p.q, p.k, p.k)
    x = Prepared(kept.AP, kept.beta, kept.G, *decayed)
    starts = p.initial_state
    if p.segments > 1:
        starts, d_final = kept.starts, reverse_scan_segments(p, x, d_output, d_final, kept.transitions)
    U, states = scan(p, x, starts, keep=True)
    Z, d_states, d_starts = reverse_scan(p, x, d_output, d_final, keep=True)
    d_initial = None if p.initial_state is None else d_starts.unflatten(0, (p.N, p.segments))[:, 0]
    dq, dk, dv, d_beta, d_log_decay = tail(p, x, U, Z, d_output, states, d_states)
    if p.H != p.HV:
        dq, dk = (grad.unflatten(2, (p.H, -1)).sum(3).to(p.q.dtype) for grad in (dq, dk))
    return [dq, dk, dv, d_beta, d_log_decay, d_initial]
