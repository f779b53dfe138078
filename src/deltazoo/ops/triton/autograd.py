"""The GPU operator as torch sees it: `deltazoo::triton_delta_rule` with its fake and autograd formulas.

Registered on a bare `Library`: a `custom_op` would add more to each call than the launches cost. Where nobody watches,
calls go around the dispatcher altogether.
"""

import torch
from torch import Tensor

from deltazoo.ops.transforms import refuse_second_derivative
from deltazoo.ops.triton import pipeline
from deltazoo.ops.triton.eager import call, eager_function
from deltazoo.ops.triton.pipeline import Kept, Problem
from deltazoo.ops.triton.plan import Plan, sizes_of
from deltazoo.ops.triton.tiling import HOPPER
from deltazoo.ops.validation import check_tensor_values

__all__ = ["triton_delta_rule"]

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_decay, float scale, Tensor? initial_state, "
    "Tensor? cu_seqlens, bool? strict"
)
_library = torch.library.Library("deltazoo", "FRAGMENT")
_KEPT = Kept._fields
_library.define(f"triton_delta_rule({_ARGUMENTS}) -> ({', '.join(['Tensor'] * (2 + len(_KEPT)))})")
_library.define(
    f"triton_delta_rule_backward({_ARGUMENTS}, {', '.join(f'Tensor kept_{x}' for x in _KEPT)}, "
    "Tensor d_output, Tensor? d_final) -> Tensor[]"
)


def triton_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, strict: bool | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Whole sequences on the GPU; arguments and results as in `deltazoo.ops.delta_rule`.

    `strict` is its precision: True, False for fast, or None for as each chunk's erase gain needs.
    """
    arguments = (q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict)
    output, final, *_ = call(torch.ops.deltazoo.triton_delta_rule.default, _Eager, _launch, arguments)
    return output, final


def _launch(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict):
    """Output, final state, the fields of `Kept`, and the plan."""
    check_tensor_values(log_decay, cu_seqlens, v.shape[1])
    with torch.cuda.device_of(v):
        p = Problem(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict)
        output, final, kept = pipeline.forward(p)
    return output, final, *kept, p.plan


def _forward(q, *rest):
    *results, _ = _launch(q, *rest)
    return tuple(q.new_empty(0) if x is None else x for x in results)  # an operator cannot return None


def _launch_backward(
    q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict, kept, d_output, d_final, plan=None
):
    """Gradients of the tensors but `cu_seqlens`, in their dtypes; None for those that were not given."""
    with torch.cuda.device_of(v):
        p = Problem(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict, plan)
        dq, dk, dv, d_beta, d_log_decay, d_initial = pipeline.backward(p, kept, d_output, d_final)
    # The others are in their dtypes already.
    return dq, dk, dv, _like(d_beta, beta), _like(d_log_decay, log_decay), _like(d_initial, initial_state)


def _like(gradient, x):
    return gradient if gradient is None or gradient.dtype == x.dtype else gradient.to(x.dtype)


def _backward(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict, *rest):
    *tensors, d_output, d_final = rest
    grads = _launch_backward(
        q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict, Kept(*tensors), d_output, d_final
    )
    return [grad for grad in grads if grad is not None]


_library.impl("triton_delta_rule", _forward, "CompositeExplicitAutograd")
_library.impl("triton_delta_rule_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("deltazoo::triton_delta_rule", lib=_library)
def _(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict):
    # Launches are not worked out here, so any card serves for the shared memory that they may use.
    plan = Plan(*sizes_of(q, v, beta, log_decay, cu_seqlens, strict), scale, HOPPER)
    kept = (q.new_empty(0) if x is None else x for x in Kept.empty(plan, q))
    final = q.new_empty((plan.N, plan.HV, plan.K, plan.V), dtype=torch.float32)
    return v.new_empty(v.shape), final, *kept


@torch.library.register_fake("deltazoo::triton_delta_rule_backward", lib=_library)
def _(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict, *rest):
    return [x.new_empty(x.shape) for x in (q, k, v, beta, log_decay, initial_state) if x is not None]


def _setup(ctx, inputs, kept) -> None:
    q, k, v, beta, log_decay, ctx.scale, initial_state, cu_seqlens, ctx.strict = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, beta, log_decay, initial_state, cu_seqlens, *kept)


def _setup_operator(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(*output[2:])
    _setup(ctx, inputs, output[2:])


def _operator_gradients(ctx, d_output, d_final, *_):
    refuse_second_derivative("the triton backend", "use backend='chunkwise'")
    q, k, v, beta, log_decay, initial_state, cu_seqlens, *kept = ctx.saved_tensors
    if d_output is None:
        d_output = torch.zeros_like(v)
    grads = torch.ops.deltazoo.triton_delta_rule_backward.default(
        q, k, v, beta, log_decay, ctx.scale, initial_state, cu_seqlens, ctx.strict, *kept, d_output, d_final
    )
    grads = iter(grads)
    given = [None if x is None else next(grads) for x in (q, k, v, beta, log_decay, initial_state)]
    return *given[:5], None, given[5], None, None


torch.library.register_autograd(
    "deltazoo::triton_delta_rule", _operator_gradients, setup_context=_setup_operator, lib=_library
)


def _setup_eager(ctx, inputs, output) -> None:
    _, _, *kept, ctx.plan = output
    _setup(ctx, inputs, kept)


def _eager_gradients(ctx, d_output, d_final):
    refuse_second_derivative("the triton backend", "use backend='chunkwise'")
    q, k, v, beta, log_decay, initial_state, cu_seqlens, *kept = ctx.saved_tensors
    if d_output is None:
        d_output = torch.zeros_like(v)
    *grads, d_initial = _launch_backward(
        q, k, v, beta, log_decay, ctx.scale, initial_state, cu_seqlens, ctx.strict, Kept(*kept), d_output, d_final,
        ctx.plan,
    )  # fmt: skip
    return *grads, None, d_initial, None, None


_Eager = eager_function(_launch, _setup_eager, _eager_gradients, shown=lambda results: results[:2])
