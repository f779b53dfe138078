"""Reasons, in words, why the blocks of a training step may not be captured.

A graph repeats the work that the device was given during the capture. Everything else that Python does happens once, at
the capture. If that would matter, or if nobody knows, the step runs eagerly.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
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
from deltazoo.models.captured_training.blocks_state import HOOKS
from deltazoo.ops.autograd_modes import transforming

MOST_TOKENS = 32_768
"""Most tokens of a captured call. Larger calls keep a GPU busy anyway, and their graphs take much memory."""
_KNOWN_PACKAGES = ("deltazoo.", "torch.nn.", "transformers.", "peft.")
"""Packages whose modules do nothing in a training step but give work to the device. The modules of torch.distributed
and of torch's compiler do more."""


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
    if is_fsdp_managed_module(module):
        return "FSDP frees its parameters and gathers them elsewhere"
    if not all(_may_sleep(hook) for hooks in HOOKS for hook in getattr(module, hooks).values()):
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


def _may_sleep(hook: Any) -> bool:
    """Whether a hook is one of transformers, which does nothing unless outputs of single layers are asked for."""
    return getattr(hook, "__module__", "") == output_capturing.__name__


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
