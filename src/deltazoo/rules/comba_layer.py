"""The layers of Comba: in the form of its equation, and in that of the authors' code and flash-linear-attention."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, LayerInput, RuleInputs
from deltazoo.layers.initialization import Initializer
from deltazoo.ops import fused


class Comba(DeltaRuleAttention):
    """Comba: `decay` `[H]` is the feedback c before its sigmoid, and `D` `[H]` the share of the key in the read-out."""

    float32_parameters = (*DeltaRuleAttention.float32_parameters, "decay", "D")
    tensor_parallel: ClassVar = {"decay": "heads", "D": "heads"}
    projects_micro_steps = False
    unit_keys: ClassVar[bool] = False
    """Whether queries and keys are normalised last."""

    def make_parameters(self) -> None:
        """Make both numbers per head."""
        if self.allow_neg_eigval:
            raise ValueError(
                f"rule {self.spec.name!r} takes no allow_neg_eigval=True: it reads the state before the decay, so "
                "its eigenvalue exp(g) - beta would reach -2"
            )
        self.decay = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))

    def initializers(self, initializer_range: float | None = None) -> dict[str, Initializer]:
        """Initial values of one for both."""
        return {**super().initializers(initializer_range), "decay": nn.init.ones_, "D": nn.init.ones_}

    def neutral_initializers(self) -> dict[str, Initializer]:
        """Initial values close to Gated DeltaNet where decay is weak: feedback of nearly one, queries unchanged."""
        return {"decay": partial(nn.init.constant_, val=4.0), "D": nn.init.zeros_}

    def rule_inputs(self, x: LayerInput, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
        """The inputs of Gated DeltaNet, with query and erase key changed by both numbers."""
        q, k, erase_key = fused.comba_keys(q, k, self.decay, self.D, unit=self.unit_keys, fused=self.fused_kernels)
        inputs = super().rule_inputs(x, q, k, v)._replace(erase_key=erase_key)
        return inputs.bounded(1.0, by_rounding=self.spec.normalize_k, fused=self.fused_kernels)


class CombaUnitErase(Comba):
    """Comba that normalises last: `l2(q - d c k)`, `l2(k)` and erase key `l2(c k)` of the convolved q and k."""

    unit_keys = True

    def _normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def _unit_heads(self, normalize: bool) -> int:
        return 0
