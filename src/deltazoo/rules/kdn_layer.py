"""The layers of Kalman Delta Networks: KDA with a variance of what is stored as a further state."""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, LayerInput, RuleInputs, Sequences, run_scan
from deltazoo.layers.state import StateAccess
from deltazoo.ops import fused
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.recompute import recomputable
from deltazoo.ops.step_size import of_value_heads


class IsotropicKDN(DeltaRuleAttention):
    """KDA with a variance p per value head; a further state `[N, HV]` holds the difference of p from its start."""

    float32_parameters = (*DeltaRuleAttention.float32_parameters, "start_precision")
    input_projections = (*DeltaRuleAttention.input_projections, "omega_proj")
    tensor_parallel: ClassVar = {"start_precision": "heads", "omega_proj": "heads"}
    projects_micro_steps = False
    shares_rows = False

    def make_parameters(self) -> None:
        """Make the projection to the process noise, and the start of p."""
        if self.allow_neg_eigval:
            raise ValueError(f"rule {self.spec.name!r} takes no allow_neg_eigval=True: a filter's gain is at most 1")
        self.omega_proj = self.make_noise()
        self.start_precision = nn.Parameter(torch.empty(self.num_v_heads))

    def make_noise(self) -> nn.Module:
        """The projection to the process noise."""
        return nn.Linear(self.hidden_size, self.num_v_heads)

    def initializers(self, initializer_range: float | None = None) -> dict[str, Callable[[Tensor], object]]:
        """Start the variance at 1."""
        at_one = math.log(math.expm1(0.9))
        return {
            **super().initializers(initializer_range),
            "start_precision": lambda parameter: nn.init.constant_(parameter, at_one),
        }

    def step_gate(self, x: LayerInput) -> Tensor:
        """The precision `1 / r` of the observation: zero for padding, like a step size."""
        return 1 / (F.softplus(-at_least_float32(x.project("b_proj"))) + 0.01)

    def start(self) -> Tensor:
        """p before the first token, `[HV]`."""
        return 1 / (F.softplus(self.start_precision) + 0.1)

    def with_auxiliary_state(
        self, x: LayerInput, inputs: RuleInputs, past: StateAccess, sequences: Sequences
    ) -> tuple[RuleInputs, Tensor]:
        """The inputs with the gain as the step size, and the variance."""
        assert inputs.beta is not None and inputs.log_decay is not None
        decay = recomputable(lambda g: (2 * g).exp().mean(-1), inputs.log_decay)
        noise = _process_noise(x.project("omega_proj"))
        lengths = of_value_heads(fused.squared_norm(inputs.k, fused=self.fused_kernels), self.num_v_heads)
        damping, start = inputs.beta * lengths, self.start()
        before, state = run_scan(
            decay, noise, damping, past.auxiliary, sequences, start=start, fused=self.fused_kernels
        )
        h = (decay * before + noise) * inputs.beta
        return inputs._replace(beta=h / (1 + h * lengths)), state


class DiagonalKDN(IsotropicKDN):
    """KDA with a variance p per key channel; a further state `[N, HV, K]` holds the difference of p from its start."""

    tensor_parallel: ClassVar = {"start_precision": "heads", "omega_proj": "low_rank"}

    def make_noise(self) -> nn.Module:
        """The projection to the process noise, of low rank."""
        return self.low_rank(self.num_v_heads * self.head_k_dim, bias=True)

    def with_auxiliary_state(
        self, x: LayerInput, inputs: RuleInputs, past: StateAccess, sequences: Sequences
    ) -> tuple[RuleInputs, Tensor]:
        """The inputs, with as many key heads as value heads and the gain as the write key; and the variance."""
        assert inputs.beta is not None and inputs.log_decay is not None
        q, k = of_value_heads(inputs.q, self.num_v_heads), of_value_heads(inputs.k, self.num_v_heads)
        decay, noise, damping = recomputable(
            _variance_inputs, inputs.log_decay, x.project("omega_proj"), inputs.beta, k
        )
        start = self.start()[:, None].expand(-1, self.head_k_dim)
        before, state = run_scan(
            decay, noise, damping, past.auxiliary, sequences, start=start, fused=self.fused_kernels
        )
        write_key = recomputable(_gain, decay, before, noise, inputs.beta, k)
        return inputs._replace(q=q, k=write_key, beta=torch.ones_like(inputs.beta), erase_key=k), state


def _process_noise(x: Tensor) -> Tensor:
    """The noise w in float32; an infinite projection, which float16 can give, counts as 10,000."""
    return F.softplus(at_least_float32(x).clamp_max(1e4))


def _variance_inputs(log_decay: Tensor, noise: Tensor, precision: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`exp(2 g)`, w and `K k^2 / r`, all `[B, T, HV, K]`."""
    squares = at_least_float32(k).square()
    noise = _process_noise(noise).view(log_decay.shape)
    return (2 * log_decay).exp(), noise, k.shape[-1] * precision[..., None] * squares


def _gain(decay: Tensor, before: Tensor, noise: Tensor, precision: Tensor, k: Tensor) -> Tensor:
    """The gain `h * k / (r + sum h k^2)` in k's dtype, with `precision = 1 / r`; zero if the precision is zero."""
    weighted = (decay * before + noise) * at_least_float32(k)
    gain = precision / (1 + precision * (weighted * k).sum(-1))
    return (weighted * gain[..., None]).to(k.dtype)
