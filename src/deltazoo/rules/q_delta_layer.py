"""The layer of Q-Delta."""

from typing import ClassVar

from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, LayerInput, RuleInputs
from deltazoo.layers.initialization import Initializer, nearly_zero_rows_
from deltazoo.ops import fused


class QDelta(DeltaRuleAttention):
    """Gated DeltaNet with `lamb_proj` `[H, hidden_size]`, the share of the query in the erase key."""

    input_projections = (*DeltaRuleAttention.input_projections, "lamb_proj")
    tensor_parallel: ClassVar = {"lamb_proj": "heads"}
    projects_micro_steps = False

    def make_parameters(self) -> None:
        """Make the map to lambda."""
        if self.allow_neg_eigval:
            raise ValueError(
                f"rule {self.spec.name!r} takes no allow_neg_eigval=True: the erase gain b (1 + lambda k.q) would "
                "reach 4"
            )
        self.lamb_proj = nn.Linear(self.hidden_size, self.num_heads, bias=False)

    def neutral_initializers(self) -> dict[str, Initializer]:
        """Initial values with lambda = 0.29 for all tokens."""
        return {"lamb_proj.weight": nearly_zero_rows_}

    def rule_inputs(self, x: LayerInput, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
        """The inputs of Gated DeltaNet, with the erase key `k + lambda q`."""
        inputs = super().rule_inputs(x, q, k, v)
        erase_key = fused.q_delta_key(x.project("lamb_proj"), q, k, fused=self.fused_kernels)
        units = self.spec.normalize_q and self.spec.normalize_k
        return inputs._replace(erase_key=erase_key).bounded(by_rounding=units, fused=self.fused_kernels)
