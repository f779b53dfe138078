"""A second, independent writing of the recurrence, which judges ``backend="reference"`` itself.

The package's loop corrects a value and adds an outer product. This one multiplies by the transition matrix instead,

    S_t = (I - beta_t k_t e_t^T) diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T,      o_t = scale * S_t^T q_t,

with ``diag(exp(log_decay_t)) - beta_t k_t e_t^T`` in front of the state for the undecayed read, and one such factor for
each micro-step of a token. In float64, with gradients from autograd: slow, and short enough to check by eye.
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
    erase_key: Tensor | None = None,
    erase_reads: str = "decayed",
    num_micro_steps: int = 1,
) -> DeltaRuleOutput:
    """Same arguments and results as ``delta_rule``; float64 only."""
    assert all(x.dtype == torch.float64 for x in (q, k, v, beta)), "the judge works in float64"
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    key_head = torch.arange(HV, device=k.device) // (HV // H)
    q, k, e = q[:, :, key_head], k[:, :, key_head], (k if erase_key is None else erase_key)[:, :, key_head]
    scale = K**-0.5 if scale is None else scale
    decay = torch.ones(B, T, HV, K, dtype=q.dtype, device=q.device)
    if log_decay is not None:
        decay = decay * (log_decay if log_decay.ndim == 4 else log_decay[..., None]).exp()
    if cu_seqlens is None:
        spans = [(0, T)]
        states = [initial_state]
        num_rows = B
    else:
        bounds = cu_seqlens.tolist()
        spans = [*zip(bounds, bounds[1:], strict=False)]
        states = [None if initial_state is None else initial_state[n : n + 1] for n in range(len(spans))]
        num_rows = 1

    n = num_micro_steps
    kept = torch.stack([decay] + [torch.ones_like(decay)] * (n - 1), dim=2).flatten(1, 2)  # by each micro-step
    first = (torch.arange(T * n, device=k.device) % n == 0)[:, None, None, None]
    write = beta[..., None, None] * k[..., :, None]
    erase = write @ e[..., None, :]
    read = erase if erase_reads == "undecayed" else erase * kept[..., None, :]  # erase @ diag(kept)
    transitions = (torch.diag_embed(kept) - torch.where(first, read, erase)).unbind(1)
    writes, queries = (write @ v[..., None, :]).unbind(1), q[..., None].unbind(1)
    outputs, final_states = [], []
    for (start, stop), S in zip(spans, states, strict=True):
        if S is None:
            S = torch.zeros(num_rows, HV, K, V, dtype=q.dtype, device=q.device)
        for i in range(start * n, stop * n):
            S = transitions[i] @ S + writes[i]
            if i % n == n - 1:
                outputs.append(scale * (S.mT @ queries[i // n])[..., 0])
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
    erase_key: Tensor | None = None,
    erase_reads: str = "decayed",
    num_micro_steps: int = 1,
    chunk_size: int = 64,
) -> DeltaRuleOutput:
    """The equations of docs/math.md as they stand there, in float32 or float64, gradients by autograd.

    What it costs in accuracy to solve a chunk's triangular system instead of walking its tokens shows in this function:
    it sets the scale for the errors of faster chunk forms. Same arguments and results as ``delta_rule``.
    """
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    n = num_micro_steps
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    e = k if erase_key is None else erase_key
    heads_first = [x.to(dtype).transpose(1, 2) for x in (q, k, v, beta, e)]
    q_, k_, v_, beta_, e_ = (x.repeat_interleave(HV // x.shape[1], 1) for x in heads_first)  # [B, HV, T, ...]
    q_ = torch.stack([torch.zeros_like(q_)] * (n - 1) + [q_], 3).flatten(2, 3)  # micro-steps as tokens of their own
    g = torch.zeros_like(k_)
    if log_decay is not None:
        g_ = (log_decay if log_decay.ndim == 4 else log_decay[..., None]).to(dtype).transpose(1, 2)
        g = g + torch.stack([g_] + [torch.zeros_like(g_)] * (n - 1), 3).flatten(2, 3)
    scale = K**-0.5 if scale is None else scale
    bounds = [0, T] if cu_seqlens is None else (cu_seqlens * n).tolist()
    outputs, final_states = [], []
    for i, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        S = v_.new_zeros(B, HV, K, V)
        if initial_state is not None:
            S = (initial_state if cu_seqlens is None else initial_state[i : i + 1]).to(dtype)
        for start in range(first, last, chunk_size):
            chunk = slice(start, min(start + chunk_size, last))
            Q, Kc, E, Vc, b, gc = (x[:, :, chunk] for x in (q_ * scale, k_, e_, v_, beta_[..., None], g))
            C = gc.shape[2]
            later = torch.ones(C, C, dtype=torch.bool).tril(-1)[..., None]
            between = torch.where(later, gc[:, :, :, None], 0).cumsum(2)  # [B, HV, i, j, K]: G_i - G_j, summed directly
            D = torch.where(later | torch.eye(C, dtype=torch.bool)[..., None], between.exp(), 0)
            entry, exit, total = gc.cumsum(2).exp(), D[:, :, -1], gc.sum(2).exp()
            read, before = entry, D
            if erase_reads == "undecayed":  # one row earlier: the row before a later micro-step has the same decay
                read = torch.cat([torch.ones_like(entry[:, :, :1]), entry[:, :, :-1]], 2)
                before = torch.cat([torch.zeros_like(D[:, :, :1]), D[:, :, :-1]], 2)
            N = torch.einsum("bhik,bhjk,bhijk->bhij", E, Kc, before).tril(-1)
            P = torch.einsum("bhik,bhjk,bhijk->bhij", Q, Kc, D)
            A = torch.linalg.inv(torch.eye(C, dtype=dtype) + b * N)
            U = A @ (b * (Vc - (read * E) @ S))
            outputs.append((entry * Q) @ S + P @ U)
            S = total[..., None] * S + (exit * Kc).mT @ U
        final_states.append(S)
    output = torch.cat(outputs, dim=2)[:, :, n - 1 :: n].transpose(1, 2).to(v.dtype)
    return DeltaRuleOutput(output, torch.cat(final_states))


def condition_of_chunks(k: Tensor, beta: Tensor, erase_key: Tensor | None = None, chunk_size: int = 64) -> float:
    """The largest condition number (infinity norm) of ``I + strict_lower(diag(beta) E K^T)`` over all chunks.

    E holds the erase keys, K the keys.

    Solving such a system in a dtype with rounding error u costs up to condition * u, however it is done. Independent
    keys give small numbers; one key written again and again with beta near 2 gives about (2 * chunk_size)^2.
    Decay is left out: it only makes the numbers smaller.
    """
    e = k if erase_key is None else erase_key
    k, e, beta = (x.double().transpose(1, 2) for x in (k, e, beta))
    k, e = (x.repeat_interleave(beta.shape[1] // k.shape[1], 1) for x in (k, e))
    worst = 1.0
    for start in range(0, k.shape[2], chunk_size):
        K, E, b = (x[:, :, start : start + chunk_size] for x in (k, e, beta[..., None]))
        system = torch.eye(K.shape[2], dtype=torch.float64) + b * (E @ K.mT).tril(-1)
        worst = max(worst, torch.linalg.cond(system, p=float("inf")).max().item())
    return worst
