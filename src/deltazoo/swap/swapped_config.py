"""The configuration of a swapped model, which records the options of every swapped layer, and layers built from it."""

from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig

from deltazoo.models.config_keys import AutoMapConfig, offer_lora_targets, without_runtime_options
from deltazoo.runtime import RUNTIME_OPTIONS
from deltazoo.spec import get_rule
from deltazoo.swap.drop_in_layer import drop_in_class
from deltazoo.swap.families import ModelFamily
from deltazoo.swap.swapped_attention import SwappedAttention

__all__ = ["SwappedConfig", "build_swapped_attention", "recorded_layers"]


class SwappedConfig(AutoMapConfig):
    """What the configuration of a swapped model adds to the original configuration class."""

    model_type: ClassVar[str]
    original_model_type: ClassVar[str]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As transformers documents it; runtime options, which older versions saved, are left out with a warning."""
        layers = config_dict.get("delta_layers")
        if layers:
            found = {name: value for options in layers.values() for name, value in options.items()}
            without_runtime_options(found)  # warns once for all layers
            layers = {index: _without_old_options(options) for index, options in layers.items()}
            config_dict = {**config_dict, "delta_layers": layers}
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain values."""
        # PEFT asks for this dictionary just before it looks up default targets, and may be imported later than we are.
        offer_lora_targets(self.model_type, like=self.original_model_type)
        return super().to_dict()


def _without_old_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a layer without those that older versions recorded and that do not act."""
    options = {name: value for name, value in options.items() if name not in RUNTIME_OPTIONS}
    if not options.get("use_short_conv", True):
        options.pop("conv_size", None)
    return options


def recorded_layers(config: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    """Options of the swapped layers among those that run, by number (JSON has strings for numbers)."""
    if not config.delta_layers:
        raise ValueError(
            f"a {type(config).__name__} without delta_layers describes no model; swap_attention writes them"
        )
    layers = {int(index): options for index, options in config.delta_layers.items()}
    # from_pretrained(..., num_hidden_layers=n) keeps the first n layers, and so does early exit for a while.
    return {index: options for index, options in layers.items() if index < config.num_hidden_layers}


def build_swapped_attention(
    family: ModelFamily, config: PreTrainedConfig, index: int, options: dict[str, Any], teacher: nn.Module | None = None
) -> SwappedAttention:
    """The module for one slot, from what the configuration records; parameters start as in the rule's paper."""
    options = dict(options)
    rope, rule = options.pop("rope"), get_rule(options.pop("variant"), options.pop("revision", 1))
    delta = drop_in_class(rule)(
        rule, config.hidden_size, layer_idx=index, initializer_range=config.initializer_range, **options
    )
    return SwappedAttention(delta, family, index, rope=rope, teacher=teacher)
