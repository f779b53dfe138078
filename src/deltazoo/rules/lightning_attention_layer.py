"""The layer of lightning attention."""

import torch
from torch import Tensor

from deltazoo.layers import DeltaRuleAttention, LayerInput
from deltazoo.ops.dtypes import wide_dtype


class LightningAttention(DeltaRuleAttention):
    """Linear attention whose decay follows from the numbers of head and layer, without parameters."""

    def make_decay_gate(self) -> None:
        """Make no parameters."""

    def log_decay(self, x: LayerInput) -> Tensor:
        """Log-decays `[B, T, HV]`, equal for every token; heads beyond a power of two lie between the first ones."""
        share, shares = self.head_share
        number = shares * self.num_v_heads
        evenly = number if self.spec.revision == 1 else 2 ** (number.bit_length() - 1)
        heads = torch.arange(1, self.num_v_heads + 1, device=x.hidden_states.device) + share * self.num_v_heads
        heads = heads.to(wide_dtype(x.hidden_states))
        heads = torch.where(heads <= evenly, heads, heads - evenly - 0.5)
        rates = torch.exp2(heads * (-8 / evenly))
        return (-self._depth_factor() * rates).expand(*x.hidden_states.shape[:2], -1)

    def _depth_factor(self) -> float:
        if self.layer_idx is None or self.num_layers is None or self.num_layers < 2:
            return 1 + 1e-5
        return 1 - self.layer_idx / (self.num_layers - 1) + 1e-5
