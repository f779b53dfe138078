"""Wrong: keys are not normalised, and the step size does not depend on their length."""

from deltazoo import DeltaRuleAttention, RuleSpec, register_rule


@register_rule(
    RuleSpec(
        name="expands_the_state",
        paper="none",
        summary="Wrong.",
        equation="S_t = S_{t-1}",
        step_size="euler",
        normalize_k=False,
    )
)
class ExpandsTheState(DeltaRuleAttention):
    def rule_inputs(self, x, q, k, v):
        inputs = super().rule_inputs(x, q, k, v)
        return inputs._replace(beta=self.step_gate(x))
