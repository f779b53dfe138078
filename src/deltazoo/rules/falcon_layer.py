"""The layer of Falcon-1: values under the key of the token before."""

import torch
from torch import Tensor

from deltazoo.layers import DeltaRuleAttention, LayerInput, RuleInputs, Sequences, run_scan
from deltazoo.layers.state import StateAccess
from deltazoo.ops import fused
from deltazoo.ops.recompute import recomputable
from deltazoo.ops.step_size import of_value_heads


class Falcon(DeltaRuleAttention):
    """Gated DeltaNet that keeps the key of the last token as a further state `[N, H, K]`."""

    projects_micro_steps = False
    shares_rows = False

    def with_auxiliary_state(
        self, x: LayerInput, inputs: RuleInputs, past: StateAccess, sequences: Sequences
    ) -> tuple[RuleInputs, Tensor]:
        """The inputs with the keys of the tokens before, and the last key."""
        none_kept = inputs.k.new_zeros(inputs.k.shape[:2])
        k, state = run_scan(none_kept, inputs.k, None, past.auxiliary, sequences, fused=self.fused_kernels)
        lengths = of_value_heads(fused.squared_norm(k, fused=self.fused_kernels), self.num_v_heads)
        eta, log_decay = recomputable(_normalised_step, inputs.beta, lengths, inputs.log_decay)
        return inputs._replace(k=k, beta=eta, log_decay=log_decay), state


def _normalised_step(b: Tensor, lengths: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """`eta = b / (|k|^2 + lambda + 1e-6)`, zero for no key, and `log(1 - eta lambda)`, with `lambda = -log_decay`."""
    eta = torch.where(lengths > 0, b / (lengths - log_decay + 1e-6), 0)
    return eta, torch.log1p(-(-log_decay * eta).clamp_max(1 - 1e-6))
