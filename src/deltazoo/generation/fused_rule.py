"""A delta-rule layer in a decoding step, between the product of its maps and its output map: three launches or four.

Gates, queries, keys and values stay in float32 between the launches.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from deltazoo.generation.step_modules import is_unhooked
from deltazoo.layers import DeltaRuleAttention, LayerInput
from deltazoo.layers.rotary import Rotary
from deltazoo.layers.short_convolution import ShortConvolution
from deltazoo.layers.state import LayerState
from deltazoo.ops.decoding.step_form import STEP_KEYS, STEP_SIZES, RuleShape
from deltazoo.ops.fused import FUSED_ACTIVATIONS
from deltazoo.ops.linear_maps import is_plain_sequence

__all__ = ["FusedRule", "first_maps", "further_maps", "is_plain_linear", "why_not_this_rule"]


def why_not_this_rule(layer: DeltaRuleAttention) -> str | None:
    """The reason why the kernels do not compute a layer's rule; None if they do."""
    spec, form = layer.spec, layer.step_form
    if form is None or form.keys not in STEP_KEYS or (spec.decay == "none") != (form.decay is None):
        return f"the rule {spec.name!r} has a decay or keys of its own"
    if spec.step_size not in STEP_SIZES:
        return "its step size is a function of its own"
    if layer.allow_neg_eigval and layer.neg_eigval != "both":
        return f"its neg_eigval is {layer.neg_eigval!r}"
    if spec.output_gate != "none" and spec.gate_activation not in FUSED_ACTIVATIONS:
        return "its output gate has an activation of its own"
    keys_fit = spec.erase_key == "tied" if form.keys == "tied" else spec.normalize_k
    if not keys_fit:
        return f"its keys are {form.keys!r}, and its spec has others"
    if form.keys == "erase_first" and spec.erase_reads != "decayed":
        return "its first step reads the state before the decay"
    if form.decay == "fixed" and spec.decay != "scalar":
        return "its decay is per head, and its spec has another"
    convolutions = [getattr(layer, f"{name}_conv1d", None) for name in "qkv"]
    if layer.conv_size < 2 or any(type(x) is not ShortConvolution for x in convolutions):
        return "queries, keys and values do not pass a short convolution"
    low_rank = [getattr(layer, name) for name in _low_rank(layer)]
    if not all(is_plain_sequence(x) and len(x) == 2 and all(map(is_plain_linear, x)) for x in low_rank):
        return "a gate of low rank is not two plain linear maps"
    if any(x[1].in_features > 512 for x in low_rank):
        return "a gate has a higher rank than the kernels hold"
    if layer.head_k_dim > 256 or layer.head_v_dim > 512:
        return "it is wider than the kernels"
    return None


def is_plain_linear(x: Any) -> bool:
    """Whether a module is a linear map whose weight a step may read itself."""
    return type(x) is nn.Linear and is_unhooked(x)


def _low_rank(layer: Any) -> list[str]:
    """Names of the maps of low rank to output gate, decay and a further key, those that the layer has."""
    spec, form = layer.spec, layer.step_form
    names = [
        "g_proj" if spec.output_gate == "low_rank" else None,
        form.decay_gate if spec.decay == "channel" else None,
        form.first_key,
    ]
    return [name for name in names if name is not None]


def first_maps(layer: DeltaRuleAttention) -> dict[str, nn.Module]:
    """The linear maps that read a layer's input, by name; for maps of low rank the first halves."""
    maps = {name: getattr(layer, name) for name in layer.input_projections if hasattr(layer, name)}
    return {name: x[0] if isinstance(x, nn.Sequential) else x for name, x in maps.items()}


def further_maps(layer: Any) -> list[nn.Module]:
    """The linear maps that read the layer's input, besides those to q, k and v."""
    spec, form = layer.spec, layer.step_form
    names = [
        "g_proj" if spec.output_gate == "full" else None,
        form.decay_gate if spec.decay == "scalar" else None,
        "b_proj" if spec.corrects else None,
        *form.key_maps,
    ]
    return [*(getattr(layer, x) for x in names if x is not None), *(getattr(layer, x)[0] for x in _low_rank(layer))]


