"""When the blocks of a training step may be captured: the reasons against it, in words, and what must stay as it is.

A graph repeats what the device was told while it was captured. Whatever else Python does happens once, at the capture.
Where that would matter, or where nobody knows, the step runs eagerly.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint
from transformers.utils import output_capturing

from deltazoo._report import report
from deltazoo.generation.capture import graphs_run_on
from deltazoo.generation.conditions import IMPLEMENTATIONS
from deltazoo.layers import DeltaRuleAttention
from deltazoo.ops.autograd_modes import transforming

__all__ = ["MOST_TOKENS", "Settings", "Weights", "checkpointing_of", "why_not_blocks", "why_not_now"]

MOST_TOKENS = 32_768
"""Of a captured call. Larger ones keep a GPU busy anyway, and their memory counts."""
_KNOWN_PACKAGES = ("deltazoo", "torch", "transformers", "peft")
"""Packages whose modules do nothing in a training step but tell the device what to do."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_COMPARED_OTHERWISE = {*vars(nn.Module())} - {"training"}


def why_not_now(x: Tensor) -> str | None:
    """Why a training step with these hidden states `[B, T, D]` must not run captured now; None if it may.

    Cheap: it looks at the state of the process, not at the model.
    """
    if not graphs_run_on(x.device):
        return f"on {x.device} there are no CUDA graphs"
    if type(x) is not Tensor:
        return f"the hidden states are a {type(x).__name__}"
    if x.shape[:-1].numel() > MOST_TOKENS:
        return f"more than {MOST_TOKENS:,} tokens keep the GPU busy anyway"
    if transforming() or is_in_torch_dispatch_mode() or torch._C._len_torch_function_stack():
        return "a function transform, dispatch mode or default device is active"
    if torch.is_anomaly_enabled():
        return "anomaly detection is on"
    if torch.is_inference_mode_enabled():
        return "inference mode is on"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks on saved tensors are active, as of activation offloading"
    if output_capturing._active_collector.get():
        return "outputs of single layers are asked for"
    if _has_any_global_hook():
        return "there are hooks for all modules"
    return None


def why_not_blocks(blocks: Sequence[nn.Module], device: torch.device) -> str | None:
    """Why these blocks cannot be captured as they are; None if they can."""
    for block in blocks:
        for name, module in block.named_modules():
            if reason := _why_not_module(module, device):
                return f"{name or type(block).__name__}: {reason}"
    if device.type != "cuda":
        return None
    for layer in report(nn.ModuleList(blocks)).layers:
        if layer.backend != "triton":
            return f"the operator runs on {layer.backend}: {layer.reason}"
    return None


def _why_not_module(module: Any, device: torch.device) -> str | None:
    kind: Any = type(module)
    if kind.__module__.partition(".")[0] not in _KNOWN_PACKAGES and not isinstance(module, DeltaRuleAttention):
        return f"it is a {kind.__module__}.{kind.__qualname__}, which may do more than a graph repeats"
    for hooks in _HOOKS:
        if any(not _may_sleep(hook) for hook in getattr(module, hooks).values()):
            return "it has hooks"
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return "its forward pass has been replaced"
    softmax: Any = module.config._attn_implementation if getattr(module, "is_causal", False) else IMPLEMENTATIONS[0]
    if softmax not in IMPLEMENTATIONS:
        return f"softmax attention runs {softmax!r}, not one of {', '.join(IMPLEMENTATIONS)}"
    for name, x in _tensors(module):
        if x.device != device:
            return f"{name} is on {x.device} and the hidden states on {device}"
        if type(x) not in (nn.Parameter, Tensor, nn.Buffer) or hasattr(x, "ds_id"):
            return f"{name} is no plain tensor but a {type(x).__name__}"
    return checkpointing_of(module)[1]


def _may_sleep(hook: Any) -> bool:
    """Whether a hook does nothing unless outputs of single layers are asked for, as those of transformers."""
    return getattr(hook, "__module__", "") == output_capturing.__name__


