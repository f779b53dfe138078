"""When the blocks of a training step may be captured: the reasons against it, in words, and what must stay as it is.

A graph repeats what the device was told while it was captured. Whatever else Python does happens once, at the capture.
Where that would matter, or where nobody knows, the step runs eagerly.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint
from transformers.utils import output_capturing

from deltazoo._report import report
from deltazoo.generation.static_cache import IMPLEMENTATIONS
from deltazoo.layers import DeltaRuleAttention
from deltazoo.ops.autograd_modes import transforming

__all__ = ["MOST_TOKENS", "Settings", "Weights", "checkpointing_of", "why_not_blocks", "why_not_now"]

MOST_TOKENS = 32_768
"""Of a captured call. Larger ones keep a GPU busy anyway, and their memory counts."""
_KNOWN_PACKAGES = ("deltazoo.", "torch.nn.", "transformers.", "peft.")
"""Packages whose modules do nothing in a training step but tell the device what to do. Those of torch.distributed and
of torch's compiler do more."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_not_now(x: Tensor) -> str | None:
    """Why a training step with these hidden states `[B, T, D]` must not run captured now; None if it may.

    Cheap: it looks at the state of the process, not at the model.
    """
    if type(x) is not Tensor:
        return f"the hidden states are a {type(x).__name__}"
    if x.shape[:-1].numel() > MOST_TOKENS:
        return f"more than {MOST_TOKENS:,} tokens keep the GPU busy anyway"
    if x.is_cuda and (torch.cuda.is_current_stream_capturing() or _launches_are_watched()):
        return "a graph of the whole step is being captured, or hooks watch launches of kernels"
    if torch.jit.is_tracing() or transforming() or is_in_torch_dispatch_mode() or torch._C._len_torch_function_stack():
        return "a function transform, a tracer, a dispatch mode or a default device is active"
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


def _launches_are_watched() -> bool:
    from deltazoo.ops.triton.launch import launches_are_watched

    return launches_are_watched()


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
    if not (kind.__module__.startswith(_KNOWN_PACKAGES) or isinstance(module, DeltaRuleAttention)):
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
        if x.requires_grad and not isinstance(x, nn.Parameter):
            return f"{name} requires a gradient and is no parameter"
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
        unique = {id(x): x for *_, x in self.places}
        self._tensors, self.parameters = list(unique.values()), [x for x in unique.values() if type(x) is nn.Parameter]
        self._addresses, self._form = self._read(Tensor.data_ptr), self._read(_FORM)

    def in_place(self) -> bool:
        """Whether all are where they were, so that a graph may read them; quick, since a step waits for it."""
        return self._read(Tensor.data_ptr) == self._addresses

    def same(self) -> bool:
        """Whether they are the same objects in the same places and of the same form, too."""
        holders, names, tensors = zip(*self.places, strict=True)
        moved = any(map(is_not, map(dict.get, holders, names), tensors))
        return not moved and self._read(_FORM) == self._form

    def versions(self) -> list[int]:
        """Numbers that rise when a parameter is changed in place."""
        return list(map(_VERSION, self.parameters))

    def _read(self, property_of: Callable[[Any], Any]) -> list[Any]:
        return list(map(property_of, self._tensors))


_FORM = attrgetter("requires_grad", "shape", "dtype")
_VERSION = attrgetter("_version")


class Settings:
    """What the modules of some blocks are: which, with which attributes, hooks and submodules.

    It is compared in every step, so by functions of Python that loop in C.

    Args:
        blocks: whose modules they are.
        config: of the model.
    """

    def __init__(self, blocks: Sequence[nn.Module], config: Any) -> None:
        attributes = [vars(module) for module in _modules(blocks)]
        self._config = vars(config)
        self._containers = [
            x
            for by in attributes
            for name, x in by.items()
            if name not in _OF_ALL_MODULES and isinstance(x, dict | list | set)
        ]
        self._nested = _copied([self._config, *self._containers])
        # Dictionaries compare values by identity first, and modules and most other objects only so.
        self._now = [*attributes, *[by[name] for by in attributes for name in ("_modules", *_HOOKS) if by[name]]]
        self._then = [dict(by) for by in self._now]
        registries = [by[name] for by in attributes for name in _REGISTRIES]
        self._registries, self._sizes = registries, list(map(len, registries))

    def same(self) -> bool:
        """Whether all of it is as it was."""
        try:
            alike = self._now == self._then or self._made_anew_alike()
            alike = alike and list(map(len, self._registries)) == self._sizes
        except RuntimeError:  # two tensors have been compared
            return False
        return alike and _copied([self._config, *self._containers]) == self._nested

    def _made_anew_alike(self) -> bool:
        """Whether all that differs is functions with the same options, as TRL's DPO makes them for every reference."""
        for now, then in zip(self._now, self._then, strict=True):
            if now.keys() != then.keys():
                return False
            for name, x in now.items():
                if x is not (y := then[name]) and x != y and _parts(x) != _parts(y):
                    return False
        self._then = [dict(by) for by in self._now]
        return True


_REGISTRIES = ("_parameters", "_buffers", "_modules", *_HOOKS)
_OF_ALL_MODULES = {*vars(nn.Module())}
_VALUES = {bool, int, float, str, torch.dtype, torch.device}


def _parts(value: Any) -> Any:
    """Function and options of a partial one; else the identity."""
    return (value.func, value.args, value.keywords) if isinstance(value, partial) else id(value)


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
