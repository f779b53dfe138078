"""What all calls of the same sizes share, computed once: sizes, tiles, and the grid and constants of every launch."""

from functools import lru_cache
from typing import Any

import torch
import triton

from deltazoo.ops.call import RuleCall
from deltazoo.ops.triton.hopper.launch_options import (
    BACKWARD,
    FEWER_STAGES,
    FUSED_FORWARD,
    reverse_scan_options,
    scan_options,
)  # fmt: skip
from deltazoo.ops.triton.hopper.served_calls import backward_refusal, refusal
from deltazoo.ops.triton.launch import Constants
from deltazoo.ops.triton.tiling import CHUNK, HOPPER, Tiles, tiles_for

__all__ = ["FROM_IDENTITY", "FROM_STATE", "FROM_ZERO", "Plan", "plan_for", "sizes_of"]

MIN_SEGMENT = 32
"""Chunks in the shortest segment worth its three scans."""

FROM_ZERO, FROM_STATE, FROM_IDENTITY = 0, 1, 2
"""What a scan starts from, as the constant INITIAL of the kernels: a state of zero, a given one, or the identity."""

FEW_SCANS = 66
"""Tiles of 128 value channels that leave half of a large GPU's multiprocessors idle: tiles of 64 serve them better."""


def segments_of(chunks: int, programs: int) -> tuple[int, int]:
    """Number of segments that rows of so many chunks are cut into, and the chunks in each.

    Args:
        programs: those of a serial scan without a cut; about 256 fill a large GPU.
    """
    if chunks < 2 * MIN_SEGMENT or programs > 128:
        return 1, chunks
    length = -(-chunks // min(-(-256 // programs), chunks // MIN_SEGMENT))
    return -(-chunks // length), length


def sizes_of(
    call: RuleCall,
) -> tuple[torch.Size, torch.Size, bool, int, bool, int | None, bool | None, bool, bool, int]:
    """The arguments of `Plan` that follow from the inputs."""
    q, _, v, beta, log_decay, _, _, cu_seqlens, strict, erase_key, undecayed, num_micro_steps = call
    decay = 0 if log_decay is None else log_decay.ndim - 2
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        q.shape, v.shape, q.dtype != torch.float32, decay, beta is not None, sequences, strict,
        erase_key is not None, undecayed and decay > 0, num_micro_steps,
    )  # fmt: skip


per_plan = lru_cache(maxsize=1024)


class Plan:
    """Sizes of a call, and its launches, each by the name of its kernel.

    Sizes may be symbolic as long as nothing is launched.

    Args:
        q, v: shapes; v has `num_micro_steps` times the tokens of q.
        half: 16-bit inputs.
        decay: 0 none, 1 per head, 2 per channel.
        has_beta: with step sizes.
        sequences: number of sequences packed into a row; None if rows are not packed.
        strict: strict precision, or fast (False), or as each chunk's erase gain needs (None).
        has_erase_key: the erase key is not the write key.
        undecayed: the erase reads the state before the decay.
        num_micro_steps: rows of k, v and beta per token. Chunks count rows.
        scale: factor on q.
        shared: shared memory per thread block in bytes (`tiling.shared_memory`).
        gluon: whether Gluon kernels can run (`hopper.gluon.available`).
        whole_segments: of a piece of rows that several ranks share, whose sequences are segments: the number of
            segments on all ranks. They choose kernels and tiles, so that every rank chooses alike.
    """

    def __init__(
        self, q: torch.Size, v: torch.Size, half: bool, decay: int, has_beta: bool, sequences: int | None,
        strict: bool | None, has_erase_key: bool, undecayed: bool, num_micro_steps: int, scale: float, shared: int,
        gluon: bool = False, whole_segments: int | None = None,
    ) -> None:  # fmt: skip
        self.B, self.tokens, self.H, self.K = q
        self.T, self.HV, self.V = v[1:]
        self.has_erase_key, self.undecayed, self.num_micro_steps = has_erase_key, undecayed, num_micro_steps
        self.half, self.decay, self.has_beta, self.packed = half, decay, has_beta, sequences is not None
        self.scale, self.shared = scale, shared
        chooses = half and has_beta  # float32 has one precision, and without beta there is nothing to be strict about
        self.by_gain, self.strict = chooses and strict is None, bool(chooses and strict)
        self.scan_modes = (False, True) if self.by_gain else (self.strict,)
        """Whether each launch of a serial scan is strict, in the order of the tokens."""
        self.matrices = 2 if has_beta else 1
        """Per chunk: A and P, or P alone."""
        self.N = self.B if sequences is None else sequences
        self.NT = -(-self.T // CHUNK) if sequences is None else self.T // CHUNK + self.N
        """Chunks per row of the batch; of packed rows an upper bound: every sequence may end in a partial chunk."""
        self.slots = self.B * self.NT * self.HV
        """Chunks of all rows and value heads: the first dimension of what is kept per chunk."""
        self.segments, self.segment_chunks = 1, self.NT
        if sequences is None and whole_segments is None:
            self.segments, self.segment_chunks = segments_of(self.NT, self.B * self.HV * -(-self.V // 64))
        self.scans = self.N * self.segments
        """Independent scans: sequences, or their segments."""
        self.heads = (self.N if whole_segments is None else whole_segments) * self.HV
        """Heads of all sequences."""
        self.many_scans = self.heads * self.segments * -(-self.V // 128) > FEW_SCANS
        self.hopper = gluon and refusal(self) is None
        """Whether Gluon kernels take the serial scans, but for strict reverse ones."""

    @property
    def per_channel(self) -> bool:
        """Whether there is one decay per key channel."""
        return self.decay == 2

    @property
    def grouped(self) -> bool:
        """Whether several value heads share a key head."""
        return self.H != self.HV

    @property
    def scanned_key_heads(self) -> int:
        """Heads of the keys that the scans read: with decay per channel every value head has keys of its own."""
        return self.HV if self.per_channel else self.H

    @property
    def fused_backward(self) -> bool:
        """Whether one Gluon kernel makes all gradients, of heads without a chunk that has a large gain."""
        return self.hopper and backward_refusal(self) is None

    @property
    def keeps_states(self) -> bool:
        """Whether a recorded forward pass keeps U and the states, unless the backward pass is to scan again."""
        return self.hopper

    @property
    def separate(self) -> bool:
        """Whether the scans read other keys than they write."""
        return self.has_beta and (self.per_channel or self.has_erase_key)

    @property
    def one_program_per_head(self) -> bool:
        """Whether all launches of the reverse scan on Hopper have one program per head of a sequence or segment."""
        strict = self.scan_tiles.get(True)  # the launch in plain Triton
        return self.hopper and self.many_scans and (strict is None or strict.reverse_scan["BV"] >= self.V)

    @property
    def scan_tiles(self) -> dict[bool, Tiles]:
        """Tiles of the strict and of the other launches of the serial scans."""
        return {
            strict: tiles_for(
                self.K, self.V, self.half, self.decay, self.has_beta, strict, self.separate, self.shared,
                self.many_scans,
            )
            for strict in self.scan_modes
        }  # fmt: skip

    @property
    def tiles(self) -> Tiles:
        """Tiles of all other kernels, which do not depend on the precision."""
        return self.scan_tiles[self.scan_modes[0]]

    @property
    def common(self) -> dict[str, Any]:
        """Arguments of all kernels but `invert_kernel` and `chain_kernel`."""
        return dict(
            scale=self.scale, T=self.T, NT=self.NT, HV=self.HV, K=self.K, C=CHUNK, HAS_BETA=self.has_beta,
            MICRO_STEPS=self.num_micro_steps, UNDECAYED=self.undecayed, PACKED=self.packed,
            PRECISION="tf32" if self.half else "tf32x3",
        )  # fmt: skip

    @property
    def per_chunk(self) -> dict[str, Any]:
        """Arguments of the kernels that run one program per chunk and value head, and read keys."""
        return self.common | dict(H=self.H, GROUPED=self.grouped)

    @property
    def per_sequence(self) -> dict[str, Any]:
        """Arguments of the serial scans."""
        return self.common | dict(
            HK=self.scanned_key_heads, DECAY=self.decay, SEPARATE=self.separate, BY_GAIN=self.by_gain,
            V=self.V, segments=self.segments, chunks=self.segment_chunks,
        )  # fmt: skip

    @property
    def precisions(self) -> dict[str, bool]:
        """Arguments of the kernels that choose a precision per chunk."""
        return dict(STRICT=self.strict, BY_GAIN=self.by_gain)

    def chunk_grid(self) -> tuple[int, int, int]:
        """One program per chunk and value head; heads run fastest."""
        if max(self.NT, self.B) > 65_535:  # CUDA's limit for the second and third dimension of a grid
            raise NotImplementedError(
                f"the triton backend takes up to 65535 rows of up to 65535 chunks of {CHUNK} tokens, "
                f"got {self.B} rows of {self.NT} chunks; use backend='chunkwise'"
            )
        return self.HV, self.NT, self.B

    @property
    def neighbours(self) -> int:
        """Neighbouring chunks, up to 16, that a program of a kernel for few of the chunks looks at."""
        return min(max(self.slots // 512, 1), 16)

    def neighbour_grid(self) -> tuple[tuple[int], dict[str, int]]:
        """Grid and arguments of a kernel for few of the chunks."""
        chunks = self.neighbours
        return (-(-self.slots // chunks),), dict(chunks=chunks, slots=self.slots)

    def scan_grid(self, V: int, BV: int) -> tuple[int]:
        """One program per tile of value channels, value head, and sequence or segment."""
        return (-(-V // BV) * self.HV * self.scans,)

    @per_plan
    def prepare(self) -> Constants:
        """The launch for no decay, or one per head."""
        options = self.tiles.prepare
        more = self.num_micro_steps > 1 or self.has_erase_key
        if more and self.half and self.tiles.BK <= 128 and self.shared >= HOPPER:  # older cards spill
            options = options | dict(maxnreg=128)  # a few less let four programs share a multiprocessor
        return Constants(
            *self.chunk_grid(), DECAY=self.decay, BK=self.tiles.BK, **self.precisions, **self.per_chunk, **options,
        )  # fmt: skip

    @per_plan
    def fused_forward(self, initial: bool, keep: bool) -> Constants:
        """The launch of the fused forward pass; `initial`: from a given state, `keep`: a backward pass follows."""
        options = FUSED_FORWARD | dict(STAGES=FEWER_STAGES) if keep or self.per_channel else FUSED_FORWARD
        return Constants(
            self.B * self.HV, scale=self.scale, T=self.T, H=self.H, HV=self.HV, DECAY=self.decay, INITIAL=initial,
            BY_GAIN=self.by_gain, KEEP=keep, **options,
        )  # fmt: skip

    @per_plan
    def prepare_rest(self) -> Constants:
        """The launch that prepares the chunks which the fused forward pass left."""
        chunks = self.neighbours
        HV, NT, B = self.chunk_grid()
        return Constants(
            HV, -(-NT // chunks), B, chunks=chunks, scale=self.scale, T=self.T, NT=self.NT, H=self.H,
            HV=self.HV, K=self.K, BK=self.tiles.BK, C=CHUNK, DECAY=self.decay, GROUPED=self.grouped,
            PRECISION="tf32", maxnreg=168, **self.tiles.prepare,
        )  # fmt: skip

    @per_plan
    def prepare_channel(self) -> list[Constants]:
        """Launches for decay per channel: one, or a second one for strong decay if the channels take several tiles."""
        tiles = self.tiles.prepare_channel
        return [
            Constants(
                *self.chunk_grid(), level_tiles=tiles["BK"] // tiles["LEVEL_BK"], PART=part, **self.precisions,
                **self.per_chunk, **tiles,
            )
            for part in ((0,) if tiles["BK"] >= self.K else (1, 2))
        ]  # fmt: skip

    @per_plan
    def invert(self) -> Constants:
        """The launch for the inverse of strict chunks."""
        grid, neighbours = self.neighbour_grid()
        return Constants(*grid, HV=self.HV, C=CHUNK, **neighbours, **self.tiles.invert)

    @per_plan
    def scan(
        self, initial: int, values: bool, output: bool, keep: bool, strict: bool, by_token: bool = False
    ) -> Constants:
        """One launch of the scan.

        Args:
            initial: what it starts from, `FROM_ZERO` and so on.
            values: with values; without them the state is `[K, K]`, a segment's transition.
            output: it stores the output.
            keep: it stores U and the states that enter the chunks.
            strict: precision.
            by_token: the states lie as `Kept.states` does.
        """
        tiles = getattr(self.scan_tiles[strict], "scan_both" if output and keep else "scan_keep" if keep else "scan")
        V = self.V if values else self.K
        return Constants(
            *self.scan_grid(V, tiles["BV"]), HAS_V=values, INITIAL=initial, OUTPUT=output, KEEP=keep,
            BY_TOKEN=by_token, STRICT=strict,
            **self.per_sequence | dict(V=V), **tiles,
        )  # fmt: skip

    @per_plan
    def hopper_scan(
        self, initial: int, values: bool, output: bool, keep: bool, strict: bool, by_token: bool = False
    ) -> Constants:
        """One launch of the scan on Hopper; arguments as for `scan`."""
        options = scan_options(output, keep, values, self.decay, self.separate, strict, self.many_scans)
        return self._hopper_constants(
            options, HAS_V=values, INITIAL=initial, OUTPUT=output, KEEP=keep, BY_TOKEN=by_token, STRICT=strict,
        )  # fmt: skip

    @per_plan
    def hopper_reverse_scan(self, final: bool, initial: bool, keep: bool, in_place: bool) -> Constants:
        """One launch of the reverse scan on Hopper; arguments as for `reverse_scan`.

        Args:
            in_place: the gradients of the states take the place of queries and keys.
        """
        options = reverse_scan_options(keep, self.decay, self.separate, self.many_scans)
        return self._hopper_constants(options, HAS_FINAL=final, HAS_INITIAL=initial, KEEP=keep, IN_PLACE=in_place)

    def _hopper_constants(self, options: dict[str, int], **named: Any) -> Constants:
        return Constants(
            2 // options["PARTS"] * self.HV * self.scans, UNDECAYED=self.undecayed, scale=self.scale, T=self.T,
            NT=self.NT, HV=self.HV, HK=self.scanned_key_heads, DECAY=self.decay,
            SEPARATE=self.separate, BY_GAIN=self.by_gain, segments=self.segments, chunks=self.segment_chunks,
            **named, **options,
        )  # fmt: skip

    @per_plan
    def chain(self, reverse: bool) -> Constants:
        """The launch that chains the segments of a row."""
        tiles = self.tiles.chain
        return Constants(
            -(-self.V // tiles["BV"]) * self.HV * self.N, segments=self.segments, HV=self.HV, K=self.K, V=self.V,
            REVERSE=reverse, **tiles,
        )  # fmt: skip

    @per_plan
    def reverse_scan(self, final: bool, initial: bool, keep: bool, strict: bool) -> Constants:
        """One launch of the reverse scan.

        Args:
            final: it starts from a given gradient of the final state, otherwise from zero.
            initial: it stores the gradient of the initial state.
            keep: it stores Z and the gradients of the states that leave the chunks.
            strict: precision.
        """
        tiles = self.scan_tiles[strict].reverse_scan
        return Constants(
            *self.scan_grid(self.V, tiles["BV"]), HAS_FINAL=final, HAS_INITIAL=initial, KEEP=keep, STRICT=strict,
            **self.per_sequence, **tiles,
        )  # fmt: skip

    @per_plan
    def hopper_backward(self, strict: bool) -> Constants:
        """The launch that makes all gradients on Hopper; by the gain one of two, for heads that are `strict` or not."""
        return Constants(
            self.scans * self.HV, scale=self.scale, T=self.T, H=self.H, HV=self.HV, segments=self.segments,
            chunks=self.segment_chunks, ZERO=0, DECAY=self.decay, STRICT=strict, **BACKWARD,
        )  # fmt: skip

    @per_plan
    def small_steps(self) -> Constants:
        """The launch for gradients of small step sizes on Hopper where the states remain."""
        chunks, tile = 4, 64
        return Constants(
            -(-self.slots // chunks), T=self.T, NT=self.NT, H=self.H, HV=self.HV, value_tiles=self.V // tile,
            slots=self.slots, K=self.K, V=self.V, BV=tile, C=CHUNK, CHUNKS=chunks, DECAY=self.decay, num_warps=4,
        )  # fmt: skip

    @per_plan
    def tiny_steps(self) -> Constants:
        """The same where they do not."""
        return Constants(
            self.scans * self.HV, T=self.T, H=self.H, HV=self.HV, segments=self.segments, chunks=self.segment_chunks,
            value_tiles=self.V // 64, K=self.K, V=self.V, BV=64, C=CHUNK, DECAY=self.decay, num_warps=4,
        )  # fmt: skip

    @per_plan
    def log_decay_gradient(self) -> Constants:
        """The launch that ends the gradient of log-decay on Hopper."""
        HV, NT, B = self.chunk_grid()
        heads = min(16, triton.next_power_of_2(HV))
        return Constants(-(-HV // heads), NT, B, T=self.T, HV=HV, C=CHUNK, D=self.V, HEADS=heads, num_warps=4)

    @per_plan
    def sum_of_groups(self) -> Constants:
        """The launch that sums dq and dk over value heads that share a key head, on Hopper."""
        rows, tile = self.B * self.T * self.H, 16
        return Constants(-(-rows // tile), 2, rows=rows, GROUP=self.HV // self.H, D=self.K, ROWS=tile, num_warps=4)

    def _gradient_arguments(self, tiles: dict[str, int]) -> dict[str, Any]:
        key_tiles, value_tiles = -(-self.K // tiles["BK"]), -(-self.V // tiles["BV"])
        return dict(V=self.V, key_tiles=key_tiles, value_tiles=value_tiles, **self.per_chunk, **tiles)

    @per_plan
    def chunk_gradients(self) -> Constants:
        """The launch for no decay, or one per head."""
        arguments = self._gradient_arguments(self.tiles.gradients)
        return Constants(*self.chunk_grid(), DECAY=self.decay, **self.precisions, **arguments)

    @per_plan
    def chunk_gradients_channel(self) -> Constants:
        """The launch for decay per channel and 16-bit inputs: chunks without strong decay."""
        return Constants(*self.chunk_grid(), **self._gradient_arguments(self.tiles.gradients))

    @per_plan
    def chunk_gradients_strong(self) -> Constants:
        """The launch for decay per channel and 16-bit inputs: chunks with strong decay."""
        grid, neighbours = self.neighbour_grid()
        return Constants(*grid, **neighbours, **self._gradient_arguments(self.tiles.gradients_strong))

    @per_plan
    def chunk_gradients_exact(self, strong: bool) -> Constants:
        """The launch for decay per channel and float32 that does the chunks with strong decay, or all others."""
        grid, neighbours = self.neighbour_grid() if strong else ((self.slots,), dict(chunks=1, slots=self.slots))
        return Constants(*grid, STRONG=int(strong), **neighbours, **self._gradient_arguments(self.tiles.gradients))

    @per_plan
    def hopper_chunk_gradients_channel(self) -> Constants:
        """The launch of chunks without strong decay on Hopper."""
        return Constants(*self.chunk_grid(), **self._hopper_gradient_arguments())

    @per_plan
    def hopper_chunk_gradients_strong(self) -> Constants:
        """The launch of chunks with strong decay on Hopper."""
        grid, neighbours = self.neighbour_grid()
        return Constants(*grid, **neighbours, **self._hopper_gradient_arguments())

    def _hopper_gradient_arguments(self) -> dict[str, Any]:
        return dict(
            scale=self.scale, channels=self.K, nothing=0, T=self.T, NT=self.NT, H=self.H, HV=self.HV,
            GROUPED=self.grouped, num_warps=4,
        )  # fmt: skip


plan_for = lru_cache(maxsize=1024)(Plan)