def checkpointing_of(module: nn.Module) -> tuple[dict[str, Any] | None, str | None]:
    """Options by which a module runs under gradient checkpointing, None if it does not; and why it cannot be captured.

    transformers gives every block `torch.utils.checkpoint.checkpoint` with its options.
    """
    function: Any = getattr(module, "_gradient_checkpointing_func", None)
    if not getattr(module, "gradient_checkpointing", False) or function is None:
        return None, None
    if not isinstance(function, partial) or function.func is not checkpoint or function.args:
        return None, f"its gradient checkpointing is done by {function!r}"
    if function.keywords.get("use_reentrant", True):
        return None, "gradient checkpointing is reentrant: pass gradient_checkpointing_kwargs={'use_reentrant': False}"
    return function.keywords, None


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and other tensors that a module itself holds, by name."""
    for held in (module._parameters, module._buffers, vars(module)):
        for name, x in held.items():
            if isinstance(x, Tensor):
                yield name, x


class Weights:
    """All tensors that the modules of some blocks hold, at their addresses.

    Args:
        blocks: whose modules they are.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.places: list[tuple[dict[str, Any], str, Tensor]] = []
        for module in _modules(blocks):
            held: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
            self.places += [(by, name, x) for by in held for name, x in by.items() if isinstance(x, Tensor)]
        self._form = [(by, name, x, x.data_ptr(), x.requires_grad) for by, name, x in self.places]
        self.parameters = list({id(x): x for by, name, x in self.places if isinstance(x, nn.Parameter)}.values())

    def same(self) -> bool:
        """Whether each is the same object at the same address, with a gradient or without as before."""
        for by, name, x, address, requires_grad in self._form:
            if by.get(name) is not x or x.data_ptr() != address or x.requires_grad is not requires_grad:
                return False
        return True

    def versions(self) -> list[int]:
        """Numbers that rise when a parameter is changed in place."""
        return [x._version for x in self.parameters]


class Settings:
    """What the modules of some blocks are: which, with which attributes, hooks and submodules.

    Args:
        blocks: whose modules they are.
        config: of the model.
    """

    def __init__(self, blocks: Sequence[nn.Module], config: Any) -> None:
        self._config, self._config_then = vars(config), _copied(vars(config))
        # Flat lists, since this is compared in every step.
        self._modules = _modules(blocks)
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._containers: list[tuple[dict[str, Any], str, Any]] = []
        self._registries: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._sizes: list[tuple[dict[str, Any], int]] = []
        self._tensors: list[tuple[Tensor, Any, torch.dtype]] = []
        for module in self._modules:
            attributes = vars(module)
            own = [(attributes, name, x) for name, x in attributes.items() if name not in _COMPARED_OTHERWISE]
            self._values += own
            self._containers += [(*place, _copied(x)) for *place, x in own if isinstance(x, dict | list | set)]
            registries = [attributes[name] for name in (*_HOOKS, "_modules")]
            self._registries += [(registry, dict(registry)) for registry in registries]
            self._sizes += [(x, len(x)) for x in (attributes, module._parameters, module._buffers)]
            self._tensors += [(x, x.shape, x.dtype) for _, x in _tensors(module)]

    def same(self) -> bool:
        """Whether all of it is as it was."""
        for held, size in self._sizes:
            if len(held) != size:
                return False
        for attributes, name, then in self._values:
            now = attributes.get(name, _MISSING)
            if now is not then and not (type(now) is type(then) and type(now) in _COMPARED and now == then):
                return False
        for registry, before in self._registries:
            if (registry or before) and registry != before:
                return False
        for x, shape, dtype in self._tensors:
            if x.shape != shape or x.dtype != dtype:
                return False
        for attributes, name, then in self._containers:
            if _copied(attributes[name]) != then:
                return False
        return _copied(self._config) == self._config_then


_MISSING = object()
_VALUES = {bool, int, float, str, torch.dtype, torch.device}
_COMPARED = {*_VALUES, tuple}


def _copied(value: Any) -> Any:
    """Containers copied, in them plain values as they are and the identity of everything else."""
    kind = type(value)
    if kind in _VALUES or value is None:
        return value
    if isinstance(value, dict):
        return {key: _copied(x) for key, x in value.copy().items()}
    return [_copied(x) for x in list(value)] if isinstance(value, list | tuple | set) else id(value)


def _modules(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for block in blocks for module in block.modules()}.values())
