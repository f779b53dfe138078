"""What every transformers model with delta-rule layers in it needs, our own models and swapped ones alike."""

from typing import ClassVar

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from deltazoo.layers import DeltaRuleAttention, ShortConvolution
from deltazoo.layers.initialization import short_conv_

__all__ = ["ModelWithDeltaLayers"]


class ModelWithDeltaLayers(PreTrainedModel):
    """Initialisation of delta-rule layers, and what transformers must not do to them."""

    # Quantisers leave these alone: a few rows each, and step sizes and decays suffer most from rounding. They ask with
    # names of modules, parameters and halves of a sequence, and match patterns from the start.
    gate_projections: ClassVar[tuple[str, ...]]
    # A recurrent state would have to travel between the ranks that share a sequence.
    _supports_context_parallel = False
    # Tokens can be taken back (DeltaRuleCacheLayer.crop), so assisted decoding works.
    _is_stateful = False

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
