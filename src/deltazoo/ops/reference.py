"""The definition: one token at a time, in plain torch. Every other path is tested against this one.

    S~  = D_t S_{t-1}                               decay first
    S_t = S~ + beta_t k_t (v_t - k_t^T S~)^T        then correct the value stored under k_t
    o_t = scale * S_t^T q_t                         read after the update

Without `beta` there is no correction term: `S_t = S~ + k_t v_t^T` (linear attention).
"""

import torch
from torch import Tensor

__all__ = ["recurrent_loop", "recurrent_step"]


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence.

    Args:
        q, k: `[N, H, K]`; v: `[N, HV, V]`; beta: `[N, HV]` or None (no correction term).
        log_decay: `[N, HV]`, `[N, HV, K]` or None.
        state: `[N, HV, K, V]`.
        scale: factor on q.

    Returns:
        output `[N, HV, V]` and the next state, both in the state's dtype.
    """
    group = v.shape[1] // k.shape[1]
    q, k = q.to(state.dtype), k.to(state.dtype)
    if group > 1:
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    v = v.to(state.dtype)
    if log_decay is not None:
        decay = log_decay.to(state.dtype).exp()
        state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
    if beta is not None:
        stored = (k[..., None] * state).sum(-2)
        v = beta.to(state.dtype)[..., None] * (v - stored)
    state = state + k[..., None] * v[..., None, :]
    return (scale * q[..., None] * state).sum(-2), state


def recurrent_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The recurrence over whole sequences; arguments and results as in `deltazoo.ops.delta_rule`."""
    B, T, HV, V = v.shape
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    num_sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (num_sequences, HV, k.shape[-1], V)
    state = v.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)

    def run(rows: slice, tokens: range, state: Tensor) -> tuple[list[Tensor], Tensor]:
        outputs = []
        for t in tokens:
            step, decay = (None if x is None else x[rows, t] for x in (beta, log_decay))
            output, state = recurrent_step(q[rows, t], k[rows, t], v[rows, t], step, decay, state, scale)
            outputs.append(output)
        return outputs, state

    if cu_seqlens is None:
        outputs, state = run(slice(None), range(T), state)
    else:
        bounds = cu_seqlens.tolist()
        runs = [run(slice(0, 1), range(*bounds[i : i + 2]), state[i : i + 1]) for i in range(num_sequences)]
        outputs = [output for sequence, _ in runs for output in sequence]
        state = torch.cat([final for _, final in runs])
    return torch.stack(outputs, dim=1).to(v.dtype) if outputs else v.clone(), state
