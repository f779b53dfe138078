"""The rules' layers under their own names: `GatedDeltaNet(hidden_size, num_heads)`."""

from typing import Any, ClassVar

from deltazoo.layers.delta_attention import DeltaRuleAttention


class _NamedLayer(DeltaRuleAttention):
    rule: ClassVar[str]

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int | None = None, **options: Any) -> None:
        super().__init__(self.rule, hidden_size, num_heads, head_dim, **options)

    __init__.__qualname__ = "DeltaRuleAttention.__init__"  # in Python's message about a missing argument


class DeltaNet(_NamedLayer, stands_for=DeltaRuleAttention):
    """Rule `delta_net` (arXiv:2406.06484): each token corrects the value that the state recalls under its key."""

    rule = "delta_net"


class NegativeEigenvalueDeltaNet(_NamedLayer, stands_for=DeltaRuleAttention):
    """Rule `neg_delta_net` (arXiv:2411.12537): DeltaNet whose transition may also reflect, which tracks states."""

    rule = "neg_delta_net"


class GatedDeltaNet(_NamedLayer, stands_for=DeltaRuleAttention):
    """Rule `gated_deltanet` (arXiv:2412.06464): DeltaNet that can also forget, one decay per head."""

    rule = "gated_deltanet"


class EFLA(_NamedLayer, stands_for=DeltaRuleAttention):
    """Rule `efla` (arXiv:2512.12602): the delta rule's differential equation solved exactly, with raw keys."""

    rule = "efla"


class KimiDeltaAttention(_NamedLayer, stands_for=DeltaRuleAttention):
    """Rule `kda` (arXiv:2510.26692): Gated DeltaNet with one decay per key channel."""

    rule = "kda"


class Longhorn(_NamedLayer, stands_for=DeltaRuleAttention):
    """Rule `longhorn` (arXiv:2407.14207): the implicit step of online regression, with raw keys."""

    rule = "longhorn"


class LinearAttention(_NamedLayer, stands_for=DeltaRuleAttention):
    """Rule `linear_attention` (arXiv:2006.16236): writes without erasing, the baseline."""

    rule = "linear_attention"
