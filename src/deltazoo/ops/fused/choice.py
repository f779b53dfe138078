"""The choice of every fused function, kernel or torch, and the checks that all kernels share."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.ops.autograd_modes import refuse_transforms, transforming
from deltazoo.ops.backends import triton_interprets, triton_obstacle
from deltazoo.ops.dtypes import KERNEL_DTYPES

GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
"""The activations of output gates that a spec can name."""

FUSED_ACTIVATIONS = ("silu", "sigmoid")
"""The activations that the kernels know: those of the norm in training and of the rule in decoding."""

L2_NORM_EPS = 1e-6
"""Number added to the squared length in an L2 norm; kernels of keys and of the rule have it as a literal."""

MOST_COLUMNS = 8192
"""Longest rows of kernels that hold whole rows in registers: norms and keys."""

REFUSAL = ("a fused kernel", "set fused_kernels=False")
"""Arguments of `refuse_transforms` and `refuse_second_derivative`: the unsupported thing, and the advice."""


def takes_kernel(
    fused: bool | None, x: Tensor, *others: Tensor | None, columns: int = 1, trained: tuple[Tensor | None, ...] = ()
) -> bool:
    """Whether a Triton kernel computes a fused function, rather than torch.

    Args:
        fused: False: torch. True: a kernel. None: a kernel if one runs: on an NVIDIA GPU, in the kernels' dtypes,
            outside transforms of torch.func and forward mode; under Triton's interpreter, which only tests use, torch.
        x: the first input, `[..., D]`.
        others: further tensors that the kernel reads; None is skipped.
        columns: length of the rows that a program holds; at most `MOST_COLUMNS`.
        trained: inputs for which the kernel has no gradient: with None, torch computes if autograd records one of
            them. With True the caller refuses such a call itself.

    Raises:
        NotImplementedError: `fused` is True and no kernel runs.
        ValueError: tensors of several devices for a kernel.
    """
    if fused is False:
        return False
    if fused:
        _require(x, others, columns)
    else:
        if columns > MOST_COLUMNS or not _run_on(x):
            return False
        if trained and torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in trained):
            return False
    device = x.device
    for other in others:
        if other is None:
            continue
        if not _has_kernel_dtype(other):
            return False
        if other.device != device:
            raise ValueError(f"fused kernels take tensors of one device, got {device} and {other.device}")
    return True


def _run_on(x: Tensor) -> bool:
    """Whether kernels run on a tensor, with the modes that are active now."""
    return x.is_cuda and not transforming() and not triton_obstacle(x.device, x.dtype, 1, 1)


def _require(x: Tensor, others: tuple[Tensor | None, ...], columns: int) -> None:
    """Raise NotImplementedError if the kernels do not run; tensors without data pass, for compilers."""
    if x.device.type not in ("cuda", "meta") and not triton_interprets():
        raise NotImplementedError(f"fused kernels run on NVIDIA GPUs, not on {x.device.type}: leave fused_kernels off")
    for tensor in (x, *others):
        if tensor is not None and not _has_kernel_dtype(tensor):
            raise NotImplementedError(f"fused kernels take float32, bfloat16 and float16, not {tensor.dtype}")
    refuse_transforms(*REFUSAL)
    if columns > MOST_COLUMNS:
        raise NotImplementedError(
            f"this kernel takes rows of up to {MOST_COLUMNS}, not {columns}: leave fused_kernels off"
        )


def _has_kernel_dtype(x: Tensor) -> bool:
    """Whether kernels can read a tensor: of one of their dtypes, or of integers."""
    return x.dtype in KERNEL_DTYPES or not x.is_floating_point()
