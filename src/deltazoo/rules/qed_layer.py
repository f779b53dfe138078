"""The layer of QED."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.layers.initialization import Initializer
from deltazoo.ops import fused
from deltazoo.rules.gated_deltanet2_layer import GatedDeltaNet2


class QED(GatedDeltaNet2):
    """Gated DeltaNet-2 with `theta` `[H]`, the weight of the query's direction before its sigmoid."""

    float32_parameters = (*GatedDeltaNet2.float32_parameters, "theta")
    tensor_parallel: ClassVar = {**GatedDeltaNet2.tensor_parallel, "theta": "heads"}

    def make_parameters(self) -> None:
        """Make the gates and `theta`."""
        super().make_parameters()
        self.theta = nn.Parameter(torch.empty(self.num_heads))

    def initializers(self, initializer_range: float | None = None) -> dict[str, Initializer]:
        """Initial values with `theta` at -2."""
        return {**super().initializers(initializer_range), "theta": partial(nn.init.constant_, val=-2.0)}

    def erase_key(self, erase_gate: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The erase key `b * k + lambda (I - k k^T) (b * q)`, computed in float32, rounded once to the key's dtype."""
        return fused.qed_key(erase_gate, q, k, self.theta, self.largest_key_gate, fused=self.fused_kernels)
