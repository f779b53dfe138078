"""The base class of transformers models with delta-rule layers: our own models and swapped ones."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path, PureWindowsPath
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file

from deltazoo.layers import DeltaRuleAttention, ShortConvolution
from deltazoo.models.captured_training import forget_captured
from deltazoo.names import nearest, unknown
from deltazoo.ops import ContextParallel
from deltazoo.runtime import FORMER_OPTIONS, RuntimeOptions

_OF_DOWNLOADS = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of `from_pretrained` that select a file of a repository."""

GATE_PROJECTIONS = (
    *("b_proj", "a_proj", "f_proj"),
    *("gk_proj", "erase_b_proj", "lamb_proj", "a_atk_proj", "b_atk_proj"),  # each of one rule
)
"""Projections of step sizes and decays. Quantisers leave them alone: they are small, and rounding harms them most."""


def declare_gates(model: PreTrainedModel) -> None:
    """Tell transformers which parameters of a model's delta-rule layers have a dtype of their own.

    * Parameters and buffers that a layer keeps in float32 stay float32 in a model of half precision.
    * FSDP2 gathers parameters in groups of one dtype. In a model of half precision, each module inside a layer with
      float32 parameters becomes a group, and the group of the layer itself holds those parameters.
    * Quantisers leave the projections of step sizes and decays alone. They read the list of modules that are float32 in
      a float16 model, so that list has the projections only in a model that is to be quantised.
    """
    float32, projections = set(), set()
    groups: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, DeltaRuleAttention):
            continue
        children = [child for child, _ in layer.named_children()]
        projections |= {f"{name}.{child}" for child in children if child in GATE_PROJECTIONS}
        kept = {gate for gate in layer.float32_parameters if gate in layer._parameters}
        float32 |= {*kept, *layer.float32_buffers}
        if kept:
            layers = re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name)
            groups |= dict.fromkeys([*(f"{layers}.{child}" for child in children), layers], "free_full_weight")
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *float32}
    if getattr(model.config, "quantization_config", None) is not None:
        model._keep_in_fp32_modules = {*(model._keep_in_fp32_modules or ()), *projections}
    if model.config.dtype in (torch.bfloat16, torch.float16):
        model._fsdp_plan = {**groups, **(getattr(model, "_fsdp_plan", None) or {})}


class SafetensorsOnly(PreTrainedModel):
    """A `PreTrainedModel` that loads from safetensors files alone, because reading a pickle can run code."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | None, *args: Any, **kwargs: Any
    ) -> Self:
        """A model from safetensors files; see transformers.

        Raises:
            ValueError: an argument or an index of shards names pickled weights, or the index names a file outside the
                checkpoint's folder. Nothing has been read then.
            OSError: there is no safetensors file.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False asks for pickled weights, which are never read: leave it out")
        path = pretrained_model_name_or_path
        if path is not None and os.path.isfile(path) and not os.fspath(path).endswith(".safetensors"):
            raise ValueError(f"{path} is no safetensors file; pickled weights are never read")
        if path is not None:
            _check_shards(_shards_of(path, kwargs))
        return super().from_pretrained(path, *args, **{**kwargs, "use_safetensors": True})

    @staticmethod
    def _load_pretrained_model(  # type: ignore[override]
        model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, **kwargs: Any
    ) -> Any:
        # Further files may come from adapters, the model below an adapter, or an index that a config.json names.
        _check_shards((getattr(load_config, "sharded_metadata", None) or {}).get("weight_map", {}).values())
        _check_shards(Path(file).name for file in checkpoint_files or ())
        load = super(SafetensorsOnly, type(model))._load_pretrained_model
        return load(model, state_dict, checkpoint_files, load_config, **kwargs)


