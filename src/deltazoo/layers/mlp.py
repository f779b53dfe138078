"""The feed-forward layer of a block."""

from typing import ClassVar

from torch import Tensor, nn

from deltazoo.ops import fused as fused_ops


def default_intermediate_size(hidden_size: int, hidden_ratio: float = 4) -> int:
    """Two thirds of `hidden_ratio * hidden_size`, rounded up to a multiple of 256.

    With three matrices instead of two, this has about the parameters of a plain MLP of that ratio (arXiv:2002.05202).
    """
    return 256 * -(-int(hidden_size * hidden_ratio * 2 / 3) // 256)


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, without biases (arXiv:2002.05202).

    Args:
        hidden_size: width of inputs and outputs.
        intermediate_size: `default_intermediate_size(hidden_size)` unless given.
        fused: whether a Triton kernel computes what is between the matrix products; None: wherever it runs.
    """

    input_projections: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int | None = None,
        *,
        fused: bool | None = False,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.fused = fused
        self.intermediate_size = intermediate_size or default_intermediate_size(hidden_size)
        self.gate_proj = nn.Linear(hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., hidden_size]` to the same shape."""
        return fused_ops.swiglu_mlp(x, self.gate_proj, self.up_proj, self.down_proj, fused=self.fused)
