"""Blocks whose decoding step runs in a few launches, in place of one or two per operation.

    one row:    norm, q/k/v and gates, short convolutions | rule | output norm, o, residual | norm, gate/up, SwiGLU |
                down, residual
    more rows:  norm | q/k/v and gates | short convolutions | rule | output norm | o | residual, norm | gate/up |
                SwiGLU | down | residual, norm of the next block

Maps of low rank, such as KDA's gates, take one launch more for one row, and programs of the convolutions' launch for
more. Keys scaled by a moment (PGDN, PKDA) take one more before the rule.

The blocks are our own, and those of transformers whose attention has been swapped, which turn queries and keys first.

A block's own forward pass remains the definition. It runs wherever `why_not_fused` objects to the block, or
`FusedBlock` to a call. Results of the fused step differ by rounding, of which there is less: gates, queries, keys and
values stay in float32 between the launches. `FusedRule` is the layer's part, also inside other engines.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticCache

from deltazoo._report import replaced_methods
from deltazoo.generation.cache import DeltaRuleCacheLayer, cache_in
from deltazoo.generation.step_modules import (
    JointProduct,
    Replacement,
    block_parts,
    is_row_norm,
    is_swiglu,
    is_unhooked,
    replacement,
)
from deltazoo.layers import DeltaRuleAttention, LayerInput
from deltazoo.layers.mlp import SwiGLU
from deltazoo.layers.norm import GatedRMSNorm, RMSNorm
from deltazoo.layers.rotary import Rotary
from deltazoo.layers.short_convolution import ShortConvolution
from deltazoo.layers.state import LayerState, is_decoding_step
from deltazoo.names import first_reason
from deltazoo.ops.decoding.step_form import STEP_KEYS, STEP_SIZES, RuleShape
from deltazoo.ops.fused import FUSED_ACTIVATIONS, MOST_COLUMNS, takes_kernel
from deltazoo.ops.linear_maps import is_hooked, is_plain_sequence


def fused_blocks(model: nn.Module, products: Sequence[JointProduct]) -> "list[FusedBlock]":
    """The blocks of a model whose decoding step may run fused.

    Args:
        products: its merged maps, whose weights a fused block reads.
    """
    by_map = {id(product.linears[0]): product for product in products}
    blocks = [module for module in model.modules() if _names_of_parts(type(module))]
    fused = [FusedBlock(x, by_map) if why_not_fused(x, by_map) is None else None for x in blocks]
    for block, following in pairwise(fused):
        if block is not None:
            block.following = following
    return [block for block in fused if block is not None]


class _BlockParts(NamedTuple):
    """The modules of a block that computes `x + layer(norm(x))`, then `x + mlp(norm(x))`."""

    norm: Any
    layer: Any
    mlp_norm: Any
    mlp: Any
    swapped: Any = None
    """The attention module of transformers that contains the layer."""

    @classmethod
    def of(cls, block: Any) -> "_BlockParts":
        norm, layer, mlp_norm, mlp = (getattr(block, name) for name in _names_of_parts(type(block)))
        if "step_parts" in vars(type(block)):
            return cls(norm, layer, mlp_norm, mlp)
        return cls(norm, getattr(layer, "delta", layer), mlp_norm, mlp, layer)

    @property
    def turns(self) -> bool:
        """Whether a rotary embedding turns queries and keys."""
        return self.swapped is not None and self.swapped.rope


class _RowNorm(NamedTuple):
    """Weight and epsilon of an RMSNorm of a block, read anew for every step."""

    weight: Tensor
    """`[D]`."""
    eps: float


def _row_norm(module: Any) -> Any:
    return _RowNorm(module.weight, module.eps if type(module) is RMSNorm else module.variance_epsilon)


def _names_of_parts(kind: type[nn.Module]) -> tuple[str, ...]:
    return vars(kind).get("step_parts") or block_parts(kind)


def why_not_fused(block: Any, products: dict[int, JointProduct]) -> str | None:
    """The reason why a block's decoding step cannot run fused; None if it can.

    Args:
        block: a block with the modules that its class names in `step_parts`, or a block of transformers with the same
            sums.
        products: the merged products of the model, by the identity of their first map.
    """
    parts = norm, layer, mlp_norm, mlp, swapped = _BlockParts.of(block)
    own = swapped is None
    known = isinstance(layer, DeltaRuleAttention) and layer.is_registered_class
    if not known or not (type(mlp) is SwiGLU if own else is_swiglu(mlp)):
        return f"its layers are {type(layer).__name__} and {type(mlp).__name__}"
    if methods := replaced_methods(layer):
        return f"{methods[0]} of its layer was replaced"
    if reason := why_not_this_rule(layer):
        return reason
    if parts.turns and layer.step_form.keys == "scaled":
        return "its keys are turned, and scaled by a moment"
    norms_known = all(type(x) is RMSNorm if own else is_row_norm(x) for x in (norm, mlp_norm))
    if not norms_known or type(layer.o_norm) not in (RMSNorm, GatedRMSNorm):
        return "a norm is of another kind"
    if layer.fused_kernels is False or (own and any(x.fused is False for x in (norm, mlp_norm, mlp))):
        return "other kernels were asked for"
    if layer.backend not in (None, "triton"):
        return f"backend={layer.backend!r} was asked for"
    qkv = [layer.q_proj, layer.k_proj, layer.v_proj]
    for first, others in ((qkv, further_maps(layer)), ([mlp.gate_proj], [mlp.up_proj])):
        product = products.get(id(first[0]))
        merged = [] if product is None or (first != qkv and product.bias is not None) else list(product.linears)
        if merged[: len(first)] != first or any(linear not in merged for linear in others):
            return "the maps of one input could not be merged"
    if not all(is_plain_linear(x) and x.bias is None for x in (layer.o_proj, mlp.down_proj)):
        return "a linear map is not a plain one"
    if layer.hidden_size > MOST_COLUMNS:
        return "it is wider than the kernels"
    weights = [linear.weight for linear in (layer.q_proj, layer.o_proj, mlp.gate_proj, mlp.down_proj)]
    if len({(x.dtype, x.device) for x in weights}) > 1 or not takes_kernel(None, weights[0]):
        return f"its weights are in {', '.join(sorted({f'{x.dtype} on {x.device}' for x in weights}))}"
    if not all(x.is_contiguous() and x.device == weights[0].device for x in block.parameters()):
        return "its parameters are not contiguous on one device"
    if any(map(is_hooked, block.modules())):
        return "it has hooks or a replaced forward pass"
    return None


class FusedBlock:
    """One block, and the fused step that replaces it. The step reads the modules' weights when called.

    Args:
        block: a block to which `why_not_fused` has no objection.
        products: the merged products of the model, by the identity of their first map.

    Attributes:
        following: the block after it, if that can run fused.
        ready: an input and its norm, computed together with the output of the block before.
    """

    def __init__(self, block: Any, products: dict[int, JointProduct]) -> None:
        self.block = block
        self._parts = parts = _BlockParts.of(block)
        self._layer, self._mlp = parts.layer, parts.mlp
        self._into_layer = products[id(self._layer.q_proj)]
        self._into_mlp = products[id(self._mlp.gate_proj)]
        ends = accumulate(self._into_layer.sizes, initial=0)
        begins = {id(linear): first for linear, first in zip(self._into_layer.linears, ends, strict=False)}
        columns = {name: begins.get(id(x), 0) for name, x in first_maps(self._layer).items()}
        self._rule = FusedRule(self._layer, columns, lambda name: getattr(self._layer, name)[1])
        self.following: FusedBlock | None = None
        self.ready: tuple[Tensor, Tensor] | None = None

    @property
    def replacement(self) -> Replacement:
        """The replacement of the block's forward pass within a step, for calls that the fused step can compute."""
        return replacement(self.block, self._output)

    def _output(self, x: Tensor, *args: Any, position_embeddings: Rotary | None = None, **kwargs: Any) -> Tensor | None:
        own, cache = self._parts.swapped is None, cache_in(kwargs)
        batch: Any = kwargs.get("batch" if own else "delta_batch")
        rotary = position_embeddings if self._parts.turns else None
        if args or batch is None or (self._parts.turns and rotary is None):
            return None
        if not isinstance(cache, StaticCache) or not batch.sequences.whole_rows:
            return None
        layer = cache.layers[(self.block if own else self._parts.swapped).layer_idx]
        state = layer.state if isinstance(layer, DeltaRuleCacheLayer) else None
        if state is None or not self._fits(x, state, rotary):
            return None
        output = self._step(x, state, rotary)
        layer.store(state, 1, cache.layers)
        return output

    def _fits(self, x: Tensor, state: LayerState, rotary: Rotary | None) -> bool:
        """Whether a call has one token per row, no gradients, and tensors that the kernels take."""
        return (
            is_decoding_step(x)
            and not (torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type))
            and takes_kernel(None, x)
            and x.dtype == self._into_layer.weight.dtype
            and state.conv is not None
            and state.conv.dtype == x.dtype
            and all(_is_of_rows(angles, len(x), self._layer.head_k_dim) for angles in rotary or ())
            and all(tensor is None or tensor.is_contiguous() for tensor in (x, *state))
        )

    def _step(self, x: Tensor, state: LayerState, rotary: Rotary | None) -> Tensor:
        """The block's output for x `[R, 1, hidden_size]`; the state advances in place."""
        for changed in state:
            if changed is not None and not changed.is_inference():  # autograd does not see what kernels write
                torch.autograd.graph.increment_version(changed)
        return self._step_one_row(x, state, rotary) if len(x) == 1 else self._step_rows(x, state, rotary)

    def _step_one_row(self, x: Tensor, state: LayerState, rotary: Rotary | None) -> Tensor:
        from deltazoo.ops.decoding.product import token_product

        norm, mlp_norm = map(_row_norm, (self._parts.norm, self._parts.mlp_norm))
        mixed = token_product(
            x[0], self._into_layer.weight, norm_weight=norm.weight, norm_eps=norm.eps,
            bias=self._into_layer.bias, convolution=self._rule.convolution(state), dtype=torch.float32,
        )  # fmt: skip
        z, head_norm = self._rule.of_row(mixed, state, rotary)
        x = token_product(z, self._layer.o_proj.weight, head_norm=head_norm, residual=x[0])
        h = token_product(x, self._into_mlp.weight, norm_weight=mlp_norm.weight, norm_eps=mlp_norm.eps, glu=True)
        return token_product(h, self._mlp.down_proj.weight, residual=x)[None]

    def _step_rows(self, x: Tensor, state: LayerState, rotary: Rotary | None) -> Tensor:
        from deltazoo.ops.decoding.between_products import add_parts, norm_heads, swiglu_parts
        from deltazoo.ops.decoding.row_product import row_product

        total, following = x.flatten(0, 1), self.following
        (source, normed), self.ready = self.ready or (None, None), None
        if normed is None or source is not x:
            _, normed = add_parts(None, total, _row_norm(self._parts.norm))
        product = row_product(normed, self._into_layer.weight)
        z = norm_heads(*self._rule.of_parts(product, state, rotary, self._into_layer.bias), x.dtype)
        total, normed = add_parts(row_product(z, self._layer.o_proj.weight), total, _row_norm(self._parts.mlp_norm))
        h = swiglu_parts(row_product(normed, self._into_mlp.weight), x.dtype)
        next_norm = None if following is None else _row_norm(following._parts.norm)
        total, normed = add_parts(row_product(h, self._mlp.down_proj.weight), total, next_norm)
        output = total.view_as(x)
        if following is not None:
            following.ready = output, normed
        return output


