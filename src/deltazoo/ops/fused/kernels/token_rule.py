"""The delta rule for one token, from convolved queries, keys and values to the output before its norm: one launch.

    q, k by their L2 norms      b = sigmoid(b_proj x)      log_decay = -exp(A_log) softplus(a + dt_bias)
    S' = exp(log_decay) S + k u^T      o = scale S'^T q      z = o w act(g)      squares = sum of o^2

with `u = beta (v - S^T k)`, beta being made of b and `|k|^2` (`deltazoo.ops.step_size`), or `u = v` where nothing is
erased. The decay is per head, or per key channel; its logarithm may also be `logsigmoid(a) / 16`, or a constant of the
head. What follows applies `rsqrt(mean o^2 + eps)` per head (`HeadNorm`), since a head is divided among programs here.
The rule is computed as in `deltazoo.ops.triton.decode`.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.fused.kernels.launch_ahead import launch_options, launches_ahead, wait_for_inputs
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["RuleShape", "Tile", "choose_tile", "token_rule"]


class RuleShape(NamedTuple):
    """Sizes and choices of a layer whose rule `token_rule` computes."""

    H: int
    HV: int
    K: int
    V: int
    normalize_q: bool
    doubled_step: bool
    """The step size is twice as large."""
    decay: str
    """"none", "scalar" or "channel"."""
    gate: str
    """Of the output: "none", "silu" or "sigmoid"."""
    low_rank_gate: bool = False
    """The output gate comes from `low_rank_gates`, as a decay per channel always does."""
    normalize_k: bool = True
    step: str = "euler"
    """Name of the step size; "none": nothing is erased, and `mixed` has no b."""
    decay_form: str = "softplus"
    """Of the log-decay: "softplus", "log_sigmoid", or "fixed", which is per head and takes no a."""

    @property
    def bounded(self) -> bool:
        """Whether the step size is at most `2 / |k|^2`, as it could exceed that."""
        return self.doubled_step or (self.step == "euler" and not self.normalize_k)


@triton.jit
def _unit_head(x, NORMALIZE: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6) if NORMALIZE else x


@triton.jit
def _softplus(x):
    """`log(1 + exp(x))`, exact to a few roundings for small results too."""
    y = tl.exp(-tl.abs(x))
    u = 1 + y
    log1p = tl.where(u == 1.0, y, tl.log(u) * (y / (u - 1)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def _step_size(b, squared_norm, STEP: tl.constexpr):
    if STEP == "exact":  # b (1 - exp(-x)) / x; where x is small, the rounding of e cancels between e - 1 and log(e)
        x = b * squared_norm
        e = tl.exp(-x)
        ratio = tl.where(x > 1.0, (1 - e) / x, tl.where(e == 1.0, 1.0, (e - 1) / tl.log(e)))
        return b * ratio
    if STEP == "implicit":
        return b / (1 + b * squared_norm)
    if STEP == "kaczmarz":
        return b / (squared_norm + 1e-6)
    return b


@triton.jit(do_not_specialize=["scale"])
def token_rule_kernel(
    mixed,  # [B, M] float32: q, k, v after SiLU; then what makes the gates; b last, if there is one
    gates,  # [B, N] float32: g if it is of low rank, then a if it is per channel; or None
    state,  # [B, HV, K, V] float32, advanced in place
    A_log,  # [HV] float32, the log-decay itself if it is fixed; or None
    dt_bias,  # [HV], or [HV, K]; or None
    norm_weight,  # [V]
    z,  # [B, HV, V] float32
    squares,  # [B, HV, BLOCKS] float32
    scale,
    M: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NORMALIZE_Q: tl.constexpr,
    NORMALIZE_K: tl.constexpr,
    STEP: tl.constexpr,
    DOUBLED: tl.constexpr,
    BOUNDED: tl.constexpr,
    DECAY: tl.constexpr,
    DECAY_FORM: tl.constexpr,
    GATE: tl.constexpr,
    LOW_RANK: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    AHEAD: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    GATE_AT: tl.constexpr = 2 * H * K + HV * V
    B_AT: tl.constexpr = M if STEP == "none" else M - HV
    GATES: tl.constexpr = (HV * V if LOW_RANK else 0) + (HV * K if DECAY == "channel" else 0)
    block = tl.program_id(0) % BLOCKS
    matrix = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = matrix % HV
    keys = tl.arange(0, BK)
    columns = block * BV + tl.arange(0, BV)
    key_mask = keys < K
    column_mask = columns < V

    # Only this layer's kernel of the token before has written the state, and it has ended.
    tile = matrix * (K * V) + (keys[:, None] * V + columns[None, :])
    tile_mask = key_mask[:, None] & column_mask[None, :]
    S = tl.load(state + tile, mask=tile_mask, other=0.0)
    norm = tl.load(norm_weight + columns, mask=column_mask, other=0.0).to(tl.float32)
    SOFTPLUS: tl.constexpr = DECAY_FORM == "softplus"
    if DECAY_FORM == "log_sigmoid":  # logsigmoid(a) = -softplus(-a)
        rate = 1 / 16
    elif DECAY != "none":
        rate = tl.exp(tl.load(A_log + head))  # the decay itself if it is fixed
    if DECAY == "scalar" and SOFTPLUS:
        bias = tl.load(dt_bias + head)
    if DECAY == "channel" and SOFTPLUS:
        channel_bias = tl.load(dt_bias + head * K + keys, mask=key_mask, other=0.0)
    wait_for_inputs(AHEAD)

    mixed += (matrix // HV) * M
    if GATES > 0:
        gates += (matrix // HV) * GATES
    q = tl.load(mixed + head // (HV // H) * K + keys, mask=key_mask, other=0.0)
    k = tl.load(mixed + H * K + head // (HV // H) * K + keys, mask=key_mask, other=0.0)
    v = tl.load(mixed + 2 * H * K + head * V + columns, mask=column_mask, other=0.0)
    if STEP != "none":
        b = tl.sigmoid(tl.load(mixed + B_AT + head))
    if GATE != "none":
        g = tl.load((gates if LOW_RANK else mixed + GATE_AT) + head * V + columns, mask=column_mask, other=0.0)
    if DECAY_FORM == "fixed":
        S *= rate
    elif DECAY == "scalar":
        a = tl.load(mixed + (B_AT - HV) + head)
        S *= tl.exp(-rate * _softplus(a + bias if SOFTPLUS else -a))
    elif DECAY == "channel":
        a = tl.load(gates + (GATES - HV * K) + head * K + keys, mask=key_mask, other=0.0)
        S *= tl.exp(-rate * _softplus(a + channel_bias if SOFTPLUS else -a))[:, None]
    q = _unit_head(q, NORMALIZE_Q)
    k = _unit_head(k, NORMALIZE_K)
    u = v
    if STEP != "none":
        squared_norm = tl.sum(k * k, axis=0)
        beta = _step_size(b, squared_norm, STEP)
        if DOUBLED:
            beta *= 2
        if BOUNDED:
            beta = tl.minimum(beta, 2 / tl.maximum(squared_norm, 1e-38))
        u = beta * (v - tl.sum(S * k[:, None], axis=0))
    o = scale * (tl.sum(S * q[:, None], axis=0) + tl.sum(q * k, axis=0) * u)
    S += k[:, None] * u[None, :]
    tl.store(state + tile, S, mask=tile_mask)
    tl.store(squares + matrix * BLOCKS + block, tl.sum(o * o, axis=0))
    o *= norm
    if GATE != "none":
        o *= tl.sigmoid(g)
    if GATE == "silu":
        o *= g
    tl.store(z + matrix * V + columns, o, mask=column_mask)


class Tile(NamedTuple):
    """The value columns of one program, and its warps."""

    columns: int
    warps: int


@lru_cache(maxsize=1024)
def choose_tile(matrices: int, K: int, V: int) -> Tile:
    """The tile for so many states `[K, V]`: narrow where there are few."""
    rows = triton.next_power_of_2(K)
    columns = min(16 if matrices * V <= 4096 else 32, triton.next_power_of_2(V))
    return Tile(columns, max(1, rows * columns // 2048))


def token_rule(
    mixed: Tensor,
    gates: Tensor | None,
    state: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    shape: RuleShape,
) -> tuple[Tensor, Tensor]:
    """One token of the rule. No gradients: for inference.

    Args:
        mixed: `[B, M]` float32: per row q `[H, K]`, k `[H, K]`, v `[HV, V]`, all convolved and activated; then, as far
            as the shape has them, output gate `[HV, V]` and decay gate a `[HV]`, or what gates of low rank are made of;
            the step gate b `[HV]` last, unless nothing is erased.
        gates: of low rank, as `low_rank_gates` returns them: output gate `[HV, V]`, decay gate `[HV, K]`; None if there
            are none.
        state: `[B, HV, K, V]` float32, contiguous; advanced in place.
        A_log: `[HV]` float32, of a softplus decay; of a fixed one the log-decay itself; None for others.
        dt_bias: of a softplus decay, `[HV]`, or `[HV * K]` if it is per channel; None for others.
        norm_weight: `[V]` of the output norm.
        shape: of the layer.

    Returns:
        `[B, HV * V]` float32: the output times norm weight and gate, without the division by its size per head; and
        `[B, HV, parts]` float32: partial sums of the squares to divide by.
    """
    B, M = mixed.shape
    tile = choose_tile(B * shape.HV, shape.K, shape.V)
    z = mixed.new_empty(B, shape.HV * shape.V)
    squares = mixed.new_empty(B, shape.HV, -(-shape.V // tile.columns))
    constants = _constants(B, M, shape, tile, launches_ahead(mixed.device))
    with torch.cuda.device_of(mixed):
        launch(token_rule_kernel, constants, mixed, gates, state, A_log, dt_bias, norm_weight, z, squares)
    return z, squares


@lru_cache(maxsize=1024)
def _constants(B: int, M: int, shape: RuleShape, tile: Tile, ahead: bool) -> Constants:
    return Constants(
        B * shape.HV * -(-shape.V // tile.columns), scale=shape.K**-0.5, M=M, H=shape.H, HV=shape.HV, K=shape.K,
        V=shape.V, NORMALIZE_Q=shape.normalize_q, NORMALIZE_K=shape.normalize_k, STEP=shape.step,
        DOUBLED=shape.doubled_step, BOUNDED=shape.bounded, DECAY=shape.decay, DECAY_FORM=shape.decay_form,
        GATE=shape.gate, LOW_RANK=shape.low_rank_gate, BK=triton.next_power_of_2(shape.K), BV=tile.columns,
        AHEAD=ahead, num_warps=tile.warps, **launch_options(ahead),
    )  # fmt: skip
