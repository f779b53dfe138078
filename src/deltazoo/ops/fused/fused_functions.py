"""Functions that check their arguments and run the fused kernels, imported by the first call.

Each is one pass over memory where plain torch takes several. They run where Triton runs; elsewhere they raise
NotImplementedError, as the operators do for a named backend that cannot run a call.
"""

import torch
from torch import Tensor

from deltazoo.names import unknown
from deltazoo.ops.autograd_modes import records_gradients, refuse_transforms, transforming
from deltazoo.ops.backends import triton_interprets, triton_obstacle
from deltazoo.ops.dtypes import KERNEL_DTYPES
from deltazoo.ops.fused.kernels import L2_NORM_EPS, REFUSAL

__all__ = [
    "FUSED_ACTIVATIONS",
    "L2_NORM_EPS",
    "MOST_NORM_COLUMNS",
    "fused_add_rms_norm",
    "fused_cross_entropy_",
    "fused_gated_rms_norm",
    "fused_kernels_fit",
    "fused_l2_norm",
    "fused_rms_norm",
    "fused_rms_norm_linear",
    "fused_rotary",
    "fused_swiglu",
    "fused_swiglu_linear",
]

FUSED_ACTIVATIONS = ("silu", "sigmoid")
"""Activations of output gates that the kernels know, of the norm in training and of the rule in decoding, by name."""

MOST_NORM_COLUMNS = 8192
"""The longest axis of the RMSNorm kernels: a program holds whole rows in registers."""


def fused_kernels_fit(x: Tensor, past: Tensor | None = None) -> bool:
    """Whether these kernels can run on `x`: a tensor on an NVIDIA GPU, in a dtype that the triton backend supports.

    False if the convolution's state `past` needs a gradient, under transforms of torch.func and in forward mode. Also
    false under Triton's interpreter on a CPU, which only tests use.
    """
    return (
        x.is_cuda
        and not records_gradients(past)
        and not transforming()
        and triton_obstacle(x.device, x.dtype, 1, 1) is None
    )


def fused_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """`x / sqrt(mean x^2 + eps) * weight * activation(gate)` over the last axis.

    Args:
        x, gate: `[..., D]` float32, bfloat16 or float16.
        weight: `[D]`.
        eps: added to the mean square.
        activation: one of `FUSED_ACTIVATIONS`.

    Returns:
        `[..., D]` in x's dtype, computed in float32.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or another dtype.
        ValueError: tensors on several devices, or another activation.
    """
    if activation not in FUSED_ACTIVATIONS:
        raise ValueError(unknown("activation", activation, FUSED_ACTIVATIONS))
    _require_triton(x, gate, weight)
    from deltazoo.ops.fused.kernels.gated_norm import gated_rms_norm

    return gated_rms_norm(x, gate, weight, eps, activation == "silu")


def fused_rms_norm_linear(x: Tensor, weight: Tensor, linear: Tensor, eps: float) -> Tensor:
    """`fused_rms_norm` of each head, times the transpose of `linear`; the backward pass keeps the arguments alone.

    Args:
        x: `[B, T, H, D]` float32, bfloat16 or float16, D at most `MOST_NORM_COLUMNS`.
        weight: `[D]`.
        linear: `[C, H * D]` in x's dtype.
        eps: added to the mean square.

    Returns:
        `[B, T, C]`.

    Raises:
        NotImplementedError: as `fused_rms_norm`.
        ValueError: tensors on several devices, or `linear` of another shape or dtype.
    """
    _require_triton(x, weight, linear)
    _require_columns(x)
    if x.ndim != 4 or linear.dtype != x.dtype or linear.shape[1:] != (x.shape[2] * x.shape[3],):
        raise ValueError(
            f"expected x [B, T, H, D] and linear [C, H * D] of one dtype, got {x.dtype} {tuple(x.shape)} and "
            f"{linear.dtype} {tuple(linear.shape)}"
        )
    from deltazoo.ops.fused.kernels.rms_norm import rms_norm_linear

    return rms_norm_linear(x, weight, linear, eps)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """`x / sqrt(mean x^2 + eps) * weight` over the last axis, computed in float32.

    Args:
        x: `[..., D]` float32, bfloat16 or float16, D at most `MOST_NORM_COLUMNS`.
        weight: `[D]`.
        eps: added to the mean square.
        dtype: of the result; None: x's.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, another dtype, or a longer axis.
        ValueError: tensors on several devices.
    """
    _require_triton(x, weight)
    _require_columns(x)
    from deltazoo.ops.fused.kernels.rms_norm import rms_norm

    return rms_norm(x, weight, eps, dtype or x.dtype)


