"""Conditions of captured steps: reasons, in words, against a capture, and the state of blocks that a graph is good for.

A graph repeats the work that the device was given during the capture. Everything else that Python does happens once, at
the capture. If that would matter, or if nobody knows, the step runs eagerly. Every step compares the state of its
blocks with that at the capture and waits for the result, so the comparisons are functions of Python that loop in C.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint
from transformers.generation.utils import is_fsdp_managed_module
from transformers.utils import output_capturing

from deltazoo._report import report
from deltazoo.generation.static_cache import IMPLEMENTATIONS
from deltazoo.layers import DeltaRuleAttention
from deltazoo.ops.autograd_modes import transforming

MOST_TOKENS = 32_768
"""Most tokens of a captured call. Larger calls keep a GPU busy anyway, and their graphs take much memory."""
_KNOWN_PACKAGES = ("deltazoo.", "torch.nn.", "transformers.", "peft.")
"""Packages whose modules do nothing in a training step but give work to the device. The modules of torch.distributed
and of torch's compiler do more."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTRIES = ("_parameters", "_buffers", "_modules", *HOOKS)
_OF_ALL_MODULES = {*vars(nn.Module())}
_VALUES = {bool, int, float, str, torch.dtype, torch.device, type(None)}
_FORM = attrgetter("requires_grad", "dtype", "shape")


def why_not_now(x: Tensor) -> str | None:
    """Why a training step with these hidden states `[B, T, D]` must not run captured now; None if it may.

    It takes little time, since it looks at the state of the process, not at the model.
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
    layers = report(nn.ModuleList(blocks)).layers if device.type == "cuda" else ()
    return next((f"the operator runs on {x.backend}: {x.reason}" for x in layers if x.backend != "triton"), None)


def _why_not_module(module: Any, device: torch.device) -> str | None:
    kind: Any = type(module)
    if not (kind.__module__.startswith(_KNOWN_PACKAGES) or isinstance(module, DeltaRuleAttention)):
        return f"it is a {kind.__module__}.{kind.__qualname__}, which may do more than a graph repeats"
    # Hooks of transformers do nothing unless outputs of single layers are asked for.
    registered = (hook for hooks in HOOKS for hook in getattr(module, hooks).values())
    if any(getattr(hook, "__module__", "") != output_capturing.__name__ for hook in registered):
        return "it has hooks"
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return "its forward pass has been replaced"
    softmax: Any = module.config._attn_implementation if getattr(module, "is_causal", False) else IMPLEMENTATIONS[0]
    if softmax not in IMPLEMENTATIONS:
        return f"softmax attention runs {softmax!r}, not one of {', '.join(IMPLEMENTATIONS)}"
    for name, x in chain(module._parameters.items(), module._buffers.items(), vars(module).items()):
        if isinstance(x, Tensor) and (reason := _why_not_tensor(x, device)):
            return f"{name} {reason}"
    return checkpointing_of(module)[1]


def _why_not_tensor(x: Tensor, device: torch.device) -> str | None:
    if x.device != device:
        return f"is on {x.device} and the hidden states on {device}"
    if type(x) not in (nn.Parameter, Tensor, nn.Buffer) or hasattr(x, "ds_id"):
        return f"is no plain tensor but a {type(x).__name__}"
    if x.requires_grad and not isinstance(x, nn.Parameter):
        return "requires a gradient and is no parameter"
    return None


def checkpointing_of(module: nn.Module) -> tuple[dict[str, Any] | None, str | None]:
    """Options of the gradient checkpointing of a module, None without; and the reason why it cannot be captured.

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


def modules_of(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks and the modules below them, each once."""
    return list({id(module): module for block in blocks for module in block.modules()}.values())


class BlocksState:
    """The state of blocks at the time when this was made.

    Attributes:
        places: dictionary, name and tensor of each parameter, buffer and tensor among the attributes of a module.
        parameters: the parameters, each once.
        gathered: all of them under FSDP, which frees them and gathers them elsewhere in every step; else none.
    """

    def __init__(self, blocks: Sequence[nn.Module], config: Any) -> None:
        attributes = [vars(module) for module in modules_of(blocks)]
        holders = [by for held in attributes for by in (held["_parameters"], held["_buffers"], held)]
        self.places = [(by, name, x) for by in holders for name, x in by.items() if isinstance(x, Tensor)]
        self._tensors = list({id(x): x for *_, x in self.places}.values())
        self.parameters = [x for x in self._tensors if type(x) is nn.Parameter]
        divided = any(map(is_fsdp_managed_module, modules_of(blocks)))
        self.gathered = self.parameters if divided else []
        self._fixed = [x for x in self._tensors if not divided or type(x) is not nn.Parameter]
        self._addresses, self._forms = list(map(Tensor.data_ptr, self._fixed)), self._read_forms()
        # Dictionaries compare values by identity first, and modules and most other objects have no other comparison.
        # Tensors of one element compare by value, others raise.
        self._scalars = [(by, name, x) for by, name, x in self.places if x.numel() < 2]
        registries = [held[name] for held in attributes for name in _REGISTRIES]
        self._empty = [registry for registry in registries if not registry]
        self._now = [*attributes, *filter(None, registries)]
        self._then = list(map(dict, self._now))
        values = chain.from_iterable(map(dict.items, attributes))
        containers = [x for name, x in values if name not in _OF_ALL_MODULES and isinstance(x, dict | list | set)]
        self._nested = [vars(config), *containers]
        self._nested_then = _copied(self._nested)

    def in_place(self) -> bool:
        """Whether all tensors that a graph reads are where they were."""
        return list(map(Tensor.data_ptr, self._fixed)) == self._addresses

    def same(self) -> bool:
        """Whether everything but the addresses is as it was."""
        try:
            alike = self._now == self._then or self._made_anew_alike()
        except RuntimeError:  # two tensors have been compared
            return False
        alike = alike and not any(self._empty) and all(by[name] is x for by, name, x in self._scalars)
        return alike and _copied(self._nested) == self._nested_then and self._read_forms() == self._forms

    def _made_anew_alike(self) -> bool:
        """Whether only functions have been made anew, with the same options, as TRL's DPO does for each reference."""
        for now, then in zip(self._now, self._then, strict=True):
            if now.keys() != then.keys():
                return False
            for name, x in now.items():
                if x is not (y := then[name]) and x != y and _parts(x) != _parts(y):
                    return False
        self._then = list(map(dict, self._now))
        return True

    def _read(self, property_of: Callable[[Any], Any]) -> list[Any]:
        return list(map(property_of, self._tensors))

    def _read_forms(self) -> tuple[list[Any], ...]:
        return self._read(_FORM), self._read(Tensor.stride)

    @contextmanager
    def with_parameters(self, others: Mapping[int, Any]) -> Iterator[None]:
        """A context in which other tensors, by the parameters' ids, stand in the places of parameters."""
        places = [(by, name, by[name], others[id(x)]) for by, name, x in self.places if id(x) in others]
        for by, name, _, other in places:
            by[name] = other
        try:
            yield
        finally:
            for by, name, before, _ in places:
                by[name] = before


def _parts(value: Any) -> Any:
    """Function and options of a `functools.partial`; the identity of anything else."""
    return (value.func, value.args, value.keywords) if isinstance(value, partial) else id(value)


def _copied(value: Any) -> Any:
    """A copy of a container that holds plain values themselves, and the identity of everything else."""
    kind = type(value)
    if kind in _VALUES:
        return value
    if isinstance(value, dict):
        return {key: _copied(x) for key, x in value.copy().items()}
    return [_copied(x) for x in list(value)] if isinstance(value, list | tuple | set) else id(value)
