"""Wrong: the gate reads the previous token, also across padding and packed sequences, but not in decoding."""

import torch

from deltazoo import DeltaRuleAttention, RuleSpec, register_rule
from deltazoo.layers import LayerInput


@register_rule(
    RuleSpec(name="sees_its_neighbours", paper="none", summary="Wrong.", equation="S_t = S_{t-1}", step_size="euler")
)
class SeesItsNeighbours(DeltaRuleAttention):
    def step_gate(self, x):
        before = torch.nn.functional.pad(x.hidden_states, (0, 0, 1, 0))[:, :-1]
        return super().step_gate(LayerInput(x.hidden_states + before, self))
