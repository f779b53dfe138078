"""Wrong: a single token has another gate than a token of a longer sequence."""

from deltazoo import DeltaRuleAttention, RuleSpec, register_rule


@register_rule(
    RuleSpec(name="decodes_otherwise", paper="none", summary="Wrong.", equation="S_t = S_{t-1}", step_size="euler")
)
class DecodesOtherwise(DeltaRuleAttention):
    def step_gate(self, x):
        b = super().step_gate(x)
        return b / 2 if x.hidden_states.shape[1] == 1 else b
