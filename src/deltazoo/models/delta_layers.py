"""What every transformers model with delta-rule layers in it needs, our own models and swapped ones alike."""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from deltazoo.layers import DeltaRuleAttention, ShortConvolution
from deltazoo.layers.initialization import short_conv_
from deltazoo.runtime import RuntimeOptions

__all__ = ["ModelWithDeltaLayers", "float32_names", "refuse_undescribed"]

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


def float32_names(model: nn.Module) -> set[str]:
    """Names of the parameters that the model's delta-rule layers keep in float32."""
    layers = (module for module in model.modules() if isinstance(module, DeltaRuleAttention))
    return {name for layer in layers for name in layer.float32_parameters}


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

    # Quantisers leave these alone: a few rows each, and step sizes and decays suffer most from rounding. They ask with
    # names of modules, parameters and halves of a sequence, and match patterns from the start.
    gate_projections: ClassVar[tuple[str, ...]]
    # A recurrent state would have to travel between the ranks that share a sequence.
    _supports_context_parallel = False
    # Tokens can be taken back (DeltaRuleCacheLayer.crop), so assisted decoding works.
    _is_stateful = False

    def post_init(self) -> None:
        """As in transformers; besides, what the layers declare stays in float32."""
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), *float32_names(self)}
        super().post_init()

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
        self.runtime = options  # type: ignore[assignment]

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        # For quantisers alone: a float16 model computes its gate projections in float16 like all others.
        plan = super()._get_dtype_plan(dtype)
        return {name: wide for name, wide in plan.items() if name not in self.gate_projections}

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
