"""Functions that check their arguments and run the fused kernels, imported by the first call.

Each is one pass over memory where plain torch takes several. They run where Triton runs; elsewhere they raise
NotImplementedError, as the operators do for a named backend that cannot run a call.
"""

import torch
from torch import Tensor

from deltazoo.names import unknown
from deltazoo.ops.backends import triton_interprets, triton_obstacle
from deltazoo.ops.dtypes import KERNEL_DTYPES
from deltazoo.ops.fused.kernels import L2_NORM_EPS, REFUSAL
from deltazoo.ops.transforms import records_gradients, refuse_transforms, transforming

__all__ = [
    "L2_NORM_EPS",
    "MOST_NORM_COLUMNS",
    "MOST_SUMMED_CHANNELS",
    "fused_decayed_sum",
    "fused_erase_gain",
    "fused_kernels_fit",
    "fused_rule_keys",
    "fused_scaled_key",
    "fused_short_conv",
    "fused_short_conv_step",
    "fused_short_convs",
    "fused_sigmoid_gate",
    "fused_softplus_decay",
    "fused_squared_norm",
    "fused_weighted_squares",
]

MOST_NORM_COLUMNS = 8192
"""The longest axis of the RMSNorm kernels: a program holds whole rows in registers."""

MOST_SUMMED_CHANNELS = 256
"""Of a head whose sum decays: a program has all of them, since the gradient of the decay sums over them."""


def fused_kernels_fit(x: Tensor, past: Tensor | None = None) -> bool:
    """Whether these kernels can run on `x`: a tensor on an NVIDIA GPU, in a dtype that the triton backend supports.

    False if the convolution's state `past` needs a gradient, under transforms of torch.func and in forward mode. Also
    false under Triton's interpreter on a CPU, which only tests use.
    """
    return (
        x.is_cuda
        and not records_gradients(past)
        and not transforming()
        and triton_obstacle(x.device, x.dtype, 1, 1) is None
    )


def fused_short_conv(
    x: Tensor,
    weight: Tensor,
    past: Tensor | None = None,
    *,
    sequence: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "silu",
    head_dim: int = 0,
) -> Tensor:
    """Causal depthwise convolution, SiLU, and the L2 norm of heads: `y = silu(sum_i w_i x_{t-i})`, then per head.

    Args:
        x: `[B, T, C]` float32, bfloat16 or float16.
        weight: `[C, W]`; the last tap belongs to the current token.
        past: `[N, C, W - 1]`, the inputs before each row or sequence, oldest first; zeros unless given. Not
            differentiable.
        sequence: `[T]` int64, which packed sequence each token belongs to, with B = 1.
        cu_seqlens: `[N + 1]`, their boundaries.
        activation: of the sum, "silu" or "identity".
        head_dim: channels per head, each head divided by `sqrt(|y|^2 + L2_NORM_EPS)`; 0: no norm.

    Returns:
        `[B, T, C]` in x's dtype, computed in float32.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or another dtype.
        ValueError: `past` needs a gradient, or tensors on several devices.
    """
    _require_triton(x, weight, past, sequence, cu_seqlens)
    if records_gradients(past):
        raise ValueError("the fused convolution gives no gradient to its state: detach it, or leave fused_kernels off")
    from deltazoo.ops.fused.kernels.short_conv_operator import short_conv

    return short_conv(x, weight, past, sequence, cu_seqlens, _is_silu(activation), head_dim)


def _is_silu(activation: str) -> bool:
    if activation not in ("silu", "identity"):
        raise ValueError(unknown("activation", activation, ("silu", "identity")))
    return activation == "silu"


def fused_short_convs(
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    *,
    sequence: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "silu",
    head_dims: tuple[int, int, int] = (0, 0, 0),
) -> tuple[Tensor, Tensor, Tensor]:
    """`fused_short_conv` of queries, keys and values, one function for autograd: the host has a third of the work.

    Args:
        inputs: three `[B, T, C_i]` float32, bfloat16 or float16.
        weights: three `[C_i, W]`.
        sequence, cu_seqlens, activation: as of `fused_short_conv`.
        head_dims: `head_dim` of each.

    Raises:
        NotImplementedError, ValueError: as `fused_short_conv`.
    """
    _require_triton(*inputs, *weights, sequence, cu_seqlens)
    from deltazoo.ops.fused.kernels.short_conv_operator import short_convs

    return short_convs(*inputs, *weights, sequence, cu_seqlens, _is_silu(activation), *head_dims)


