"""Normalisations, computed in float32 at least: RMSNorm with and without a gate, the L2 norm of queries and keys."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deltazoo.layers.state import is_decoding_step
from deltazoo.names import function_of
from deltazoo.ops import fused as fused_ops
from deltazoo.ops.fused import FUSED_ACTIVATIONS, GATE_ACTIVATIONS, L2_NORM_EPS


def l2_normalize(x: Tensor, eps: float = L2_NORM_EPS, *, fused: bool | None = False) -> Tensor:
    """`x * rsqrt(sum x^2 + eps)` over the last axis, in x's dtype (`deltazoo.ops.fused.l2_norm`).

    `fused`: whether a Triton kernel computes it; None: wherever it runs.
    """
    return fused_ops.l2_norm(x, eps, fused=fused)


def l2_normalize_both(q: Tensor, k: Tensor, *, fused: bool | None = False) -> tuple[Tensor, Tensor]:
    """`l2_normalize` of queries and keys `[B, T, heads, K]`, computed together in a decoding step."""
    if is_decoding_step(q):
        q, k = l2_normalize(torch.cat([q, k], dim=2), fused=fused).split([q.shape[2], k.shape[2]], dim=2)
        return q, k
    return l2_normalize(q, fused=fused), l2_normalize(k, fused=fused)


class RMSNorm(nn.Module):
    """`x * rsqrt(mean x^2 + eps) * weight` over the last axis, in x's dtype (arXiv:1910.07467).

    Args:
        dim: size of the last axis.
        eps: added to the mean square.
        fused: whether Triton kernels compute it, one each way, with the addition of a residual; None: wherever they
            run.
        feeds_linear: only linear maps read the result. Under autocast the Triton kernel then writes it in the dtype
            that each of them would cast it to.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        fused: bool | None = False,
        feeds_linear: bool = False,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.fused = fused
        self.feeds_linear = feeds_linear
        self.weight = nn.Parameter(torch.ones(dim))

    def set_fused(self, fused: bool | None) -> None:
        """Choose between the Triton kernel and plain torch."""
        self.fused = fused

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x `[..., dim]`; with a residual, its sum with x, and return that sum as well."""
        how = dict(fused=self.fused, feeds_linear=self.feeds_linear)
        if residual is None:
            return fused_ops.rms_norm(x, self.weight, self.eps, **how)
        return fused_ops.add_rms_norm(x, residual, self.weight, self.eps, **how)

    def extra_repr(self) -> str:
        """Size and epsilon, for printing."""
        return f"{self.dim}, eps={self.eps}"


class GatedRMSNorm(RMSNorm):
    """RMSNorm times an activated gate: `norm(x) * activation(gate)`.

    Gated DeltaNet (arXiv:2412.06464) takes SiLU, Kimi Delta Attention (arXiv:2510.26692) sigmoid, after finding SiLU
    clearly worse.

    Args:
        dim: size of the last axis.
        eps: added to the mean square.
        activation: name of the gate's activation in `GATE_ACTIVATIONS`, or a function of each element.
        fused: whether Triton kernels compute it, one each way; None: wherever they run and know the activation
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
        function_of("gate_activation", activation, GATE_ACTIVATIONS)  # refuses unknown names
        self.activation = activation
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
        return fused_ops.gated_rms_norm(x, gate, self.weight, self.eps, self.activation, fused=self.fused)

    def extra_repr(self) -> str:
        """Size, epsilon and activation, for printing."""
        return f"{super().extra_repr()}, activation={self.activation!r}"
