"""Wrong: the gate looks at the mean of all tokens, later ones included."""

from deltazoo import DeltaRuleAttention, RuleSpec, register_rule
from deltazoo.layers import LayerInput


@register_rule(
    RuleSpec(name="reads_the_future", paper="none", summary="Wrong.", equation="S_t = S_{t-1}", step_size="euler")
)
class ReadsTheFuture(DeltaRuleAttention):
    def step_gate(self, x):
        y = x.hidden_states
        return super().step_gate(LayerInput(y + y.mean(1, keepdim=True), self))
