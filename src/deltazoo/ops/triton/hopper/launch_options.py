"""Options of the Gluon kernels' launches: stages that shared memory holds, registers of each partition, warps."""

from deltazoo.ops.triton.hopper.served_calls import HEAD
from deltazoo.ops.triton.tiling import CHUNK, HOPPER

__all__ = ["BACKWARD", "FEWER_STAGES", "FUSED_FORWARD", "reverse_scan_options", "scan_options"]

BACKWARD = dict(WALK_REGISTERS=168, GRADIENT_REGISTERS=160, COPY_REGISTERS=24, num_warps=4)
"""Options of `backward_kernel`: registers per thread of its partitions; the one that is not named gets what remains."""

FUSED_FORWARD = dict(STAGES=3, STATE_REGISTERS=184, PREPARE_REGISTERS=120, COPY_REGISTERS=24, num_warps=4)
"""Options of the fused forward pass: 219 of 227 KiB of shared memory, and all registers of a multiprocessor."""

FEWER_STAGES = 2
"""Stages where the fused forward pass keeps something for the backward pass, which takes buffers, or has a decay per
channel, whose keys and log-decays do."""

KEYS, PART, MATRIX, STATE = 2 * CHUNK * HEAD, 2 * CHUNK * HEAD // 2, 2 * CHUNK * CHUNK, 2 * HEAD * HEAD // 2
"""Bytes of tiles: keys of a chunk, values for a part of their channels, A or P, and a part of a state."""

BARRIERS = 448
"""Bytes at most of barriers, and of what Triton hands to the partitions."""


def scan_options(
    output: bool, keep: bool, values: bool, decay: int, separate: bool, strict: bool, many_scans: bool
) -> dict[str, int]:
    """Value channels per program, as parts of 64, and the stages of both rings of operands that shared memory holds.

    Args:
        output, keep, values: as for `Plan.scan`.
        decay: 0 none, 1 per head, 2 per channel.
        separate: the scan reads other keys than it writes.
        strict: the second term of A has a buffer.
        many_scans: two parts per program fill the card.
    """
    parts = 2 if many_scans else 1
    factors = 4 * ((CHUNK, 4 * CHUNK + 1, CHUNK + HEAD)[decay])
    stage = (1 + output) * KEYS + values * parts * PART + factors
    late_stage = separate * KEYS + (1 + output + strict) * MATRIX
    once = (output or keep) * parts * PART + keep * parts * STATE + BARRIERS
    return dict(PARTS=parts, num_warps=4) | _stages(HOPPER - once, stage, late_stage)


def reverse_scan_options(keep: bool, decay: int, separate: bool, many_scans: bool) -> dict[str, int]:
    """The same for the reverse scan; `keep` as for `Plan.reverse_scan`."""
    parts = 2 if many_scans else 1
    factors = 4 * ((CHUNK, 3 * CHUNK + 1, CHUNK + HEAD)[decay])
    stage = (2 + separate) * KEYS + parts * PART + factors
    once = keep * parts * (PART + STATE) + BARRIERS
    return dict(PARTS=parts, num_warps=4) | _stages(HOPPER - once, stage, 2 * MATRIX)


def _stages(free: int, stage: int, late_stage: int) -> dict[str, int]:
    """The most stages, at most four, and of what a chunk needs late as many or one less."""
    for count in (4, 3, 2):
        for late in (count, count - 1):
            if late > 1 and count * stage + late * late_stage <= free:
                return dict(STAGES=count, LATE_STAGES=late)
    raise AssertionError("two stages fit every kernel")
