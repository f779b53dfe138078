"""Names of transformers, torch, Triton, accelerate and PEFT that src uses although they are no public API: each exists.

When a test here fails after an upgrade, it names what went missing and why we need it. A new use is added to the list.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers
from packaging.version import Version

import deltazoo

PACKAGE = Path(deltazoo.__file__).parent


class Internal(NamedTuple):
    """One name."""

    name: str
    owner: str
    """What has it: a module, class or function whose attribute it is, or in whose source it occurs."""
    purpose: str
    since: str = "5.14"
    """First version of transformers that has it; src does without it before."""


MODEL = "transformers.modeling_utils:PreTrainedModel"
INTERNALS = (
    # Auto classes and registration.
    Internal("_extra_content", "transformers.models.auto.configuration_auto:_LazyConfigMapping", "lazy registration"),
    Internal("_model_mapping", "transformers:AutoModel", "the classes of a swapped model's original"),
    Internal("WeightRenaming", "transformers.core_model_loading", "GLA's names of the output norm, both ways"),
    # Declarations of model classes.
    Internal("_can_compile_fullgraph", MODEL, "declared: static caches compile"),
    Internal("_can_record_outputs", MODEL, "declared: modules whose outputs are returned on request"),
    Internal("_input_embed_layer", "transformers.modeling_utils:EmbeddingAccessMixin", "fla-hub's name for it"),
    Internal("_is_stateful", MODEL, "declared: no token can be taken back, so no assistants"),
    Internal("_no_split_modules", MODEL, "declared: blocks stay on one device"),
    Internal("_skip_keys_device_placement", MODEL, "declared: the cache is not moved"),
    Internal("_supports_attention_backend", MODEL, "declared"),
    Internal("_supports_context_parallel", MODEL, "declared: ranks share no sequence", since="5.17"),
    Internal("_supports_flash_attn", MODEL, "declared"),
    Internal("_supports_flex_attn", MODEL, "declared"),
    Internal("_supports_sdpa", MODEL, "declared"),
    Internal("_tied_weights_keys", MODEL, "declared: embedding and head"),
    # Dtypes and initialisation.
    Internal("_get_dtype_plan", MODEL, "overridden: gates are float32 for quantisers alone"),
    Internal("_init_weights", MODEL, "overridden: every layer initialises itself"),
    Internal("_is_hf_initialized", "transformers.initialization", "loaded parameters keep their values"),
    Internal("_keep_in_fp32_modules", MODEL, "gate projections that quantisers leave alone"),
    Internal("_keep_in_fp32_modules_strict", MODEL, "gate parameters that stay float32"),
    Internal("_hf_peft_config_loaded", MODEL, "only adapters are saved"),
    # Several devices.
    Internal("_fsdp_plan", MODEL, "gate parameters in FSDP2 groups of their own"),
    Internal("_pp_plan", MODEL, "declared"),
    Internal("_tp_plan", MODEL, "adapted by a swap"),
    Internal("_tp_size", "transformers.generation.utils", "a divided model captures no step"),
    Internal("is_fsdp_managed_module", "transformers.generation.utils", "a divided model captures no step"),
    # Forward pass.
    Internal("ALL_ATTENTION_FUNCTIONS", "transformers.modeling_utils", "softmax attention by any implementation"),
    Internal("BaseModelOutputWithPast", "transformers.modeling_outputs", "what models return"),
    Internal("CausalLMOutputWithPast", "transformers.modeling_outputs", "what models return"),
    Internal("ForCausalLMLoss", "transformers.loss.loss_utils", "the loss that is computed without all logits"),
    Internal("GenericForQuestionAnswering", "transformers.modeling_layers", "head"),
    Internal("GenericForSequenceClassification", "transformers.modeling_layers", "head"),
    Internal("GenericForTokenClassification", "transformers.modeling_layers", "head"),
    Internal("_CAN_RECORD_REGISTRY", "transformers.utils.output_capturing", "recorded outputs of swapped classes"),
    Internal("_attn_implementation", "transformers.configuration_utils:PreTrainedConfig", "the chosen implementation"),
    Internal("can_return_tuple", "transformers.utils", "return_dict=False"),
    Internal("capture_outputs", "transformers.utils.output_capturing", "output_hidden_states, output_attentions"),
    Internal("deprecate_kwarg", "transformers.utils.deprecation", "the old name of the argument `cache`"),
    Internal("create_causal_mask", "transformers.masking_utils", "masks of the softmax layers"),
    Internal("merge_with_config_defaults", "transformers.utils.generic", "use_cache and others from the configuration"),
    Internal("ALL_MASK_ATTENTION_FUNCTIONS", "transformers.masking_utils", "masks of rows that ranks share"),
    # Generation and caches.
    Internal("BaseStreamer", "transformers.generation.streamers", "tokens are shown as they are generated"),
    Internal("DynamicSlidingWindowLayer", "transformers.cache_utils", "cache layers that steps are captured with"),
    Internal("GenerationMode", "transformers.generation.configuration_utils", "modes that steps are captured for"),
    Internal("LinearAttentionCacheLayerMixin", "transformers.cache_utils", "base of our cache layer"),
    Internal("LinearAttentionLayer", "transformers.cache_utils", "cache layers that steps are captured with"),
    Internal("LlamaRMSNorm", "transformers.models.llama.modeling_llama", "norms known by their code"),
    Internal("Olmo2RMSNorm", "transformers.models.olmo2.modeling_olmo2", "the same, rounded after the weight"),
    Internal("Gemma2RMSNorm", "transformers.models.gemma2.modeling_gemma2", "the same, with weights around zero"),
    Internal("LlamaMLP", "transformers.models.llama.modeling_llama", "MLPs known by their code"),
    Internal("LlamaDecoderLayer", "transformers.models.llama.modeling_llama", "blocks known by their code"),
    Internal("SiLUActivation", "transformers.activations", "the activation of these"),
    Internal("create_masks_for_generate", "transformers.masking_utils", "masks that generate prepares"),
    Internal("create_recurrent_attention_mask", "transformers.masking_utils", "padding in later pieces of a prompt"),
    Internal("_get_default_generation_params", "transformers:GenerationConfig", "keys that others write"),
    Internal(
        "_get_static_cache_init_shape",
        "transformers:GenerationMixin",
        "overridden: no shapes of keys for linear layers",
        since="5.23",
    ),
    Internal("_optimize_model_for_decode", "transformers:GenerationMixin", "experts in decoding"),
    Internal("_prepare_cache_for_generation", "transformers:GenerationMixin", "overridden: our cache layers"),
    Internal(
        "_update_model_kwargs_for_generation", "transformers:GenerationMixin", "overridden: the last logits are kept"
    ),
    Internal("_supports_logits_to_keep", "transformers:GenerationMixin", "logits of the last token alone"),
    # Swapping, acceleration, adapters.
    Internal("_hf_hook", "accelerate.hooks", "the device of offloaded weights"),
    Internal("_old_forward", "accelerate.hooks", "the forward that hooks keep"),
    Internal("force_accelerate_hooks", "transformers.integrations.accelerate", "offloaded convolutions"),
    Internal("SAFE_WEIGHTS_INDEX_NAME", "transformers.utils", "an index of shards is checked before anything is read"),
    Internal("_load_pretrained_model", "transformers:PreTrainedModel", "overridden: safetensors files alone"),
    Internal("cached_file", "transformers.utils", "an index of shards is found as transformers finds it"),
    Internal("get_checkpoint_conversion_mapping", "transformers.conversion_mapping", "names in originals' checkpoints"),
    Internal("register_checkpoint_conversion_mapping", "transformers.conversion_mapping", "the same for swapped types"),
    Internal("TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING", "peft.utils.constants", "default targets of LoRA"),
    # Serving.
    Internal("bytes_to_unicode", "transformers.convert_slow_tokenizer", "the bytes of a token, for logprobs"),
    # Training.
    Internal("TRAINER_STATE_NAME", "transformers.trainer", "the step of a checkpoint"),
    Internal("_get_output_dir", "transformers:Trainer", "overridden: checkpoints appear when complete"),
    Internal("_n_gpu", "transformers:TrainingArguments", "no DataParallel"),
    Internal("_save_checkpoint", "transformers:Trainer", "overridden: checkpoints appear when complete"),
    Internal("OPTIMIZER_NAME", "transformers.trainer", "the optimizer's file of a checkpoint"),
    Internal("SCHEDULER_NAME", "transformers.trainer", "the schedule's file of a checkpoint"),
    Internal("_clip_grad_norm", "transformers:Trainer", "overridden: parameters of several dtypes and meshes"),
    Internal("_load_optimizer_and_scheduler", "transformers:Trainer", "overridden: the optimizer's state in pieces"),
    Internal("_save_optimizer_and_scheduler", "transformers:Trainer", "overridden: the optimizer's state in pieces"),
    Internal("_wrap_model", "transformers:Trainer", "overridden: fully sharded and shared rows"),
    # torch.
    Internal("_C", "torch", "see the names below"),
    Internal("_construct_storage_from_data_pointer", "torch._C", "results of a graph without a hold on its memory"),
    Internal("_foreach_mul", "torch", "copies of many gradients at once"),
    Internal("_forward_hooks_always_called", "torch.nn:Module", "a hook is taken off"),
    Internal("_get_cublas_allow_bf16_reduced_precision_reduction", "torch._C", "products of a captured step"),
    Internal("_get_cublas_allow_fp16_reduced_precision_reduction", "torch._C", "products of a captured step"),
    Internal("_len_torch_function_stack", "torch._C", "modes that see every function"),
    Internal("_buffers", "torch.nn:Module", "tensors that a captured step reads"),
    Internal("_modules", "torch.nn:Module", "recorders in the places of blocks"),
    Internal("_active_collector", "transformers.utils.output_capturing", "outputs of single layers are asked for"),
    Internal("output_capturing", "transformers.utils", "outputs of single layers are asked for"),
    Internal("_gradient_checkpointing_func", MODEL, "checkpointing in a captured step saves no random state"),
    Internal("_apply", "torch.nn:Module", "overridden: parameters that stay float32"),
    Internal("_are_functorch_transforms_active", "torch._C", "transforms"),
    Internal("_assert_async", "torch", "checks on the device without synchronisation"),
    Internal("_autograd", "torch._C", "hooks on saved tensors"),
    Internal("_backward_hooks", "torch.nn.modules.module", "a module with hooks is called"),
    Internal("_backward_pre_hooks", "torch.nn.modules.module", "a module with hooks is called"),
    Internal("_backward_cls", "torch.autograd:Function", "its backward pass is found without a look-up by name"),
    Internal("_base", "torch:Tensor", "views share one saved tensor"),
    Internal("_c10d_functional", "torch.ops", "collectives that the compiler knows, started before they are awaited"),
    Internal("_c10d_functional_autograd", "torch.ops", "the exchange between ranks that softmax layers differentiate"),
    Internal("_cdata", "torch:UntypedStorage", "identity of memory"),
    Internal("_compiled_call_impl", "torch.nn:Module", "a compiled module captures no step"),
    Internal("_current_level", "torch.autograd.forward_ad", "forward-mode derivatives"),
    Internal("_dynamo", "torch", "addresses that captured steps rely on"),
    Internal("_foreach_copy_", "torch", "states of all layers in one launch"),
    Internal("_foreach_zero_", "torch", "states of all layers in one launch"),
    Internal("_forward_hooks", "torch.nn.modules.module", "a module with hooks is called"),
    Internal("_forward_pre_hooks", "torch.nn.modules.module", "a module with hooks is called"),
    Internal("_forward_pre_hooks_with_kwargs", "torch.nn.modules.module", "our hook is removed again"),
    Internal("_functorch", "torch._C", "transforms"),
    Internal("_global_forward_hooks", "torch.nn.modules.module", "hooks on all modules"),
    Internal("_global_forward_pre_hooks", "torch.nn.modules.module", "hooks on all modules"),
    Internal("_has_any_global_hook", "torch.nn.modules.module", "hooks on all modules"),
    Internal("_make", "typing:NamedTuple", "a record from a list of its fields"),
    Internal("_ops", "torch", "operators by name in recomputation under torch.compile"),
    Internal("_parameters", "torch.nn.modules.module", "a layer's own parameters, replaced or looked up"),
    Internal(
        "_reinterpret", "triton.experimental.gluon.language:shared_memory_descriptor", "shared memory in two forms"
    ),
    Internal("_top_saved_tensors_default_hooks", "torch._C._autograd", "hooks on saved tensors"),
    Internal("_version", "torch:Tensor", "whether a tensor was written to"),
    # Native architectures.
    Internal("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "transformers.models.auto.modeling_auto", "which have a model"),
    Internal("_load_from_checkpoint", "transformers:Trainer", "overridden: renamed weights are loaded too"),
    Internal("_experts_implementation", "transformers.configuration_utils", "set back after serving's steps"),
    Internal("_can_set_attn_implementation", MODEL, "overridden: a swapped class answers as its original"),
    Internal("_can_set_experts_implementation", MODEL, "whether a model has experts; overridden as the one above"),
)

# Public by their documentation, or set by us on objects of others.
NOT_INTERNAL = {
    *("_asdict", "_fields", "_replace"),  # of named tuples
    "_getframe",  # of sys
    "_dynamo_marked_constant",  # documented by torch for functions
    *("_delta_hook", "_no_weight_decay", "_original_properties"),  # ours
}


def _version(text: str) -> Version:
    return Version(Version(text).base_version)


def _exists(internal: Internal) -> bool:
    try:
        owner = pkgutil.resolve_name(internal.owner)
    except (ImportError, AttributeError):
        return False
    if hasattr(owner, internal.name):
        return True
    try:
        return internal.name in inspect.getsource(owner)
    except (OSError, TypeError):
        return False


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: internal.name)
def test_the_installed_version_has_it(internal: Internal) -> None:
    if internal.owner.startswith("triton"):
        pytest.importorskip("triton")
    elif not internal.owner.startswith("torch") and _version(transformers.__version__) < _version(internal.since):
        pytest.skip(f"transformers has it since {internal.since}")
    assert _exists(internal), (
        f"{internal.owner} of transformers {transformers.__version__} has no {internal.name} ({internal.purpose})"
    )


def test_a_missing_name_is_noticed() -> None:
    assert not _exists(Internal("_no_such_name", MODEL, ""))
    assert not _exists(Internal("_fsdp_plan", "transformers.no_such_module", ""))


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name != "_"


def _defined(tree: ast.AST) -> set[str]:
    """Functions, classes, variables, and attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return names


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _internals_in(tree: ast.AST, defined_anywhere: set[str]) -> Iterator[str]:
    here = _defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            of_ours = _is_self(node.value) or ast.unparse(node.value) == "super()"
            if node.attr not in (defined_anywhere if of_ours else here):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(name.value) and name.value not in defined_anywhere:
                yield name.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
            yield from (alias.name for alias in node.names if not hasattr(transformers, alias.name))


