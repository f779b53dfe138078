"""Kernels of Liger (arXiv:2410.10989), for what models do between layers: norms, SwiGLU, and the loss.

The extra `fast` installs them (`pip install '.[fast]'` in a checkout). They run on GPUs. A call without the package or
elsewhere is refused.
"""

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from deltazoo.ops.backends import triton_interprets
from deltazoo.ops.dtypes import KERNEL_DTYPES
from deltazoo.ops.fused.loss import IGNORED, require_label_per_row
from deltazoo.ops.transforms import refuse_second_derivative, refuse_transforms

__all__ = ["liger_add_rms_norm", "liger_linear_cross_entropy", "liger_rms_norm", "liger_swiglu"]

# Nothing is added to the weight. Liger's name for norms computed in float32 with one rounding at the end, as ours are.
_NORM_OPTIONS = (0.0, "gemma")
# Whether Liger's norms write their input's gradient over their output's, which others may also use.
_IN_PLACE = False


def liger_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean x^2 + eps) * weight` over the last axis of `[..., D]`, in x's dtype, computed in float32.

    Raises:
        NotImplementedError: Liger is not installed; another device than a GPU; another dtype than float32, bfloat16
            and float16.
    """
    function = _function("rms_norm", "LigerRMSNormFunction", x)
    return _with_one_derivative(function.apply(x, weight, eps, *_NORM_OPTIONS, _IN_PLACE))


def liger_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual` as `liger_rms_norm` computes it, and the sum itself, in one pass each way.

    The results have the dtype that torch gives the sum.

    Raises:
        NotImplementedError: see `liger_rms_norm`.
    """
    function = _function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", x)
    dtype = torch.promote_types(x.dtype, residual.dtype)  # the kernel would give both results the dtype of x
    normalized, total = function.apply(x.to(dtype), residual.to(dtype), weight, eps, *_NORM_OPTIONS, _IN_PLACE)
    return _with_one_derivative(normalized), _with_one_derivative(total)


def liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`. The gradients are written over `gate` and `up`, which autograd is told.

    Raises:
        NotImplementedError: see `liger_rms_norm`.
        RuntimeError: in a second backward pass.
    """
    function = _function("swiglu", "LigerSiLUMulFunction", gate)
    return _with_one_backward((function if torch.compiler.is_compiling() else _SwiGLU).apply(gate, up))


def liger_linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As `deltazoo.ops.fused.linear_cross_entropy`, but the forward pass computes the gradients, too.

    Raises:
        NotImplementedError: see `liger_rms_norm`.
        ValueError: as many labels as rows are needed.
        RuntimeError: in a second backward pass.
    """
    function = _function("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", x)
    require_label_per_row(x, labels)
    if torch.is_grad_enabled() and weight.requires_grad and not x.requires_grad:
        x = x.detach().requires_grad_()  # otherwise the weight would get no gradient
    # In the order of its arguments: no bias and no class weights; no z-loss, label smoothing or softcap; the weight's
    # gradient is summed in float32.
    options = (None, None, IGNORED, 0.0, 0.0, "sum", None, False, torch.float32)
    return _with_one_backward(function.apply(x, weight, labels, *options)[0])


class _SwiGLU(torch.autograd.Function):
    """SwiGLU with Liger's kernels. Liger's own autograd function overwrites saved tensors without telling autograd."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        kernel = _function("swiglu", "swiglu_forward", gate)
        gate, up, product = kernel(gate.contiguous(), up.contiguous())
        ctx.save_for_backward(gate, up)
        return product

    @staticmethod
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gradients = _function("swiglu", "swiglu_backward", gate)(gate, up, d_product.contiguous())
        increment_version((gate, up))
        return gradients


def _function(module: str, name: str, x: Tensor) -> Any:
    """The function or autograd function `name` of `liger_kernel.ops.MODULE`, if it can run on `x`."""
    if x.device.type != "cuda" and not triton_interprets():
        raise NotImplementedError(f"Liger's kernels run on GPUs, not on {x.device.type}: leave liger off")
    if x.dtype not in KERNEL_DTYPES:
        raise NotImplementedError(f"Liger's kernels take float32, bfloat16 and float16, not {x.dtype}: leave liger off")
    refuse_transforms("a kernel of Liger's", "leave liger off")
    try:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)  # noqa: TID251
    except ModuleNotFoundError as error:
        missing = (error.name or "liger_kernel").partition(".")[0]
        raise NotImplementedError(
            f"Liger's kernels need {missing}, which is not installed: pip install '.[fast]' in a checkout of deltazoo, "
            "or leave liger off"
        ) from error


def _with_one_derivative(result: Tensor) -> Tensor:
    """Refuse second derivatives: autograd does not record Liger's backward kernels."""
    if result.requires_grad and not torch.compiler.is_compiling():  # compiled graphs have none either
        result.register_hook(_refuse_second_derivative)
    return result


def _refuse_second_derivative(gradient: Tensor) -> None:
    refuse_second_derivative("a kernel of Liger's", "leave liger off")


def _with_one_backward(result: Tensor) -> Tensor:
    """Refuse a second backward pass through `result`: the first overwrites what it would read."""
    if result.requires_grad:
        result.register_hook(_Once())
    return _with_one_derivative(result)


class _Once:
    def __init__(self) -> None:
        self.passed = False

    def __call__(self, gradient: Tensor) -> None:
        if self.passed:
            raise RuntimeError("Liger's kernels allow one backward pass (no second with retain_graph): leave liger off")
        self.passed = True
