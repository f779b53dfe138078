"""Wrong: a parameter without effect."""

import torch
from torch import nn

from deltazoo import DeltaRuleAttention, RuleSpec, register_rule


@register_rule(
    RuleSpec(name="unused_parameter", paper="none", summary="Wrong.", equation="S_t = S_{t-1}", step_size="euler")
)
class UnusedParameter(DeltaRuleAttention):
    def make_parameters(self):
        self.time = nn.Parameter(torch.empty(self.num_v_heads))
