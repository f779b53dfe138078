"""Random inputs of the timed calls; what a layer does before the operator (norms, gates) is not timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.workbench.bench.operator_options import GATES
from deltazoo.workbench.bench.shapes import Shape

__all__ = ["Inputs", "make_inputs"]


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call and the gradient of its output; see `delta_rule` for the shapes."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    d_output: Tensor

    def leaves(self, op: str) -> list[Tensor]:
        """The tensors that need a gradient."""
        if op == "softmax":
            return [self.q, self.k, self.v]
        leaves = [self.q, self.k, self.v, self.beta]
        return leaves if self.log_decay is None else [*leaves, self.log_decay]


def make_inputs(shape: Shape, op: str, gates: str, *, device: str, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Unit-length q and k, normal v, float32 beta = sigmoid(normal) and float32 gates of the wanted strength."""
    B, T, H, K, V = shape.B, shape.T, shape.H, shape.K, shape.V
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def unit_rows() -> Tensor:
        return F.normalize(normal(B, T, H, K), dim=-1).to(dtype).requires_grad_()

    log_decay = None
    if gates != "none":
        size = (B, T, H, K) if op == "kda" else (B, T, H)
        log_decay = (2 * GATES[gates] * torch.rand(size, generator=generator, device=device)).requires_grad_()
    return Inputs(
        q=unit_rows(),
        k=unit_rows(),
        v=normal(B, T, H, V).to(dtype).requires_grad_(),
        beta=normal(B, T, H).sigmoid().requires_grad_(),
        log_decay=log_decay,
        d_output=normal(B, T, H, V).to(dtype),
    )
