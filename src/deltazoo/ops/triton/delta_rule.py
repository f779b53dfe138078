"""The delta rule over whole sequences on a GPU as an operator of torch: `deltazoo::triton_delta_rule`."""

import torch
from torch import Tensor

from deltazoo.ops.autograd_modes import records_gradients, scans_again
from deltazoo.ops.call import SCHEMA, RuleCall
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.backward import backward
from deltazoo.ops.triton.forward import forward, infer
from deltazoo.ops.triton.problem import Kept, Problem, fake_plan, new_kept
from deltazoo.ops.validation import check_tensor_values

_FIELDS = len(RuleCall._fields)


def triton_delta_rule(call: RuleCall) -> tuple[Tensor, Tensor]:
    """Output and final state of whole sequences on the GPU, see `deltazoo.ops.delta_rule`."""
    keep = records_gradients(*call.differentiable) and not scans_again()
    return _operator(*call, keep)


def _forward(*arguments):
    """Output, final state, and the fields of `Kept`. The last argument, `keep`: no backward pass has to scan again."""
    call, keep = RuleCall._make(arguments[:-1]), arguments[-1]
    check_tensor_values(call.log_decay, call.cu_seqlens, call.q.shape[1])
    output, final, kept = forward(Problem(call), keep)
    return output, final, *kept


def _infer(*arguments):
    """Output and final state of a call that keeps nothing for gradients."""
    call = RuleCall._make(arguments[:-1])
    check_tensor_values(call.log_decay, call.cu_seqlens, call.q.shape[1])
    return infer(Problem(call))


def _fake_forward(*arguments):
    call, keep = RuleCall._make(arguments[:-1]), arguments[-1]
    q, plan = call.q, fake_plan(call)
    final = q.new_empty((plan.N, plan.HV, plan.K, plan.V), dtype=torch.float32)
    output = call.v.new_empty((plan.B, plan.tokens, plan.HV, plan.V))
    return output, final, *new_kept(plan, q, keep)


def _backward(*arguments, in_place=False, overwritten=False):
    """The gradients of `backward`, with its options; the operator has none, since its arguments must not change."""
    call, (*kept, d_output, d_final) = RuleCall._make(arguments[:_FIELDS]), arguments[_FIELDS:]
    return backward(call, Kept._make(kept), d_output, d_final, in_place, overwritten)


def _fake_backward(*arguments):
    call = RuleCall._make(arguments[:_FIELDS])
    return tuple(None if x is None else x.new_empty(x.shape) for x in call.differentiable)


def _save(ctx, inputs, results):
    call = RuleCall._make(inputs[:-1])
    ctx.set_materialize_grads(False)
    ctx.options, ctx.overwritten = call.options, False
    ctx.save_for_backward(*call.differentiable, call.cu_seqlens, *results[2:])


def _gradients(backward, ctx, d_output, d_final, *_):
    q, k, v, beta, log_decay, initial_state, erase_key, cu_seqlens, *kept = ctx.saved_tensors
    call = RuleCall.of((q, k, v, beta, log_decay, initial_state, erase_key), cu_seqlens, ctx.options)
    if d_output is None:
        d_output = v.new_zeros(*q.shape[:2], *v.shape[2:])
    in_place = {}
    if backward is _backward_operator.launch:
        in_place = dict(in_place=True, overwritten=ctx.overwritten)
        ctx.overwritten = True  # a backward pass may run again with `retain_graph`
    return *call.in_order(backward(*call, *kept, d_output, d_final, **in_place)), None


_KEPT = ", ".join(f"Tensor? kept_{name}" for name in Kept._fields)

_backward_operator = Operator(
    f"triton_delta_rule_backward({SCHEMA}, {_KEPT}, Tensor d_output, Tensor? d_final) -> ({', '.join(['Tensor'] * 7)})",
    _backward,
    fake=_fake_backward,
)
_operator = DifferentiableOperator(
    f"triton_delta_rule({SCHEMA}, bool keep) -> ({', '.join(['Tensor'] * (2 + len(Kept._fields)))})",
    _forward,
    fake=_fake_forward,
    backward=_backward_operator,
    save=_save,
    gradients=_gradients,
    refusal=("the triton backend", "use backend='chunkwise'"),
    shown=2,
    infer=_infer,
)
