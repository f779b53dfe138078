"""One block of a model: a token mixing layer and an MLP, each after a norm and added to the residual stream."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from deltazoo.generation.batch import BatchDescription
from deltazoo.generation.cache import CacheStates, takes_cache
from deltazoo.layers import make_layer
from deltazoo.layers.mlp import SwiGLU
from deltazoo.layers.norm import RMSNorm
from deltazoo.layers.recompute_levels import level_of, run_block
from deltazoo.models.configuration import DeltaRuleConfig
from deltazoo.models.softmax_attention import SoftmaxAttention
from deltazoo.runtime import RuntimeOptions


class SoftmaxInputs(NamedTuple):
    """The inputs that the softmax layers of a hybrid model share in one forward pass."""

    attention_mask: Any
    position_embeddings: tuple[Tensor, Tensor]
    kernel_kwargs: dict[str, Any]


def make_block_layer(config: DeltaRuleConfig, layer_idx: int) -> nn.Module:
    """The linear or softmax layer of one block, as the configuration says."""
    assert config.layer_types is not None
    if config.layer_types[layer_idx] == "full_attention":
        return SoftmaxAttention(config, layer_idx)
    return make_layer(**config.layer_options, layer_idx=layer_idx, num_layers=config.num_hidden_layers)


class DeltaRuleBlock(GradientCheckpointingLayer):
    """A decoder block: `x + layer(norm(x))`, then `x + mlp(norm(x))`."""

    step_parts: ClassVar[tuple[str, ...]] = ("attn_norm", "attn", "mlp_norm", "mlp")
    """The modules of these two sums in order; a captured decoding step may run them fused."""

    def __init__(self, config: DeltaRuleConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps, feeds_linear=True)
        self.attn = make_block_layer(config, layer_idx)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, feeds_linear=True)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.use_runtime(RuntimeOptions())

    def use_runtime(self, options: RuntimeOptions) -> None:
        """Run with other `fused_kernels` and `recompute`. `set_runtime` tells the linear or softmax layer itself."""
        self.recompute = options.recompute
        for module in (self.attn_norm, self.mlp_norm, self.mlp):
            module.fused = options.fused_kernels

    @takes_cache()  # gradient checkpointing finds the cache by this name, and keeps it from a block that runs twice
    def forward(
        self,
        hidden_states: Tensor,
        batch: BatchDescription,
        softmax: SoftmaxInputs | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Map `[B, T, hidden_size]` to the same shape.

        Args:
            hidden_states: the residual stream.
            batch: the sequences of the batch, the same for all blocks.
            softmax: masks and rotary embeddings, needed by softmax layers only.
            cache: a cache that `prepare_cache` has prepared.
        """
        # Gradient checkpointing keeps less than any level. A block with a cache must not run twice and write to it
        # twice.
        keeps_all = not self.training or self.gradient_checkpointing or cache is not None
        level = "none" if keeps_all else level_of(self.recompute, hidden_states.device, hidden_states.numel())
        mix = partial(run_block, "block", self._mix, exchanges=batch.shared) if level == "nested" else self._mix
        return run_block(level, self._run, mix, hidden_states, batch, softmax, cache, exchanges=batch.shared)

    def _run(self, mix: Callable[..., Tensor], hidden_states: Tensor, *inputs: Any) -> Tensor:
        mixed = mix(hidden_states, *inputs)
        normalized, hidden_states = self.mlp_norm(mixed, residual=hidden_states)
        return hidden_states + self.mlp(normalized)

    def _mix(self, hidden_states: Tensor, batch: BatchDescription, softmax: Any, cache: Cache | None) -> Tensor:
        mixed = self.attn_norm(hidden_states)
        if isinstance(self.attn, SoftmaxAttention):
            mask, rotary, kernel_kwargs = softmax
            return self.attn(mixed, rotary, mask, cache, **kernel_kwargs)[0]
        states = None if cache is None else CacheStates(cache)
        return self.attn(mixed, past_key_values=states, sequences=batch.sequences)
