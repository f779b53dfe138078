"""Softmax attention for the full-attention layers of hybrid models: RoPE, grouped heads, transformers' kernels."""

from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deltazoo.layers.float32_parameters import Float32Parameters
from deltazoo.layers.rotary import rotate
from deltazoo.models.configuration import DeltaRuleConfig
from deltazoo.models.forward_arguments import refuse_dropped
from deltazoo.models.rotary_frequencies import default_frequencies, rotary_frequencies, with_softmax_heads
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.runtime import RuntimeOptions

__all__ = ["RotaryEmbedding", "SoftmaxAttention"]


class RotaryEmbedding(Float32Parameters):
    """Cosines and sines of the rotary embedding (arXiv:2104.09864), plain or with any of transformers' scalings.

    The attributes have the names by which transformers' RoPE functions and weight initialisation read them.
    """

    float32_buffers = ("inv_freq", "original_inv_freq")
    inv_freq: Tensor

    def __init__(self, config: DeltaRuleConfig) -> None:
        super().__init__()
        assert config.rope_parameters is not None and config.num_attention_heads is not None
        self.config = with_softmax_heads(config)
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        inv_freq, self.attention_scaling = rotary_frequencies(self.config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: DeltaRuleConfig, **kwargs: Any) -> tuple[Tensor, float]:
        """`default_frequencies`, under the name by which transformers' weight initialisation asks for them."""
        return default_frequencies(config)

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[B, T, d]` of the d channels that turn, in x's dtype, for positions `[B, T]`."""
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device, torch.float32)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


class SoftmaxAttention(nn.Module):
    """Causal softmax attention with rotary embeddings; groups of query heads share a key/value head."""

    is_causal = True
    input_projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: DeltaRuleConfig, layer_idx: int) -> None:
        super().__init__()
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        assert heads is not None and groups is not None
        self.config = config
        self.layer_idx = layer_idx
        self.fused_kernels: bool | None = None
        self.head_dim = config.hidden_size // heads
        self.num_key_value_groups = heads // groups
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, groups * self.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, groups * self.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)

    def use_runtime(self, options: RuntimeOptions) -> None:
        """Run with other `fused_kernels`."""
        self.fused_kernels = options.fused_kernels

    def head_counts(self) -> dict[str, int]:
        """The number of heads that tensor parallelism divides, by its name in the configuration."""
        return {"num_key_value_heads": self.k_proj.out_features // self.head_dim}

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            position_embeddings: cosine and sine `[B or 1, T, d]`.
            attention_mask: as `create_causal_mask` makes it for the chosen implementation.
            cache: that holds this layer's keys and values.
            kwargs: for the implementation, such as the boundaries of packed sequences.

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
        query, key = (rotate(x, position_embeddings, fused=self.fused_kernels) for x in (query, key))
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
    """The definition, with an additive mask; output `[B, T, heads, d]` and weights `[B, heads, T, S]`."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    # In float32 the mask of float64 would be -inf, and a padding token, which sees no other, NaN.
    weights = at_least_float32(scores).softmax(dim=-1).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights
