"""Wrong: the results depend on a random number that is drawn when the layer is built and not saved."""

import torch

from deltazoo import DeltaRuleAttention, RuleSpec, register_rule


@register_rule(
    RuleSpec(name="forgets_on_reload", paper="none", summary="Wrong.", equation="S_t = S_{t-1}", step_size="euler")
)
class ForgetsOnReload(DeltaRuleAttention):
    def make_parameters(self):
        self.factor = torch.rand((), device="cpu").item()

    def step_gate(self, x):
        return self.factor * super().step_gate(x)
