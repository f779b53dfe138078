"""A rule that is not in the zoo: the delta rule's differential equation by the trapezoidal rule, with a time per head.

    S_t = (I - beta_t k_t k_t^T) D_t S_{t-1} + beta_t k_t v_t^T,     beta_t = b_t / (1 + b_t |k_t|^2 / 2)

Between the explicit step (DeltaNet) and the implicit one (Longhorn): the mean of both ends of the step, as Crank and
Nicolson took it. The eigenvalue along the key is (1 - b l / 2) / (1 + b l / 2), in (-1, 1] for keys of any length.
"""

from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention
from deltazoo.ops.step_size import gate_and_squared_norm
from deltazoo.spec import DeltaRuleSpec, register_variant


def trapezoidal(b: Tensor, k: Tensor) -> Tensor:
    """`beta = b / (1 + b |k|^2 / 2)`."""
    b, squared_norm = gate_and_squared_norm(b, k)
    return b / (1 + b * squared_norm / 2)


@register_variant(
    DeltaRuleSpec(
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
    """The time over which the step goes is `exp(log_time) * sigmoid(...)`, with `log_time` learned per value head."""

    float32_parameters = (*DeltaRuleAttention.float32_parameters, "log_time")
    tensor_parallel = {"log_time": "heads"}  # noqa: RUF012

    def make_parameters(self) -> None:
        self.log_time = nn.Parameter(self.A_log.new_empty(self.num_v_heads))

    def initializers(self, initializer_range=None):
        return {**super().initializers(initializer_range), "log_time": nn.init.ones_}

    def step_gate(self, hidden_states: Tensor) -> Tensor:
        b = super().step_gate(hidden_states)
        return self.log_time.to(b.dtype).exp() * b
