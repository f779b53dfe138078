"""The definition: one token at a time, in plain torch. All other backends are tested against it.

    S~  = D_t S_{t-1}                               decay first
    S_t = S~ + beta_t k_t (v_t - e_t^T S~)^T        then replace the value under the erase key e_t
    o_t = scale * S_t^T q_t                         read after the update

The erase key is the write key k_t unless given. The undecayed read takes `e_t^T S_{t-1}` instead of `e_t^T S~`. A token
of n micro-steps repeats the second line n times, each with its own k, e, v and beta; only the first of them can read
the state before the decay. Without `beta` there is no correction term: `S_t = S~ + k_t v_t^T` (linear attention).
"""

import torch
from torch import Tensor

from deltazoo.ops.call import RuleCall
from deltazoo.ops.dtypes import wide_dtype


def recurrent_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    scale: float,
    erase_key: Tensor | None = None,
    undecayed: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of n micro-steps.

    Args:
        q: `[N, H, K]`.
        k: `[N, n, H, K]`; v: `[N, n, HV, V]`; beta: `[N, n, HV]` or None (no correction term).
        log_decay: `[N, HV]`, `[N, HV, K]` or None.
        state: `[N, HV, K, V]`.
        scale: factor on q.
        erase_key: `[N, n, H, K]`; None means k.
        undecayed: whether the first micro-step's erase reads the state before the decay.

    Returns:
        Output `[N, HV, V]` and the next state, both in the state's dtype.
    """
    group = v.shape[2] // k.shape[2]

    def per_value_head(x: Tensor) -> Tensor:
        x = x.to(state.dtype)
        return x.repeat_interleave(group, dim=-2) if group > 1 else x

    q, k = per_value_head(q), per_value_head(k)
    erase = k if erase_key is None else per_value_head(erase_key)
    before = state
    if log_decay is not None:
        decay = log_decay.to(state.dtype).exp()
        state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
    for j in range(k.shape[1]):
        write = v[:, j].to(state.dtype)
        if beta is not None:
            read = before if undecayed and j == 0 else state
            stored = (erase[:, j, :, :, None] * read).sum(-2)
            write = beta[:, j].to(state.dtype)[..., None] * (write - stored)
        state = state + k[:, j, :, :, None] * write[..., None, :]
    return (scale * q[..., None] * state).sum(-2), state


def recurrent_loop(call: RuleCall) -> tuple[Tensor, Tensor]:
    """The recurrence over whole sequences: output `[B, T, HV, V]` and final state `[N, HV, K, V]`."""
    q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, _, erase_key, undecayed, num_micro_steps = call
    (B, T), (HV, V) = q.shape[:2], v.shape[2:]
    dtype = wide_dtype(v)
    num_sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (num_sequences, HV, k.shape[-1], V)
    state = v.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)

    def run(rows: slice, tokens: range, state: Tensor) -> tuple[list[Tensor], Tensor]:
        outputs = []
        for t in tokens:
            micro_steps = slice(t * num_micro_steps, (t + 1) * num_micro_steps)
            decay = None if log_decay is None else log_decay[rows, t]
            key, value = k[rows, micro_steps], v[rows, micro_steps]
            step, erase = (None if x is None else x[rows, micro_steps] for x in (beta, erase_key))
            output, state = recurrent_step(q[rows, t], key, value, step, decay, state, scale, erase, undecayed)
            outputs.append(output)
        return outputs, state

    if cu_seqlens is None:
        outputs, state = run(slice(None), range(T), state)
    else:
        bounds = cu_seqlens.tolist()
        runs = [run(slice(0, 1), range(*bounds[i : i + 2]), state[i : i + 1]) for i in range(num_sequences)]
        outputs = [output for sequence, _ in runs for output in sequence]
        state = torch.cat([final for _, final in runs])
    if not outputs:  # all inputs get gradients, here empty, as in a call with tokens
        nothing = sum(x.sum() for x in (q, k, v, beta, log_decay, erase_key) if x is not None)
        return v + nothing, state + nothing
    return torch.stack(outputs, dim=1).to(v.dtype), state


def gradients_of_loop(
    call: RuleCall, d_output: Tensor, d_final: Tensor, *, create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradients of `call.differentiable` by autograd through the loop; None for tensors that need no gradient.

    With `create_graph` they have a graph of their own, for second derivatives.
    """
    with torch.enable_grad():
        # Views are differentiated, since two arguments may be one tensor.
        given = [None if x is None else x.view_as(x) for x in call.differentiable]
        results = recurrent_loop(RuleCall.of(given, call.cu_seqlens, call.options))
    wanted = [x for x in given if x is not None and x.requires_grad]
    # The final state does not depend on q.
    recorded = [(y, d) for y, d in zip(results, (d_output, d_final), strict=True) if y.requires_grad]
    outputs, gradients = zip(*recorded, strict=True)
    options = dict(create_graph=create_graph, materialize_grads=True)
    found = iter(torch.autograd.grad(outputs, wanted, gradients, **options))
    return tuple([next(found) if x is not None and x.requires_grad else None for x in given])
