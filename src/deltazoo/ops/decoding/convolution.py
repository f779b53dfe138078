"""Short convolutions of one token, within other kernels or after a product in parts, with SiLU and the new windows.

    z = sum_i w_i x_{t-i}      y = z * sigmoid(z)  or z

This is `short_conv_step` without the L2 norm of heads. The outputs of a product may continue after those that are
convolved: gates, which stay unchanged, and inputs of second maps (`low_rank_maps`), which other programs of the launch
compute from the parts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.decoding.launch_ahead import launch_step, page_size, wait_for_inputs
from deltazoo.ops.decoding.low_rank_maps import LowRankGate, MapSizes, map_arguments, map_constants, second_maps
from deltazoo.ops.fused.device_math import sigmoid
from deltazoo.ops.triton.launch import Constants

_CHANNELS = 256
"""Outputs of one program."""


class Convolution(NamedTuple):
    """Short convolutions of the first outputs of a product, with SiLU or without."""

    taps: tuple[Tensor, Tensor, Tensor]
    """Taps of queries, keys and values, `[C_i, W]`, W at least 2; contiguous."""
    window: Tensor
    """`[R, C, W - 1]`: the product's outputs before this token, oldest first, C the sum of the C_i. Advanced in place.
    Contiguous; or pages of such windows, `[pages, C, W - 1]`."""
    silu: bool = True


@triton.jit
def load_windows(q_taps, k_taps, v_taps, window, row, columns, CQ: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr,
                 W: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """The windows of some outputs and their taps, both `[BN, BW]` with the oldest first, and the newest tap."""
    slots = tl.arange(0, BW)
    mask = (columns < CQ + CK + CV)[:, None] & (slots < W - 1)[None, :]
    first = (row * (CQ + CK + CV) + columns) * (W - 1)
    older = tl.load(window + first[:, None] + slots[None, :], mask=mask, other=0.0)
    older_taps = _taps(q_taps, k_taps, v_taps, columns[:, None], slots[None, :], mask, CQ, CK, CV, W)
    newest_tap = _taps(q_taps, k_taps, v_taps, columns, W - 1, columns >= 0, CQ, CK, CV, W)
    return older, older_taps, newest_tap


@triton.jit
def _taps(q_taps, k_taps, v_taps, columns, slots, mask, CQ: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr,
          W: tl.constexpr):  # fmt: skip
    of_q = columns < CQ
    of_k = (columns >= CQ) & (columns < CQ + CK)
    of_v = (columns >= CQ + CK) & (columns < CQ + CK + CV)
    taps = tl.load(q_taps + columns * W + slots, mask=mask & of_q, other=0.0)
    taps += tl.load(k_taps + (columns - CQ) * W + slots, mask=mask & of_k, other=0.0)
    taps += tl.load(v_taps + (columns - CQ - CK) * W + slots, mask=mask & of_v, other=0.0)
    return taps.to(tl.float32)


@triton.jit
def convolve(
    x,  # [BN] float32, outputs of a product
    older,  # results of `load_windows`
    older_taps,
    newest_tap,
    row,
    columns,
    window,
    C: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, SILU: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Convolve the outputs below C, advance their windows, apply SiLU if wanted; other outputs stay."""
    slots = tl.arange(0, BW)
    inside = columns < C
    newest = x.to(window.dtype.element_ty)  # rounded to the dtype of the window
    z = newest.to(tl.float32) * newest_tap + tl.sum(older.to(tl.float32) * older_taps, axis=1)
    tl.debug_barrier()  # no thread may write what another has yet to read
    first = (row * C + columns) * (W - 1)
    moves = inside[:, None] & ((slots >= 1) & (slots < W - 1))[None, :]
    tl.store(window + first[:, None] + (slots - 1)[None, :], older, mask=moves)
    tl.store(window + first + (W - 2), newest, mask=inside)
    return tl.where(inside, z * sigmoid(z, HALF) if SILU else z, x)


