"""The layers with a gate per channel of keys and of values: of FG2-GDN, Gated DeltaNet-2 and QED."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, LayerInput, RuleInputs, bounded_step
from deltazoo.layers.initialization import Initializer, nearly_zero_rows_
from deltazoo.ops import fused
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


class FG2GatedDeltaNet(ChannelGates):
    """KDA whose keys and values are multiplied by the roots of their gates."""

    def rule_inputs(self, x: LayerInput, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
        """Gated keys and values, with a step size of one."""
        key_gate, value_gate = self.channel_gates(x)
        largest = self.largest_key_gate
        # The write is the product of both roots: halved values undo the doubling there.
        largest_write = largest if self.neg_eigval == "both" else 1 / largest
        k = fused.sigmoid_gate(key_gate, k, largest, root=True, fused=self.fused_kernels)
        v = fused.sigmoid_gate(value_gate, v, largest_write, root=True, fused=self.fused_kernels)
        return RuleInputs(q, k, v, self.whole_step(k, v), self.log_decay(x))


class GatedDeltaNet2(ChannelGates):
    """KDA that erases under the gated key, and writes the gated value under the key."""

    def make_parameters(self) -> None:
        """Make the gates; an option that cannot act on them raises ValueError."""
        if self.neg_eigval == "erase":
            raise ValueError(
                f"rule {self.spec.name!r} has a gate for the erase alone, which allow_neg_eigval doubles: "
                "neg_eigval='erase' cannot act"
            )
        super().make_parameters()

    def rule_inputs(self, x: LayerInput, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
        """Inputs with the gated key as erase key, the gated value, and a step size of one."""
        erase_gate, write_gate = self.channel_gates(x)
        erase_key = self.erase_key(erase_gate, q, k)
        beta = self.whole_step(k, v, erase_key)
        v = fused.sigmoid_gate(write_gate, v, fused=self.fused_kernels)
        return RuleInputs(q, k, v, beta, self.log_decay(x), erase_key)

    def erase_key(self, erase_gate: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The erase key `b * k`, from the gate before its sigmoid; both `[B, T, H, K]`, the key's dtype."""
        return fused.sigmoid_gate(erase_gate, k, self.largest_key_gate, fused=self.fused_kernels)


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
