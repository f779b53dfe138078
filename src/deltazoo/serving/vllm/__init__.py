"""Our models inside vLLM: a plugin that vLLM finds by its entry point, in every process that it starts.

    vllm serve PATH

A delta-rule layer keeps its states in vLLM's pages and computes its linear maps by vLLM's modules (`paged_layer`).
`own_models` has our models, pure and hybrid; `swapped_models` has vLLM's models with our layers in place of some of
their attention. No rule needs code here.
"""

from typing import Any

import vllm
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm import ModelRegistry
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
from vllm.transformers_utils import model_arch_config_convertor as vllm_configs

import deltazoo
from deltazoo.models.config_keys import class_name
from deltazoo.models.hub import model_types
from deltazoo.models.softmax_attention import with_softmax_heads
from deltazoo.names import SWAPPED_PREFIX
from deltazoo.swap.models import recorded_layers

__all__ = ["register"]

OLDEST, NEWEST = "0.26", "0.33"
"""The oldest and the newest version of vLLM, all of which we have tried; vLLM's interfaces for states change often."""
OWN, PURE = "DeltazooForCausalLM", "Pure"
"""vLLM's name of our own models, and the prefix of that name for models without softmax layers: vLLM asks a model's
class, not its configuration, whether it has any."""
SWAPPED = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose swapped models vLLM can serve: those that we have tried."""


def register() -> None:
    """Make vLLM know our models. It calls this once in every process.

    Raises:
        RuntimeError: another version of vLLM.
    """
    release = Version(".".join(vllm.__version__.split(".")[:2]))
    if not Version(OLDEST) <= release <= Version(NEWEST):
        raise RuntimeError(
            f"deltazoo {deltazoo.__version__} works with vLLM {OLDEST} to {NEWEST}, got {vllm.__version__}: install "
            "one of these, or serve the model with `deltazoo serve`"
        )
    modules = {OWN: "own_models"}
    for model_type in (*model_types(), *(SWAPPED_PREFIX + family for family in SWAPPED)):
        vllm_configs.MODEL_ARCH_CONFIG_CONVERTORS[model_type] = _Config
        if model_type.startswith(SWAPPED_PREFIX):
            modules[_swapped_name(CONFIG_MAPPING[model_type])] = "swapped_models"
    for name, module in modules.items():
        for one in (name, PURE + name):
            ModelRegistry.register_model(one, f"deltazoo.serving.vllm.{module}:{one}")
            MODELS_CONFIG_MAP[one] = _Settings


def _swapped_name(config_class: type[Any]) -> str:
    return class_name(config_class.__name__, "ForCausalLM")


class _Settings(MambaModelConfig):
    """vLLM's settings for our models: CUDA graphs for decoding steps only, and no torch.compile."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
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


class _Config(vllm_configs.ModelArchConfigConvertorBase):
    """vLLM's view of a configuration of ours. Models without softmax layers have no attention heads."""

    def __init__(self, hf_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, *args, **kwargs)
        found = hf_config.architectures or []
        if any(not name.endswith("ForCausalLM") for name in found):
            raise ValueError(f"deltazoo serves causal language models in vLLM, got {', '.join(found)}")
        self._swapped = hf_config.model_type.startswith(SWAPPED_PREFIX)
        kinds = [] if self._swapped else hf_config.layer_types
        linear = len(recorded_layers(hf_config)) if self._swapped else kinds.count("linear_attention")
        rope = hf_config.rope_parameters or {}
        if not self._swapped and rope.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(
                f"rope_parameters: vLLM turns queries and keys by fixed angles, and those of {rope['rope_type']!r} "
                "depend on how long a sequence is: use `deltazoo serve`"
            )
        if not self._swapped and rope.get("rope_type") == "proportional" and rope.get("factor", 1.0) != 1.0:
            raise ValueError(
                f"rope_parameters: vLLM reads no factor of 'proportional', got {rope['factor']}: use `deltazoo serve`"
            )
        if not linear:
            raise ValueError("the model has no linear layers, and deltazoo has nothing to add to vLLM")
        self._is_hybrid = linear < hf_config.num_hidden_layers
        name = _swapped_name(type(hf_config)) if self._swapped else OWN
        hf_config.architectures = [name if self._is_hybrid else PURE + name]  # by this name vLLM finds the class

    def get_total_num_attention_heads(self) -> int:
        return super().get_total_num_attention_heads() if self._is_hybrid else 0

    def get_total_num_kv_heads(self) -> int:
        return super().get_total_num_kv_heads() if self._is_hybrid else 0

    def get_head_size(self) -> int:
        if not self._is_hybrid:
            return 0
        # In our own configurations `head_dim` describes linear layers.
        return super().get_head_size() if self._swapped else with_softmax_heads(self.hf_config).head_dim

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        """The most tokens of a sequence, and the key; our pure models take at least as many as in `deltazoo serve`."""
        length, key = super().derive_max_model_len_and_key()
        return (length if self._is_hybrid or self._swapped else max(length, 32_768)), key