def _shards_of(path: str | os.PathLike, options: dict[str, Any]) -> Iterable[Any]:
    """Names of the shards in the index that a folder or a repository on the Hub may have."""
    stem, end = SAFE_WEIGHTS_INDEX_NAME.rsplit(".", 1)
    variant = options.get("variant")
    name = SAFE_WEIGHTS_INDEX_NAME if variant is None else f"{stem}.{variant}.{end}"
    download = {key: options[key] for key in _OF_DOWNLOADS if options.get(key) is not None}
    try:
        index = cached_file(os.fspath(path), name, **download)
    except OSError:  # no index, or out of reach: transformers reports it
        return ()
    return () if index is None else json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()


def _check_shards(names: Iterable[Any]) -> None:
    """Raise ValueError unless these are names of safetensors files in the checkpoint's folder."""
    for name in names:
        parts = PureWindowsPath(str(name))  # it knows the separators and roots of all systems
        if not str(name).endswith(".safetensors") or parts.anchor or ".." in parts.parts:
            raise ValueError(
                f"{name!r} is named as a file of the model's weights: pickled weights are never read, nor are files "
                "outside the checkpoint's folder; only safetensors files in it are"
            )


class ModelWithDeltaLayers(SafetensorsOnly):
    """Initialisation, dtypes and runtime options of delta-rule layers in a transformers model."""

    # transformers' own context parallelism knows softmax attention alone; ours is deltazoo.context_parallel.
    _supports_context_parallel = False
    deltazoo_context: ContextParallel | None = None
    """The ranks that share every row, as `deltazoo.context_parallel` sets them."""
    _is_stateful = True  # transformers then refuses assisted decoding, which takes tokens back

    runtime_options: ClassVar[tuple[str, ...]] = ("backend", "fused_kernels", "captured_training")
    """The runtime options that this model has."""
    runtime: RuntimeOptions = RuntimeOptions()
    """The present runtime options; `set_runtime` changes them."""

    def post_init(self) -> None:
        """Finish the construction as transformers does, and call `declare_gates`."""
        super().post_init()
        declare_gates(self)

    def set_runtime(self, **options: Any) -> None:
        """Change runtime options in all layers; they are not saved with the model.

        Args:
            options: values by name, see `deltazoo.runtime.RuntimeOptions`; None leaves the choice to the model. Options
                that are not named stay as they are.

        Raises:
            TypeError: an option that this model does not have.
            ValueError: a value that an option does not have, or that a layer cannot run with; nothing is changed then.
        """
        keys = [field.name for field in fields(self.config)]
        for name in options:  # from_pretrained passes on what is no key of the configuration, misspelt keys too
            key = nearest(name, [*self.runtime_options, *keys])
            if name not in (*self.runtime_options, *FORMER_OPTIONS) and key in keys:
                message = unknown("runtime option", name, self.runtime_options)
                raise TypeError(f"{message}; did you mean the configuration key {key!r}?")
        before, after = self.runtime, self.runtime.changed(options, self.runtime_options)
        layers: list[Any] = [module for module in self.modules() if hasattr(module, "use_runtime")]
        try:
            for layer in layers:
                layer.use_runtime(after)
        except ValueError:
            for layer in layers:
                layer.use_runtime(before)
            raise

    def use_runtime(self, options: RuntimeOptions) -> None:
        """Record the options; modules on which they act have a method of the same name."""
        self.runtime = options
        if options.captured_training is False:
            forget_captured(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        # torch moves and casts weights by this method; graphs of training steps read the old ones, and hold memory.
        forget_captured(self)
        return super()._apply(*args, **kwargs)

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        # `declare_gates` lists the projections for quantisers alone. A float16 model computes them in float16.
        plan = super()._get_dtype_plan(dtype)
        return {name: wide for name, wide in plan.items() if not name.endswith(GATE_PROJECTIONS)}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # transformers calls this for modules whose own parameters a checkpoint lacks. So a convolution is initialised
        # here although its layer initialises it too.
        if isinstance(module, DeltaRuleAttention):
            module.init_parameters(self.config.initializer_range)
        elif isinstance(module, ShortConvolution):
            if not getattr(module.weight, "_is_hf_initialized", False):
                module.initialize_(module.weight)
        else:
            super()._init_weights(module)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A context of evaluation mode, after which every module has its former mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
