"""Normalisations, computed in float32 at least: RMSNorm with and without a gate, the L2 norm of queries and keys."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.layers.state import is_decoding_step
from deltazoo.names import function_of
from deltazoo.ops.autograd_modes import transforming
from deltazoo.ops.dtypes import at_least_float32, autocast_dtype
from deltazoo.ops.fused import (
    FUSED_ACTIVATIONS,
    L2_NORM_EPS,
    MOST_NORM_COLUMNS,
    fused_add_rms_norm,
    fused_gated_rms_norm,
    fused_kernels_fit,
    fused_l2_norm,
    fused_rms_norm,
    fused_rms_norm_linear,
)
from deltazoo.ops.fused.liger import liger_add_rms_norm, liger_rms_norm
from deltazoo.ops.recompute import declare_recomputable, recomputable

__all__ = ["GATE_ACTIVATIONS", "GatedRMSNorm", "RMSNorm", "fuses_rows", "l2_normalize", "l2_normalize_both"]


def l2_normalize(x: Tensor, eps: float = L2_NORM_EPS, *, fused: bool | None = False) -> Tensor:
    """`x * rsqrt(sum x^2 + eps)` over the last axis, in x's dtype.

    The epsilon is inside the root, as in the released checkpoints: it bounds the gradient at the zero vector. With
    `fused` a Triton kernel computes it; None: wherever it runs.
    """
    return recomputable(partial(_unit_length, eps=eps, fused=fused), x)


def fuses_rows(x: Tensor, fused: bool | None) -> bool:
    """Whether a kernel that holds whole rows of x is to compute: `fused`, or, where that is None, whether one can."""
    return (x.shape[-1] <= MOST_NORM_COLUMNS and fused_kernels_fit(x)) if fused is None else fused


def _unit_length(x: Tensor, eps: float, fused: bool | None) -> Tensor:
    if fuses_rows(x, fused):
        return fused_l2_norm(x, eps)
    wide = at_least_float32(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def l2_normalize_both(q: Tensor, k: Tensor, *, fused: bool | None = False) -> tuple[Tensor, Tensor]:
    """`l2_normalize` of queries and keys `[B, T, heads, K]`, in one go for a decoding step."""
    if is_decoding_step(q):
        q, k = l2_normalize(torch.cat([q, k], dim=2), fused=fused).split([q.shape[2], k.shape[2]], dim=2)
        return q, k
    return l2_normalize(q, fused=fused), l2_normalize(k, fused=fused)


class RMSNorm(nn.Module):
    """`x * rsqrt(mean x^2 + eps) * weight` over the last axis, in x's dtype (arXiv:1910.07467).

    Args:
        dim: of the last axis.
        eps: added to the mean square.
        liger: Liger's kernels instead of plain torch.
        fused: one Triton kernel each way instead of plain torch, the addition of a residual included; None: wherever
            it runs.
        feeds_linear: only linear maps read the result. Under autocast the Triton kernel then writes it in the dtype
            that each of them would cast it to.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        liger: bool = False,
        fused: bool | None = False,
        feeds_linear: bool = False,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.liger = liger
        self.fused = fused
        self.feeds_linear = feeds_linear
        self.weight = nn.Parameter(torch.ones(dim))

    def set_fused(self, fused: bool | None) -> None:
        """Choose between the Triton kernel and plain torch."""
        self.fused = fused

    def takes_kernel(self, x: Tensor) -> bool:
        """Whether our Triton kernel is to normalise x."""
        return not self.liger and fuses_rows(x, self.fused)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x `[..., dim]`; with a residual, its sum with x, and return that sum as well."""
        if residual is None:
            return recomputable(self._normalize_once, x, self.weight)
        if self.takes_kernel(x) and (self.fused or fused_kernels_fit(residual)):
            y, total = fused_add_rms_norm(x, residual, self.weight, self.eps, self._kernel_dtype(x))
            declare_recomputable(y, self._normalize_once, total, self.weight)  # the sum is kept in place of x
            return y, total
        return recomputable(self._add_and_normalize, x, residual, self.weight)

    def takes_linear(self, x: Tensor) -> bool:
        """Whether `with_linear` has a kernel for a training step with such an input."""
        return torch.is_grad_enabled() and not transforming() and self.takes_kernel(x)

    def with_linear(self, x: Tensor, linear: Tensor) -> Tensor:
        """The norm of x `[B, T, H, dim]` times the transpose of `linear` `[C, H * dim]`."""
        return fused_rms_norm_linear(x, self.weight, linear, self.eps)

    def _add_and_normalize(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if self.liger:
            return liger_add_rms_norm(x, residual, weight, self.eps)
        total = residual + x
        return self._normalize_once(total, weight), total

    def _normalize_once(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise in x's dtype. On a GPU torch's kernel computes in float32 inside and keeps no float32 copy of x."""
        if self.liger:
            return liger_rms_norm(x, weight, self.eps)
        if self.takes_kernel(x):
            return fused_rms_norm(x, weight, self.eps, self._kernel_dtype(x))
        if x.is_cuda and x.dtype == weight.dtype:
            return F.rms_norm(x, (self.dim,), weight, self.eps)
        return self._normalize(x, weight).to(x.dtype)

    def _kernel_dtype(self, x: Tensor) -> torch.dtype | None:
        """`dtype` of `fused_rms_norm`: under autocast, what the linear maps that read the result would cast it to."""
        return autocast_dtype(x.device) if self.feeds_linear else None

    def _normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = at_least_float32(x)
        return F.rms_norm(wide, (self.dim,), weight.to(wide.dtype), self.eps)

    def extra_repr(self) -> str:
        """Size and epsilon, for printing."""
        return f"{self.dim}, eps={self.eps}"


GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
"""The activations of output gates that a spec can name."""


class GatedRMSNorm(RMSNorm):
    """RMSNorm, then times an activated gate: `norm(x) * activation(gate)`.

    SiLU in Gated DeltaNet (arXiv:2412.06464), sigmoid in Kimi Delta Attention (arXiv:2510.26692, which finds SiLU
    clearly worse there).

    Args:
        dim: of the last axis.
        eps: added to the mean square.
        activation: of the gate: its name in `GATE_ACTIVATIONS`, or a function of each element.
        fused: one Triton kernel each way instead of plain torch; None: wherever it runs and knows the activation
            (`FUSED_ACTIVATIONS`).

    Raises:
        ValueError: an unknown activation, or `fused=True` with one that the kernel does not know.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        activation: str | Callable[[Tensor], Tensor] = "silu",
        *,
        fused: bool | None = False,
    ) -> None:
        super().__init__(dim, eps)
        self.activation = activation
        self._activate = function_of("gate_activation", activation, GATE_ACTIVATIONS)
        self.set_fused(fused)

    def set_fused(self, fused: bool | None) -> None:
        """Choose between the Triton kernel and plain torch; ValueError if the kernel lacks the activation."""
        known = self.activation in FUSED_ACTIVATIONS
        if fused and not known:
            raise ValueError(
                f"the fused kernel has no activation {self.activation}, only {', '.join(FUSED_ACTIVATIONS)}: leave "
                "fused_kernels off"
            )
        self.fused = fused if known else False

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise x `[..., dim]` and multiply by the activated gate of the same shape."""
        return recomputable(self._normalize_and_gate, x, gate, self.weight)

    def takes_kernel(self, x: Tensor) -> bool:
        """Whether our Triton kernel is to normalise x."""
        return fused_kernels_fit(x) if self.fused is None else self.fused

    def _normalize_and_gate(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        if self.takes_kernel(x):
            return fused_gated_rms_norm(x, gate, weight, self.eps, self.activation)  # type: ignore[arg-type]
        return (self._normalize(x, weight) * self._activate(at_least_float32(gate))).to(x.dtype)

    def extra_repr(self) -> str:
        """Size, epsilon and activation, for printing."""
        return f"{super().extra_repr()}, activation={self.activation!r}"
