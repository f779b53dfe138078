"""Norms and MLPs of transformers' own layers, by our kernels within a captured step.

Around the layers of a swapped or accelerated model are modules of its family. One of their RMSNorms takes six or seven
launches, with our kernel one, and of a step with one row launches are most of the time.

transformers has classes of its own for every family, nearly all with the same few forward passes. So a module is known
by the code of its forward pass, not by its class. Results differ from the module's own by rounding, of which there is
less: transformers rounds the norm before its weight, and SiLU before the product.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from deltazoo.ops import fused
from deltazoo.ops.fused import MOST_COLUMNS, takes_kernel
from deltazoo.ops.linear_maps import is_hooked

__all__ = ["LibraryModule", "block_parts", "is_row_norm", "is_swiglu", "joint_maps", "library_modules"]


def library_modules(model: nn.Module) -> "list[LibraryModule]":
    """The modules of transformers within a model that our kernels can compute."""
    found = ((module, _kernel_of(type(module))) for module in model.modules())
    return [LibraryModule(module, kernel) for module, kernel in found if kernel is not None]


class LibraryModule:
    """A module in our kernel, a part of a step, for calls that the kernel takes.

    Args:
        module: of transformers.
        kernel: computes its output; None: it does not take the module's options or the input.
    """

    def __init__(self, module: nn.Module, kernel: "_Kernel") -> None:
        self.module = module
        self._kernel = kernel

    def is_current(self) -> bool:
        """Whether the module has no hooks, and its forward pass has not been replaced."""
        return not is_hooked(self.module)

    def forwards(self) -> list[tuple[nn.Module, Callable[[Tensor], Tensor | None]]]:
        """The module with the function that computes its output."""
        return [(self.module, self._output)]

    def forget(self) -> None:
        """Nothing is kept."""

    def _output(self, x: Tensor) -> Tensor | None:
        return self._kernel(self.module, x) if not torch.is_grad_enabled() and takes_kernel(None, x) else None


def joint_maps(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of the linear maps that a known MLP of transformers applies to its input, in their order."""
    return ("gate_proj", "up_proj") if _kernel_of(kind) is _mlp else ()


def is_swiglu(module: nn.Module) -> bool:
    """Whether it is an MLP of transformers that computes what `deltazoo.layers.mlp.SwiGLU` does, biases aside."""
    return _kernel_of(type(module)) is _mlp and type(module.act_fn) in _SILU


def is_row_norm(module: nn.Module) -> bool:
    """Whether it is an RMSNorm of transformers with a plain weight."""
    return _kernel_of(type(module)) is _norm


def block_parts(kind: type[nn.Module]) -> tuple[str, ...]:
    """As `deltazoo.models.block.DeltaRuleBlock.step_parts` of a block of transformers; empty if it is another sum."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    is_known = kind.__module__.startswith("transformers.models.") and _code(kind) == _code(LlamaDecoderLayer)
    return ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp") if is_known else ()


_SILU = (nn.SiLU, SiLUActivation)
_Kernel = Callable[[Any, Tensor], Tensor | None]


def _norm(module: Any, x: Tensor) -> Tensor | None:
    fits = x.dtype == module.weight.dtype and x.shape[-1] <= MOST_COLUMNS
    return fused.rms_norm(x, module.weight, module.variance_epsilon, fused=True) if fits else None


def _norm_around_one(module: Any, x: Tensor) -> Tensor | None:
    """With a weight that is kept as its difference from one."""
    fits = x.shape[-1] <= MOST_COLUMNS
    return fused.rms_norm(x, 1 + module.weight.float(), module.eps, fused=True) if fits else None


def _mlp(module: Any, x: Tensor) -> Tensor | None:
    if type(module.act_fn) not in _SILU:
        return None
    gate, up = module.gate_proj(x), module.up_proj(x)
    alike = gate.dtype == up.dtype
    return module.down_proj(fused.swiglu(gate, up, fused=True) if alike else module.act_fn(gate) * up)


@cache
def _kernels() -> dict[tuple[Any, ...], _Kernel]:
    """By the code of the forward passes that they stand for."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    kernels = ((LlamaRMSNorm, _norm), (Olmo2RMSNorm, _norm), (Gemma2RMSNorm, _norm_around_one), (LlamaMLP, _mlp))
    return {_code(kind): kernel for kind, kernel in kernels}


def _kernel_of(kind: type[nn.Module]) -> _Kernel | None:
    is_of_transformers = kind.__module__.startswith("transformers.models.")
    return _kernels().get(_code(kind)) if is_of_transformers else None


def _code(kind: type[nn.Module]) -> tuple[Any, ...]:
    """What decides what a forward pass computes: instructions, constants and names, also of what norms call."""
    functions = (getattr(kind, name, None) for name in ("forward", "_norm"))
    codes = (getattr(inspect.unwrap(function), "__code__", None) for function in functions if function is not None)
    return tuple((x.co_code, x.co_consts, x.co_names) for x in codes if x is not None)
