"""The stages of a sequence that several ranks share, as operators of torch for `ops/context/backends.py`.

All take a `RuleCall` with segments as sequences, and the number of segments on all ranks together, which chooses the
kernels. So a segment is computed in the same way however many a rank has.
"""

import torch
from torch import Tensor

from deltazoo.ops.call import SCHEMA, RuleCall
from deltazoo.ops.operator import Operator
from deltazoo.ops.triton.backward import backward
from deltazoo.ops.triton.plan import Plan
from deltazoo.ops.triton.problem import Kept, Problem, contiguous, fake_plan, new_states
from deltazoo.ops.triton.stages import prepare, reverse_scan, scan, scan_for_states

_INPUTS = f"{SCHEMA}, int segments"
_NUM_INPUTS = len(RuleCall._fields) + 1
_PREPARED = 8
"""Number of the first fields of `Kept` that the preparation of chunks fills."""
_KEPT = "".join(f", Tensor? {name}" for name in Kept._fields[:_PREPARED])
_ENDS = ", Tensor d_output, Tensor d_end"


def _parts(arguments):
    """The arguments of the problem, the kept tensors of its chunks, and the rest."""
    (*inputs, segments), others = arguments[:_NUM_INPUTS], arguments[_NUM_INPUTS:]
    return (RuleCall(*inputs), segments), others[:_PREPARED], others[_PREPARED:]


def _kept(prepared: tuple[Tensor | None, ...], U: Tensor | None = None, states: Tensor | None = None) -> Kept:
    return Kept._make([*prepared, None, None, U, states])


def _new_state(q: Tensor, plan: Plan, columns: int) -> Tensor:
    return q.new_empty(plan.N, plan.HV, plan.K, columns, dtype=torch.float32)


def _pairs(*arguments):
    inputs, _, _ = _parts(arguments)
    p = Problem(*inputs)
    kept = Kept.empty(p.plan, p.q, keep=False)
    prepare(p, kept)
    M, X = _new_state(p.q, p.plan, p.plan.K), _new_state(p.q, p.plan, p.plan.V)
    scan(p, kept, p.v, None, X)
    scan(p, kept, None, None, M)
    return M, X, *kept[:_PREPARED]


def _fake_pairs(*arguments):
    inputs, _, _ = _parts(arguments)
    q, plan = inputs[0].q, fake_plan(*inputs)
    return _new_state(q, plan, plan.K), _new_state(q, plan, plan.V), *Kept.empty(plan, q, keep=False)[:_PREPARED]


def _outputs(*arguments):
    inputs, prepared, (keep,) = _parts(arguments)
    p = Problem(*inputs)
    plan = p.plan
    U, states = new_states(plan, p.v) if keep and plan.route.keeps == "states" else (None, None)
    output, ends = p.v.new_empty(plan.B, plan.tokens, plan.HV, plan.V), _new_state(p.q, plan, plan.V)
    scan(p, _kept(prepared), p.v, p.initial_state, ends, output, U, states)
    return output, ends, U, states


def _fake_outputs(*arguments):
    inputs, _, (keep,) = _parts(arguments)
    v, plan = inputs[0].v, fake_plan(*inputs)
    U, states = new_states(plan, v) if keep and plan.route.keeps == "states" else (None, None)
    return v.new_empty(plan.B, plan.tokens, plan.HV, plan.V), _new_state(v, plan, plan.V), U, states


def _start_gradients(*arguments):
    inputs, prepared, (d_output, d_end) = _parts(arguments)
    p = Problem(*inputs)
    d_output, d_end = contiguous(d_output, p.plan), d_end.contiguous()
    return reverse_scan(p, _kept(prepared), d_output, d_end, keep=False, initial=True)[2]


def _fake_start_gradients(*arguments):
    inputs, _, _ = _parts(arguments)
    plan = fake_plan(*inputs)
    return _new_state(inputs[0].q, plan, plan.V)


def _states(*arguments):
    inputs, prepared, _ = _parts(arguments)
    p = Problem(*inputs)
    return scan_for_states(p, _kept(prepared), p.initial_state)


def _fake_states(*arguments):
    inputs, _, _ = _parts(arguments)
    return new_states(fake_plan(*inputs), inputs[0].v)


def _gradients(*arguments):
    (call, segments), prepared, (U, states, d_output, d_end) = _parts(arguments)
    return backward(call, _kept(prepared, U, states), d_output, d_end, whole_segments=segments)


def _fake_gradients(*arguments):
    (call, _), _, _ = _parts(arguments)
    return tuple(None if x is None else x.new_empty(x.shape) for x in call.differentiable)


def _operator(name, more, results, launch, fake):
    """An operator of a call of segments and `more` that returns `results` tensors."""
    several = f"({', '.join(['Tensor'] * results)})"
    return Operator(f"segment_{name}({_INPUTS}{more}) -> {several if results > 1 else 'Tensor'}", launch, fake)


segment_pairs = _operator("pairs", "", 2 + _PREPARED, _pairs, _fake_pairs)
"""M and X of every segment `[S, HV, K, K]` and `[S, HV, K, V]`, and the kept tensors of the chunks."""

segment_outputs = _operator("outputs", f"{_KEPT}, bool keep", 4, _outputs, _fake_outputs)
"""The output and the segments' last states; with `keep` also U and the states, if one scan gives all of them."""

segment_start_gradients = _operator("start_gradients", _KEPT + _ENDS, 1, _start_gradients, _fake_start_gradients)
"""Gradients of the segments' first states."""

segment_states = _operator("states", _KEPT, 2, _states, _fake_states)
"""U, and the states that enter the chunks."""

segment_gradients = _operator("gradients", f"{_KEPT}, Tensor U, Tensor states{_ENDS}", 7, _gradients, _fake_gradients)
"""Gradients of `RuleCall.differentiable`."""
