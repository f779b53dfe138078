"""Where a captured step would do what the ordinary loop does: what stands against it in a model, and what a step of an
earlier call relied on.

A graph repeats what the device was told while it was captured. Whatever Python does besides happens once: hooks, counts
on the host, choices made from attributes.
"""

import weakref
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.generation.utils import is_fsdp_managed_module

from deltazoo.generation.step_capture import graphs_run_on

__all__ = ["Fingerprint", "why_not_this_model"]

_INTERNAL = {*vars(nn.Module()), "forward", "_captured_steps"} - {"training"}
"""What every module may have; what counts of it is compared, or stands against captured steps, by itself."""
_IMPLEMENTATIONS = ("sdpa", "eager")
"""Of softmax attention; others read masks that grow, or that are no tensors."""


def why_not_this_model(model: Any) -> str | None:
    """Why the steps of a model should run one by one as it is now; None if they may be captured."""
    device = model.device
    if not graphs_run_on(device):
        return f"the model is on {device}, where there are no CUDA graphs"
    if model.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on, and keeps copies of weights"
    if torch.compiler.is_compiling():
        return "it is being compiled"
    if getattr(model, "hf_quantizer", None) is not None:
        return "the model is quantised"
    if (getattr(model, "_tp_size", None) or 1) > 1 or is_fsdp_managed_module(model):
        return "the model is divided among processes"
    return _odd_tensor(model, device) or _odd_module(model)


def _odd_tensor(model: nn.Module, device: torch.device) -> str | None:
    for name, x in _tensors(model):
        if x.device != device:
            return f"{name} is on {x.device} and the model on {device}"
        if type(x) not in (nn.Parameter, Tensor) or hasattr(x, "ds_id"):
            return f"{name} is no plain tensor but a {type(x).__name__}"
    return None


def _odd_module(model: nn.Module) -> str | None:
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "there are forward hooks for all modules"
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(not _is_ours(hook) for hook in hooks):
            return f"{name or 'the model'} has a forward hook"
        if "forward" in vars(module) or module._compiled_call_impl is not None:
            return f"the forward pass of {name or 'the model'} has been replaced"
    if "prepare_inputs_for_generation" in vars(model):
        return "prepare_inputs_for_generation has been replaced"
    config: Any = model.config
    softmax = [m for m in model.modules() if getattr(m, "is_causal", False)]
    if softmax and config._attn_implementation not in _IMPLEMENTATIONS:
        return f"softmax attention runs {config._attn_implementation!r}, not one of {', '.join(_IMPLEMENTATIONS)}"
    return None


def _is_ours(hook: Any) -> bool:
    """Whether all that a hook does for one token happens on the device."""
    function = getattr(hook, "func", hook)  # of a partial
    return getattr(function, "__module__", "").startswith("deltazoo.")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


class Fingerprint:
    """What a captured step relies on: the model's modules, their settings, and where weights lie. `==` compares.

    Weights changed where they lie (training, `load_state_dict`, merged adapters) are no other fingerprint: a graph
    reads them anew.
    """

    def __init__(self, model: Any) -> None:
        modules = list(model.modules())
        self._modules = [weakref.ref(module) for module in modules]
        self._rest = (
            [(x.data_ptr(), x.dtype, x.shape, x.stride()) for _, x in _tensors(model)],
            [_settings(vars(module)) for module in modules],
            _settings(vars(model.config)),
            torch.is_inference_mode_enabled(),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint) or len(self._modules) != len(other._modules):
            return False
        pairs = zip(self._modules, other._modules, strict=True)
        return all(a() is b() is not None for a, b in pairs) and self._rest == other._rest

    __hash__ = None  # type: ignore[assignment]


def _settings(values: Any) -> Any:
    """The plain values in a nest of lists, dicts and dataclasses, and where something else is."""
    if is_dataclass(values) and not isinstance(values, type | PreTrainedConfig):
        values = vars(values)
    if isinstance(values, dict):
        return {key: _settings(value) for key, value in values.items() if key not in _INTERNAL}
    if isinstance(values, list | tuple | set):
        return [_settings(value) for value in values]
    plain = isinstance(values, bool | int | float | str | torch.dtype | torch.device | None)
    return values if plain else type(values)
