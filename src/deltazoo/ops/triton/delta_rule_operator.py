"""The delta rule over whole sequences on a GPU as an operator of torch: `deltazoo::triton_delta_rule`."""

import torch
from torch import Tensor

from deltazoo.ops.triton import pipeline
from deltazoo.ops.triton.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.pipeline import Kept, Problem
from deltazoo.ops.triton.plan import Plan, sizes_of
from deltazoo.ops.triton.tiling import HOPPER
from deltazoo.ops.validation import check_tensor_values

__all__ = ["triton_delta_rule"]


def triton_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, strict: bool | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Whole sequences on the GPU; arguments and results as in `deltazoo.ops.delta_rule`.

    `strict` is its precision: True, False for fast, or None for as each chunk's erase gain needs.
    """
    return _operator(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict)


def _forward(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict):
    """Output, final state, and the fields of `Kept`."""
    check_tensor_values(log_decay, cu_seqlens, v.shape[1])
    with torch.cuda.device_of(v):
        p = Problem(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict)
        output, final, kept = pipeline.forward(p)
    return output, final, *kept


def _fake_forward(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict):
    # Nothing is launched here, so the card's shared memory does not matter.
    plan = Plan(*sizes_of(q, v, beta, log_decay, cu_seqlens, strict), scale, HOPPER)
    final = q.new_empty((plan.N, plan.HV, plan.K, plan.V), dtype=torch.float32)
    return v.new_empty(v.shape), final, *Kept.empty(plan, q)


def _backward(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict, *rest):
    """Gradients of the tensors but `cu_seqlens`, in their dtypes; None for those that were not given."""
    *kept, d_output, d_final = rest
    with torch.cuda.device_of(v):
        p = Problem(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict)
        dq, dk, dv, d_beta, d_log_decay, d_initial = pipeline.backward(p, Kept(*kept), d_output, d_final)
    # The first three are in their dtypes already.
    return dq, dk, dv, _like(d_beta, beta), _like(d_log_decay, log_decay), _like(d_initial, initial_state)


def _like(gradient, x):
    return gradient if x is None or gradient.dtype == x.dtype else gradient.to(x.dtype)


def _fake_backward(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict, *rest):
    return tuple(None if x is None else x.new_empty(x.shape) for x in (q, k, v, beta, log_decay, initial_state))


def _save(ctx, inputs, results):
    q, k, v, beta, log_decay, ctx.scale, initial_state, cu_seqlens, ctx.strict = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, beta, log_decay, initial_state, cu_seqlens, *results[2:])


def _gradients(backward, ctx, d_output, d_final, *_):
    q, k, v, beta, log_decay, initial_state, cu_seqlens, *kept = ctx.saved_tensors
    if d_output is None:
        d_output = torch.zeros_like(v)
    dq, dk, dv, d_beta, d_log_decay, d_initial = backward(
        q, k, v, beta, log_decay, ctx.scale, initial_state, cu_seqlens, ctx.strict, *kept, d_output, d_final
    )
    d_beta = None if beta is None else d_beta  # the operator gives empty tensors for what was not given
    d_log_decay = None if log_decay is None else d_log_decay
    d_initial = None if initial_state is None else d_initial
    return dq, dk, dv, d_beta, d_log_decay, None, d_initial, None, None


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_decay, float scale, Tensor? initial_state, "
    "Tensor? cu_seqlens, bool? strict"
)
_KEPT = ", ".join(f"Tensor kept_{name}" for name in Kept._fields)

_operator = DifferentiableOperator(
    f"triton_delta_rule({_ARGUMENTS}) -> ({', '.join(['Tensor'] * (2 + len(Kept._fields)))})",
    _forward,
    fake=_fake_forward,
    backward=Operator(
        f"triton_delta_rule_backward({_ARGUMENTS}, {_KEPT}, Tensor d_output, Tensor? d_final) "
        f"-> ({', '.join(['Tensor'] * 6)})",
        _backward,
        fake=_fake_backward,
    ),
    save=_save,
    gradients=_gradients,
    refusal=("the triton backend", "use backend='chunkwise'"),
    shown=2,
)
