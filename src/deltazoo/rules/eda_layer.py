"""The layer of erase-then-delta attention."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, LayerInput, RuleInputs
from deltazoo.layers.initialization import Initializer, nearly_zero_rows_
from deltazoo.layers.norm import l2_normalize
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.recompute import recomputable

_RANK_PER_HEAD = 16


class EraseThenDeltaAttention(DeltaRuleAttention):
    """KDA with an erase address from `erase_proj`, of rank `16 H`, and its gate `erase_b_proj` `[HV, hidden_size]`."""

    input_projections = (*DeltaRuleAttention.input_projections, "erase_proj", "erase_b_proj")
    tensor_parallel: ClassVar = {"erase_proj": "low_rank", "erase_b_proj": "heads"}
    projects_micro_steps = False
    erase_proj: nn.Sequential

    def make_parameters(self) -> None:
        """Make address and gate of the erase step, the gate with a bias if `b_proj` has one, and the decay's map."""
        for name, heads in (("f_proj", self.num_v_heads), ("erase_proj", self.num_heads)):
            setattr(self, name, self.low_rank(heads * self.head_k_dim, bias=False, rank=heads * _RANK_PER_HEAD))
        self.erase_b_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=self.b_proj.bias is not None)

    def neutral_initializers(self) -> dict[str, Initializer]:
        """Initial values with a weak erase step, `sigmoid(-4) = 0.018`, which is close to KDA."""
        return {
            "erase_b_proj.weight": nearly_zero_rows_,
            "erase_b_proj.bias": partial(nn.init.constant_, val=-4.0),
        }

    def rule_inputs(self, x: LayerInput, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
        """Two micro-steps: the first erases under the address and writes nothing, the second is that of KDA."""
        inputs = super().rule_inputs(x, q, k, v)
        address = x.project("erase_proj").unflatten(-1, (-1, self.head_k_dim))
        address = l2_normalize(address, fused=self.fused_kernels)
        erase_gate = torch.sigmoid(at_least_float32(x.project("erase_b_proj")))
        assert inputs.beta is not None
        return inputs._replace(
            k=recomputable(_side_by_side, address, k),
            v=recomputable(_behind_zeros, inputs.v),
            beta=_side_by_side(erase_gate, inputs.beta),
        )


def _side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """The heads of the first micro-step followed by those of the second."""
    return torch.cat((first, second), dim=2)


def _behind_zeros(second: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(second), second), dim=2)
