"""The layer of gated linear attention."""

from typing import ClassVar

import torch
from torch import Tensor

from deltazoo.layers import DeltaRuleAttention, LayerInput
from deltazoo.layers.initialization import Initializer, nearly_zero_rows_, spaced_decay_rates
from deltazoo.ops import fused

_RANK = 16
_SLOWER = 16.0
"""Divisor of the logarithm of a sigmoid that is the log-decay."""


class GatedLinearAttention(DeltaRuleAttention):
    """Linear attention whose decay per channel comes from `gk_proj`, two maps of rank 16 with a bias."""

    input_projections = (*DeltaRuleAttention.input_projections, "gk_proj")
    tensor_parallel: ClassVar = {"gk_proj": "low_rank"}

    def make_decay_gate(self) -> None:
        """Make the projection; there is no `A_log` and no `dt_bias`."""
        self.gk_proj = self.low_rank(self.num_v_heads * self.head_k_dim, bias=True, rank=_RANK)

    def make_parameters(self) -> None:
        """Make no parameters, but without convolutions take the activation off queries, keys and values."""
        if not self.conv_size:
            self.activation = "identity"

    def neutral_initializers(self) -> dict[str, Initializer]:
        """Initial values of slow decays, equal for all tokens and spaced over the channels of each head."""
        return {"gk_proj.1.weight": nearly_zero_rows_, "gk_proj.1.bias": self._start_bias}

    def log_decay(self, x: LayerInput) -> Tensor:
        """The log-decay `logsigmoid(gk_proj(x)) / 16`."""
        a = x.project("gk_proj").unflatten(-1, (-1, self.head_k_dim))
        return fused.log_sigmoid_decay(a, _SLOWER, fused=self.fused_kernels)

    def _start_bias(self, bias: Tensor) -> None:
        rate = _SLOWER * spaced_decay_rates(self.head_k_dim).double().to(bias.device)
        with torch.no_grad():
            bias.copy_(-torch.log(torch.expm1(rate)).repeat(self.num_v_heads))
