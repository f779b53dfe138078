"""Gradients of the scores P and L of a chunk, its values and step sizes, with which all gradient kernels begin."""

import triton
import triton.language as tl

from deltazoo.ops.triton.chunk.address import tokens_of


@triton.jit
def load_values(d_output, U, Z, o_output, m_output, offsets, mask):
    """dO, U and Z of a tile of value channels. Only last micro-steps have an output, so it has other offsets."""
    b_dO = tl.load(d_output + o_output, mask=m_output, other=0.0)
    b_U = tl.load(U + offsets, mask=mask, other=0.0)
    b_Z = tl.load(Z + offsets, mask=mask, other=0.0)
    return b_dO, b_U, b_Z


@triton.jit
def values_gradient(v, dv, offsets, mask, b_beta, b_Z, HAS_BETA: tl.constexpr):
    """Store dv of a tile of value channels; returns its part of d_beta."""
    if HAS_BETA:
        b_v = tl.load(v + offsets, mask=mask, other=0.0)
        part = tl.sum(b_Z.to(tl.float32) * b_v.to(tl.float32), 1)
        b_dv = b_beta[:, None] * b_Z.to(tl.float32)
    else:
        part = tl.zeros([b_Z.shape[0]], dtype=tl.float32)
        b_dv = b_Z
    tl.store(dv + offsets, b_dv.to(dv.dtype.element_ty), mask=mask)
    return part


@triton.jit
def score_gradients(
    v, dv, d_output, U, Z, b_beta, o_cv, o_output, o_v, m_c, m_output, value_tiles, V: tl.constexpr, BV: tl.constexpr,
    WHOLE: tl.constexpr, HAS_BETA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores of a chunk, dP and -dL, not yet masked, and the values' part of d_beta; stores dv.

    With WHOLE, if a tile has all value channels, it also returns dO, U and Z. `o_output` and `m_output` are the offsets
    of dO and the mask of the rows that have one; for everything else `o_cv` and `m_c`.
    """
    C: tl.constexpr = m_c.shape[0]
    b_dP, b_dL = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    b_dbeta = tl.zeros([C], dtype=tl.float32)
    b_dO, b_U, b_Z = o_v, o_v, o_v
    if WHOLE:
        m_cv = m_c[:, None] & (o_v < V)[None, :]
        m_ov = m_output[:, None] & (o_v < V)[None, :]
        b_dO, b_U, b_Z = load_values(d_output, U, Z, o_output, m_ov, o_cv, m_cv)
        b_dbeta += values_gradient(v, dv, o_cv, m_cv, b_beta, b_Z, HAS_BETA)
        b_dP = tl.dot(b_dO, tl.trans(b_U), b_dP, input_precision=PRECISION)
        if HAS_BETA:
            b_dL = tl.dot(b_Z, tl.trans(b_U), b_dL, input_precision=PRECISION)
    else:
        for i_v in tl.range(0, value_tiles, num_stages=STAGES):
            m_cv = m_c[:, None] & (i_v * BV + o_v < V)[None, :]
            m_ov = m_output[:, None] & (i_v * BV + o_v < V)[None, :]
            dO_tile, U_tile, Z_tile = load_values(d_output, U, Z, i_v * BV + o_output, m_ov, i_v * BV + o_cv, m_cv)
            b_dbeta += values_gradient(v, dv, i_v * BV + o_cv, m_cv, b_beta, Z_tile, HAS_BETA)
            if HAS_BETA:
                b_dL = tl.dot(Z_tile, tl.trans(U_tile), b_dL, input_precision=PRECISION)
            # The sum with the last product makes this iteration wait for all of its products. Otherwise they would
            # still be running while the next tile is copied over their operands: Triton has a single buffer for
            # operands that registers read as well (docs/log.md).
            b_dP = tl.dot(dO_tile, tl.trans(U_tile), b_dP, input_precision=PRECISION) + 0.0
    return b_dO, b_U, b_Z, b_dP, b_dL, b_dbeta


NEAR_ZERO = tl.constexpr(0.0625)
"""The largest step size whose gradient does not come from `<z, u>`."""


@triton.jit
def not_near_zero(b_beta):
    """Mask of the step sizes whose gradient comes from `<z, u>`."""
    return b_beta > NEAR_ZERO


@triton.jit
def store_step_gradient(d_beta, b_beta, b_ZU, m_c):
    """Store d_beta of the tokens whose step size is not near zero: `<z, u> / beta`, from the products `Z U^T`.

    Returns the mask of these tokens. d_beta is also `<z, v> + <k, row>`, but with nearly parallel keys that is a sum of
    many terms that cancel, while the correction u has only been rounded. With a step size near zero u vanishes.
    """
    o = tl.arange(0, b_ZU.shape[0])
    large = not_near_zero(b_beta)
    diagonal = tl.sum(tl.where(o[:, None] == o[None, :], b_ZU, 0.0), 1)
    tl.store(d_beta, diagonal / tl.where(large, b_beta, 1.0), mask=m_c & large)
    return large


@triton.jit
def pair_gradients(
    v, beta, U, Z, d_output, W, P_diagonal, dv, d_beta, slot, first, rows, i_h, scale, value_tiles, HV, V: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, HAS_BETA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MICRO_STEPS: tl.constexpr, WITH_STEPS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the scores of one chunk, dv, and d_beta of the tokens whose step size is not near zero.

    Returns the values' part of d_beta, and the mask of the tokens whose d_beta is stored. W gets the strictly lower
    parts of dP, with the scale, and (with beta) of dL, WITH_STEPS times the step size of these tokens; `P_diagonal` the
    diagonal
    of dP.
    """
    o_c, o_v = tl.arange(0, C), tl.arange(0, BV)
    m_c = o_c < rows
    values = (first * HV + i_h) * V
    o_cv = o_c[:, None] * (HV * V) + o_v[None, :]
    outputs, o_output, m_output = values, o_cv, m_c
    if MICRO_STEPS > 1:
        first_token, o_token, _, ends = tokens_of(first, o_c, MICRO_STEPS)
        outputs, m_output = (first_token * HV + i_h) * V, m_c & ends
        o_output = o_token[:, None] * (HV * V) + o_v[None, :]
    b_beta, stored = tl.load(beta + slot * C + o_c) if HAS_BETA else o_c, m_c
    _, _, _, b_dP, b_dL, b_dbeta = score_gradients(
        v + values, dv + values, d_output + outputs, U + values, Z + values, b_beta, o_cv, o_output, o_v, m_c,
        m_output, value_tiles, V, BV, False, HAS_BETA, PRECISION, STAGES,
    )  # fmt: skip

    o_cc = o_c[:, None] * C + o_c[None, :]
    below = o_c[:, None] > o_c[None, :]
    b_dP *= scale
    tl.debug_barrier()  # waits until all threads have read W of the chunk before
    tl.store(W + o_cc, tl.where(below, b_dP, 0.0).to(W.dtype.element_ty))
    tl.store(P_diagonal + o_c, tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_dP, 0.0), 1))
    if HAS_BETA:
        stored = store_step_gradient(d_beta + first * HV + i_h + o_c * HV, b_beta, b_dL, m_c)
        if WITH_STEPS:
            b_dL *= tl.where(stored, b_beta, 1.0)[:, None]
        tl.store(W + C * C + o_cc, tl.where(below, -b_dL, 0.0).to(W.dtype.element_ty))
    tl.debug_barrier()
    return b_dbeta, stored
