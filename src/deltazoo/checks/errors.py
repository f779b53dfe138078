"""Errors of the operator's results against float64, and the errors that plain torch makes on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deltazoo.ops.call import RuleCall
from deltazoo.ops.chunkwise import form

__all__ = ["RoundedProducts", "plain_torch", "relative_error"]


class RoundedProducts(TorchFunctionMode):
    """A mode in which matrix products round their operands to a dtype, as a matrix unit does, and accumulate wider."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.__matmul__, Tensor.matmul, torch.matmul):
            args = tuple(x.to(self.dtype).to(x.dtype) for x in args)
        return function(*args, **(kwargs or {}))


def plain_torch(
    inputs: Mapping[str, Tensor | None],
    d_output: Tensor,
    d_state: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    erase_reads: str = "decayed",
    num_micro_steps: int = 1,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Output, final state and every gradient of the chunk form in torch, with the operands of its products rounded.

    Args:
        inputs: q, k, v, beta, and log_decay, initial_state and erase_key where given, see `delta_rule`.
        d_output, d_state: gradients of the output and of the final state.
        cu_seqlens, erase_reads, num_micro_steps: see `delta_rule`.
        dtype: dtype to which operands are rounded; that of k unless given.

    Returns:
        `output`, `final_state`, and `d_<name>` of every input.
    """
    # The functions below the registered operators are called, since inside those a function mode has no effect.
    every = ("q", "k", "v", "beta", "log_decay", "initial_state", "erase_key")
    q, k, *others = (inputs.get(name) for name in every)
    assert q is not None and k is not None
    options = q.shape[-1] ** -0.5, None, erase_reads == "undecayed", num_micro_steps
    call = RuleCall.of((q, k, *others), cu_seqlens, options)
    with torch.no_grad(), RoundedProducts(dtype or k.dtype):
        output, state, *kept = form.forward.launch(*call)
        gradients = form.backward.launch(*call, *kept, d_output.to(output.dtype), d_state)
    names = [f"d_{name}" for name in every if inputs.get(name) is not None]
    return {"output": output, "final_state": state, **dict(zip(names, gradients, strict=True))}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm of the exact tensor, in float64; the absolute error if that is zero."""
    exact = exact.double()
    return float((found.double() - exact).norm()) / (float(exact.norm()) or 1.0)