@triton.jit
def convolve_parts_kernel(
    parts,  # [S, R, M]
    bias,  # [M] or None
    q_taps,
    k_taps,
    v_taps,
    window,  # [R, C, W - 1], or pages of these
    mixed,  # [R, M] float32
    state_indices,  # [R], the page of each row's window; or None
    weight_0, bias_0, weight_1, bias_1, weight_2, bias_2, y,  # as of `second_maps`; or None
    R,
    PAGE: tl.constexpr,
    S: tl.constexpr, M: tl.constexpr, CQ: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr, W: tl.constexpr,
    BW: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr,
    FIRST_0: tl.constexpr, N_0: tl.constexpr, RANK_0: tl.constexpr, FIRST_1: tl.constexpr, N_1: tl.constexpr,
    RANK_1: tl.constexpr, FIRST_2: tl.constexpr, N_2: tl.constexpr, RANK_2: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK_0: tl.constexpr, BK_1: tl.constexpr, BK_2: tl.constexpr, MAP_BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if weight_0 is not None:
        maps = tl.cdiv(R, BM) * MAP_BLOCKS  # the first programs
        if program < maps:
            second_maps(
                program, parts, bias, weight_0, bias_0, weight_1, bias_1, weight_2, bias_2, y, R, S, M, FIRST_0, N_0,
                RANK_0, FIRST_1, N_1, RANK_1, FIRST_2, N_2, RANK_2, BM, BN, BK_0, BK_1, BK_2, AHEAD,
            )  # fmt: skip
        else:
            _convolve_outputs(program - maps, parts, bias, q_taps, k_taps, v_taps, window, mixed, state_indices, R,
                              PAGE, S, M, CQ, CK, CV, W, BW, SILU, BC, AHEAD)  # fmt: skip
    else:
        _convolve_outputs(program, parts, bias, q_taps, k_taps, v_taps, window, mixed, state_indices, R, PAGE, S, M, CQ,
                          CK, CV, W, BW, SILU, BC, AHEAD)  # fmt: skip


@triton.jit
def _convolve_outputs(program, parts, bias, q_taps, k_taps, v_taps, window, mixed, state_indices, R, PAGE: tl.constexpr,
                      S: tl.constexpr, M: tl.constexpr, CQ: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr,
                      W: tl.constexpr, BW: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr,
                      AHEAD: tl.constexpr):  # fmt: skip
    BLOCKS: tl.constexpr = (M + BC - 1) // BC
    row = (program // BLOCKS).to(tl.int64)
    columns = (program % BLOCKS) * BC + tl.arange(0, BC)
    mask = columns < M
    window_row = row
    if state_indices is not None:
        window += tl.load(state_indices + row).to(tl.int64) * PAGE
        window_row = 0
    older, older_taps, newest_tap = load_windows(q_taps, k_taps, v_taps, window, window_row, columns, CQ, CK, CV, W, BW)
    total = tl.zeros([BC], tl.float32)
    if bias is not None:
        total += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(AHEAD)
    for part in tl.static_range(S):
        total += tl.load(parts + (part * R + row) * M + columns, mask=mask, other=0.0).to(tl.float32)
    HALF: tl.constexpr = window.dtype.element_ty != tl.float32
    total = convolve(total, older, older_taps, newest_tap, window_row, columns, window, CQ + CK + CV, W, BW, SILU, HALF)
    tl.store(mixed + row * M + columns, total, mask=mask)


def convolve_parts(
    parts: Tensor,
    convolution: Convolution,
    bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    gates: Sequence[LowRankGate] = (),
) -> tuple[Tensor, Tensor | None]:
    """The outputs of a product, the first of them convolved, and second maps of others. It has no gradients.

    Args:
        parts: `[S, R, M]`, whose sum over S is the product; contiguous.
        convolution: the convolutions, whose windows advance.
        bias: `[M]`, added to the product.
        state_indices: `[R]` integers, the page that holds each row's window.
        gates: at most three second maps, of columns that are not convolved.

    Returns:
        `[R, M]` float32: queries, keys and values after SiLU, then the other outputs.
        `[R, N]` float32: the outputs of the second maps side by side, before activations; None without maps.

    Raises:
        ValueError: more than three maps.
    """
    S, R, M = parts.shape
    (q_taps, k_taps, v_taps), window, silu = convolution
    mixed = parts.new_empty(R, M, dtype=torch.float32)
    tensors, maps, y = map_arguments(mixed, gates) if gates else ((None,) * 6, (), None)
    channels = len(q_taps), len(k_taps), len(v_taps)
    sizes = S, R, M, channels, window.shape[-1] + 1, silu, page_size(window, state_indices), maps
    launch_step(
        convolve_parts_kernel, _constants, sizes, parts, bias, q_taps, k_taps, v_taps, window, mixed, state_indices,
        *tensors, y,
    )  # fmt: skip
    return mixed, y


def _constants(
    S: int, R: int, M: int, channels: tuple[int, int, int], W: int, silu: bool, page: int, maps: MapSizes
) -> Constants:
    CQ, CK, CV = channels
    rows = min(64, max(16, triton.next_power_of_2(R))) if maps else 1  # without maps one kernel for all numbers
    map_blocks, numbered = map_constants(32, maps)
    return Constants(
        R * -(-M // _CHANNELS) + -(-R // rows) * map_blocks, R=R, PAGE=page, S=S, M=M, CQ=CQ, CK=CK, CV=CV, W=W,
        BW=triton.next_power_of_2(W - 1), SILU=silu, BC=_CHANNELS, BM=rows, MAP_BLOCKS=map_blocks, num_warps=4,
        **numbered,
    )  # fmt: skip