def _overridden() -> Iterator[tuple[str, type]]:
    """Private members of our classes that a base class of transformers or torch has as well."""
    for found in pkgutil.walk_packages(deltazoo.__path__, "deltazoo."):
        if found.name.endswith("__main__") or found.name.startswith("deltazoo.serving.vllm"):  # a plugin of vLLM
            continue
        for cls in vars(importlib.import_module(found.name)).values():
            if inspect.isclass(cls) and cls.__module__.startswith("deltazoo."):
                yield from ((name, cls) for name in _overridden_by(cls))


def _overridden_by(cls: type) -> Iterator[str]:
    others: set[str] = set()
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] in ("transformers", "torch", "accelerate", "peft"):
            others.update(vars(base))
        elif base.__module__.startswith("deltazoo."):
            yield from (name for name in vars(base) if _is_private(name) and name in others)


LISTED = {internal.name for internal in INTERNALS} | NOT_INTERNAL


def test_every_use_in_src_is_listed() -> None:
    """Attributes with a leading underscore, and imports of names that `transformers` itself does not export.

    An attribute counts as ours if src defines its name: anywhere for `self.name`, in the same file for others. So the
    scan misses a foreign attribute that has the name of one of ours in that file; one whose name is put together, or
    stands in a list; public names with undocumented meaning; and methods that transformers calls by a public name.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    defined_anywhere = set().union(*map(_defined, trees.values()))
    unlisted = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in trees.items()
        for name in _internals_in(tree, defined_anywhere)
        if name not in LISTED
    }
    assert not unlisted, f"add to INTERNALS, or use a public name: {sorted(unlisted)}"


def test_every_overridden_member_is_listed() -> None:
    generated = {"_abc_impl", "_backward_cls"}  # by Python's abc and torch's autograd, for every class
    unlisted = {f"{cls.__qualname__}.{name}" for name, cls in _overridden() if name not in LISTED | generated}
    assert not unlisted, f"add to INTERNALS: {sorted(unlisted)}"


def test_the_list_has_no_name_that_src_stopped_using() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert not [internal.name for internal in INTERNALS if internal.name not in source]


def test_a_new_use_is_noticed() -> None:
    found = _internals_in(ast.parse("from transformers.modeling_utils import no_such\nmodel._secret = 1"), set())
    assert [*found] == ["no_such", "_secret"]
