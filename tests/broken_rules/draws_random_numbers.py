"""Wrong: noise on the gate, so that two equal calls differ."""

import torch

from deltazoo import DeltaRuleAttention, RuleSpec, register_rule


@register_rule(
    RuleSpec(name="draws_random_numbers", paper="none", summary="Wrong.", equation="S_t = S_{t-1}", step_size="euler")
)
class DrawsRandomNumbers(DeltaRuleAttention):
    def step_gate(self, x):
        b = super().step_gate(x)
        return b * torch.rand_like(b)
