"""The sizes of a call, and its route: the kernels that run, chosen once for all calls of these sizes, with reasons."""

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from deltazoo.ops.triton.gluon import available
from deltazoo.ops.triton.tiles import CHUNK, HEAD, HOPPER, Tiles, tiles_for

MIN_SEGMENT = 32
"""Chunks in the shortest segment worth its three scans."""

FEW_SCANS = 66
"""Tiles of 128 value channels that leave half of a large GPU's multiprocessors idle: tiles of 64 serve them better."""

MAX_ROWS = 2**31 // (2 * CHUNK)
"""Chunks of all heads whose matrices, row by row, 32-bit coordinates can address."""

MIN_HEADS = 64
"""Heads of all sequences or segments from which one program per head is faster than several that fill the GPU."""

MIN_BUSY = 0.6
"""Share of the multiprocessors that the fused forward pass must keep busy to be faster than several kernels. Measured
with 80 heads of 4096 tokens: 0.17 ms without decay and 0.19 with, where several kernels take 0.21 and 0.23."""


class Card(NamedTuple):
    """The properties of a GPU that decide on kernels and tiles."""

    shared: int = HOPPER
    """Shared memory that a thread block can use, in bytes."""
    gluon: bool = False
    """Whether Gluon kernels run."""
    multiprocessors: int = 132
    """Number of multiprocessors; each runs one thread block of the fused kernels."""


@lru_cache
def card_of(device: torch.device) -> Card:
    """The GPU of a device; without one Hopper's shared memory, and no Gluon."""
    if device.type != "cuda" or not torch.cuda.is_available():  # tensors without data
        return Card()
    card: Any = torch.cuda.get_device_properties(device)
    return Card(card.shared_memory_per_block_optin, available(device), card.multi_processor_count)


class Route(NamedTuple):
    """The kernels of a call."""

    scans: str
    """Kernels that scan: "gluon", except for strict reverse scans, or "triton"."""
    forward: str
    """Forward pass that keeps no more than its inputs: "fused" in one Gluon kernel, which other kernels complete, or in
    "stages"."""
    recorded: str
    """Forward pass that keeps states for the backward pass: "fused" or in "stages". A backward pass in stages reads the
    states in another form than the fused kernel writes."""
    backward: str
    """Backward pass: "fused" in one Gluon kernel after the states are known, or in "stages"."""
    gradients: str
    """Kernels of the chunk gradients of the backward pass in stages: "gluon" or "triton"."""
    keeps: str
    """Kept for the backward pass: "states" with the chunks, or "chunks", for which the backward pass scans again."""
    keeps_to_scan_again: str
    """Kept if the backward pass scans again in any case: "chunks", or only the "inputs".

    To run the fused forward pass twice costs less than a preparation and two scans, by the times of these parts. This
    is not so if chunks may have large gains: other kernels prepare those, which would run twice. With a decay per
    channel the preparation runs twice, since its results take four times the memory of the inputs.
    """
    why: dict[str, str]
    """The obstacle to the faster kernels, for each of the first five fields; none where they run."""

    def forward_keeping(self, keeps: str) -> str:
        """The forward pass of a call that keeps "states", "chunks" or "inputs": only the preparation makes chunks."""
        return {"states": self.recorded, "chunks": "stages", "inputs": self.forward}[keeps]


OBSTACLES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("scans", lambda p: (p.K, p.V) != (HEAD, HEAD), "heads have {p.K} key and {p.V} value channels, not 128"),
    ("scans", lambda p: not p.half, "inputs are float32"),
    ("scans", lambda p: not p.has_beta, "there are no step sizes"),
    ("scans", lambda p: p.num_micro_steps > 1, "tokens have several micro-steps"),
    ("scans", lambda p: p.packed, "rows are packed"),
    ("scans", lambda p: p.slots == 0, "there are no tokens"),
    ("scans", lambda p: p.slots >= MAX_ROWS, "there are more chunks than 32-bit coordinates address"),
    ("scans", lambda p: not p.card.gluon, "Gluon kernels run on Hopper GPUs, with Triton 3.6 to 3.9"),
    ("gradients", lambda p: not p.per_channel, "decay is not per channel"),
    ("recorded backward", lambda p: p.per_channel, "decay is per channel"),
    ("forward recorded backward gradients", lambda p: p.dtype != torch.bfloat16, "inputs are {p.dtype}"),
    ("forward recorded backward", lambda p: p.strict, "precision is strict"),
    ("forward recorded backward", lambda p: p.reads_otherwise, "the erase reads with other keys or before the decay"),
    ("recorded", lambda p: p.segments > 1, "long rows are cut into segments"),
    ("forward", lambda p: p.segments > 1 and p.per_channel, "long rows are cut into segments"),
    ("forward recorded", lambda p: p.leaves_idle, "{p.row_heads} heads in all leave multiprocessors idle"),
    ("recorded backward", lambda p: p.heads * p.segments < MIN_HEADS, "there are few heads"),
)
"""The obstacles to Gluon kernels: fields of `Route`, the condition on a plan, and the reason in words.

The first that holds counts. Those of `scans` count for all fields.
"""


