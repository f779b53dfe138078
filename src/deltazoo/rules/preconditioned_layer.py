"""The layer of PGDN and PKDA: write keys scaled by a running second moment of the keys."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, LayerInput, RuleInputs, Sequences
from deltazoo.layers.initialization import Initializer, decay_rate_, log_uniform_step_, nearly_zero_rows_
from deltazoo.layers.rule import run_rule
from deltazoo.layers.state import StateAccess
from deltazoo.ops import fused
from deltazoo.ops.decay import softplus_decay


class Preconditioned(DeltaRuleAttention):
    """Layers that keep the moment `A_t = exp(ga) A_{t-1} + ba k^2` as a further state `[N, H, 1, K]`.

    Its decay ga comes from `a_atk_proj` (`a_proj` in PKDA, which has no other), `A_log_atk` and `dt_bias_atk`, its step
    ba from `b_atk_proj`. `log_atk_scale` is the logarithm of the moment that leaves a key unchanged. All are one number
    per key head.
    """

    float32_parameters = (*DeltaRuleAttention.float32_parameters, "A_log_atk", "dt_bias_atk", "log_atk_scale")
    input_projections = (*DeltaRuleAttention.input_projections, "a_atk_proj", "b_atk_proj")
    tensor_parallel: ClassVar = {
        "a_proj": "heads",
        "a_atk_proj": "heads",
        "b_atk_proj": "heads",
        "A_log_atk": "heads",
        "dt_bias_atk": "heads",
        "log_atk_scale": "heads",
    }
    projects_micro_steps = False
    A_log_atk: nn.Parameter
    dt_bias_atk: nn.Parameter
    log_atk_scale: nn.Parameter
    b_atk_proj: nn.Module

    def make_parameters(self) -> None:
        """Make the parameters of the moment."""
        for name in (self.moment_decay, "b_atk_proj"):
            self.add_module(name, nn.Linear(self.hidden_size, self.num_heads, bias=False))
        for name in ("A_log_atk", "dt_bias_atk", "log_atk_scale"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.num_heads)))

    @property
    def moment_decay(self) -> str:
        """Name of the linear map to the moment's decay."""
        return "a_atk_proj" if self.spec.decay == "scalar" else "a_proj"

    def initializers(self, initializer_range: float | None = None) -> dict[str, Initializer]:
        """Initial values that give the moment the decay of the state, and the scale exp(-0.2)."""
        return {
            **super().initializers(initializer_range),
            "A_log_atk": partial(decay_rate_, rate_range=self.spec.decay_rate_range),
            "dt_bias_atk": partial(log_uniform_step_, dt_range=self.spec.dt_range),
            "log_atk_scale": partial(nn.init.constant_, val=-0.2),
        }

    def neutral_initializers(self) -> dict[str, Initializer]:
        """Initial values whose scale is the moment of random unit keys, which leaves keys unchanged."""
        return {
            f"{self.moment_decay}.weight": nearly_zero_rows_,
            "b_atk_proj.weight": nearly_zero_rows_,
            "log_atk_scale": self._stationary_scale_,
        }

    def _stationary_scale_(self, log_scale: Tensor) -> None:
        """Fill the scale with the moment of random unit keys: `k^2` is 1 / K on average, and ba starts at 1/2."""
        with torch.no_grad():
            log_decay = softplus_decay(log_scale.new_zeros(1, 1, self.num_heads), self.A_log_atk, self.dt_bias_atk)
            log_scale.copy_(torch.log(0.5 / self.head_k_dim / -torch.expm1(log_decay.flatten())))

    def with_auxiliary_state(
        self, x: LayerInput, inputs: RuleInputs, past: StateAccess, sequences: Sequences
    ) -> tuple[RuleInputs, Tensor | None]:
        """Inputs that write under the scaled key and erase under the key; the moment is linear attention with K = 1."""
        k = inputs.k
        gate, step = (x.project(name) for name in (self.moment_decay, "b_atk_proj"))
        squares = fused.weighted_squares(step, k, fused=self.fused_kernels)
        log_decay = softplus_decay(gate, self.A_log_atk, self.dt_bias_atk)
        state = None
        if self._sums_fused(squares, past, sequences):
            moment = fused.decayed_sum(squares, log_decay)
        else:
            ones = torch.ones_like(squares[..., :1])
            moment, state = run_rule(
                RuleInputs(ones, ones, squares, None, log_decay).mask_padding(sequences),
                past.auxiliary,
                sequences,
                in_place=past.in_place,
                backend=self.backend,
            )
        write_key = fused.scaled_key(moment, self.log_atk_scale, k, fused=self.fused_kernels)
        inputs = inputs._replace(k=write_key, erase_key=k)
        may_expand = self.allow_neg_eigval or not self.spec.normalize_k
        return (inputs.bounded() if may_expand else inputs), state

    def _sums_fused(self, squares: Tensor, past: StateAccess, sequences: Sequences) -> bool:
        """Whether one kernel computes the moment: it takes whole rows without states before and after."""
        whole = sequences.whole_rows and not past.wanted and self.backend in (None, "triton")
        return whole and fused.takes_decayed_sum(self.fused_kernels, squares)
