"""The delta rule over whole sequences on a GPU as an operator of torch: `deltazoo::triton_delta_rule`."""

import torch
from torch import Tensor

from deltazoo.ops.autograd_modes import records_gradients, scans_again
from deltazoo.ops.call import SCHEMA, RuleCall
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton import pipeline
from deltazoo.ops.triton.pipeline import Kept, Problem, fake_plan
from deltazoo.ops.validation import check_tensor_values

__all__ = ["triton_delta_rule"]


def triton_delta_rule(call: RuleCall) -> tuple[Tensor, Tensor]:
    """Output and final state of whole sequences on the GPU, as of `deltazoo.ops.delta_rule`."""
    keep = records_gradients(*call.differentiable) and not scans_again()
    return _operator(*call, keep)


def _forward(*arguments):
    """Output, final state, and the fields of `Kept`. The last argument: so that no backward pass need scan again."""
    call, keep = RuleCall(*arguments[:-1]), arguments[-1]
    check_tensor_values(call.log_decay, call.cu_seqlens, call.q.shape[1])
    with torch.cuda.device_of(call.v):
        output, final, kept = pipeline.forward(Problem(call), keep)
    return output, final, *kept


def _infer(*arguments):
    """Output and final state of a call that keeps nothing for gradients."""
    call = RuleCall(*arguments[:-1])
    check_tensor_values(call.log_decay, call.cu_seqlens, call.q.shape[1])
    with torch.cuda.device_of(call.v):
        return pipeline.infer(Problem(call))


def _fake_forward(*arguments):
    call, keep = RuleCall(*arguments[:-1]), arguments[-1]
    q, plan = call.q, fake_plan(call)
    final = q.new_empty((plan.N, plan.HV, plan.K, plan.V), dtype=torch.float32)
    output = call.v.new_empty((plan.B, plan.tokens, plan.HV, plan.V))
    return output, final, *pipeline.new_kept(plan, q, keep)


_INPUTS = len(RuleCall._fields)


def _backward(*arguments, in_place=False, overwritten=False):
    """Gradients of the tensors but `cu_seqlens`, in their dtypes; None for those that were not given.

    With `in_place` what the forward pass kept may be overwritten and freed. If it has been `overwritten` it is computed
    again.
    """
    call, (keep, *saved, d_output, d_final) = RuleCall(*arguments[:_INPUTS]), arguments[_INPUTS:]
    kept = Kept(*saved)
    with torch.cuda.device_of(call.v):
        p = Problem(call)
        if overwritten and kept.AP.numel() and (kept.U is not None or not p.plan.fused_backward):
            kept = pipeline.forward(p)[2]
        dq, dk, de, dv, d_beta, d_log_decay, d_initial = pipeline.backward(p, kept, d_output, d_final, keep, in_place)
    # Those not named here are in their dtypes already.
    gates = _like(d_beta, call.beta), _like(d_log_decay, call.log_decay), _like(d_initial, call.initial_state)
    return dq, dk, dv, *gates, de


def _like(gradient, x):
    return gradient if x is None or gradient.dtype == x.dtype else gradient.to(x.dtype)


def _fake_backward(*arguments):
    return tuple(None if x is None else x.new_empty(x.shape) for x in RuleCall(*arguments[:_INPUTS]).differentiable)


def _save(ctx, inputs, results):
    q, k, v, beta, log_decay, ctx.scale, initial_state, cu_seqlens, ctx.strict, erase_key, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.overwritten = False
    ctx.save_for_backward(q, k, v, beta, log_decay, initial_state, cu_seqlens, erase_key, *results[2:])


def _gradients(backward, ctx, d_output, d_final, *_):
    q, k, v, beta, log_decay, initial_state, cu_seqlens, erase_key, *kept = ctx.saved_tensors
    if d_output is None:
        d_output = v.new_zeros(*q.shape[:2], *v.shape[2:])
    in_place = {}
    if backward is _backward:  # the operator's arguments may not change
        in_place = dict(in_place=True, overwritten=ctx.overwritten)
        ctx.overwritten = True  # a graph that is kept (`retain_graph`) may be gone through once more
    dq, dk, dv, d_beta, d_log_decay, d_initial, d_erase_key = backward(
        q, k, v, beta, log_decay, ctx.scale, initial_state, cu_seqlens, ctx.strict, erase_key, *ctx.options,
        *kept, d_output, d_final, **in_place,
    )  # fmt: skip
    d_beta = None if beta is None else d_beta  # the operator gives empty tensors for what was not given
    d_log_decay = None if log_decay is None else d_log_decay
    d_initial = None if initial_state is None else d_initial
    d_erase_key = None if erase_key is None else d_erase_key
    return dq, dk, dv, d_beta, d_log_decay, None, d_initial, None, None, d_erase_key, None, None, None


_KEPT = ", ".join(f"Tensor kept_{name}" for name in Kept._fields)

_operator = DifferentiableOperator(
    f"triton_delta_rule({SCHEMA}, bool keep) -> ({', '.join(['Tensor'] * (2 + len(Kept._fields)))})",
    _forward,
    fake=_fake_forward,
    backward=Operator(
        f"triton_delta_rule_backward({SCHEMA}, bool keep, {_KEPT}, Tensor d_output, Tensor? d_final) "
        f"-> ({', '.join(['Tensor'] * 7)})",
        _backward,
        fake=_fake_backward,
    ),
    save=_save,
    gradients=_gradients,
    refusal=("the triton backend", "use backend='chunkwise'"),
    shown=2,
    infer=_infer,
)
