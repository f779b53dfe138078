"""A delta-rule layer with the further parameters of softmax attention layers: biases, norms, shared key heads."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention, RMSNorm, layer_class
from deltazoo.layers.initialization import Initializer
from deltazoo.layers.rule import StepForm
from deltazoo.spec import RuleSpec

__all__ = ["DropInDeltaAttention", "drop_in_class"]


class DropInDeltaAttention(DeltaRuleAttention):
    """`DeltaRuleAttention` that can hold every parameter of a softmax attention layer, so that they can be copied.

    Args:
        rule: name of a registered rule.
        hidden_size, num_heads, head_dim: as in `DeltaRuleAttention`.
        num_kv_heads: heads that the key and value projections make, a divisor of `num_heads`; each serves a group of
            neighbouring heads, as in grouped-query attention. Step sizes, decays and states stay one per head. (The
            other grouping, `num_v_heads`, has queries shared by several values, which no known model family has.)
        qkv_bias: biases on the query, key and value projections.
        o_bias: a bias on the output projection.
        gate_bias: a bias on a full-rank output gate; without one a SiLU gate cannot start open.
        qk_norm: RMSNorms of queries and keys before rotary embedding and L2 norm: one for the channels of a "head", or
            one over the "width" of all heads; None for none.
        qk_norm_eps: their epsilon.
        options: further ones of `DeltaRuleAttention`.

    Raises:
        ValueError: as for `DeltaRuleAttention`; options that do not fit together.
    """

    gain_at_most_one = True

    def __init__(
        self,
        rule: str | RuleSpec,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        gate_bias: bool = False,
        qk_norm: str | None = None,
        qk_norm_eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__(rule, hidden_size, num_heads, head_dim, **options)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.qk_norm = qk_norm
        self._check_sizes(gate_bias)
        shared = num_heads // self.num_kv_heads
        widths = {
            "q": self.q_proj.out_features,
            "k": self.k_proj.out_features // shared,
            "v": self.v_proj.out_features // shared,
        }
        for name, width in widths.items():
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, width, bias=qkv_bias))
            if self.conv_size:
                # Without the L2 norm, which comes after the original attention's norms.
                setattr(self, f"{name}_conv1d", self.short_convolution(width))
        self.o_proj = nn.Linear(self.o_proj.in_features, hidden_size, bias=o_bias)
        if gate_bias:
            self.g_proj = nn.Linear(hidden_size, self.o_proj.in_features)
        if qk_norm is not None:
            dims = (head_dim, head_dim) if qk_norm == "head" else (widths["q"], widths["k"])
            self.q_norm, self.k_norm = (RMSNorm(dim, qk_norm_eps, fused=self.fused_kernels) for dim in dims)
        self.init_parameters()

    def _check_sizes(self, gate_bias: bool) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.num_kv_heads != self.num_heads != self.num_v_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} shares keys and values among heads, "
                f"num_v_heads={self.num_v_heads} queries and keys among values: choose one"
            )
        if gate_bias and self.spec.output_gate != "full":
            raise ValueError(f"rule {self.spec.name!r} has no full-rank output gate, so gate_bias=True cannot act")
        if self.qk_norm not in (None, "head", "width"):
            raise ValueError(f"qk_norm must be 'head', 'width' or None, got {self.qk_norm!r}")
        if self.qk_norm == "width" and self.projected_steps > 1:
            raise ValueError(
                "the model has norms over the queries and over the keys of all heads together. They take one key per "
                f"token, and this layer has num_micro_steps={self.num_micro_steps}: qk_norm=False leaves the norms out"
            )

    def _split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = super()._split_heads(q, k, v)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        shared = self.num_heads // self.num_kv_heads
        if shared > 1:
            k, v = k.repeat_interleave(shared, dim=2), v.repeat_interleave(shared, dim=2)
        return q, k, v

    def step_form(self) -> StepForm | None:
        """That of the layer it extends; None where queries and keys have norms, or heads share keys and values."""
        plain = self.qk_norm is None and self.num_kv_heads == self.num_heads
        return super().step_form() if plain else None

    def initializers(self, initializer_range: float | None = None) -> dict[str, Initializer]:
        """As in `DeltaRuleAttention`; the norms of queries and keys start with factors of one."""
        known = super().initializers(initializer_range)
        ones = partial(nn.init.constant_, val=1.0)
        return {name: ones if name in ("q_norm.weight", "k_norm.weight") else start for name, start in known.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a class that `drop_in_class` has made by the layer class it was made from."""
        layer = vars(type(self)).get("made_from")
        if layer is None:
            return super().__reduce_ex__(protocol)
        return _unfilled, (layer,), vars(self)


def drop_in_class(rule: str | RuleSpec) -> type[DropInDeltaAttention]:
    """`DropInDeltaAttention` on top of the layer class of a rule."""
    return _drop_in(layer_class(rule))


_MADE: dict[type[Any], type[DropInDeltaAttention]] = {DeltaRuleAttention: DropInDeltaAttention}


def _drop_in(layer: type[DeltaRuleAttention]) -> type[DropInDeltaAttention]:
    if layer not in _MADE:
        members: dict[str, Any] = {"__module__": layer.__module__, "__doc__": layer.__doc__, "made_from": layer}
        if "step_form" in vars(layer):  # only a class that says so itself decodes in a fused step
            members["step_form"] = DropInDeltaAttention.step_form
        if "gain_at_most_one" in vars(layer):  # likewise
            members["gain_at_most_one"] = layer.gain_at_most_one
        _MADE[layer] = type(f"DropIn{layer.__name__}", (DropInDeltaAttention, layer), members)
    return _MADE[layer]


def _unfilled(layer: type[DeltaRuleAttention]) -> DropInDeltaAttention:
    made = _drop_in(layer)
    return made.__new__(made)