class FusedRule:
    """The convolutions and the rule of a layer for one token per row, from the product of the layer's maps.

    Args:
        layer: a layer to which `why_not_this_rule` has no objection.
        columns: first column of each map's result in the product, by the map's name.
        second_map: function that gives the second half of a map of low rank, by its name; called at every step.
    """

    def __init__(self, layer: Any, columns: Mapping[str, int], second_map: Callable[[str], nn.Module]) -> None:
        self._layer, self._columns, self._second_map = layer, columns, second_map
        self._shape = self._rule_shape()
        self._low_rank = _low_rank(layer)
        self._fixed_decay: Tensor | None = None
        if layer.step_form.decay == "fixed":  # computed once, not for every token
            x = layer.o_norm.weight.new_empty(1, 1, layer.hidden_size)
            self._fixed_decay = layer.log_decay(LayerInput(x, layer)).flatten()

    def convolution(self, state: LayerState) -> Any:
        """The layer's short convolutions with their windows in `state`, in the form that the product kernel takes."""
        from deltazoo.ops.decoding.convolution import Convolution

        layer = self._layer
        q_conv, k_conv, v_conv = layer.q_conv1d, layer.k_conv1d, layer.v_conv1d
        assert state.conv is not None
        taps = (q_conv.weight[:, 0], k_conv.weight[:, 0], v_conv.weight[:, 0])
        return Convolution(taps, state.conv, layer.activation == "silu")

    def __call__(
        self, mixed: Tensor, state: LayerState, rotary: Rotary | None = None, state_indices: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The rule's output before its norm, `[R, HV * V]` float32, and that norm; the state advances in place.

        Args:
            mixed: `[R, M]` float32, the product after its convolutions.
            state: states of the rows; or pages of states, with the same indices for all its tensors.
            rotary: cosines and sines `[R or 1, 1, d]`, contiguous.
            state_indices: `[R]` integers, the page of each row.
        """
        from deltazoo.ops.decoding.between_products import HeadNorm
        from deltazoo.ops.decoding.low_rank_maps import LowRankGate, low_rank_gates
        from deltazoo.ops.decoding.rule import token_rule
        from deltazoo.ops.decoding.scaled_keys import scaled_keys

        layer, form = self._layer, self._layer.step_form
        shape = self._shape if rotary is None else self._shape._replace(turned=rotary[0].shape[-1])
        angles = None if rotary is None else (rotary[0].flatten(0, 1), rotary[1].flatten(0, 1))
        seconds: list[Any] = [self._second_map(name) for name in self._low_rank]
        low_rank = [
            LowRankGate(self._columns[name], x.weight, x.bias) for name, x in zip(self._low_rank, seconds, strict=True)
        ]
        gates = low_rank_gates(mixed, low_rank) if low_rank else None
        softplus = form.decay in ("softplus", "saturating")
        A_log, dt_bias = (layer.A_log, layer.dt_bias) if softplus else (self._fixed_decay, None)
        key_parameters, write_keys = [getattr(layer, name) for name in form.key_parameters], None
        if form.keys == "scaled":
            assert state.auxiliary is not None
            gates_at = self._column(form.key_maps[0]), self._column(form.key_maps[1])
            write_keys = scaled_keys(mixed, state.auxiliary, key_parameters, *gates_at, state_indices)
            key_parameters = []
        z, squares = token_rule(
            mixed,
            gates,
            state.recurrent,
            A_log,
            dt_bias,
            layer.o_norm.weight,
            shape,
            key_parameters,
            write_keys,
            angles,
            state_indices,
        )
        return z, HeadNorm(squares, layer.head_v_dim, layer.o_norm.eps)

    def _column(self, name: str | None) -> int:
        """First column of a map's result in the product; 0 for a name that is none of its maps."""
        return 0 if name is None else self._columns.get(name, 0)

    def _rule_shape(self) -> RuleShape:
        layer, spec, form = self._layer, self._layer.spec, self._layer.step_form
        return RuleShape(
            layer.num_heads,
            layer.num_v_heads,
            layer.head_k_dim,
            layer.head_v_dim,
            normalize_q=spec.normalize_q,
            doubled_step=layer.allow_neg_eigval,
            decay=spec.decay,
            gate="none" if spec.output_gate == "none" else spec.gate_activation,
            low_rank_gate=spec.output_gate == "low_rank",
            normalize_k=spec.normalize_k,
            step=spec.step_size,
            decay_form=form.decay or "softplus",
            keys=form.keys,
            micro_steps=layer.projected_steps,
            undecayed=spec.erase_reads == "undecayed",
            scale_queries=spec.scale_queries,
            gate_at=self._column("g_proj"),
            decay_at=self._column(form.decay_gate),
            step_at=self._column("b_proj"),
            keys_at=self._column(form.key_maps[0] if form.key_maps else None),
        )
