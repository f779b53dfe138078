"""RMSNorm and gated RMSNorm with the constructors, parameters and results of flash-linear-attention's modules."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.layers.norm import GATE_ACTIVATIONS
from deltazoo.names import unknown
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.fused import MOST_NORM_COLUMNS, fused_gated_rms_norm, fused_kernels_fit, fused_rms_norm

__all__ = ["FusedRMSNormGated", "RMSNorm"]

_ACTIVATIONS = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
"""Their names of the gate's activation, and ours."""


class _Norm(nn.Module):
    """Parameters of both modules, and what they do with a residual."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool,
        bias: bool,
        eps: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps

        def parameter() -> nn.Parameter:
            return nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

        self.register_parameter("weight", parameter() if elementwise_affine else None)
        self.register_parameter("bias", parameter() if elementwise_affine and bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Size, affine or not, and epsilon, for printing."""
        affine = "" if self.elementwise_affine else ", elementwise_affine=False"
        return f"{self.hidden_size}{affine}, eps={self.eps}"

    def _scale(self, x: Tensor) -> Tensor:
        return x.new_ones(self.hidden_size, dtype=torch.float32) if self.weight is None else self.weight

    def _plain(self, x: Tensor) -> Tensor:
        """The norm in float32 (float64 stays), not rounded."""
        wide = at_least_float32(x)
        y = F.rms_norm(wide, (self.hidden_size,), self._scale(x).to(wide.dtype), self.eps)
        return y if self.bias is None else y + self.bias


def _with_residual(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> tuple[Tensor, Tensor]:
    """What is normalised, in float32 if it is a sum; and what `prenorm` returns."""
    if residual is None:
        return x, x.float() if residual_in_fp32 else x
    if residual.shape != x.shape:
        raise ValueError(f"x and residual must have one shape, got {tuple(x.shape)} and {tuple(residual.shape)}")
    total = at_least_float32(x) + residual
    return total, total.to(residual.dtype)


class RMSNorm(_Norm):
    """`x / sqrt(mean x^2 + eps) * weight + bias` over the last axis, in x's dtype.

    Args:
        hidden_size: of the last axis.
        elementwise_affine: with a weight.
        bias: with a bias, if there is a weight.
        eps: added to the mean square.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x `[..., hidden_size]`.

        Args:
            x: the input.
            residual: of x's shape, added to x before.
            prenorm: return the sum as well, in the residual's dtype; without a residual x.
            residual_in_fp32: without a residual, return x in float32 there.
        """
        total, kept = _with_residual(x, residual, residual_in_fp32)
        if self.bias is None and self.hidden_size <= MOST_NORM_COLUMNS and fused_kernels_fit(total):
            y = fused_rms_norm(total, self._scale(x), self.eps, x.dtype)
        else:
            y = self._plain(total).to(x.dtype)
        return (y, kept) if prenorm else y


class FusedRMSNormGated(_Norm):
    """RMSNorm times an activated gate: `x / sqrt(mean x^2 + eps) * weight * activation(g)`.

    Args:
        hidden_size: of the last axis.
        elementwise_affine: with a weight.
        eps: added to the mean square.
        activation: of the gate: "swish" or "silu", which are the same, or "sigmoid".
        device, dtype: of the weight.

    Raises:
        ValueError: another activation.
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        if activation not in _ACTIVATIONS:
            raise ValueError(unknown("activation of the gate", activation, _ACTIVATIONS))
        self.activation = activation

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x `[..., hidden_size]` and multiply by the activated gate g of the same shape.

        `residual`, `prenorm` and `residual_in_fp32` as of `RMSNorm`.
        """
        total, kept = _with_residual(x, residual, residual_in_fp32)
        activation = _ACTIVATIONS[self.activation]
        if fused_kernels_fit(total):
            y = fused_gated_rms_norm(total, g.reshape(total.shape), self._scale(x), self.eps, activation)
        else:
            y = self._plain(total) * GATE_ACTIVATIONS[activation](at_least_float32(g)).reshape(total.shape)
        return (y.to(x.dtype), kept) if prenorm else y.to(x.dtype)

    def extra_repr(self) -> str:
        """Size, epsilon and activation, for printing."""
        return f"{super().extra_repr()}, activation={self.activation}"
