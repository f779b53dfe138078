"""What flash-linear-attention's functions compute, written as loops over tokens from their documentation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    if g is not None and gate is not None:
        logit = g if dt_bias is None else g + dt_bias.view(g.shape[2:])
        rate = torch.ones(HV, dtype=q.dtype) if A_log is None else A_log.view(HV).exp()
        rate = rate if g.ndim == 3 else rate[:, None]
        g = lower_bound * (rate * logit).sigmoid() if gate == "bounded" else -rate * F.softplus(logit)
    q = q * (K**-0.5 if scale is None else scale)
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    rows = range(B) if cu_seqlens is None else [0] * (len(bounds) - 1)
    spans = [(0, T)] * B if cu_seqlens is None else list(zip(bounds, bounds[1:], strict=False))
    outputs: list[list[Tensor]] = [[] for _ in range(B)]
    states = []
    for n, (row, (start, stop)) in enumerate(zip(rows, spans, strict=True)):
        heads = []
        for j in range(HV):
            i = j // (HV // H)
            S = torch.zeros(K, V, dtype=q.dtype)
            if initial_state is not None:
                S = initial_state[n, j].T if state_v_first else initial_state[n, j]
            column = []
            for t in range(start, stop):
                if g is not None:
                    decay = g[row, t, j].exp()
                    S = S * (decay if decay.ndim == 0 else decay[:, None])
                error = v[row, t, j] - k[row, t, i] @ S
                S = S + beta[row, t, j] * torch.outer(k[row, t, i], error)
                column.append(q[row, t, i] @ S)
            heads.append((torch.stack(column) if column else v.new_zeros(0, V), S.T if state_v_first else S))
        outputs[row].append(torch.stack([o for o, _ in heads], dim=1))
        states.append(torch.stack([S for _, S in heads]))
    return torch.stack([torch.cat(pieces) for pieces in outputs]), torch.stack(states)


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
