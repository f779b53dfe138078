"""Our own models inside vLLM, pure and hybrid; their modules have the names of the checkpoint."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import IsAttentionFree, IsHybrid, SupportsLoRA
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.utils import AutoWeightsLoader

from deltazoo.compat.fla.checkpoints import missing_weights, modernize_state_dict, refuse_missing_weights
from deltazoo.layers import DeltaRuleAttention, RMSNorm, make_layer
from deltazoo.ops.fused import takes_kernel
from deltazoo.ops.fused.glu import swiglu
from deltazoo.serving.vllm.paged_layer import JoinedMaps, MakeLayer, PagedLayer, states_of


def share_of(options: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The options of a layer with one rank's heads, if so many ranks share them."""
    heads = ("num_heads", "num_v_heads", "num_kv_heads")
    return {**options, **{name: options[name] // ranks for name in heads if options.get(name)}}


class PagedModel:
    """A model whose linear layers keep their states in vLLM's pages, and vLLM's questions about these states."""

    has_inner_state: ClassVar[bool] = True
    is_complete = False
    """Whether a checkpoint with all parameters has been loaded."""

    @staticmethod
    def linear_layers(config: Any) -> dict[int, MakeLayer]:
        """Functions that make the linear layers, by index of the layer."""
        raise NotImplementedError

    @classmethod
    def _states(cls, vllm_config: VllmConfig) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of one sequence's states in a layer; ValueError if they differ among layers."""
        config, ranks = vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
        makers, dtype = cls.linear_layers(config).values(), vllm_config.model_config.dtype
        first, *others = [states_of(make, ranks, dtype) for make in makers]
        if different := [x for x in others if x != first]:
            raise ValueError(f"vLLM keeps states of one shape in all layers, got {first} and {different[0]}")
        return first

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Shapes of one sequence's states in a layer."""
        return tuple(shape for shape, _ in cls._states(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Dtypes of one sequence's states in a layer."""
        return tuple(dtype for _, dtype in cls._states(vllm_config))

    def paged_layers(self) -> list[PagedLayer]:
        """The linear layers."""
        model: Any = self
        return [x for x in model.modules() if isinstance(x, PagedLayer)]

    def get_mamba_state_copy_func(self) -> tuple[Any, ...]:
        """Functions that copy the states of a page for the prefix cache; each state is copied whole."""
        return (get_temporal_copy_spec,) * len(self.paged_layers()[0].states)

    def get_mamba_state_copy_funcs(self, mamba_types: Iterable[Any]) -> dict[Any, tuple[Any, ...]]:
        """The functions of `get_mamba_state_copy_func` by kind of metadata, which newer versions of vLLM ask for."""
        return dict.fromkeys(mamba_types, self.get_mamba_state_copy_func())

    def complete(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights; ValueError after the last of the first call if the model has others, which vLLM leaves random.

        Later calls may replace some weights of a complete model, as trainers do that generate with vLLM.
        """
        names = set()
        for name, x in weights:
            names.add(name)
            yield name, x
        if not self.is_complete:
            refuse_missing_weights(missing_weights(self.config, names), self.config.name_or_path)  # type: ignore[attr-defined]
            self.is_complete = True


class _SoftmaxAttention(JoinedMaps, Qwen3Attention):
    """vLLM's attention with the parameters of ours; the configuration chooses norms of queries and keys."""

    joined = {"qkv_proj": {f"{x}_proj": x for x in "qkv"}}

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        config = vllm_config.model_config.hf_config
        super().__init__(
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.rope_parameters,
            config.max_position_embeddings, rms_norm_eps=config.norm_eps, qkv_bias=config.qkv_bias,
            cache_config=vllm_config.cache_config, quant_config=vllm_config.quant_config, prefix=prefix,
        )  # fmt: skip
        if not config.softmax_qk_norm:
            self.q_norm = self.k_norm = nn.Identity()


class _SwiGLU(JoinedMaps):
    joined = {"gate_up_proj": {"gate_proj": 0, "up_proj": 1}}

    def __init__(self, config: Any, quantised: Any, prefix: str) -> None:
        super().__init__()
        width, options = config.intermediate_size, dict(bias=False, quant_config=quantised, return_bias=False)
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [width] * 2, prefix=f"{prefix}.gate_up_proj", **options
        )
        self.down_proj = RowParallelLinear(width, config.hidden_size, prefix=f"{prefix}.down_proj", **options)

    def forward(self, x: Tensor) -> Tensor:
        joint = self.gate_up_proj(x)
        if not takes_kernel(None, joint):
            return self.down_proj(swiglu(*joint.chunk(2, dim=-1)))
        from deltazoo.ops.decoding.between_products import swiglu_parts

        return self.down_proj(swiglu_parts(joint[None], joint.dtype))


class _Block(nn.Module):
    """`x + layer(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, vllm_config: VllmConfig, index: int, prefix: str) -> None:
        super().__init__()
        config, quantised = vllm_config.model_config.hf_config, vllm_config.quant_config
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps, fused=None)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, fused=None)
        self.mlp = _SwiGLU(config, quantised, f"{prefix}.mlp")
        self.is_linear = config.layer_types[index] == "linear_attention"
        self.attn: nn.Module = (
            PagedLayer(_OwnModel.linear_layers(config)[index], vllm_config, f"{prefix}.attn")
            if self.is_linear
            else _SoftmaxAttention(vllm_config, f"{prefix}.attn")
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        mixed = self.attn_norm(x)
        mixed = self.attn(mixed) if self.is_linear else self.attn(positions, mixed)
        normed, x = self.mlp_norm(mixed, residual=x)
        return x + self.mlp(normed)


class _Decoder(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size, prefix=f"{prefix}.embeddings")
        self.layers = nn.ModuleList(
            _Block(vllm_config, i, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, fused=None)


class _OwnModel(PagedModel, SupportsLoRA):
    """The code that pure models and hybrids share; vLLM tells them apart by another base class."""

    packed_modules_mapping: dict[str, list[str]] = {
        product: list(maps) for x in (_SoftmaxAttention, _SwiGLU) for product, maps in x.joined.items()
    }
    embedding_modules: ClassVar[dict[str, str]] = {"embeddings": "input_embeddings", "lm_head": "output_embeddings"}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = config = vllm_config.model_config.hf_config
        self.model = _Decoder(vllm_config, "model")
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, quant_config=vllm_config.quant_config, prefix="lm_head"
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embeddings)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.packed_modules_mapping = {**self.packed_modules_mapping, **self.paged_layers()[0].packed}

    @staticmethod
    def linear_layers(config: Any) -> dict[int, MakeLayer]:
        """Functions that make the linear layers, by index of the layer."""

        def make(index: int, ranks: int) -> DeltaRuleAttention:
            options = share_of(config.layer_options, ranks)
            return make_layer(**options, layer_idx=index, num_layers=config.num_hidden_layers)

        return {i: partial(make, i) for i, kind in enumerate(config.layer_types) if kind == "linear_attention"}

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings `[T, hidden_size]`."""
        return self.model.embeddings(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Final hidden states `[T, hidden_size]`."""
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds  # type: ignore[arg-type]
        for block in self.model.layers:
            x = block(x, positions)
        return self.model.norm(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits of the tokens whose hidden states are given."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint of ours or of fla, written by any version."""
        if type(self.config).model_type != "delta_rule":
            names = type(self.config).parameter_names
            found = modernize_state_dict(dict(weights))
            weights = [(_renamed(name, names), x) for name, x in found.items()]
        tied = "lm_head." if self.config.tie_word_embeddings else "no such name"
        return AutoWeightsLoader(self).load_weights(x for x in self.complete(weights) if not x[0].startswith(tied))


def _renamed(name: str, ends: Mapping[str, str]) -> str:
    """The name with its end replaced, if that is a key of `ends`."""
    return next((name.removesuffix(end) + ours for end, ours in ends.items() if name.endswith(end)), name)


class DeltazooForCausalLM(_OwnModel, nn.Module, IsHybrid):
    """A model of linear and softmax layers."""


class PureDeltazooForCausalLM(_OwnModel, nn.Module, IsAttentionFree):
    """A model of linear layers alone."""