def route_of(plan: "Plan") -> Route:
    """The kernels of all calls of a plan."""
    why: dict[str, str] = {}
    for fields, holds, reason in OBSTACLES:
        new = [field for field in fields.split() if field not in why]
        if new and holds(plan):
            why |= dict.fromkeys(new, reason.format(p=plan))
        if "scans" in why:
            why = dict.fromkeys(Route._fields[:5], why["scans"])
            break
    forward, recorded, backward = ("stages" if name in why else "fused" for name in Route._fields[1:4])
    scans, gradients = ("triton" if name in why else "gluon" for name in ("scans", "gradients"))
    again = recorded == "fused" and not plan.by_gain
    return Route(
        scans, forward, recorded, backward, gradients, "states" if scans == "gluon" else "chunks",
        "inputs" if again or plan.per_channel else "chunks", why,
    )  # fmt: skip


def segments_of(chunks: int, programs: int) -> tuple[int, int]:
    """Number of segments into which rows of `chunks` chunks are cut, and the chunks in each.

    Args:
        chunks: number of chunks of a row.
        programs: number of programs of a serial scan without a cut; about 256 fill a large GPU.
    """
    if chunks < 2 * MIN_SEGMENT or programs > 128:
        return 1, chunks
    length = -(-chunks // min(-(-256 // programs), chunks // MIN_SEGMENT))
    return -(-chunks // length), length


class Plan:
    """The sizes of a call and its route.

    Sizes may be symbolic as long as nothing is launched.

    Args:
        q, v: shapes of q and v; v has `num_micro_steps` times the tokens of q.
        dtype: dtype of q, k and v.
        decay: "none", "scalar" (per head) or "channel".
        has_beta: whether there are step sizes.
        sequences: number of sequences packed into a row; None if rows are not packed.
        strict: strict precision, or fast (False), or by each chunk's erase gain (None).
        has_erase_key: whether the erase key differs from the write key.
        undecayed: whether the erase reads the state before the decay.
        num_micro_steps: rows of k, v and beta per token. Chunks count rows.
        scale: factor on q.
        card: the GPU.
        whole_segments: for a piece of rows that several ranks share, whose sequences are segments: the number of
            segments on all ranks. It chooses kernels and tiles, so that every rank chooses alike.
    """

    def __init__(
        self, q: torch.Size, v: torch.Size, dtype: torch.dtype, decay: str, has_beta: bool, sequences: int | None,
        strict: bool | None, has_erase_key: bool, undecayed: bool, num_micro_steps: int, scale: float, card: Card,
        whole_segments: int | None = None,
    ) -> None:  # fmt: skip
        self.B, self.tokens, self.H, self.K = q
        self.T, self.HV, self.V = v[1:]
        self.has_erase_key, self.undecayed, self.num_micro_steps = has_erase_key, undecayed, num_micro_steps
        self.dtype, self.half = dtype, dtype != torch.float32
        self.decay, self.per_channel, self.has_beta = decay, decay == "channel", has_beta
        assert not (undecayed and self.per_channel), "no kernel has this read"
        self.packed, self.scale, self.card = sequences is not None, scale, card
        # float32 has one precision, and so have calls without beta
        chooses = self.half and has_beta
        self.by_gain, self.strict = chooses and strict is None, bool(chooses and strict)
        self.scan_modes = (False, True) if self.by_gain else (self.strict,)
        """Whether each launch of a serial scan is strict, in the order of the tokens."""
        self.matrices = 2 if has_beta else 1
        """Number of matrices per chunk: A and P, or P alone."""
        self.grouped = self.H != self.HV
        """Whether several value heads share a key head."""
        self.separate = has_beta and (self.per_channel or has_erase_key)
        """Whether the scans read with other keys than they write."""
        self.N = self.B if sequences is None else sequences
        self.NT = -(-self.T // CHUNK) if sequences is None else self.T // CHUNK + self.N
        """Chunks per row of the batch; for packed rows an upper bound, since every sequence may end in a partial
        chunk."""
        self.slots = self.B * self.NT * self.HV
        """Chunks of all rows and value heads: the first dimension of tensors kept per chunk."""
        self.segments, self.segment_chunks = 1, self.NT
        if sequences is None and whole_segments is None:
            self.segments, self.segment_chunks = segments_of(self.NT, self.B * self.HV * -(-self.V // 64))
        self.scans = self.N * self.segments
        """Independent scans: sequences, or their segments."""
        self.heads = (self.N if whole_segments is None else whole_segments) * self.HV
        """Heads of all sequences."""
        self.many_scans = self.heads * self.segments * -(-self.V // 128) > FEW_SCANS
        self.route = route_of(self)
        self.gluon = self.route.scans == "gluon"
        self.fused_backward = self.route.backward == "fused"

    @property
    def reads_otherwise(self) -> bool:
        """Whether the erase reads with another key than the write key, or before the decay."""
        return self.has_erase_key or self.undecayed

    @property
    def row_heads(self) -> int:
        """Value heads of all rows or segments: the number of programs of the fused forward pass."""
        return self.B * self.segments * self.HV

    @property
    def leaves_idle(self) -> bool:
        """Whether these programs, each with a multiprocessor to itself, leave too many of these idle."""
        count = self.card.multiprocessors
        return self.row_heads < MIN_BUSY * count * -(-self.row_heads // count)

    @cached_property
    def scan_tiles(self) -> dict[bool, Tiles]:
        """Tiles of the strict and of the other launches of the serial scans."""
        sizes = self.K, self.V, self.half, self.decay, self.has_beta
        card = self.separate, self.card.shared, self.many_scans
        return {strict: tiles_for(*sizes, strict, *card) for strict in self.scan_modes}

    @property
    def tiles(self) -> Tiles:
        """Tiles of all other kernels, which do not depend on the precision."""
        return self.scan_tiles[self.scan_modes[0]]

    @cached_property
    def one_program_per_head(self) -> bool:
        """Whether all launches of the reverse scan on Hopper have one program per head of a sequence or segment."""
        strict = self.scan_tiles.get(True)  # the launch in plain Triton
        return self.gluon and self.many_scans and (strict is None or strict.reverse_scan["BV"] >= self.V)

    @property
    def common(self) -> dict[str, Any]:
        """Arguments of the kernels in plain Triton that read the kept tensors of chunks."""
        return dict(
            scale=self.scale, T=self.T, NT=self.NT, HV=self.HV, K=self.K, C=CHUNK, HAS_BETA=self.has_beta,
            MICRO_STEPS=self.num_micro_steps, PACKED=self.packed,
            PRECISION="tf32" if self.half else "tf32x3",
        )  # fmt: skip

    @property
    def per_chunk(self) -> dict[str, Any]:
        """Arguments of kernels that run one program per chunk and value head, and read keys."""
        return self.common | dict(H=self.H, GROUPED=self.grouped)

    @property
    def precisions(self) -> dict[str, bool]:
        """Arguments of the kernels that choose a precision per chunk."""
        return dict(STRICT=self.strict, BY_GAIN=self.by_gain)

    @property
    def scanned_heads(self) -> dict[str, Any]:
        """Arguments of all serial scans. With decay per channel every value head has keys of its own."""
        return dict(
            HK=self.HV if self.per_channel else self.H, DECAY=self.decay, SEPARATE=self.separate, BY_GAIN=self.by_gain,
            segments=self.segments, chunks=self.segment_chunks,
        )  # fmt: skip

    def chunk_grid(self) -> tuple[int, int, int]:
        """The grid of one program per chunk and value head; heads are the first axis."""
        if max(self.NT, self.B) > 65_535:  # CUDA's limit for the second and third dimension of a grid
            raise NotImplementedError(
                f"the triton backend takes up to 65535 rows of up to 65535 chunks of {CHUNK} tokens, "
                f"got {self.B} rows of {self.NT} chunks; use backend='chunkwise'"
            )
        return self.HV, self.NT, self.B

    @property
    def neighbours(self) -> int:
        """Number of neighbouring chunks, up to 16, at which a program of a kernel for few chunks looks."""
        return min(max(self.slots // 512, 1), 16)

    def neighbour_grid(self) -> tuple[tuple[int], dict[str, int]]:
        """Grid and arguments of a kernel for few chunks."""
        chunks = self.neighbours
        return (-(-self.slots // chunks),), dict(chunks=chunks, slots=self.slots)


per_plan = lru_cache(maxsize=1024)
"""A decorator of functions that make the constants of a launch from a plan."""

plan_for = lru_cache(maxsize=1024)(Plan)
