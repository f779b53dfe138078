"""Wrong: a gate for three value heads, whatever the layer has."""

import torch

from deltazoo import DeltaRuleAttention, RuleSpec, register_rule


@register_rule(RuleSpec(name="raises", paper="none", summary="Wrong.", equation="S_t = S_{t-1}", step_size="euler"))
class Raises(DeltaRuleAttention):
    def step_gate(self, x):
        return super().step_gate(x) * torch.ones(3)
