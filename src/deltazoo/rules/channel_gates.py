"""The base class of layers with a gate per channel of keys and of values."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, LayerInput, bounded_step
from deltazoo.layers.initialization import Initializer, nearly_zero_rows_
from deltazoo.ops.dtypes import wide_dtype
from deltazoo.ops.step_size import largest_gain
from deltazoo.spec import choice_name


class ChannelGates(DeltaRuleAttention):
    """Layers with gates of keys `b_proj` `[H * K, hidden_size]` and of values `w_proj` `[HV * V, hidden_size]`."""

    input_projections = (*DeltaRuleAttention.input_projections, "w_proj")
    tensor_parallel: ClassVar = {"w_proj": "heads"}
    projects_micro_steps = False

    def make_parameters(self) -> None:
        """Make the gates per channel; `b_proj` takes the place of the gate per head."""
        if self.spec.step_size != "euler":
            raise ValueError(
                f"rule {self.spec.name!r} has gates per channel in place of a step size, so "
                f"step_size={choice_name(self.spec.step_size)!r} cannot act: leave it at 'euler'"
            )
        bias = self.b_proj.bias is not None
        self.b_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_k_dim, bias=bias)
        self.w_proj = nn.Linear(self.hidden_size, self.num_v_heads * self.head_v_dim, bias=False)

    def neutral_initializers(self) -> dict[str, Initializer]:
        """Initial values at which both gates are 1/2, which gives KDA with a step size of 1/2."""
        return {"w_proj.weight": nearly_zero_rows_}

    def channel_gates(self, x: LayerInput) -> tuple[Tensor, Tensor]:
        """Both gates before their sigmoids, `[B, T, H, K]` and `[B, T, HV, V]`."""
        keys, values = (x.project(name) for name in ("b_proj", "w_proj"))
        return keys.unflatten(-1, (-1, self.head_k_dim)), values.unflatten(-1, (-1, self.head_v_dim))

    @property
    def largest_key_gate(self) -> float:
        """The upper end of the range of the gate of keys."""
        return 2.0 if self.allow_neg_eigval else 1.0

    def whole_step(self, k: Tensor, v: Tensor, erase_key: Tensor | None = None) -> Tensor:
        """A step size `[B, T, HV]` of one, or less where doubled gates would let the erase gain exceed 2."""
        step = torch.ones(v.shape[:3], dtype=wide_dtype(v), device=v.device)
        if not self.allow_neg_eigval:
            return step
        gain, units = largest_gain(decays=True), self.spec.normalize_k
        return bounded_step(step, k, erase_key, largest_gain=gain, by_rounding=units, fused=self.fused_kernels)
