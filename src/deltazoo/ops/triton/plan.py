"""What all calls of the same sizes share: sizes, tiles, and the constants of every launch. Worked out once."""

from functools import lru_cache

import torch
from torch import Tensor

from deltazoo.ops.triton.launch import Constants
from deltazoo.ops.triton.tiling import CHUNK, tiles_for

__all__ = ["plan_for", "sizes_of"]

MIN_SEGMENT = 32
"""Chunks in the shortest segment worth its three scans."""

FEW_SCANS = 66
"""Tiles of 128 value channels that leave half of a large GPU's multiprocessors idle: tiles of 64 serve them better."""


def segments_of(chunks: int, programs: int) -> tuple[int, int]:
    """Into how many segments to cut rows of so many chunks, and how many chunks each has.

    Args:
        programs: what the serial scans would run without a cut; about 256 fill a large GPU.
    """
    if chunks < 2 * MIN_SEGMENT or programs > 128:
        return 1, chunks
    length = -(-chunks // min(-(-256 // programs), chunks // MIN_SEGMENT))
    return -(-chunks // length), length


def sizes_of(
    q: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, cu_seqlens: Tensor | None, strict: bool | None
) -> tuple[torch.Size, torch.Size, bool, int, bool, int | None, bool | None]:
    """The arguments of `Shapes`."""
    decay = 0 if log_decay is None else log_decay.ndim - 2
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.shape, v.shape, q.dtype != torch.float32, decay, beta is not None, sequences, strict


class Shapes:
    """The sizes of one call.

    Args:
        q, v: shapes.
        half: 16-bit inputs.
        decay: 0 none, 1 per head, 2 per channel.
        has_beta: with step sizes.
        sequences: how many are packed into a row; None if rows are not packed.
        strict: strict precision, or fast (False), or as each chunk's erase gain needs (None).
    """

    def __init__(
        self, q: torch.Size, v: torch.Size, half: bool, decay: int, has_beta: bool, sequences: int | None,
        strict: bool | None,
    ) -> None:  # fmt: skip
        self.B, self.T, self.H, self.K = q
        self.HV, self.V = v[2:]
        self.half, self.decay, self.has_beta = half, decay, has_beta
        chooses = half and has_beta  # float32 has one precision, and without beta there is nothing to be strict about
        self.by_gain, self.strict = chooses and strict is None, bool(chooses and strict)
        self.parts = (False, True) if self.by_gain else (self.strict,)
        """Whether the launches of a serial scan, in the order of the tokens, are strict."""
        self.matrices = 2 if has_beta else 1
        """Per chunk: A and P, or P alone."""
        self.N = self.B if sequences is None else sequences
        self.NT = -(-self.T // CHUNK) if sequences is None else self.T // CHUNK + self.N
        """Chunks per row of the batch; packed, with room for the last, partial chunk of every sequence."""
        self.slots = self.B * self.NT * self.HV
        self.segments, self.segment_chunks = 1, self.NT
        if sequences is None:
            self.segments, self.segment_chunks = segments_of(self.NT, self.B * self.HV * -(-self.V // 64))
        self.scans = self.N * self.segments
        """Independent scans: sequences, or their segments."""
        self.crowded = self.scans * self.HV * -(-self.V // 128) > FEW_SCANS


per_plan = lru_cache(maxsize=1024)


class Plan(Shapes):
    """What all calls of the same sizes share: tiles, and the constants of each launch, by the name of its kernel."""

    def __init__(self, *arguments) -> None:
        *sizes, self.scale, shared = arguments
        super().__init__(*sizes)
        *_, sequences, _ = sizes
        packed = sequences is not None
        self.serial = {
            strict: tiles_for(self.K, self.V, self.half, self.decay, self.has_beta, strict, shared, self.crowded)
            for strict in self.parts
        }
        """Tiles of strict and of other launches of the serial scans."""
        self.tiles = self.serial[self.parts[0]]
        """Those of all other kernels do not depend on it."""
        self.precision = "tf32" if self.half else "tf32x3"
        common = dict(
            scale=self.scale, T=self.T, NT=self.NT, HV=self.HV, K=self.K, C=CHUNK, HAS_BETA=self.has_beta,
            PACKED=packed, PRECISION=self.precision,
        )  # fmt: skip
        self.chunks = dict(T=self.T, NT=self.NT, HV=self.HV, C=CHUNK, PACKED=packed)
        """Where the chunks lie."""
        self.per_chunk = dict(H=self.H, GROUPED=self.H != self.HV, **common)
        """Arguments of the kernels that run one program per chunk and value head, and read keys."""
        self.per_sequence = dict(
            HK=self.HV if self.decay == 2 else self.H, DECAY=self.decay, BY_GAIN=self.by_gain, segments=self.segments,
            chunks=self.segment_chunks, **common,
        )  # fmt: skip
        """Arguments of the kernels that walk through a sequence."""
        self.precisions = dict(STRICT=self.strict, BY_GAIN=self.by_gain)
        """Of the kernels that decide per chunk."""
        self.key_tiles, self.value_tiles = (
            -(-self.K // self.tiles.gradients["BK"]),
            -(-self.V // self.tiles.gradients["BV"]),
        )
        """Of the tail."""

    def chunk_grid(self, tiles: int = 1) -> tuple[int, int, int]:
        """One program per chunk and value head, or several; heads run fastest."""
        if max(self.NT, self.B) > 65_535:  # CUDA's limit for the second and third dimension of a grid
            raise NotImplementedError(
                f"the triton backend takes up to 65535 rows of up to 65535 chunks of {CHUNK} tokens, "
                f"got {self.B} rows of {self.NT} chunks; use backend='chunkwise'"
            )
        return tiles * self.HV, self.NT, self.B

    def neighbour_grid(self) -> tuple[tuple[int], dict[str, int]]:
        """Grid of a kernel for few of the chunks: each program looks at some neighbours."""
        chunks = min(max(self.slots // 512, 1), 16)
        return (-(-self.slots // chunks),), dict(chunks=chunks, slots=self.slots)

    @per_plan
    def invert(self) -> Constants:
        grid, neighbours = self.neighbour_grid()
        return Constants(*grid, C=CHUNK, **neighbours, **self.tiles.invert)

    def scan_grid(self, V: int, BV: int) -> tuple[int]:
        return (-(-V // BV) * self.HV * self.scans,)

    @per_plan
    def prepare(self) -> Constants:
        return Constants(
            *self.chunk_grid(), DECAY=self.decay, BK=self.tiles.BK, **self.precisions, **self.per_chunk,
            **self.tiles.prepare,
        )  # fmt: skip

    @per_plan
    def prepare_channel(self) -> list[Constants]:
        """Of one launch or, if a chunk's channels take several tiles, of one without far chunks and one of them."""
        tiles = self.tiles.channel
        return [
            Constants(
                *self.chunk_grid(), level_tiles=tiles["BK"] // tiles["LEVEL_BK"], PART=part, **self.precisions,
                **self.per_chunk, **tiles,
            )
            for part in ((0,) if tiles["BK"] >= self.K else (1, 2))
        ]  # fmt: skip

    @per_plan
    def scan(self, initial: bool, keep: bool, strict: bool) -> Constants:
        tiles = self.serial[strict].keep if keep else self.serial[strict].scan
        return Constants(
            *self.scan_grid(self.V, tiles["BV"]), V=self.V, HAS_V=True, INITIAL=int(initial), OUTPUT=not keep,
            KEEP=keep, STRICT=strict, **self.per_sequence, **tiles,
        )  # fmt: skip

    @per_plan
    def scan_segment(self, transition: bool, strict: bool) -> Constants:
        """Of the scan for a segment's transition, or for what the segment adds to it."""
        V, initial = (self.K, 2) if transition else (self.V, 0)
        if strict and self.by_gain:
            initial = 1  # it goes on from where the other launch stopped
        tiles = self.serial[strict].keep
        return Constants(
            *self.scan_grid(V, tiles["BV"]), V=V, HAS_V=not transition, INITIAL=initial, OUTPUT=False, KEEP=False,
            STRICT=strict, **self.per_sequence, **tiles,
        )  # fmt: skip

    @per_plan
    def chain(self, reverse: bool) -> Constants:
        tiles = self.tiles.chain
        return Constants(
            -(-self.V // tiles["BV"]) * self.HV * self.N, segments=self.segments, HV=self.HV, K=self.K, V=self.V,
            REVERSE=reverse, **tiles,
        )  # fmt: skip

    @per_plan
    def reverse_scan(self, final: bool, initial: bool, keep: bool, strict: bool) -> Constants:
        tiles = self.serial[strict].reverse
        return Constants(
            *self.scan_grid(self.V, tiles["BV"]), V=self.V, HAS_FINAL=final, HAS_INITIAL=initial, KEEP=keep,
            STRICT=strict, **self.per_sequence, **tiles,
        )  # fmt: skip

    @per_plan
    def chunk_gradients(self) -> Constants:
        return Constants(
            *self.chunk_grid(), DECAY=self.decay, V=self.V, key_tiles=self.key_tiles, value_tiles=self.value_tiles,
            **self.precisions, **self.per_chunk, **self.tiles.gradients,
        )  # fmt: skip

    @per_plan
    def chunk_gradients_channel(self) -> Constants:
        return Constants(
            *self.chunk_grid(), key_tiles=self.key_tiles, value_tiles=self.value_tiles, V=self.V, **self.per_chunk,
            **self.tiles.gradients,
        )  # fmt: skip

    @per_plan
    def chunk_gradients_exact(self, strong: bool) -> Constants:
        grid, neighbours = self.neighbour_grid() if strong else ((self.slots,), dict(chunks=1, slots=self.slots))
        tiles = self.tiles.gradients_exact
        return Constants(
            *grid, key_tiles=-(-self.K // tiles["BK"]), value_tiles=-(-self.V // tiles["BV"]), V=self.V,
            STRONG=int(strong), **neighbours, **self.per_chunk, **tiles,
        )  # fmt: skip


plan_for = lru_cache(maxsize=1024)(Plan)
