"""A rule for one token, from convolved queries, keys and values to the output before its norm: one launch.

    q, k by their L2 norms      b = sigmoid(b_proj x)      log_decay = -exp(A_log) softplus(a + dt_bias)
    S' = exp(log_decay) S + k u^T      o = scale S'^T q      z = o w act(g)      squares = sum of o^2

with `u = beta (v - S^T e)`, beta being a function of b and `|k|^2` (`deltazoo.ops.step_size`), or `u = v` if nothing is
erased. The erase key e is k, or another key of the rule (`step_form.STEP_KEYS`). The decay is per head or per key
channel, and its logarithm has one of several forms. Micro-steps repeat the correction with further keys and values. The
next kernel applies `rsqrt(mean o^2 + eps)` per head (`HeadNorm`), since several programs share a head here. The update
is that of `deltazoo.ops.triton.step`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.decoding.launch_ahead import launch_step, page_size, wait_for_inputs
from deltazoo.ops.decoding.step_form import RuleShape
from deltazoo.ops.fused.device_math import exponential_minus_1, softplus
from deltazoo.ops.triton.launch import Constants


@triton.jit
def unit_head(x, NORMALIZE: tl.constexpr = True):
    """x divided by its L2 norm, or x itself."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6) if NORMALIZE else x


@triton.jit
def _load_turned(x, keys, mask, cos, sin, TURNED: tl.constexpr):
    """A query or key, with its first channels turned by their angles (`deltazoo.ops.fused.rotate`)."""
    value = tl.load(x + keys, mask=mask, other=0.0)
    if TURNED > 0:
        first = keys < TURNED // 2
        other = tl.load(
            x + tl.where(first, keys + TURNED // 2, keys - TURNED // 2), mask=mask & (keys < TURNED), other=0.0
        )
        value = tl.where(keys < TURNED, cos * value + sin * tl.where(first, -other, other), value)
    return value


@triton.jit
def _query_and_keys(q, k, gate, p0, p1, KEYS: tl.constexpr, NORMALIZE_Q: tl.constexpr, NORMALIZE_K: tl.constexpr,
                    LARGEST: tl.constexpr):  # fmt: skip
    """Query, write key and erase key; `gate` before its sigmoid, whose upper end is LARGEST."""
    if KEYS == "unit_feedback":
        c = tl.sigmoid(p0)
        return unit_head(q - p1 * c * k), unit_head(k), unit_head(c * k)
    q = unit_head(q, NORMALIZE_Q)
    k = unit_head(k, NORMALIZE_K)
    e = k
    if KEYS == "gated":
        e = LARGEST * tl.sigmoid(gate) * k
    if KEYS == "gated_query":
        b = LARGEST * tl.sigmoid(gate)
        e = b * k + 0.25 * tl.sigmoid(p0) * (b * q - tl.sum(b * q * k, axis=0) * k)
    if KEYS == "roots":
        k *= tl.sqrt(LARGEST * tl.sigmoid(gate))
        e = k
    if KEYS == "query_share":
        e = k + tl.sigmoid(gate - 0.9) * q
    if KEYS == "feedback":
        e = tl.sigmoid(p0) * k
        q -= p1 * k
    return q, k, e


@triton.jit
def _decay(x, rate, FORM: tl.constexpr):
    """`exp(-rate softplus(x))`, or the decay of the saturating form, whose logarithm is at least -5."""
    log_decay = -rate * softplus(x)[0]
    return tl.exp(5 * exponential_minus_1(log_decay / 5) if FORM == "saturating" else log_decay)


@triton.jit
def _step_size(b, squared_norm, STEP: tl.constexpr):
    if STEP == "exact":  # b (1 - exp(-x)) / x; where x is small, the rounding of e cancels between e - 1 and log(e)
        x = b * squared_norm
        e = tl.exp(-x)
        b *= tl.where(x > 1.0, (1 - e) / x, tl.where(e == 1.0, 1.0, (e - 1) / tl.log(e)))
    elif STEP == "implicit":
        b /= 1 + b * squared_norm
    elif STEP == "kaczmarz":
        b /= squared_norm + 1e-6
    else:
        tl.static_assert(STEP == "euler")
    return b


@triton.jit(do_not_specialize=["scale"])
def token_rule_kernel(
    mixed,  # [B, M] float32: q, then k and v of each micro-step after SiLU; then the inputs from the columns X_AT on
    gates,  # [B, N] float32: low-rank g, a per channel, the further key of KEYS; or None
    state,  # [B, HV, K, V] float32, or pages of these; advanced in place
    A_log,  # [HV] float32, the log-decay itself if it is fixed; or None
    dt_bias,  # [HV], or [HV, K]; or None
    p0,  # [H] float32, parameter of KEYS; or None
    p1,
    write_keys,  # [B, H, K] float32, for "scaled" KEYS; or None
    cos,  # [B or 1, TURNED], sin likewise; or None
    sin,
    norm_weight,  # [V]
    z,  # [B, HV, V] float32
    squares,  # [B, HV, BLOCKS] float32
    state_indices,  # [B], the page of each row's state; or None
    scale,
    PAGE: tl.constexpr, M: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    GATE_AT: tl.constexpr, DECAY_AT: tl.constexpr, STEP_AT: tl.constexpr, KEYS_AT: tl.constexpr,
    NORMALIZE_Q: tl.constexpr, NORMALIZE_K: tl.constexpr, STEP: tl.constexpr, KEYS: tl.constexpr,
    MICRO_STEPS: tl.constexpr, UNDECAYED: tl.constexpr, TURNED: tl.constexpr, ANGLE_ROW: tl.constexpr,
    DOUBLED_STEP: tl.constexpr, LARGEST_GAIN: tl.constexpr, DECAY: tl.constexpr, DECAY_FORM: tl.constexpr,
    GATE: tl.constexpr, LOW_RANK_GATE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    V_AT: tl.constexpr = (1 + MICRO_STEPS) * H * K
    A_IN_GATES: tl.constexpr = HV * V if LOW_RANK_GATE else 0
    KEY_IN_GATES: tl.constexpr = A_IN_GATES + (HV * K if DECAY == "channel" else 0)
    GATES: tl.constexpr = KEY_IN_GATES + (H * K if KEYS == "erase_first" else 0)
    PER_CHANNEL: tl.constexpr = KEYS == "gated" or KEYS == "gated_query" or KEYS == "roots"
    LARGEST: tl.constexpr = 2.0 if DOUBLED_STEP else 1.0
    block = tl.program_id(0) % BLOCKS
    matrix = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = matrix % HV
    key_head = head // (HV // H)
    keys = tl.arange(0, BK)
    columns = block * BV + tl.arange(0, BV)
    key_mask = keys < K
    column_mask = columns < V

    # The state was written only by this layer's kernel of the token before, which has ended.
    first = matrix * (K * V)
    if state_indices is not None:
        first = tl.load(state_indices + matrix // HV).to(tl.int64) * PAGE + head * (K * V)
    tile = first + (keys[:, None] * V + columns[None, :])
    tile_mask = key_mask[:, None] & column_mask[None, :]
    S = tl.load(state + tile, mask=tile_mask, other=0.0)
    norm = tl.load(norm_weight + columns, mask=column_mask, other=0.0).to(tl.float32)
    SOFTPLUS: tl.constexpr = DECAY_FORM == "softplus" or DECAY_FORM == "saturating"
    if DECAY_FORM == "log_sigmoid":  # logsigmoid(a) = -softplus(-a)
        rate = 1 / 16
    elif DECAY != "none":
        rate = tl.exp(tl.load(A_log + head))  # the decay itself if it is fixed
    if DECAY == "scalar" and SOFTPLUS:
        bias = tl.load(dt_bias + head)
    if DECAY == "channel" and SOFTPLUS:
        channel_bias = tl.load(dt_bias + head * K + keys, mask=key_mask, other=0.0)
    if p0 is not None:
        p0 = tl.load(p0 + key_head)
    if p1 is not None:
        p1 = tl.load(p1 + key_head)
    wait_for_inputs(AHEAD)

    mixed += (matrix // HV) * M
    if GATES > 0:
        gates += (matrix // HV) * GATES
    if TURNED > 0:
        angles = (matrix // HV) * ANGLE_ROW + keys
        cos = tl.load(cos + angles, mask=keys < TURNED, other=0.0).to(tl.float32)
        sin = tl.load(sin + angles, mask=keys < TURNED, other=0.0).to(tl.float32)
    raw_query = _load_turned(mixed + key_head * K, keys, key_mask, cos, sin, TURNED)
    if GATE != "none":
        g = tl.load((gates if LOW_RANK_GATE else mixed + GATE_AT) + head * V + columns, mask=column_mask, other=0.0)
    if DECAY_FORM == "fixed":
        decay = rate
    elif DECAY == "scalar":
        a = tl.load(mixed + DECAY_AT + head)
        decay = _decay(a + bias if SOFTPLUS else -a, rate, DECAY_FORM)
    elif DECAY == "channel":
        a = tl.load(gates + A_IN_GATES + head * K + keys, mask=key_mask, other=0.0)
        decay = _decay(a + channel_bias if SOFTPLUS else -a, rate, DECAY_FORM)[:, None]
    key_gate = None
    if PER_CHANNEL:
        key_gate = tl.load(mixed + STEP_AT + key_head * K + keys, mask=key_mask, other=0.0)
    if KEYS == "query_share":
        key_gate = tl.load(mixed + KEYS_AT + key_head)
    for step in tl.static_range(MICRO_STEPS):
        k = _load_turned(mixed + ((1 + step) * H + key_head) * K, keys, key_mask, cos, sin, TURNED)
        u = tl.load(mixed + V_AT + (step * HV + head) * V + columns, mask=column_mask, other=0.0)
        q, k, e = _query_and_keys(raw_query, k, key_gate, p0, p1, KEYS, NORMALIZE_Q, NORMALIZE_K, LARGEST)
        if PER_CHANNEL:
            w = tl.sigmoid(tl.load(mixed + KEYS_AT + head * V + columns, mask=column_mask, other=0.0))
            u *= tl.sqrt(LARGEST * w) if KEYS == "roots" else w
        if step == 0 and DECAY != "none":
            if UNDECAYED:
                erased = tl.sum(S * e[:, None], axis=0)
            S *= decay
        if KEYS == "erase_first":
            first_key = tl.load(gates + KEY_IN_GATES + key_head * K + keys, mask=key_mask, other=0.0)
            first_key = unit_head(first_key)
            c = tl.sigmoid(tl.load(mixed + KEYS_AT + head))
            S -= first_key[:, None] * (c * tl.sum(S * first_key[:, None], axis=0))[None, :]
        if step == MICRO_STEPS - 1:
            read = tl.sum(S * q[:, None], axis=0)
        if STEP != "none":
            if PER_CHANNEL:
                beta = 1.0
            else:
                b = tl.sigmoid(tl.load(mixed + STEP_AT + step * HV + head))
                beta = _step_size(b, tl.sum(k * k, axis=0), STEP) * LARGEST
        if KEYS == "scaled":
            k = tl.load(write_keys + (matrix // HV * H + key_head) * K + keys, mask=key_mask, other=0.0)
        if STEP != "none":
            if LARGEST_GAIN > 0:  # 1.2e-38 is a normal number of float32: Triton takes others for float64
                beta = tl.minimum(beta, LARGEST_GAIN / tl.maximum(tl.sum(e * k, axis=0), 1.2e-38))
            if step > 0 or not UNDECAYED or DECAY == "none":
                erased = tl.sum(S * e[:, None], axis=0)
            u = beta * (u - erased)
        if step == MICRO_STEPS - 1:
            o = scale * (read + tl.sum(q * k, axis=0) * u)
        S += k[:, None] * u[None, :]
    tl.store(state + tile, S, mask=tile_mask)
    tl.store(squares + matrix * BLOCKS + block, tl.sum(o * o, axis=0))
    o *= norm
    if GATE != "none":
        o *= tl.sigmoid(g)
    if GATE == "silu":
        o *= g
    tl.store(z + matrix * V + columns, o, mask=column_mask)


class RuleTile(NamedTuple):
    """The value columns of one program, and its warps."""

    columns: int
    warps: int


@lru_cache(maxsize=1024)
def choose_tile(matrices: int, K: int, V: int) -> RuleTile:
    """The tile for a number of states `[K, V]`: narrow if there are few."""
    rows = triton.next_power_of_2(K)
    columns = min(16 if matrices * V <= 4096 else 32, triton.next_power_of_2(V))
    return RuleTile(columns, max(1, rows * columns // 2048))


def token_rule(
    mixed: Tensor,
    gates: Tensor | None,
    state: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    shape: RuleShape,
    key_parameters: Sequence[Tensor] = (),
    write_keys: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
    state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output of the rule for one token, before its norm. It has no gradients.

    Args:
        mixed: `[B, M]` float32: per row q `[H, K]`, then k `[H, K]` and v `[HV, V]` of all micro-steps, convolved and
            activated; then the inputs that begin at the columns of `shape`.
        gates: results of `low_rank_maps`: output gate `[HV, V]`, decay gate `[HV, K]`, first key `[H, K]`, those that
            the rule has; None if it has none.
        state: `[B, HV, K, V]` float32, contiguous; advanced in place. With `state_indices` `[pages, HV, K, V]`, each
            page contiguous.
        A_log: `[HV]` float32, of a softplus decay, saturating or not; for a fixed decay the log-decay; None for others.
        dt_bias: `[HV]` of a softplus decay, or `[HV * K]` if it is per channel; None for others.
        norm_weight: `[V]`, weight of the output norm.
        shape: sizes and choices of the layer's rule.
        key_parameters: `[H]` float32, p0 and p1 of `shape.keys`, those that it has.
        write_keys: `[B, H, K]` float32, for "scaled" keys.
        angles: cosines and sines `[B or 1, shape.turned]`, contiguous, if there is a rotation.
        state_indices: `[B]` integers, the page of each row's state; if rows share a page, any of their states is kept.

    Returns:
        `[B, HV * V]` float32: the output times norm weight and gate, without the division by its size per head; and
        `[B, HV, parts]` float32: partial sums of the squares to divide by.
    """
    B, M = mixed.shape
    tile = choose_tile(B * shape.HV, shape.K, shape.V)
    z = mixed.new_empty(B, shape.HV * shape.V)
    squares = mixed.new_empty(B, shape.HV, -(-shape.V // tile.columns))
    cos, sin = angles or (None, None)
    several = cos is not None and len(cos) > 1
    p0, p1, *_ = *key_parameters, None, None
    launch_step(
        token_rule_kernel, _constants, (B, M, shape, tile, several, page_size(state, state_indices)), mixed, gates,
        state, A_log, dt_bias, p0, p1, write_keys, cos, sin, norm_weight, z, squares, state_indices,
    )  # fmt: skip
    return z, squares


def _constants(B: int, M: int, shape: RuleShape, tile: RuleTile, several_angles: bool, page: int) -> Constants:
    fields = {name.upper(): value for name, value in shape._asdict().items()}
    scale = shape.K**-0.5 if fields.pop("SCALE_QUERIES") else 1.0
    return Constants(
        B * shape.HV * -(-shape.V // tile.columns), scale=scale, PAGE=page, M=M, **fields,
        LARGEST_GAIN=shape.largest_gain, ANGLE_ROW=several_angles * shape.turned, BK=triton.next_power_of_2(shape.K),
        BV=tile.columns, num_warps=tile.warps,
    )  # fmt: skip
