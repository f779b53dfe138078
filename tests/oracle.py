"""A second, independent writing of the recurrence, which judges ``backend="reference"`` itself.

The package's loop corrects a value and adds an outer product. This one multiplies by the transition matrix instead,

    S_t = (I - beta_t k_t k_t^T) diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T,      o_t = scale * S_t^T q_t,

one token, one sequence at a time, in float64, with gradients from autograd: slow, and short enough to check by eye.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltazoo.ops import DeltaRuleOutput


def delta_rule_by_transition_matrices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> DeltaRuleOutput:
    """Same arguments and results as ``delta_rule``; float64 only."""
    assert all(x.dtype == torch.float64 for x in (q, k, v, beta)), "the judge works in float64"
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    key_head = torch.arange(HV, device=k.device) // (HV // H)
    q, k = q[:, :, key_head], k[:, :, key_head]
    scale = K**-0.5 if scale is None else scale
    decay = torch.ones(B, T, HV, K, dtype=q.dtype, device=q.device)
    if log_decay is not None:
        decay = decay * (log_decay if log_decay.ndim == 4 else log_decay[..., None]).exp()
    if cu_seqlens is None:
        spans = [(slice(None), 0, T)]
        states = [initial_state]
        num_rows = B
    else:
        bounds = cu_seqlens.tolist()
        spans = [(slice(None), start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
        states = [None if initial_state is None else initial_state[n : n + 1] for n in range(len(spans))]
        num_rows = 1

    outputs, final_states = [], []
    identity = torch.eye(K, dtype=q.dtype, device=q.device)
    for (rows, start, stop), S in zip(spans, states, strict=True):
        if S is None:
            S = torch.zeros(num_rows, HV, K, V, dtype=q.dtype, device=q.device)
        for t in range(start, stop):
            k_t, b_t = k[rows, t, :, :, None], beta[rows, t, :, None, None]
            transition = (identity - b_t * k_t @ k_t.mT) * decay[rows, t, :, None, :]
            S = transition @ S + b_t * k_t @ v[rows, t, :, None, :]
            outputs.append(scale * (S.mT @ q[rows, t, :, :, None])[..., 0])
        final_states.append(S)
    return DeltaRuleOutput(torch.stack(outputs, dim=1), torch.cat(final_states))


def delta_rule_by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> DeltaRuleOutput:
    """The equations of docs/math.md as they stand there, in float32 or float64, gradients by autograd.

    What it costs in accuracy to solve a chunk's triangular system instead of walking its tokens shows in this function:
    it sets the scale for the errors of faster chunk forms. Same arguments and results as ``delta_rule``.
    """
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    heads_first = [x.to(dtype).transpose(1, 2) for x in (q, k, v, beta)]
    q_, k_, v_, beta_ = (x.repeat_interleave(HV // x.shape[1], 1) for x in heads_first)  # [B, HV, T, ...]
    g = torch.zeros_like(k_)
    if log_decay is not None:
        g = g + (log_decay if log_decay.ndim == 4 else log_decay[..., None]).to(dtype).transpose(1, 2)
    scale = K**-0.5 if scale is None else scale
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, final_states = [], []
    for n, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        S = v_.new_zeros(B, HV, K, V)
        if initial_state is not None:
            S = (initial_state if cu_seqlens is None else initial_state[n : n + 1]).to(dtype)
        for start in range(first, last, chunk_size):
            chunk = slice(start, min(start + chunk_size, last))
            Q, Kc, Vc, b, gc = (x[:, :, chunk] for x in (q_ * scale, k_, v_, beta_[..., None], g))
            C = gc.shape[2]
            later = torch.ones(C, C, dtype=torch.bool).tril(-1)[..., None]
            between = torch.where(later, gc[:, :, :, None], 0).cumsum(2)  # [B, HV, i, j, K]: G_i - G_j, summed directly
            D = torch.where(later | torch.eye(C, dtype=torch.bool)[..., None], between.exp(), 0)
            entry, exit, total = gc.cumsum(2).exp(), D[:, :, -1], gc.sum(2).exp()
            N = torch.einsum("bhik,bhjk,bhijk->bhij", Kc, Kc, D).tril(-1)
            P = torch.einsum("bhik,bhjk,bhijk->bhij", Q, Kc, D)
            A = torch.linalg.inv(torch.eye(C, dtype=dtype) + b * N)
            U = A @ (b * (Vc - (entry * Kc) @ S))
            outputs.append((entry * Q) @ S + P @ U)
            S = total[..., None] * S + (exit * Kc).mT @ U
        final_states.append(S)
    output = torch.cat(outputs, dim=2).transpose(1, 2).to(v.dtype)
    return DeltaRuleOutput(output, torch.cat(final_states))


def condition_of_chunks(k: Tensor, beta: Tensor, chunk_size: int = 64) -> float:
    """The largest condition number (infinity norm) of ``I + strict_lower(diag(beta) K K^T)`` over all chunks.

    Solving such a system in a dtype with rounding error u costs up to condition * u, however it is done. Independent
    keys give small numbers; one key written again and again with beta near 2 gives about (2 * chunk_size)^2.
    Decay is left out: it only makes the numbers smaller.
    """
    k, beta = k.double().transpose(1, 2), beta.double().transpose(1, 2)
    k = k.repeat_interleave(beta.shape[1] // k.shape[1], 1)
    worst = 1.0
    for start in range(0, k.shape[2], chunk_size):
        K, b = k[:, :, start : start + chunk_size], beta[:, :, start : start + chunk_size, None]
        system = torch.eye(K.shape[2], dtype=torch.float64) + b * (K @ K.mT).tril(-1)
        worst = max(worst, torch.linalg.cond(system, p=float("inf")).max().item())
    return worst
