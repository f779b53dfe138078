"""What flash-linear-attention's functions compute, written down from their documentation; the recurrence: oracle.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from oracle import delta_rule_by_transition_matrices
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    gate: str | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states. ``gate``: None (g is the log-decay), "softplus" or "bounded"."""
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    if g is not None and gate is not None:
        logit = g if dt_bias is None else g + dt_bias.view(g.shape[2:])
        rate = torch.ones(v.shape[2], dtype=q.dtype) if A_log is None else A_log.flatten().exp()
        rate = rate if g.ndim == 3 else rate[:, None]
        g = lower_bound * (rate * logit).sigmoid() if gate == "bounded" else -rate * F.softplus(logit)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.mT
    output, state = delta_rule_by_transition_matrices(
        q, k, v, beta, g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    return output, state.mT if state_v_first else state


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, D]`` and states ``[N, D, W]``, one sequence at a time by F.conv1d."""
    W = weight.shape[1]
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    spans = [(0, slice(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    if cu_seqlens is None:
        spans = [(row, slice(None)) for row in range(x.shape[0])]
    rows: list[list[Tensor]] = [[] for _ in range(x.shape[0])]
    states = []
    for n, (row, span) in enumerate(spans):
        piece = x[row, span].T
        past = torch.zeros(x.shape[2], W, dtype=x.dtype) if initial_state is None else initial_state[n]
        history = torch.cat([past, piece], dim=1)
        y = piece.T  # of an empty sequence
        if piece.numel():
            y = F.conv1d(history[None, :, 1:], weight[:, None], bias, groups=x.shape[2])[0].T
        y = F.silu(y) if activation else y
        rows[row].append(y if residual is None else y + residual[row, span])
        states.append(history[:, -W:])
    return torch.stack([torch.cat(pieces) for pieces in rows]), torch.stack(states)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    x = x if residual is None else x + residual
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
