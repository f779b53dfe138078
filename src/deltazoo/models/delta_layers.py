"""What every transformers model with delta-rule layers in it needs, our own models and swapped ones alike."""

import re
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from deltazoo.layers import DeltaRuleAttention, ShortConvolution
from deltazoo.layers.initialization import short_conv_
from deltazoo.runtime import RuntimeOptions

__all__ = ["ModelWithDeltaLayers", "declare_gates", "refuse_undescribed"]

# What decides a layer's results besides its sizes, which loading checks, and its parameters.
_CHOICES = (
    "spec",
    "activation",
    "allow_neg_eigval",
    "neg_eigval",
    "decay_lower_bound",
    "num_micro_steps",
    "conv_size",
    "rope",
)


# They have a few rows each, and step sizes and decays suffer most from rounding.
_GATE_PROJECTIONS = ("b_proj", "a_proj", "f_proj")


def declare_gates(model: PreTrainedModel) -> None:
    """Tell transformers what is special about the gates of a model's delta-rule layers.

    * Parameters that a layer keeps in float32 stay so in a model of half precision.
    * What FSDP2 gathers together has one dtype. So in a model of half precision the modules inside a layer with such
      parameters are groups of their own, and what is left to the layer itself are those parameters.
    * Quantisers leave the projections of step sizes and decays alone. They read that off the list of modules that are
      float32 in a float16 model, so the projections are listed only in a model that is to be quantised.
    """
    float32, projections = set(), set()
    groups: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, DeltaRuleAttention):
            continue
        children = [child for child, _ in layer.named_children()]
        projections |= {f"{name}.{child}" for child in children if child in _GATE_PROJECTIONS}
        kept = {gate for gate in layer.float32_parameters if gate in layer._parameters}
        float32 |= kept
        if kept:
            layers = re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name)
            groups |= dict.fromkeys([*(f"{layers}.{child}" for child in children), layers], "free_full_weight")
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *float32}
    if getattr(model.config, "quantization_config", None) is not None:
        model._keep_in_fp32_modules = {*(model._keep_in_fp32_modules or ()), *projections}
    if model.config.dtype in (torch.bfloat16, torch.float16):
        model._fsdp_plan = {**groups, **(getattr(model, "_fsdp_plan", None) or {})}


def refuse_undescribed(layer: nn.Module, described: nn.Module, place: str) -> None:
    """Raise unless loading would make a layer that computes what `layer` computes.

    Args:
        layer: of a model that is to be saved.
        described: what the model's configuration makes in its place.
        place: the layer's name in the model, for the message.

    Raises:
        ValueError: another class, variant or option.
    """
    found, expected = _own_class(layer), _own_class(described)
    if found is not expected:
        raise ValueError(
            f"{place} is a {found.__module__}.{found.__qualname__}, and the configuration would load a "
            f"{expected.__qualname__} in its place, with other results. Register the layer class with a spec of its "
            "own name (deltazoo.register_variant), and make the model of a configuration with that mixer"
        )
    for name in _CHOICES:
        ours, theirs = getattr(layer, name, None), getattr(described, name, None)
        if ours != theirs:
            raise ValueError(
                f"{place} has {name}={ours!r}, and the configuration would load a layer with {theirs!r} in its place: "
                "change the configuration and make the model of it"
            )


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The module's class as written; FSDP2 puts one of torch's before it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed"))


class ModelWithDeltaLayers(PreTrainedModel):
    """Initialisation of delta-rule layers, and what transformers must not do to them."""

    # A recurrent state would have to travel between the ranks that share a sequence.
    _supports_context_parallel = False
    # Tokens can be taken back (DeltaRuleCacheLayer.crop), so assisted decoding works.
    _is_stateful = False

    def post_init(self) -> None:
        """As in transformers, and `declare_gates`."""
        super().post_init()
        declare_gates(self)

    runtime_options: ClassVar[tuple[str, ...]] = ("backend", "fused_kernels")
    """The runtime options that have something to act on."""
    runtime: RuntimeOptions = RuntimeOptions()
    """How the model runs now; `set_runtime` changes it."""

    def set_runtime(self, **options: Any) -> None:
        """Change how the model runs, in all its layers; nothing of it is saved.

        Args:
            options: values by name, see `deltazoo.runtime.RuntimeOptions`; None leaves the choice to the model. Options
                that are not named stay as they are.

        Raises:
            TypeError: an option that has nothing to act on in this model.
            ValueError: a value that an option does not have, or that a layer cannot follow; nothing is changed then.
        """
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
        """Remember the options of the whole model; what they act on is asked as well."""
        self.runtime = options

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        # For quantisers alone: a float16 model computes its gate projections in float16 like all others.
        plan = super()._get_dtype_plan(dtype)
        return {name: wide for name, wide in plan.items() if not name.endswith(_GATE_PROJECTIONS)}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # transformers asks only about modules with missing parameters of their own, so a convolution is filled here
        # although its layer knows how to as well.
        if isinstance(module, DeltaRuleAttention):
            module.init_parameters(self.config.initializer_range)
        elif isinstance(module, ShortConvolution):
            if not getattr(module.weight, "_is_hf_initialized", False):
                short_conv_(module.weight)
        else:
            super()._init_weights(module)
