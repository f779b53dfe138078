"""A rule that is not in the zoo: the delta rule's differential equation by the trapezoidal rule, with a time per head.

    S_t = (I - beta_t k_t k_t^T) D_t S_{t-1} + beta_t k_t v_t^T,     beta_t = b_t / (1 + b_t |k_t|^2 / 2)

Between the explicit step (DeltaNet) and the implicit one (Longhorn): the mean of both ends of the step, as Crank and
Nicolson took it. The eigenvalue along the key is (1 - b l / 2) / (1 + b l / 2), in (-1, 1] for keys of any length.
"""

import torch
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, LayerInput
from deltazoo.ops.step_size import gate_and_squared_norm
from deltazoo.spec import RuleSpec, register_rule


def trapezoidal(b: Tensor, k: Tensor) -> Tensor:
    """`beta = b / (1 + b |k|^2 / 2)`."""
    b, squared_norm = gate_and_squared_norm(b, k)
    return b / (1 + b * squared_norm / 2)


@register_rule(
    RuleSpec(
        name="trapezoid",
        paper="Crank and Nicolson 1947, a rule of the tests",
        summary="DeltaNet by the trapezoidal rule, over a learned time per head.",
        equation="S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T, beta_t = 2 b_t / (2 + b_t |k_t|^2)",
        step_size=trapezoidal,
        decay="scalar",
        normalize_k=False,
    )
)
class TrapezoidAttention(DeltaRuleAttention):
    """The step goes over the time `exp(log_clock + log_time + tanh(time_proj(x)))` times the usual sigmoid.

    Three parameters of its own: one number for the layer, one per value head, and a linear map.
    """

    float32_parameters = (*DeltaRuleAttention.float32_parameters, "log_clock", "log_time")
    tensor_parallel = {"log_clock": "whole", "log_time": "heads", "time_proj": "heads"}

    def make_parameters(self) -> None:
        self.log_clock = nn.Parameter(torch.empty(1))
        self.log_time = nn.Parameter(torch.empty(self.num_v_heads))
        self.time_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)

    def initializers(self, initializer_range=None):
        own = {"log_clock": nn.init.zeros_, "log_time": nn.init.ones_, "time_proj.weight": nn.init.zeros_}
        return {**super().initializers(initializer_range), **own}

    def step_gate(self, x: LayerInput) -> Tensor:
        b = super().step_gate(x)
        log_time = self.log_clock + self.log_time + torch.tanh(self.time_proj(x.hidden_states))
        return log_time.to(b.dtype).exp() * b
