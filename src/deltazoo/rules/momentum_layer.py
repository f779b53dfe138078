"""The layer of the momentum rule: S and its momentum as one state of twice as many key channels."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, LayerInput, RuleInputs
from deltazoo.ops.step_size import of_value_heads


class Momentum(DeltaRuleAttention):
    """Gated DeltaNet with momentum `mu = sigmoid(momentum)`, a parameter `momentum` `[H]`."""

    float32_parameters = (*DeltaRuleAttention.float32_parameters, "momentum")
    tensor_parallel: ClassVar = {"momentum": "heads"}
    key_expansion = 2
    projects_micro_steps = False

    def make_parameters(self) -> None:
        """Make the logits of mu."""
        if self.allow_neg_eigval:
            raise ValueError(f"rule {self.spec.name!r} takes no allow_neg_eigval=True: its step sizes are at most 1")
        self.momentum = nn.Parameter(torch.empty(self.num_heads))

    def initializers(self, initializer_range: float | None = None) -> dict[str, Callable[[Tensor], object]]:
        """Initial values with mu between 0.12 and 0.88."""
        return {**super().initializers(initializer_range), "momentum": partial(nn.init.uniform_, a=-2, b=2)}

    def neutral_initializers(self) -> dict[str, Callable[[Tensor], object]]:
        """Initial values with hardly any momentum."""
        return {**super().neutral_initializers(), "momentum": partial(nn.init.constant_, val=-4)}

    def rule_inputs(self, x: LayerInput, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
        """The inputs with keys, queries and decays of twice as many channels."""
        inputs = super().rule_inputs(x, q, k, v)
        assert inputs.beta is not None and inputs.log_decay is not None
        logit = self.momentum.to(inputs.beta.dtype)
        mu, log_mu = torch.sigmoid(logit), nn.functional.logsigmoid(logit)
        query = torch.cat([q, -mu.to(q.dtype)[:, None] * q], dim=-1) * self.head_k_dim**-0.5
        g = inputs.log_decay[..., None].expand(*inputs.log_decay.shape, self.head_k_dim)
        log_decay = torch.cat([g, g + of_value_heads(log_mu[None, None], self.num_v_heads)[..., None]], dim=-1)
        return RuleInputs(query, torch.cat([k, k], -1), inputs.v, inputs.beta, log_decay, torch.cat([k, -k], -1))
