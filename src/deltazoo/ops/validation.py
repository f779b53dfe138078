"""Checks of the operators' arguments. Every message says what was passed and what was expected.

Shapes, dtypes and devices are always checked. Values (the sign of `log_decay`, the entries of `cu_seqlens`) are always
checked on the CPU. On a GPU they are checked only inside `check_values()`, because the CPU must wait for the device to
read them.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from deltazoo.names import unknown
from deltazoo.ops.dtypes import KERNEL_DTYPES

_check_gpu_values = False
_warned_of_heads_first = False
_MANY_HEADS = 128
_ERASE_READS = ("decayed", "undecayed")
_FLOATS = (*KERNEL_DTYPES, torch.float64)


@contextlib.contextmanager
def check_values(enabled: bool = True) -> Iterator[None]:
    """A context in which the values of GPU tensors are checked too; each check makes the CPU wait for the device."""
    global _check_gpu_values
    previous, _check_gpu_values = _check_gpu_values, enabled
    try:
        yield
    finally:
        _check_gpu_values = previous


def check_tensor(name: str, x: object, *, required: bool = False) -> None:
    """Raise TypeError for anything but a tensor or, unless it is required, None."""
    if x is None and required:
        raise TypeError(f"{name} must be a tensor, got None")
    if x is not None and not isinstance(x, Tensor):
        raise TypeError(
            f"{name} must be a tensor, got {type(x).__name__}; torch.tensor({name}, device=...) makes one of a list"
        )


def check_scale(scale: object) -> None:
    """Raise TypeError for a tensor, ValueError for a number that is not finite."""
    if isinstance(scale, Tensor):
        raise TypeError("scale must be a number, got a tensor, which would get no gradient: multiply q by it instead")
    if scale is not None and not torch.compiler.is_compiling() and not math.isfinite(scale):  # type: ignore[arg-type]
        raise ValueError(f"scale must be finite, got {scale}")


def reads_undecayed(erase_reads: str) -> bool:
    """Whether the erase reads the state before the decay; ValueError for a name that is neither of the two."""
    if erase_reads not in _ERASE_READS:
        raise ValueError(unknown("erase_reads", erase_reads, _ERASE_READS))
    return erase_reads == "undecayed"


def warn_of_heads_first(q: Tensor) -> None:
    """Warn, once per process, if q has many heads and fewer tokens: it may be `[B, H, T, K]`."""
    global _warned_of_heads_first
    _, T, H, _ = q.shape
    if H > _MANY_HEADS and not torch.compiler.is_compiling() and T < H and not _warned_of_heads_first:
        _warned_of_heads_first = True
        warnings.warn(
            f"q of shape {tuple(q.shape)} is taken as [B, T, H, K]: {H} heads and {T} tokens. If it is [B, H, T, K], "
            "pass q.transpose(1, 2), and so for the other arguments",
            stacklevel=5,
        )


def check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    erase_key: Tensor | None,
    num_micro_steps: int,
    one_token: bool = False,
) -> None:
    """Raise ValueError unless shapes, dtypes and devices fit the contract of `delta_rule`; TypeError for a list.

    With `one_token` the contract is that of `delta_rule_step`, which needs a state.
    """
    state_name = "state" if one_token else "initial_state"
    for name, x in (("beta", beta), ("log_decay", log_decay)):
        check_tensor(name, x)
    check_tensor(state_name, initial_state, required=one_token)
    if not isinstance(num_micro_steps, int) or isinstance(num_micro_steps, bool) or num_micro_steps < 1:
        raise ValueError(f"num_micro_steps must be a whole number of at least 1, got {num_micro_steps!r}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions [B, T, heads, channels], got shape {tuple(x.shape)}")
        if x.dtype not in _FLOATS:
            raise ValueError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
    B, T, H, K = q.shape
    S = T * num_micro_steps
    if num_micro_steps == 1 and q.shape != k.shape:
        hint = "; several updates per token need num_micro_steps" if beta is not None and k.shape[1] > T else ""
        raise ValueError(
            f"q and k must have the same shape [B, T, H, K], got {tuple(q.shape)} and {tuple(k.shape)}{hint}"
        )
    if tuple(k.shape) != (B, S, H, K):
        raise ValueError(
            f"k must have shape ({B}, {S}, {H}, {K}) to match q of shape {tuple(q.shape)} with num_micro_steps="
            f"{num_micro_steps}, got {tuple(k.shape)}: all micro-steps of token 0, then all of token 1, ..."
        )
    HV, V = v.shape[2:]
    if v.shape[:2] != (B, S):
        raise ValueError(f"v must have shape ({B}, {S}, HV, V) to match k, got {tuple(v.shape)}")
    if H == 0 or HV == 0 or HV % H:
        raise ValueError(f"the number of value heads must be a positive multiple of the key heads, got {HV} and {H}")
    if K == 0 or V == 0:
        raise ValueError(f"head dimensions must be positive, got K={K} and V={V}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if erase_key is not None and (erase_key.shape != k.shape or erase_key.dtype != k.dtype):
        raise ValueError(
            f"erase_key must have the shape and dtype of k, {tuple(k.shape)} and {k.dtype}, got "
            f"{tuple(erase_key.shape)} and {erase_key.dtype}"
        )
    if beta is not None:
        _check_float("beta", beta, [(B, S, HV)], "to match k and v")
    if log_decay is not None:
        _check_float("log_decay", log_decay, [(B, T, HV), (B, T, HV, K)], "to match k and v")
    N = B
    if cu_seqlens is not None:
        check_boundaries(cu_seqlens, B)
        N = len(cu_seqlens) - 1
    if initial_state is not None:
        _check_float(state_name, initial_state, [(N, HV, K, V)], "[sequences, HV, K, V]")
    device = v.device
    for other in (q, k, erase_key, beta, log_decay, initial_state, cu_seqlens):
        if other is not None and other.device != device:
            tensors = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, state_name: initial_state}
            raise ValueError(_devices(**tensors, erase_key=erase_key, cu_seqlens=cu_seqlens))
    if one_token and T != 1:
        raise ValueError(f"a step takes one token (T = 1), got T = {T}; use delta_rule for more")


def check_boundaries(cu_seqlens: object, B: int) -> None:
    """Raise ValueError unless these may be boundaries of sequences packed into the one row of a batch."""
    check_tensor("cu_seqlens", cu_seqlens, required=True)
    assert isinstance(cu_seqlens, Tensor)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must have shape [N + 1] with N >= 1, got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if B != 1:
        raise ValueError(f"packed sequences (cu_seqlens) need batch size 1, got {B}: flatten the batch into one row")


def check_tensor_values(log_decay: Tensor | None, cu_seqlens: Tensor | None, T: int) -> None:
    """Raise ValueError for positive log-decay and a malformed `cu_seqlens`; reads tensors only where cheap."""
    if log_decay is not None and _readable(log_decay) and log_decay.numel():
        values = _value(log_decay.detach())
        if bool((values > 0).any()):  # the largest value is NaN if there is one
            largest = values[values > 0].max().item()
            raise ValueError(
                f"log_decay must be <= 0 (a natural logarithm of a factor in [0, 1]), got a value of {largest:g}"
            )
    if cu_seqlens is not None and _readable(cu_seqlens):
        bounds = _value(cu_seqlens).tolist()
        if bounds[0] != 0:
            raise ValueError(f"cu_seqlens must start at 0, got {bounds[0]}")
        if bounds[-1] != T:
            raise ValueError(f"cu_seqlens must end at the number of tokens, {T}, got {bounds[-1]}")
        for i, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            if stop < start:
                raise ValueError(f"cu_seqlens must not descend, got {start} then {stop} at positions {i} and {i + 1}")


def _readable(x: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False  # a traced program has no values yet
    return x.device.type == "cpu" or (_check_gpu_values and x.device.type != "meta")


def _value(x: Tensor) -> Tensor:
    """The tensor under the wrappers of torch.func: under vmap the tensor of the whole batch."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def _check_float(name: str, x: Tensor, shapes: list[tuple[int, ...]], explanation: str) -> None:
    """Raise ValueError unless x has one of the shapes and a dtype that is computed in float32 or float64."""
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))} {explanation}, got {tuple(x.shape)}")
    if x.dtype not in _FLOATS:
        raise ValueError(f"{name} must be a floating-point tensor, float32 wanted, got {x.dtype}")


def _devices(**tensors: Tensor | None) -> str:
    devices = ", ".join(f"{name} on {x.device}" for name, x in tensors.items() if x is not None)
    return f"all tensors must be on one device, got {devices}"
