"""The layer of Gated DeltaNet-2."""

from torch import Tensor

from deltazoo.layers import LayerInput, RuleInputs
from deltazoo.ops import fused
from deltazoo.rules.channel_gates import ChannelGates


class GatedDeltaNet2(ChannelGates):
    """KDA that erases under the gated key, and writes the gated value under the key."""

    def make_parameters(self) -> None:
        """Make the gates; an option that cannot act on them raises ValueError."""
        if self.neg_eigval == "erase":
            raise ValueError(
                f"rule {self.spec.name!r} has a gate for the erase alone, which allow_neg_eigval doubles: "
                "neg_eigval='erase' cannot act"
            )
        super().make_parameters()

    def rule_inputs(self, x: LayerInput, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
        """Inputs with the gated key as erase key, the gated value, and a step size of one."""
        erase_gate, write_gate = self.channel_gates(x)
        erase_key = self.erase_key(erase_gate, q, k)
        beta = self.whole_step(k, v, erase_key)
        v = fused.sigmoid_gate(write_gate, v, fused=self.fused_kernels)
        return RuleInputs(q, k, v, beta, self.log_decay(x), erase_key)

    def erase_key(self, erase_gate: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The erase key `b * k`, from the gate before its sigmoid; both `[B, T, H, K]`, the key's dtype."""
        return fused.sigmoid_gate(erase_gate, k, self.largest_key_gate, fused=self.fused_kernels)
