"""The feed-forward layer of a block."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.ops.autograd_modes import transforming
from deltazoo.ops.dtypes import cast_for_product
from deltazoo.ops.fused import fused_kernels_fit, fused_swiglu, fused_swiglu_linear
from deltazoo.ops.fused.liger import liger_swiglu
from deltazoo.ops.linear_maps import called_as_is, linear_maps
from deltazoo.ops.recompute import recomputable

__all__ = ["SwiGLU", "default_intermediate_size"]


def default_intermediate_size(hidden_size: int, hidden_ratio: float = 4) -> int:
    """Two thirds of `hidden_ratio * hidden_size`, rounded up to a multiple of 256.

    With three matrices instead of two, this has about the parameters of a plain MLP of that ratio (arXiv:2002.05202).
    """
    return 256 * -(-int(hidden_size * hidden_ratio * 2 / 3) // 256)


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, without biases (arXiv:2002.05202).

    Args:
        hidden_size: of inputs and outputs.
        intermediate_size: default `default_intermediate_size`.
        liger: Liger's kernel between the matrix products.
        fused: our own Triton kernel between them; None: wherever it runs, and plain torch elsewhere.
    """

    input_projections: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int | None = None,
        *,
        liger: bool = False,
        fused: bool | None = False,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.liger = liger
        self.fused = fused
        self.intermediate_size = intermediate_size or default_intermediate_size(hidden_size)
        self.gate_proj = nn.Linear(hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., hidden_size]` to the same shape."""
        gate, up = linear_maps(x, (self.gate_proj, self.up_proj))
        if self._takes_linear(gate, up):
            gate, up, weight = cast_for_product(gate, up, self.down_proj.weight)
            if weight.dtype == gate.dtype:
                return fused_swiglu_linear(gate, up, weight)
        return self.down_proj(recomputable(self._product, gate, up))

    def _takes_linear(self, gate: Tensor, up: Tensor) -> bool:
        """Whether a training step's product and `down_proj` may be one function, which keeps gate and up alone."""
        if not torch.is_grad_enabled() or transforming() or not called_as_is(self.down_proj):
            return False
        return self.down_proj.weight.requires_grad and self._takes_kernel(gate, up)

    def _product(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.liger:
            return liger_swiglu(gate, up)
        return fused_swiglu(gate, up) if self._takes_kernel(gate, up) else F.silu(gate) * up

    def _takes_kernel(self, gate: Tensor, up: Tensor) -> bool:
        if self.liger:
            return False
        return fused_kernels_fit(gate) and gate.dtype == up.dtype if self.fused is None else self.fused