def _is_of_rows(angles: Tensor, rows: int, head_dim: int) -> bool:
    """Whether cosines or sines have the shape of one token per row, or of one for all rows, and fit a head."""
    B, T, d = angles.shape
    return B in (1, rows) and T == 1 and d % 2 == 0 and d <= head_dim and angles.is_contiguous()


def why_not_this_rule(layer: DeltaRuleAttention) -> str | None:
    """The reason why the kernels do not compute a layer's rule; None if they do."""
    spec, form = layer.spec, layer.step_form
    if form is None or form.keys not in STEP_KEYS or (spec.decay == "none") != (form.decay is None):
        return f"the rule {spec.name!r} has a decay or keys of its own"
    convolutions = [getattr(layer, f"{name}_conv1d", None) for name in "qkv"]
    gates: list[Any] = [getattr(layer, name, None) for name in _low_rank(layer)]
    plain = [x for x in gates if is_plain_sequence(x) and len(x) == 2 and all(map(is_plain_linear, x))]
    other_keys = spec.erase_key != "tied" if form.keys == "tied" else not spec.normalize_k
    other_gate = spec.output_gate != "none" and spec.gate_activation not in FUSED_ACTIVATIONS
    without_conv = layer.conv_size < 2 or any(type(x) is not ShortConvolution for x in convolutions)
    return first_reason(
        (spec.step_size not in STEP_SIZES, "its step size is a function of its own"),
        (layer.allow_neg_eigval and layer.neg_eigval != "both", f"its neg_eigval is {layer.neg_eigval!r}"),
        (other_gate, "its output gate has an activation of its own"),
        (other_keys, f"its keys are {form.keys!r}, and its spec has others"),
        (
            form.keys == "erase_first" and spec.erase_reads != "decayed",
            "its first step reads the state before the decay",
        ),
        (form.decay == "fixed" and spec.decay != "scalar", "its decay is per head, and its spec has another"),
        (without_conv, "queries, keys and values do not pass a short convolution"),
        (len(plain) < len(gates), "a gate of low rank is not two plain linear maps"),
        (any(x[1].in_features > 512 for x in plain), "a gate has a higher rank than the kernels hold"),
        (layer.head_k_dim > 256 or layer.head_v_dim > 512, "it is wider than the kernels"),
    )


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

    def of_row(self, mixed: Tensor, state: LayerState, rotary: Rotary | None = None) -> tuple[Tensor, Any]:
        """What `of_parts` gives, for one row and from its product after the convolutions, `[1, M]` float32."""
        from deltazoo.ops.decoding.low_rank_maps import low_rank_gates

        maps = self._second_maps()
        return self._output(mixed, low_rank_gates(mixed, maps) if maps else None, state, rotary, None)

    def of_parts(
        self,
        parts: Tensor,
        state: LayerState,
        rotary: Rotary | None = None,
        bias: Tensor | None = None,
        state_indices: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """The rule's output before its norm, `[R, HV * V]` float32, and that norm; the state advances in place.

        Args:
            parts: `[S, R, M]`, contiguous, whose sum over S is the product.
            state: states of the rows; or pages of states, with the same indices for all its tensors.
            rotary: cosines and sines `[R or 1, 1, d]`, contiguous.
            bias: `[M]`, added to the product.
            state_indices: `[R]` integers, the page of each row.
        """
        from deltazoo.ops.decoding.convolution import convolve_parts

        mixed, gates = convolve_parts(parts, self.convolution(state), bias, state_indices, self._second_maps())
        return self._output(mixed, gates, state, rotary, state_indices)

    def _second_maps(self) -> list[Any]:
        from deltazoo.ops.decoding.low_rank_maps import LowRankGate

        seconds: list[Any] = [self._second_map(name) for name in self._low_rank]
        names = zip(self._low_rank, seconds, strict=True)
        return [LowRankGate(self._columns[name], second.weight, second.bias) for name, second in names]

    def _output(
        self, mixed: Tensor, gates: Tensor | None, state: LayerState, rotary: Rotary | None, state_indices: Any
    ) -> tuple[Tensor, Any]:
        from deltazoo.ops.decoding.between_products import HeadNorm
        from deltazoo.ops.decoding.rule import token_rule
        from deltazoo.ops.decoding.scaled_keys import scaled_keys

        layer, form = self._layer, self._layer.step_form
        shape = self._shape if rotary is None else self._shape._replace(turned=rotary[0].shape[-1])
        angles = None if rotary is None else (rotary[0].flatten(0, 1), rotary[1].flatten(0, 1))
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
