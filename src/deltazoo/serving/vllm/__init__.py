"""Our models inside vLLM: a plugin that vLLM finds by its entry point, in every process that it starts.

    vllm serve PATH

A delta-rule layer keeps its states in vLLM's pages and computes its linear maps by vLLM's modules (`paged_layer`).
`own_models` has our models, pure and hybrid, `swapped_models` those of vLLM with our layers in some of their attention
slots. No rule has a line of its own.
"""

from typing import Any

import vllm
from packaging.version import Version
from vllm import ModelRegistry
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
from vllm.transformers_utils import model_arch_config_convertor as vllm_configs

import deltazoo
from deltazoo.models.hub import model_types

__all__ = ["register"]

OLDEST, NEWEST = "0.26", "0.33"
"""Versions of vLLM that this package knows: interfaces for states change often."""
HYBRID, PURE = "DeltazooHybridForCausalLM", "DeltazooForCausalLM"
"""vLLM's names of our models: it asks a model's class, not its configuration, whether there are softmax layers."""
SWAPPED = ("llama", "mistral", "qwen2", "qwen3")
"""Families that can be swapped and served; others call their attention in ways that were never tried."""


def register() -> None:
    """Make vLLM know our models. It calls this once in every process.

    Raises:
        RuntimeError: another version of vLLM.
    """
    release = ".".join(vllm.__version__.split(".")[:2])
    if not Version(OLDEST) <= Version(release) <= Version(NEWEST):
        raise RuntimeError(
            f"deltazoo {deltazoo.__version__} works with vLLM {OLDEST} to {NEWEST}, got {vllm.__version__}: install "
            "one of these, or serve the model with `deltazoo serve`"
        )
    for name in (PURE, HYBRID):
        ModelRegistry.register_model(name, f"deltazoo.serving.vllm.own_models:{name}")
        MODELS_CONFIG_MAP[name] = DeltazooConfig
    for model_type in model_types():
        vllm_configs.MODEL_ARCH_CONFIG_CONVERTORS[model_type] = _OwnConfig


class DeltazooConfig(MambaModelConfig):
    """vLLM's settings for our models: decoding steps as CUDA graphs, prompts as they come; nothing is compiled."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Set them.

        Raises:
            ValueError: pipeline parallelism, speculation or compilation is asked for.
        """
        super().verify_and_update_config(vllm_config)
        compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise ValueError("models of deltazoo run in vLLM without pipeline parallelism: use --tensor-parallel-size")
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "models of deltazoo run in vLLM without speculative decoding: a state cannot take tokens back"
            )
        if compilation.mode not in (None, CompilationMode.NONE):
            raise ValueError(f"models of deltazoo are not compiled in vLLM: leave out mode={compilation.mode!r}")
        compilation.mode = CompilationMode.NONE
        if compilation.cudagraph_mode is None:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


class _OwnConfig(vllm_configs.ModelArchConfigConvertorBase):
    """Our configurations as vLLM reads them: pure models have no attention heads."""

    def __init__(self, hf_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, *args, **kwargs)
        found = hf_config.architectures or []
        if any(not name.endswith("ForCausalLM") for name in found):
            raise ValueError(f"deltazoo serves causal language models in vLLM, got {', '.join(found)}")
        if "linear_attention" not in hf_config.layer_types:
            raise ValueError("the model has no linear layers, and deltazoo has nothing to add to vLLM")
        self._is_hybrid = "full_attention" in hf_config.layer_types
        hf_config.architectures = [HYBRID if self._is_hybrid else PURE]  # vLLM reads it there

    def get_total_num_attention_heads(self) -> int:
        """Of the softmax layers."""
        return self.hf_config.num_attention_heads if self._is_hybrid else 0

    def get_total_num_kv_heads(self) -> int:
        """Of the softmax layers."""
        return self.hf_config.num_key_value_heads if self._is_hybrid else 0

    def get_head_size(self) -> int:
        """Of the softmax layers; `head_dim` in the configuration is that of linear layers."""
        return self.hf_config.hidden_size // self.hf_config.num_attention_heads if self._is_hybrid else 0
