"""Kernels for what stands around the operator: plain torch wants several passes over memory there, these want one.

They run where Triton does. A call elsewhere is refused, as the operators refuse a named backend that cannot do the job.
"""

import os

import torch
from torch import Tensor

__all__ = ["fused_gated_rms_norm", "fused_short_conv"]


def fused_short_conv(
    x: Tensor,
    weight: Tensor,
    past: Tensor | None = None,
    *,
    sequence: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_dim: int = 0,
    eps: float = 1e-6,
) -> Tensor:
    """Causal depthwise convolution, SiLU, and the L2 norm of heads: `y = silu(sum_i w_i x_{t-i})`, then per head.

    Args:
        x: `[B, T, C]` float32, bfloat16 or float16.
        weight: `[C, W]`; the last tap belongs to the current token.
        past: `[N, C, W - 1]`, the inputs before each row or sequence, oldest first; zeros unless given. Not
            differentiable.
        sequence: `[T]` int64, which packed sequence each token belongs to, with B = 1.
        cu_seqlens: `[N + 1]`, their boundaries.
        head_dim: channels per head to divide by `sqrt(|y|^2 + eps)`; 0 leaves the norm out.
        eps: see `head_dim`.

    Returns:
        `[B, T, C]` in x's dtype, computed in float32.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or another dtype.
        ValueError: `past` needs a gradient.
    """
    _require_triton(x)
    if past is not None and past.requires_grad and torch.is_grad_enabled():
        raise ValueError("the fused convolution gives no gradient to its state: detach it, or leave fused_kernels off")
    from deltazoo.ops.triton.short_conv import short_conv

    return short_conv(x, weight, past, sequence=sequence, cu_seqlens=cu_seqlens, head_dim=head_dim, eps=eps)


def fused_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """`x / sqrt(mean x^2 + eps) * weight * activation(gate)` over the last axis.

    Args:
        x, gate: `[..., D]` float32, bfloat16 or float16.
        weight: `[D]`.
        eps: added to the mean square.
        activation: "silu" or "sigmoid".

    Returns:
        `[..., D]` in x's dtype, computed in float32.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or another dtype.
    """
    _require_triton(x)
    from deltazoo.ops.triton.gated_norm import gated_rms_norm

    return gated_rms_norm(x, gate, weight, eps, activation)


def _require_triton(x: Tensor) -> None:
    if x.device.type not in ("cuda", "meta") and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotImplementedError(f"fused kernels run on NVIDIA GPUs, not on {x.device.type}: leave fused_kernels off")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError(f"fused kernels take float32, bfloat16 and float16, not {x.dtype}")
