"""The public operators: check the arguments, choose a backend, call it. The contract is written here once."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.names import unknown
from deltazoo.ops.autograd_modes import records_gradients, refuse_transforms, transforming
from deltazoo.ops.backends import resolve_backend
from deltazoo.ops.call import RuleCall
from deltazoo.ops.chunkwise.form import chunkwise
from deltazoo.ops.context.group import ContextParallel
from deltazoo.ops.dtypes import autocast_dtype, wide_dtype
from deltazoo.ops.reference import recurrent_loop, recurrent_step
from deltazoo.ops.validation import (
    check_scale,
    check_shapes,
    check_tensor,
    check_tensor_values,
    reads_undecayed,
    warn_of_heads_first,
)

PRECISIONS = {None: None, "fast": False, "strict": True}
"""Whether the Triton backend is strict, by precision; None: the erase gain decides."""

Given = tuple[
    Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float | None, Tensor | None, Tensor | None, Tensor | None, int
]
"""The caller's arguments: q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, erase_key, num_micro_steps."""


class DeltaRuleOutput(NamedTuple):
    """The result of every operator."""

    output: Tensor
    """`[B, T, HV, V]` in v's dtype."""
    final_state: Tensor
    """`[N, HV, K, V]` float32 (float64 for float64 inputs), N = B or the number of packed sequences."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    erase_key: Tensor | None = None,
    erase_reads: str = "decayed",
    num_micro_steps: int = 1,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    precision: str | None = None,
    context: ContextParallel | None = None,
) -> DeltaRuleOutput:
    """The (gated) delta rule over whole sequences.

        S_t = (I - beta_t k_t e_t^T) D_t S_{t-1} + beta_t k_t v_t^T,     o_t = scale * S_t^T q_t

    with `D_t = exp(log_decay_t)`: the identity, one factor per head, or one per key channel. The erase key e_t is the
    write key k_t unless `erase_key` is given. All arguments get exact gradients, the final state's gradient included.
    The result is deterministic. It never depends on later tokens (on triton, by rounding, on those of its chunk of 64
    tokens or micro-steps), as long as no input is NaN or infinite (log_decay may be -inf): on chunkwise and triton such
    an input makes results of its whole chunk NaN.

    A token may take n = `num_micro_steps` updates: one decay, then n times erase and write, then one output. The
    micro-steps of a token lie side by side in k, v, beta and erase_key (all of token 0, then all of token 1, ...), with
    T * n entries along time. q, log_decay, `cu_seqlens` and the output count tokens.

    Args:
        q: `[B, T, H, K]` float32, bfloat16 or float16 (float64 on the torch backends); used as given, so normalise
            before. Under autocast q, k, v and erase_key are cast as a matrix product would cast them.
        k: `[B, T * n, H, K]` in q's dtype.
        v: `[B, T * n, HV, V]` in q's dtype, HV a multiple of H: value head j reads key head `j // (HV / H)`.
        beta: `[B, T * n, HV]`, effective step size in [0, 2] (larger is allowed); float32 wanted, computed in float32.
        log_decay: None, `[B, T, HV]` or `[B, T, HV, K]`; natural log, <= 0; -inf forgets everything.
        erase_key: `[B, T * n, H, K]` in k's dtype: the direction in which the update reads and erases the state. None
            means k. With any other direction than k's the state can grow (docs/math.md, section 12).
        erase_reads: "decayed", or "undecayed": the erase reads `S_{t-1}` in place of `D_t S_{t-1}`, so the factor of
            the state is `D_t - beta_t k_t e_t^T`. Of several micro-steps only the first can read before the decay.
            Without log_decay the two are the same.
        num_micro_steps: n, updates per token, at least 1.
        scale: factor on q, `K ** -0.5` unless given.
        initial_state: `[N, HV, K, V]`, zero unless given; N = B, or the number of packed sequences.
        cu_seqlens: `[N + 1]` int32 or int64, boundaries of sequences packed along T with B = 1; may be empty sequences.
        backend: "triton", "chunkwise" or "reference"; None takes triton on a GPU it supports, else chunkwise.
        precision: of the triton backend for half-precision inputs. None decides on the device: a sequence is computed
            fast up to the first chunk of 64 tokens (or micro-steps) in which some erase gain `beta * |k|^2` exceeds 1
            (1.005, to be exact: keys are rounded), and strictly from there on. With an erase key the size of `beta *
            (e . k)` of any two tokens of the chunk counts. Above 1 a repeated key changes the sign of the state along
            it at every token, and the rounding of half-precision numbers would grow, so strict products that carry
            the state take two half-precision numbers per factor (docs/precision.md). "fast" and "strict" force one
            for all tokens; "fast" is wrong for repeated keys with a gain near 2. The torch backends, and triton in
            float32, are always strict.
        context: the ranks that share the sequences. Tensors then hold this rank's piece of the tokens, `cu_seqlens` the
            boundaries in the whole row. `initial_state` and the final state have an entry for every sequence: a rank
            reads those of the sequences that begin in its piece, and returns those of the sequences that end there,
            with zeros for the others unless the context gathers them.

    Returns:
        `DeltaRuleOutput(output, final_state)`.

    Raises:
        ValueError: shapes, dtypes or values that the arguments above do not have, or that do not fit each other.
        TypeError: another class where a tensor is wanted, or a tensor as `scale`.
        NotImplementedError: a named backend that cannot run the call.

    Forward-mode differentiation, the transforms of torch.func (grad, vjp, jvp, vmap, ...) and second derivatives are
    right on the torch backends; chunkwise then runs the loop of the reference, which torch can differentiate in every
    mode and which takes more time and memory. The triton backend has none of these: asked for by name it raises,
    otherwise a call under a transform runs the reference.

    Source: arXiv:2406.06484 (delta rule), arXiv:2412.06464 (scalar decay), arXiv:2510.26692 (decay per channel),
    arXiv:2605.22791 (erase key), arXiv:2506.02475 (undecayed read), arXiv:2502.10297 (micro-steps).
    """
    given = (q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, erase_key, num_micro_steps)
    return _whole_sequences(given, backend, context, precision, erase_reads)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    context: ContextParallel | None = None,
) -> DeltaRuleOutput:
    """Linear attention, the baseline without the correction term: `S_t = D_t S_{t-1} + k_t v_t^T`.

    See `delta_rule` for arguments with their shapes, results and errors.

    Source: arXiv:2006.16236; with scalar decay arXiv:2405.21060; with decay per channel arXiv:2312.06635.
    """
    given = (q, k, v, None, log_decay, scale, initial_state, cu_seqlens, None, 1)
    return _whole_sequences(given, backend, context, corrects=False)


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    state: Tensor,
    erase_key: Tensor | None = None,
    erase_reads: str = "decayed",
    num_micro_steps: int = 1,
    scale: float | None = None,
    inplace: bool = False,
    backend: str | None = None,
) -> DeltaRuleOutput:
    """One token of the delta rule, for decoding; see `delta_rule` for arguments and shapes, with T = 1.

    With micro-steps k, v, beta and erase_key hold the `num_micro_steps` of the one token.

    Args:
        state: `[B, HV, K, V]`, the state before the token.
        inplace: whether the new state overwrites `state`, which must be contiguous and float32 (float64 for float64
            inputs) and need no gradient: half the memory traffic of a step whose state has a fixed address. Otherwise
            `state` is not changed.

    Returns:
        `DeltaRuleOutput(output [B, 1, HV, V], final_state [B, HV, K, V])`. The torch backends are differentiable; the
        Triton kernel is for inference and is not chosen while gradients are recorded.

    Raises:
        ValueError, TypeError, NotImplementedError: see `delta_rule`.
    """
    given = (q, k, v, beta, log_decay, scale, state, None, erase_key, num_micro_steps)
    return _one_token(given, backend, inplace, erase_reads)


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    state: Tensor,
    scale: float | None = None,
    inplace: bool = False,
    backend: str | None = None,
) -> DeltaRuleOutput:
    """One token of linear attention, for decoding; see `delta_rule_step` for arguments, results and errors."""
    given = (q, k, v, None, log_decay, scale, state, None, None, 1)
    return _one_token(given, backend, inplace, corrects=False)


def _whole_sequences(
    given: Given,
    backend: str | None,
    context: ContextParallel | None,
    precision: str | None = None,
    erase_reads: str = "decayed",
    corrects: bool = True,
) -> DeltaRuleOutput:
    if context is None:
        call, name = _checked(given, backend, precision, erase_reads, corrects)
        if name == "reference":
            check_tensor_values(call.log_decay, call.cu_seqlens, call.q.shape[1])
            return DeltaRuleOutput(*recurrent_loop(call))
        if name == "triton":
            from deltazoo.ops.triton.delta_rule import triton_delta_rule

            return DeltaRuleOutput(*triton_delta_rule(call))
        return DeltaRuleOutput(*chunkwise(call))
    if not isinstance(context, ContextParallel):
        raise TypeError(f"context must be a ContextParallel, got {type(context).__name__}")
    from deltazoo.ops.context.rule import rule_on_piece

    q, *_, cu_seqlens, _, _ = given
    check = partial(_checked, given, backend, precision, erase_reads, corrects)
    return DeltaRuleOutput(*rule_on_piece(check, q.shape[1], cu_seqlens, context))


def _one_token(
    given: Given, backend: str | None, inplace: bool, erase_reads: str = "decayed", corrects: bool = True
) -> DeltaRuleOutput:
    call, name = _checked(given, backend, None, erase_reads, corrects, one_token=True)
    check_tensor_values(call.log_decay, None, 1)
    state, dtype = call.initial_state, wide_dtype(call.v)
    assert state is not None  # it is checked
    recording = records_gradients(*call.differentiable)
    if inplace and (recording or state.dtype != dtype or not state.is_contiguous()):
        raise ValueError(
            f"a step in place needs a contiguous state in {dtype} and records no gradient, got {state.dtype} with "
            f"strides {state.stride()} for shape {tuple(state.shape)}, requires_grad={state.requires_grad}, gradients "
            f"{'' if recording else 'not '}recorded"
        )
    if name == "triton" and not recording:
        from deltazoo.ops.triton import step

        return DeltaRuleOutput(*step.recurrent_step(call, inplace=inplace))
    if backend == "triton":
        raise NotImplementedError("the triton step is for inference and has no gradient; use torch.no_grad()")
    decay = None if call.log_decay is None else call.log_decay[:, 0]
    output, new_state = recurrent_step(
        call.q[:, 0], call.k, call.v, call.beta, decay, state.to(dtype), call.scale, call.erase_key, call.undecayed
    )
    return DeltaRuleOutput(output[:, None].to(call.v.dtype), state.copy_(new_state) if inplace else new_state)


def _checked(
    given: Given,
    backend: str | None,
    precision: str | None,
    erase_reads: str,
    corrects: bool,
    one_token: bool = False,
) -> tuple[RuleCall, str]:
    """The call in the form that backends take, and the name of the backend that runs it.

    `corrects`: there must be step sizes. `one_token`: the call is a step, whose state is the initial one.
    """
    q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, erase_key, num_micro_steps = given
    if corrects and beta is None:  # None would mean linear attention below
        raise TypeError("beta must be a tensor, got None; without a correction term call linear_attention")
    undecayed = reads_undecayed(erase_reads) and log_decay is not None
    if precision not in PRECISIONS:
        raise ValueError(unknown("precision", precision, [name for name in PRECISIONS if name is not None]))
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, required=True)
    check_tensor("erase_key", erase_key)
    check_scale(scale)
    dtype = autocast_dtype(v.device)
    if dtype is not None and v.dtype != torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        erase_key = None if erase_key is None else erase_key.to(dtype)
    check_shapes(q, k, v, beta, log_decay, initial_state, cu_seqlens, erase_key, num_micro_steps, one_token)
    if not one_token:
        warn_of_heads_first(q)
    K, V = k.shape[-1], v.shape[-1]
    scale = float(K) ** -0.5 if scale is None else float(scale)
    per_channel = undecayed and not one_token and log_decay is not None and log_decay.ndim == 4
    name, _ = resolve_backend(
        backend, device=v.device, dtype=v.dtype, head_k_dim=K, head_v_dim=V, undecayed_channels=per_channel
    )
    if transforming():
        if backend == "triton":
            refuse_transforms("the triton backend", "use backend='chunkwise'")
        name = "reference"
    strict = PRECISIONS[precision]
    call = RuleCall(
        q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict, erase_key, undecayed, num_micro_steps
    )
    return call, name
