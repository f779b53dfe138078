"""The feed-forward block between mixers."""

import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.layers.recompute import recomputable
from deltazoo.ops.liger import liger_swiglu

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
        liger: Liger's kernel between the matrix products instead of plain torch.
    """

    def __init__(self, hidden_size: int, intermediate_size: int | None = None, *, liger: bool = False) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.liger = liger
        self.intermediate_size = intermediate_size or default_intermediate_size(hidden_size)
        self.gate_proj = nn.Linear(hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., hidden_size]` to the same shape."""
        return self.down_proj(recomputable(self._product, self.gate_proj(x), self.up_proj(x)))

    def _product(self, gate: Tensor, up: Tensor) -> Tensor:
        return liger_swiglu(gate, up) if self.liger else F.silu(gate) * up
