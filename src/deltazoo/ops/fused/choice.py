"""The one choice of every fused function, kernel or torch, and the checks that all kernels share."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.ops.autograd_modes import refuse_transforms, transforming
from deltazoo.ops.backends import triton_interprets, triton_obstacle
from deltazoo.ops.dtypes import KERNEL_DTYPES

__all__ = ["FUSED_ACTIVATIONS", "GATE_ACTIVATIONS", "L2_NORM_EPS", "MOST_COLUMNS", "REFUSAL", "takes_kernel"]

GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
"""The activations of output gates that a spec can name."""

FUSED_ACTIVATIONS = ("silu", "sigmoid")
"""Those that the kernels know, of the norm in training and of the rule in decoding."""

L2_NORM_EPS = 1e-6
"""Added to the squared length of a head whose L2 norm divides it; kernels of keys and of the rule hold a literal."""

MOST_COLUMNS = 8192
"""The longest axis of kernels that hold whole rows in registers: norms and keys."""

REFUSAL = ("a fused kernel", "set fused_kernels=False")
"""Arguments of `refuse_transforms` and `refuse_second_derivative`: what is unsupported, and what to do instead."""


def takes_kernel(
    fused: bool | None, x: Tensor, *others: Tensor | None, columns: int = 1, trained: tuple[Tensor | None, ...] = ()
) -> bool:
    """Whether a Triton kernel computes what a fused function gives, rather than torch.

    Args:
        fused: False: torch. None: a kernel where one runs: on an NVIDIA GPU, in the kernels' dtypes, outside transforms
            of torch.func and forward mode; under Triton's interpreter, which only tests use, torch. True: a kernel.
        x: the first input, `[..., D]`.
        others: what the kernel reads besides; None is skipped.
        columns: length of the rows that a program holds; at most `MOST_COLUMNS`.
        trained: tensors among the inputs whose gradient the kernel does not give: with None, torch computes where
            autograd records one of them. With True the caller refuses such a call in its own words.

    Raises:
        NotImplementedError: `fused` is True where no kernel runs.
        ValueError: a kernel is to take tensors of several devices.
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
    """Whether kernels run on this tensor here and now."""
    return x.is_cuda and not transforming() and not triton_obstacle(x.device, x.dtype, 1, 1)


def _require(x: Tensor, others: tuple[Tensor | None, ...], columns: int) -> None:
    """NotImplementedError where the kernels do not run; tensors without data pass, for compilers."""
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
    """Whether kernels read such a tensor: of their dtypes, or of integers."""
    return x.dtype in KERNEL_DTYPES or not x.is_floating_point()
