"""Swapped models inside vLLM: vLLM's models with our layers in place of some or all of their attention.

vLLM's class of the family computes everything else. `__getattr__` makes a class when vLLM asks for it by name.
"""

from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import IsAttentionFree, IsHybrid
from vllm.model_executor.models.utils import WeightsMapper

from deltazoo.layers import DeltaRuleAttention
from deltazoo.serving.vllm import PURE
from deltazoo.serving.vllm.own_models import PagedModel, share_of
from deltazoo.serving.vllm.paged_layer import MakeLayer, PagedLayer
from deltazoo.swap.families import FAMILIES
from deltazoo.swap.layer import build_swapped_attention
from deltazoo.swap.models import recorded_layers

__all__: list[str] = []


class _Slot(PagedLayer):
    """A delta-rule layer in place of vLLM's attention; it takes the same arguments and keeps the rotary embedding."""

    def __init__(self, make: MakeLayer, vllm_config: VllmConfig, prefix: str, rotary_emb: Any) -> None:
        super().__init__(make, vllm_config, prefix)
        self.rotary_emb = rotary_emb
        form: Any = self.layer.step_form
        if rotary_emb is not None and form is not None and form.keys == "scaled":
            self.rule = None  # the kernel that scales keys applies no rotary embedding

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Mix tokens at positions `[T]`."""
        if self.rotary_emb is None:
            return super().forward(hidden_states)
        halves = self.rotary_emb.cos_sin_cache[positions].to(hidden_states.dtype).chunk(2, dim=-1)
        cos, sin = (torch.cat([x, x], dim=-1) for x in halves)
        return super().forward(hidden_states, (cos, sin))


class _Swapped(PagedModel):
    """A swapped model: the code that is added to vLLM's class of the family."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        model: Any = self
        config, context = vllm_config.model_config.hf_config, vllm_config.compilation_config.static_forward_context
        self.slots: dict[str, _Slot] = {}
        swapped = recorded_layers(config)
        for index, make in self.linear_layers(config).items():
            block, name = model.model.layers[index], f"model.layers.{index}.self_attn"
            for replaced in [x for x in context if x.startswith(f"{name}.")]:
                del context[replaced]
            rotary_emb = block.self_attn.rotary_emb if swapped[index]["rope"] else None
            block.self_attn = _Slot(make, vllm_config, name, rotary_emb)
            self.slots[name] = block.self_attn
        self.hf_to_vllm_mapper = model.hf_to_vllm_mapper | WeightsMapper(orig_to_new_substr={".delta.": "."})  # LoRA's
        self.packed_modules_mapping = {**model.packed_modules_mapping, **self.paged_layers()[0].packed}

    @staticmethod
    def linear_layers(config: Any) -> dict[int, MakeLayer]:
        """Functions that make the swapped layers, by index of the layer."""

        def make(index: int, options: dict[str, Any], ranks: int) -> DeltaRuleAttention:
            family = FAMILIES[config.original_model_type]
            return build_swapped_attention(family, config, index, share_of(options, ranks)).delta

        return {i: partial(make, i, options) for i, options in recorded_layers(config).items()}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a swapped model's checkpoint: the swapped layers here, the rest by the family's class."""
        ours: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in self.slots}

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, x in self.complete(weights):
                slot, is_ours, rest = name.partition(".delta.")
                if is_ours:
                    ours[slot].append((rest, x))
                else:
                    yield name, x

        loaded: set[str] = super().load_weights(others())  # type: ignore[misc]
        for name, slot in self.slots.items():
            loaded |= {f"{name}.{parameter}" for parameter in slot.load_weights(ours[name])}
        return loaded


@cache
def _swapped_class(name: str) -> type[Any]:
    original: Any = ModelRegistry.models[name.removeprefix(PURE).removeprefix("Deltazoo")].load_model_cls()
    kind: type[Any] = IsAttentionFree if name.startswith(PURE) else IsHybrid
    members = {"__module__": __name__, "__doc__": f"{original.__name__} with delta-rule layers."}
    return type(name, (_Swapped, original, kind), members)


def __getattr__(name: str) -> type[nn.Module]:
    """The class of that name, for vLLM; made on the first call."""
    if not name.endswith("ForCausalLM"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _swapped_class(name)
