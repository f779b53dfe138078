"""Softmax attention for the full-attention layers of hybrid models: RoPE, grouped heads, transformers' kernels."""

import copy
import math
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deltazoo.layers.norm import RMSNorm
from deltazoo.layers.parameters import Float32Parameters
from deltazoo.models.forward_arguments import refuse_dropped
from deltazoo.names import one_slip_away, unknown
from deltazoo.ops import fused
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.runtime import RuntimeOptions

# transformers 5.14 reads some keys that its type does not name.
_ROPE_KEYS = sorted({*RopeParameters.__annotations__, "type", "mscale", "mscale_all_dim", "truncate"})


def check_softmax_layers(config: Any) -> None:
    """Raise ValueError unless a configuration has heads of softmax layers and a rotary embedding of their size."""
    heads, groups, rope = config.num_attention_heads, config.num_key_value_heads, config.rope_parameters
    if heads is None or groups is None:
        raise ValueError("softmax layers (layer_types) need num_attention_heads")
    if heads < 1 or config.hidden_size % heads:
        raise ValueError(f"num_attention_heads must divide hidden_size = {config.hidden_size}, got {heads}")
    if groups < 1 or heads % groups:
        raise ValueError(f"num_key_value_heads must divide num_attention_heads = {heads}, got {groups}")
    head_dim = config.hidden_size // heads
    if head_dim % 2:
        raise ValueError(f"RoPE needs an even head size, got {config.hidden_size} / {heads} = {head_dim}")
    if not rope:  # a configuration made with softmax layers has filled it in
        raise ValueError("softmax layers need rope_parameters, such as {'rope_theta': 10000.0}")
    for key in rope:
        misspelt = config.transformers_version is None or one_slip_away(key, _ROPE_KEYS)
        if key not in _ROPE_KEYS and misspelt:
            raise ValueError(f"rope_parameters: {unknown('key', key, _ROPE_KEYS)}")
    rope_type, rope_types = rope.get("rope_type", "default"), ("default", *ROPE_INIT_FUNCTIONS)
    if rope_type not in rope_types:
        raise ValueError(f"rope_parameters: {unknown('rope_type', rope_type, rope_types)}")
    theta = rope.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise ValueError(f"rope_parameters: rope_theta must be a positive, finite number, got {theta!r}")
    try:
        with unset_fake_temporarily(), torch.device("cpu"):  # the checks read values
            frequencies, scale = _frequencies(with_softmax_heads(config))
            in_range = bool(((frequencies >= 0) & frequencies.isfinite()).all()) and 0 < scale < math.inf
            found = frequencies.tolist()
    except KeyError as error:
        raise ValueError(f"rope_parameters: rope_type {rope_type!r} needs the key {error}") from error
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"rope_parameters {rope}: {error}") from error
    if not 0 < 2 * len(found) <= head_dim:
        raise ValueError(
            f"rope_parameters must turn 2 to {head_dim} channels, the size of a softmax head, got {2 * len(found)} by "
            f"{rope}"
        )
    if not in_range:
        raise ValueError(
            f"rope_parameters must give positive, finite frequencies and scale, got {found} and {scale} by {rope}"
        )


def with_softmax_heads(config: Any) -> Any:
    """A copy whose `head_dim`, which transformers' RoPE functions read, is that of the softmax layers."""
    copied = copy.copy(config)
    copied.head_dim = config.hidden_size // config.num_attention_heads
    return copied


def _frequencies(config: Any) -> tuple[Tensor, float]:
    """Frequencies `[d/2]` of the d channels that turn, in radians per position, and the scale of cosines and sines."""
    rope_type = config.rope_parameters.get("rope_type", "default")
    return _default_frequencies(config) if rope_type == "default" else ROPE_INIT_FUNCTIONS[rope_type](config)


def _default_frequencies(config: Any, **kwargs: Any) -> tuple[Tensor, float]:
    """Frequencies `theta^(-2i/d)`, and the scale 1."""
    channels = int(config.head_dim * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    return config.rope_parameters["rope_theta"] ** -exponents, 1.0


class RotaryEmbedding(Float32Parameters):
    """Cosines and sines of the rotary embedding (arXiv:2104.09864), plain or with any of transformers' scalings.

    transformers' RoPE functions and weight initialisation read the attributes by these names.
    """

    float32_buffers = ("inv_freq", "original_inv_freq")
    inv_freq: Tensor
    compute_default_rope_parameters = staticmethod(_default_frequencies)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = with_softmax_heads(config)
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        inv_freq, self.attention_scaling = _frequencies(self.config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[B, T, d]` of the d channels that turn, in x's dtype, for positions `[B, T]`."""
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device, torch.float32)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


class SoftmaxAttention(nn.Module):
    """Causal softmax attention with rotary embeddings; groups of query heads share a key/value head.

    With `softmax_qk_norm` an RMSNorm over the channels of a head comes before the rotation of queries and keys.
    """

    is_causal = True
    input_projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        assert heads is not None and groups is not None
        self.config = config
        self.layer_idx = layer_idx
        self.fused_kernels: bool | None = None
        self.head_dim = config.hidden_size // heads
        self.num_key_value_groups = heads // groups
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(config.hidden_size, count * self.head_dim, bias=config.qkv_bias)
            for count in (heads, groups, groups)
        )
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)
        self.normalizes = config.softmax_qk_norm
        if self.normalizes:
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.norm_eps, fused=None) for _ in range(2))

    def use_runtime(self, options: RuntimeOptions) -> None:
        """Run with other `fused_kernels`."""
        self.fused_kernels = options.fused_kernels
        for norm in self.children():
            if isinstance(norm, RMSNorm):
                norm.set_fused(options.fused_kernels)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the tokens by attention.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            position_embeddings: cosine and sine `[B or 1, T, d]`.
            attention_mask: the mask that `create_causal_mask` makes for the chosen implementation.
            cache: the cache that holds this layer's keys and values.
            kwargs: arguments of the implementation, such as the boundaries of packed sequences.

        Returns:
            `[B, T, hidden_size]`, and the attention weights `[B, heads, T, past + T]` if the chosen implementation
            computes them ("eager"), else None.

        Raises:
            TypeError: an argument that no implementation takes.
        """
        refuse_dropped(self, kwargs, ("position_ids", "delta_batch"))
        query, key, value = (
            rearrange(projection(hidden_states), "b t (h d) -> b t h d", d=self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.normalizes:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (fused.rotate(x, position_embeddings, fused=self.fused_kernels) for x in (query, key))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation or "eager", _eager_attention)
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.head_dim**-0.5, **kwargs
        )
        return self.o_proj(output.flatten(2)), weights


def _eager_attention(
    module: SoftmaxAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Output `[B, T, heads, d]` and weights `[B, heads, T, S]` of softmax attention, with an additive mask."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    # In float32 the mask of float64 would be -inf, and a padding token, which sees no other, NaN.
    weights = at_least_float32(scores).softmax(dim=-1).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights
