"""Blocks whose decoding step runs in a few launches, in place of one or two per operation.

    one row:    norm, q/k/v and gates, short convolutions | rule | output norm, o, residual | norm, gate/up, SwiGLU |
                down, residual
    more rows:  norm | q/k/v and gates | short convolutions | rule | output norm | o | residual, norm | gate/up |
                SwiGLU | down | residual, norm of the next block

Maps of low rank, such as KDA's gates, take one launch more before the rule, and so do keys scaled by a moment (PGDN,
PKDA).

The blocks are our own, and those of transformers whose attention has been swapped, which turn queries and keys first.

A block's own forward pass remains the definition. It runs wherever `why_not_fused` objects to the block, or
`FusedBlock` to a call. Results of the fused step differ by rounding, of which there is less: gates, queries, keys and
values stay in float32 between the launches.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticCache

from deltazoo._report import replaced_methods
from deltazoo.generation.cache import DeltaRuleCacheLayer, cache_in
from deltazoo.generation.fused_rule import FusedRule, first_maps, further_maps, is_plain_linear, why_not_this_rule
from deltazoo.generation.step_modules import (
    JointProduct,
    Replacement,
    block_parts,
    is_row_norm,
    is_swiglu,
    replacement,
)
from deltazoo.layers import DeltaRuleAttention
from deltazoo.layers.mlp import SwiGLU
from deltazoo.layers.norm import GatedRMSNorm, RMSNorm
from deltazoo.layers.rotary import Rotary
from deltazoo.layers.state import LayerState, is_decoding_step
from deltazoo.ops.fused import MOST_COLUMNS, takes_kernel
from deltazoo.ops.linear_maps import is_hooked

__all__ = ["FusedBlock", "fused_blocks", "why_not_fused"]


def fused_blocks(model: nn.Module, products: Sequence[JointProduct]) -> "list[FusedBlock]":
    """The blocks of a model whose decoding step may run fused.

    Args:
        model: the model of the blocks.
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
    reason = why_not_this_rule(layer)
    if reason is not None:
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
        return replacement(self.block, self._output_of_own if self._parts.swapped is None else self._output_of_library)

    def _output_of_own(self, hidden_states: Tensor, batch: Any, softmax: Any = None, **kwargs: Any) -> Tensor | None:
        return self._output(hidden_states, batch, cache_in(kwargs), None)

    def _output_of_library(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: Rotary | None = None,
        delta_batch: Any = None,
        **kwargs: Any,
    ) -> Tensor | None:
        turns = self._parts.turns
        if args or delta_batch is None or (turns and position_embeddings is None):
            return None
        return self._output(hidden_states, delta_batch, cache_in(kwargs), position_embeddings if turns else None)

    def _output(self, x: Tensor, batch: Any, cache: Cache | None, rotary: Rotary | None) -> Tensor | None:
        if not isinstance(cache, StaticCache) or not batch.sequences.whole_rows:
            return None
        layer = cache.layers[(self.block if self._parts.swapped is None else self._parts.swapped).layer_idx]
        state = layer.state if isinstance(layer, DeltaRuleCacheLayer) else None
        if state is None or not self._fits(x, state, rotary):
            return None
        output = self._step(x, state, rotary)
        layer.store(state, 1, cache.layers)
        return output

    def _fits(self, x: Tensor, state: LayerState, rotary: Rotary | None) -> bool:
        """Whether a call has one token per row, no gradients, and tensors that the kernels take."""
        if not is_decoding_step(x) or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return False
        if not takes_kernel(None, x) or x.dtype != self._into_layer.weight.dtype:
            return False
        if state.conv is None or state.conv.dtype != x.dtype:
            return False
        if rotary is not None and not all(_is_of_rows(angles, len(x), self._layer.head_k_dim) for angles in rotary):
            return False
        return all(tensor is None or tensor.is_contiguous() for tensor in (x, *state))

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
        z, head_norm = self._rule(mixed, state, rotary)
        x = token_product(z, self._layer.o_proj.weight, head_norm=head_norm, residual=x[0])
        h = token_product(x, self._into_mlp.weight, norm_weight=mlp_norm.weight, norm_eps=mlp_norm.eps, glu=True)
        return token_product(h, self._mlp.down_proj.weight, residual=x)[None]

    def _step_rows(self, x: Tensor, state: LayerState, rotary: Rotary | None) -> Tensor:
        from deltazoo.ops.decoding.between_products import add_parts, norm_heads, swiglu_parts
        from deltazoo.ops.decoding.convolution import convolve_parts
        from deltazoo.ops.decoding.row_product import row_product

        total, following = x.flatten(0, 1), self.following
        (source, normed), self.ready = self.ready or (None, None), None
        if normed is None or source is not x:
            _, normed = add_parts(None, total, _row_norm(self._parts.norm))
        product = row_product(normed, self._into_layer.weight)
        mixed = convolve_parts(product, self._rule.convolution(state), self._into_layer.bias)
        z = norm_heads(*self._rule(mixed, state, rotary), x.dtype)
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