def fused_short_conv_step(
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    window: Tensor,
    *,
    activation: str = "silu",
    head_dims: tuple[int, int] = (0, 0),
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """`fused_short_conv` for one token of queries, keys and values at once. No gradients: for inference.

    Args:
        inputs: three `[B, 1, C_i]` float32, bfloat16 or float16.
        weights: three `[C_i, W]`.
        window: `[B, C, S]`, the last S inputs before the token, S at least W - 1; concatenated, C the sum of the C_i;
            oldest first.
        activation: as of `fused_short_conv`.
        head_dims: `head_dim` of the first and of the second input, as of `fused_short_conv`; heads of both have one
            size.
        inplace: write the new window over `window`, which must be contiguous and in the inputs' dtype.

    Returns:
        The outputs concatenated, `[B, 1, C]` in the inputs' dtype, computed in float32, and the new window.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or another dtype.
        ValueError: a window that is too short or cannot be written in place, heads of two sizes, or tensors on several
            devices.
    """
    _require_triton(*inputs, *weights, window)
    if window.shape[-1] < weights[0].shape[-1] - 1:
        raise ValueError(
            f"{weights[0].shape[-1]} taps need a window of {weights[0].shape[-1] - 1} inputs before the token, got "
            f"{window.shape[-1]}"
        )
    if inplace and (window.dtype != inputs[0].dtype or not window.is_contiguous()):
        raise ValueError(
            f"a window updated in place must be contiguous and {inputs[0].dtype}, got {window.dtype} with strides "
            f"{window.stride()} for shape {tuple(window.shape)}"
        )
    if all(head_dims) and head_dims[0] != head_dims[1]:
        raise ValueError(f"heads of queries and keys must have one size, got head_dims={head_dims}")
    from deltazoo.ops.fused.kernels.short_conv_step import short_conv_step

    q_head, k_head = head_dims
    silu = _is_silu(activation)
    return short_conv_step(inputs, weights, window, silu=silu, q_head=q_head, k_head=k_head, inplace=inplace)


def fused_rule_keys(
    q: Tensor,
    k: Tensor,
    keys: str,
    *,
    gate: Tensor | None = None,
    parameters: tuple[Tensor, ...] = (),
    largest: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, write key and erase key of a rule that makes them of q and k, computed in float32.

    Args:
        q, k: `[B, T, H, K]`, alike, float32, bfloat16 or float16.
        keys: "query_share" (Q-Delta), "gated_query" (QED), "feedback" or "unit_feedback" (Comba): the formulas are in
            `deltazoo.ops.fused.kernels.rule_keys`.
        gate: before its sigmoid, `[B, T, H]` for "query_share", `[B, T, H, K]` for "gated_query".
        parameters: `[H]` each, theta for "gated_query"; c before its sigmoid and d for "feedback", "unit_feedback".
        largest: the upper end of the gate of "gated_query".

    Returns:
        Three `[B, T, H, K]` in the dtype of q and k; what the rule leaves as it is, the argument itself.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, another dtype, or a longer axis than
            `MOST_NORM_COLUMNS`.
        ValueError: unknown keys, tensors that do not fit each other or the keys, or on several devices.
    """
    _require_triton(q, k, gate, *parameters)
    _require_columns(q)
    wanted = {"query_share": (3, 0), "gated_query": (4, 1), "feedback": (None, 2), "unit_feedback": (None, 2)}
    if keys not in wanted:
        raise ValueError(f"keys must be one of {', '.join(wanted)}, got {keys!r}")
    axes, number = wanted[keys]
    fits = q.ndim == 4 and (q.shape, q.dtype) == (k.shape, k.dtype) and len(parameters) == number
    fits = fits and (gate is None if axes is None else gate is not None and gate.shape == q.shape[:axes])
    if not fits or any(x.shape != q.shape[2:3] for x in parameters):
        shapes = [None if x is None else tuple(x.shape) for x in (q, k, gate, *parameters)]
        raise ValueError(f"{keys!r} takes q and k [B, T, H, K], its gate and {number} parameters [H], got {shapes}")
    if gate is not None:
        _require_float(gate)
    from deltazoo.ops.fused.kernels.rule_keys import rule_keys

    p0, p1, *_ = *parameters, None, None
    new_q, new_k, erase_key = rule_keys(q, k, gate, p0, p1, keys, largest)
    return q if _is_absent(new_q) else new_q, k if _is_absent(new_k) else new_k, erase_key


def fused_weighted_squares(step: Tensor, k: Tensor) -> Tensor:
    """`sigmoid(step) k * k`, what a token adds to the second moment of its keys (PGDN, arXiv:2604.21100).

    Args:
        step: `[B, T, H]`. k: `[B, T, H, K]`. Each float32, bfloat16 or float16.

    Returns:
        `[B, T, H, K]` float32.

    Raises:
        NotImplementedError, ValueError: as `fused_scaled_key`.
    """
    _require_triton(k, step)
    _require_columns(k)
    _require_float(step)
    if k.ndim != 4 or step.shape != k.shape[:3]:
        raise ValueError(f"expected step [B, T, H] and k [B, T, H, K], got {tuple(step.shape)} and {tuple(k.shape)}")
    from deltazoo.ops.fused.kernels.moment_keys import weighted_squares

    return weighted_squares(step, k)


def fused_decayed_sum(x: Tensor, log_decay: Tensor) -> Tensor:
    """`y_t = exp(log_decay_t) y_{t-1} + x_t` over the tokens of each row, from zero.

    Args:
        x: `[B, T, H, K]` float32, K at most `MOST_SUMMED_CHANNELS`.
        log_decay: `[B, T, H]` float32, natural log.

    Returns:
        `[B, T, H, K]` float32.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or more channels.
        ValueError: tensors that do not fit each other, of another dtype, or on several devices.
    """
    _require_triton(x, log_decay)
    if x.ndim != 4 or log_decay.shape != x.shape[:3] or {x.dtype, log_decay.dtype} != {torch.float32}:
        raise ValueError(
            f"expected x [B, T, H, K] and log_decay [B, T, H] in float32, got {x.dtype} {tuple(x.shape)} and "
            f"{log_decay.dtype} {tuple(log_decay.shape)}"
        )
    if x.shape[-1] > MOST_SUMMED_CHANNELS:
        raise NotImplementedError(f"the kernel takes heads of up to {MOST_SUMMED_CHANNELS} channels, not {x.shape[-1]}")
    from deltazoo.ops.fused.kernels.decayed_sum import decayed_sum

    return decayed_sum(x, log_decay)


def fused_scaled_key(moment: Tensor, log_scale: Tensor, k: Tensor) -> Tensor:
    """`1.5^(-r / (1 + |r|)) k` with `r = log(moment + 1e-6) - log_scale` (PGDN, arXiv:2604.21100).

    Args:
        moment: `[B, T, H, K]` float32, not negative.
        log_scale: `[H]`.
        k: `[B, T, H, K]` float32, bfloat16 or float16.

    Returns:
        `[B, T, H, K]` in k's dtype, computed in float32.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, another dtype, or a longer axis than
            `MOST_NORM_COLUMNS`.
        ValueError: shapes that do not fit each other, or tensors on several devices.
    """
    _require_triton(k, moment, log_scale)
    _require_columns(k)
    _require_float(moment)
    if k.ndim != 4 or moment.shape != k.shape or log_scale.shape != k.shape[2:3]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (moment, log_scale, k))
        raise ValueError(f"expected moment and k [B, T, H, K] and log_scale [H], got {shapes}")
    from deltazoo.ops.fused.kernels.moment_keys import scaled_key

    return scaled_key(moment, log_scale, k)


def fused_squared_norm(k: Tensor) -> Tensor:
    """`|k|^2` over the last axis, in float32, of which step sizes are made; elements beyond 1e15 count as 1e15.

    Args:
        k: `[..., K]` float32, bfloat16 or float16.

    Returns:
        `[...]` float32.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, another dtype, or a longer axis than
            `MOST_NORM_COLUMNS`.
    """
    _require_triton(k)
    _require_columns(k)
    from deltazoo.ops.fused.kernels.key_products import squared_norm

    return squared_norm(k)


def fused_erase_gain(k: Tensor, erase_key: Tensor) -> Tensor:
    """`e . k` over the last axis, in float32, by which step sizes are bounded. It has no gradient.

    Args:
        k, erase_key: alike, `[..., K]` float32, bfloat16 or float16; they may be one tensor.

    Returns:
        `[...]` float32.

    Raises:
        NotImplementedError: as `fused_squared_norm`.
        ValueError: tensors of two dtypes or shapes, or on two devices.
    """
    _require_triton(k, erase_key)
    _require_columns(k)
    if (k.dtype, k.shape) != (erase_key.dtype, erase_key.shape):
        raise ValueError(
            f"k and erase_key must be alike, got {k.dtype} {tuple(k.shape)} and {erase_key.dtype} "
            f"{tuple(erase_key.shape)}"
        )
    from deltazoo.ops.fused.kernels.key_products import erase_gain

    return erase_gain(k.detach(), erase_key.detach())


def fused_sigmoid_gate(gate: Tensor, x: Tensor, largest: float = 1.0, *, root: bool = False) -> Tensor:
    """`largest * sigmoid(gate) * x`, computed in float32.

    Args:
        gate, x: of one shape, each float32, bfloat16 or float16.
        largest: the upper end of the factor.
        root: multiply by the root of the factor instead.

    Returns:
        In x's shape and dtype.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or another dtype.
        ValueError: tensors of two shapes or on two devices.
    """
    _require_triton(x, gate)
    _require_float(gate)
    if gate.shape != x.shape:
        raise ValueError(f"gate and x must have one shape, got {tuple(gate.shape)} and {tuple(x.shape)}")
    from deltazoo.ops.fused.kernels.sigmoid_gate import sigmoid_gate

    return sigmoid_gate(gate, x, largest, root)


def fused_softplus_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor, *, saturating: bool = False) -> Tensor:
    """`-exp(A_log) * softplus(a + dt_bias)`, see `deltazoo.ops.decay.softplus_decay`.

    Args:
        a: `[B, T, HV]` or `[B, T, HV, K]` float32, bfloat16 or float16.
        A_log: `[HV]`.
        dt_bias: `[HV]` or `[HV * K]`, as `a`.
        saturating: bounded by -5, as `deltazoo.ops.decay.saturating_decay` is.

    Returns:
        `log_decay` in a's shape, float32.

    Raises:
        NotImplementedError: no Triton, another device than an NVIDIA GPU, or another dtype.
        ValueError: shapes that do not fit each other, or tensors on several devices.
    """
    _require_triton(a, A_log, dt_bias)
    if a.ndim not in (3, 4) or A_log.shape != a.shape[2:3] or dt_bias.shape != (a.shape[2:].numel(),):
        raise ValueError(
            "expected a [B, T, HV] with A_log [HV] and dt_bias [HV], or a [B, T, HV, K] with A_log [HV] and "
            f"dt_bias [HV*K], got {tuple(a.shape)}, {tuple(A_log.shape)}, {tuple(dt_bias.shape)}"
        )
    from deltazoo.ops.fused.kernels.softplus_decay import softplus_decay

    return softplus_decay(a, A_log, dt_bias, saturating)


def _is_absent(result: Tensor | None) -> bool:
    """Whether an operator has no such result: None from a plain call, empty from `torch.ops`."""
    return result is None or result.ndim == 1


def _require_columns(x: Tensor) -> None:
    if x.shape[-1] > MOST_NORM_COLUMNS:
        raise NotImplementedError(
            f"this kernel takes rows of up to {MOST_NORM_COLUMNS}, not {x.shape[-1]}: leave fused_kernels off"
        )


def _require_triton(x: Tensor, *others: Tensor | None) -> None:
    if x.device.type not in ("cuda", "meta") and not triton_interprets():
        raise NotImplementedError(f"fused kernels run on NVIDIA GPUs, not on {x.device.type}: leave fused_kernels off")
    _require_float(x)
    refuse_transforms(*REFUSAL)
    for other in others:
        if other is not None and other.device != x.device:
            raise ValueError(f"fused kernels take tensors of one device, got {x.device} and {other.device}")


def _require_float(x: Tensor) -> None:
    if x.dtype not in KERNEL_DTYPES:
        raise NotImplementedError(f"fused kernels take float32, bfloat16 and float16, not {x.dtype}")