def fused_l2_norm(x: Tensor, eps: float) -> Tensor:
    """`x / sqrt(sum x^2 + eps)` over the last axis, in x's dtype, computed in float32.

    Args:
        x: `[..., D]` float32, bfloat16 or float16, D at most `MOST_NORM_COLUMNS`.
        eps: added to the sum of squares.

    Raises:
        NotImplementedError: as `fused_rms_norm`.
    """
    _require_triton(x)
    _require_columns(x)
    from deltazoo.ops.fused.kernels.rms_norm import l2_norm

    return l2_norm(x, eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`fused_rms_norm` of `x + residual`, and that sum, in one pass.

    Args:
        x, residual: of one shape `[..., D]`, each float32, bfloat16 or float16, D at most `MOST_NORM_COLUMNS`.
        weight: `[D]`.
        eps: added to the mean square.
        dtype: of the norm; None: that of the sum.

    Returns:
        The norm, and the sum in the dtype that torch gives it.

    Raises:
        NotImplementedError: see `fused_rms_norm`.
        ValueError: tensors of two shapes or on several devices.
    """
    _require_triton(x, residual, weight)
    _require_columns(x)
    if x.shape != residual.shape:
        raise ValueError(f"x and residual must have one shape, got {tuple(x.shape)} and {tuple(residual.shape)}")
    _require_float(residual)
    from deltazoo.ops.fused.kernels.rms_norm import add_rms_norm

    return add_rms_norm(x, residual, weight, eps, dtype or torch.promote_types(x.dtype, residual.dtype))


def fused_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding (arXiv:2104.09864), the half-split form of Llama, computed in float32.

    Args:
        x: `[B, T, H, K]` float32, bfloat16 or float16.
        cos, sin: `[B or 1, T, d]`, float32, bfloat16 or float16, d even and at most K: channels i and i + d/2 form a
            pair, those from d on stay. Not differentiable.

    Returns:
        `[B, T, H, K]` in x's dtype.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or another dtype.
        ValueError: angles that do not fit x or need a gradient, or tensors on several devices.
    """
    _require_triton(x, cos, sin)
    _require_float(cos)
    _require_float(sin)
    if x.ndim != 4 or cos.shape != sin.shape or cos.shape[:-1] not in (x.shape[:2], (1, x.shape[1])):
        shapes = ", ".join(str(tuple(part.shape)) for part in (x, cos, sin))
        raise ValueError(f"expected x [B, T, H, K] with cos and sin [B or 1, T, d], got {shapes}")
    if cos.shape[-1] % 2 or not 0 < cos.shape[-1] <= x.shape[-1]:
        raise ValueError(f"the angles must be of an even number of the {x.shape[-1]} channels, got {cos.shape[-1]}")
    if records_gradients(cos, sin):
        raise ValueError("the fused rotary embedding gives no gradient to its angles: detach them")
    from deltazoo.ops.fused.kernels.rotary_embedding import rotary

    return rotary(x, cos, sin)


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, computed in float32.

    Args:
        gate, up: alike, float32, bfloat16 or float16.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or another dtype.
        ValueError: tensors of two dtypes or shapes, or on two devices.
    """
    _require_triton(gate, up)
    if gate.dtype != up.dtype or gate.shape != up.shape:
        raise ValueError(
            f"gate and up must be alike, got {gate.dtype} {tuple(gate.shape)} and {up.dtype} {tuple(up.shape)}"
        )
    from deltazoo.ops.fused.kernels.swiglu import swiglu

    return swiglu(gate, up)


def fused_swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """`(silu(gate) * up) @ weight^T`. The backward pass keeps the arguments alone.

    Args:
        gate, up: `[..., D]`, alike, float32, bfloat16 or float16.
        weight: `[C, D]` in their dtype.

    Returns:
        `[..., C]`.

    Raises:
        NotImplementedError, ValueError: as `fused_swiglu`.
    """
    _require_triton(gate, up, weight)
    if not (gate.dtype == up.dtype == weight.dtype and gate.shape == up.shape):
        raise ValueError(
            f"gate, up and weight must be alike, got {gate.dtype} {tuple(gate.shape)}, {up.dtype} {tuple(up.shape)} "
            f"and {weight.dtype}"
        )
    from deltazoo.ops.fused.kernels.swiglu import swiglu_linear

    return swiglu_linear(gate, up, weight)


def fused_cross_entropy_(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Cross-entropy of each row, not differentiable. The gradient of the sum is written over the logits.

    Args:
        logits: `[N, V]` contiguous, float32, bfloat16 or float16; overwritten.
        labels: `[N]` int64; a row labelled `ignored` has loss and gradient 0.
        ignored: see `labels`.

    Returns:
        `[N]` float32.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or another dtype.
        RuntimeError: a label outside the vocabulary, on a GPU at the next synchronisation.
    """
    _require_triton(logits, labels)
    torch._assert_async(((labels == ignored) | ((labels >= 0) & (labels < logits.shape[1]))).all())
    from deltazoo.ops.fused.kernels.cross_entropy import cross_entropy_

    return cross_entropy_(logits, labels, ignored)


def _require_columns(x: Tensor) -> None:
    if x.shape[-1] > MOST_NORM_COLUMNS:
        raise NotImplementedError(
            f"this kernel takes rows of up to {MOST_NORM_COLUMNS}, not {x.shape[-1]}: leave fused_kernels off"
        )


def _require_triton(x: Tensor, *others: Tensor | None) -> None:
    if x.device.type not in ("cuda", "meta") and not triton_interprets():
        raise NotImplementedError(f"fused kernels run on NVIDIA GPUs, not on {x.device.type}: leave fused_kernels off")
    _require_float(x)
    refuse_transforms(*REFUSAL)
    for other in others:
        if other is not None and other.device != x.device:
            raise ValueError(f"fused kernels take tensors of one device, got {x.device} and {other.device}")


def _require_float(x: Tensor) -> None:
    if x.dtype not in KERNEL_DTYPES:
        raise NotImplementedError(f"fused kernels take float32, bfloat16 and float16, not {x.dtype}")
