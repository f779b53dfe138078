"""The layers of Comba: by its equation, and as its authors' code and flash-linear-attention compute it."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, LayerInput, RuleInputs
from deltazoo.layers.initialization import Initializer
from deltazoo.layers.norm import l2_normalize
from deltazoo.layers.rule import StepForm
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.fused import fused_rule_keys
from deltazoo.ops.recompute import recomputable

__all__ = ["Comba", "CombaUnitErase"]


class Comba(DeltaRuleAttention):
    """`decay` `[H]`, the feedback c before its sigmoid, and `D` `[H]`, the share of the key in the read-out."""

    float32_parameters = (*DeltaRuleAttention.float32_parameters, "decay", "D")
    tensor_parallel: ClassVar = {"decay": "heads", "D": "heads"}
    projects_micro_steps = False
    gain_at_most_one = True

    def make_parameters(self) -> None:
        """Both numbers per head."""
        if self.allow_neg_eigval:
            raise ValueError(
                f"rule {self.spec.name!r} takes no allow_neg_eigval=True: it reads the state before the decay, so "
                "its eigenvalue exp(g) - beta would reach -2"
            )
        self.decay = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))

    def initializers(self, initializer_range: float | None = None) -> dict[str, Initializer]:
        """Both start at one."""
        return {**super().initializers(initializer_range), "decay": nn.init.ones_, "D": nn.init.ones_}

    def neutral_initializers(self) -> dict[str, Initializer]:
        """Feedback of nearly one, no correction of the query: close to Gated DeltaNet where the decay is weak."""
        return {"decay": partial(nn.init.constant_, val=4.0), "D": nn.init.zeros_}

    def rule_inputs(self, x: LayerInput, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
        """As Gated DeltaNet, with query and erase key from both numbers."""
        q, k, erase_key = self.query_and_keys(q, k)
        inputs = super().rule_inputs(x, q, k, v)._replace(erase_key=erase_key)
        return inputs.bounded(1.0, by_rounding=self.spec.normalize_k, fused=self.runs_fused(k))

    def step_form(self) -> StepForm | None:
        """As `query_and_keys`."""
        form = super().step_form()
        return form and form._replace(keys="feedback", key_parameters=("decay", "D"))

    def query_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`q - d k`, `k` and the erase key `c k`."""
        q, erase_key = recomputable(self._corrected, q, k, self.decay, self.D)
        return q, k, erase_key

    def _corrected(self, q: Tensor, k: Tensor, decay: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
        if self.runs_fused(k):
            q, _, erase_key = fused_rule_keys(q, k, "feedback", parameters=(decay, D))
            return q, erase_key
        return _corrected(q, k, decay, D)


class CombaUnitErase(Comba):
    """Normalises last: `l2(q - d c k)`, `l2(k)`, erase key `l2(c k)`, of q and k as the convolutions give them."""

    gain_at_most_one = True

    def step_form(self) -> StepForm | None:
        """As `query_and_keys`."""
        form = super().step_form()
        return form and form._replace(keys="unit_feedback")

    def query_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in the class's description."""
        return recomputable(self._corrected_and_normalized, q, k, self.decay, self.D)

    def _corrected_and_normalized(
        self, q: Tensor, k: Tensor, decay: Tensor, D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.runs_fused(k):
            return fused_rule_keys(q, k, "unit_feedback", parameters=(decay, D))
        return _corrected_and_normalized(q, k, decay, D)

    def _normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def _unit_heads(self, normalize: bool) -> int:
        return 0


def _corrected(q: Tensor, k: Tensor, decay: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """`q - d k` and `c k`, computed in float32 and rounded once."""
    key = at_least_float32(k)
    c, d = torch.sigmoid(decay.to(key.dtype))[:, None], D.to(key.dtype)[:, None]
    return (q - d * key).to(q.dtype), (c * key).to(k.dtype)


def _corrected_and_normalized(q: Tensor, k: Tensor, decay: Tensor, D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`l2(q - d c k)`, `l2(k)` and `l2(c k)`, computed in float32 and rounded once."""
    key = at_least_float32(k)
    c, d = torch.sigmoid(decay.to(key.dtype))[:, None], D.to(key.dtype)[:, None]
    return l2_normalize(q - d * c * key).to(q.dtype), l2_normalize(k), l2_normalize(c * key).to(k.dtype)
