"""The layer of FG2-GDN."""

from torch import Tensor

from deltazoo.layers import LayerInput, RuleInputs
from deltazoo.ops import fused
from deltazoo.rules.channel_gates import ChannelGates


class FG2GatedDeltaNet(ChannelGates):
    """KDA whose keys and values are multiplied by the roots of their gates."""

    def rule_inputs(self, x: LayerInput, q: Tensor, k: Tensor, v: Tensor) -> RuleInputs:
        """Gated keys and values, with a step size of one."""
        key_gate, value_gate = self.channel_gates(x)
        largest = self.largest_key_gate
        # The write is the product of both roots: halved values undo the doubling there.
        largest_write = largest if self.neg_eigval == "both" else 1 / largest
        k = fused.sigmoid_gate(key_gate, k, largest, root=True, fused=self.fused_kernels)
        v = fused.sigmoid_gate(value_gate, v, largest_write, root=True, fused=self.fused_kernels)
        return RuleInputs(q, k, v, self.whole_step(k, v), self.log_decay(x))
