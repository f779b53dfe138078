"""Short causal convolution with SiLU and, per head, an L2 norm: one pass over memory, forward and backward.

    z_t = sum_i w_i x_{t-i}      s = z * sigmoid(z)  or z      y = s  or, per head,  s / sqrt(|s|^2 + eps)

Inputs before a row, or before a packed sequence, come from its state. The backward pass keeps only the inputs.
The kernels of whole sequences are in `short_conv_kernels`, that of one token in `short_conv_step`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.names import unknown
from deltazoo.ops.autograd_modes import records_gradients
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.fused.choice import takes_kernel
from deltazoo.ops.fused.norms import l2_norm
from deltazoo.ops.fused.short_conv_kernels import short_convs
from deltazoo.ops.recompute import recomputable


def short_convolution(
    x: Tensor,
    weight: Tensor,
    past: Tensor | None = None,
    *,
    sequence: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "silu",
    head_dim: int = 0,
    fused: bool | None = None,
) -> Tensor:
    """A causal depthwise convolution, SiLU, and the L2 norm of heads: `y = silu(sum_i w_i x_{t-i})`, then per head.

    Args:
        x: `[B, T, C]`.
        weight: `[C, W]` or `[C, 1, W]`; the last tap belongs to the current token.
        past: `[N, C, W - 1]`, the inputs before each row or sequence, oldest first; zeros unless given. The kernel
            gives it no gradient.
        sequence: `[T]` int64, the number of each token's packed sequence, with B = 1.
        cu_seqlens: `[N + 1]`, boundaries of these sequences.
        activation: activation of the sum, "silu" or "identity".
        head_dim: channels per head, each head divided by `sqrt(|y|^2 + L2_NORM_EPS)`; 0: no norm.

    Returns:
        `[B, T, C]` in x's dtype, computed in float32 (float64 stays).

    Raises:
        ValueError: a `past` for a kernel that needs a gradient.
    """
    silu = is_silu(activation)
    if x.numel() and takes_kernel(fused, x, weight, past, sequence, cu_seqlens, trained=(past,)):
        if records_gradients(past):
            raise ValueError(
                "the fused convolution gives no gradient to its state: detach it, or leave fused_kernels off"
            )
        past = None if past is None else past.to(x.dtype)
        return recomputable(
            short_convs, x, None, None, weight, None, None, past, sequence, cu_seqlens, silu, head_dim, True
        )[0]
    if past is not None and sequence is None and x.shape[1] == 1:
        y, _ = convolve_window(past, x, weight, silu)
        return unit_heads(y, head_dim)
    return recomputable(_in_torch, x, weight, past, sequence, cu_seqlens, silu, head_dim)


def _in_torch(
    x: Tensor,
    weight: Tensor,
    past: Tensor | None,
    sequence: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    head_dim: int,
) -> Tensor:
    if past is None:
        number = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        before = x.new_zeros(number, weight.shape[-1] - 1, x.shape[2])
    else:
        before = past.transpose(1, 2).to(x.dtype)
    total = causal_sum(x, weight, before, sequence, cu_seqlens)
    return unit_heads((F.silu(total) if silu else total).to(x.dtype), head_dim)


def short_convolutions(
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    past: Tensor | None = None,
    *,
    sequence: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "silu",
    head_dims: tuple[int, int, int] = (0, 0, 0),
    fused: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three results of `short_convolution` for queries, keys and values.

    If they are of one kind, one launch and one function of autograd compute them, in a third of the host's time.

    Args:
        inputs: three `[B, T, C_i]`.
        weights: three `[C_i, W]` or `[C_i, 1, W]`.
        past: `[N, C, W - 1]`, that of the three concatenated along the channels; zeros unless given.
        sequence, cu_seqlens, activation, fused: see `short_convolution`.
        head_dims: `head_dim` of each input.

    Raises:
        ValueError: see `short_convolution`.
    """
    kernel = takes_joint_kernel(inputs, weights, head_dims, fused, past, sequence, cu_seqlens)
    if kernel and not records_gradients(past) and not torch.compiler.is_compiling():
        options = is_silu(activation), head_dims[0], head_dims[2] == head_dims[0]
        past = None if past is None else past.to(inputs[0].dtype)
        return recomputable(short_convs, *inputs, *weights, past, sequence, cu_seqlens, *options)
    pasts = (None,) * 3 if past is None else past.split([x.shape[2] for x in inputs], 1)
    packing = {"sequence": sequence, "cu_seqlens": cu_seqlens}
    first, second, third = (
        short_convolution(x, weight, past, **packing, activation=activation, head_dim=head_dim, fused=fused)
        for x, weight, past, head_dim in zip(inputs, weights, pasts, head_dims, strict=True)
    )
    return first, second, third


def takes_joint_kernel(
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    head_dims: tuple[int, int, int],
    fused: bool | None,
    *others: Tensor | None,
) -> bool:
    """Whether one launch of a kernel computes all three; `others` are further tensors that it reads."""
    alike = inputs[0].numel() and _alike(inputs, weights, head_dims)
    return bool(alike) and takes_kernel(fused, *inputs, *weights, *others)


def _alike(inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], head_dims: tuple[int, int, int]) -> bool:
    """Whether one launch can compute all three: tensors of one kind, heads of one size, equal norms of q and k."""
    # Lists, since the compiler of torch 2.15 takes a length in a set for a constant, and would compile for each.
    kinds = [(x.dtype, x.shape[:2], w.dtype, w.shape[-1]) for x, w in zip(inputs, weights, strict=True)]
    q_head, k_head, v_head = head_dims
    return kinds == kinds[:1] * len(kinds) and q_head == k_head and v_head in (0, q_head)


def is_silu(activation: str) -> bool:
    """Whether the activation is "silu" rather than "identity"; ValueError for any other."""
    if activation not in ("silu", "identity"):
        raise ValueError(unknown("activation", activation, ("silu", "identity")))
    return activation == "silu"


def unit_heads(y: Tensor, head_dim: int) -> Tensor:
    """y `[B, T, C]` with each head of `head_dim` channels divided by its L2 norm; y itself for 0."""
    return l2_norm(y.unflatten(2, (-1, head_dim)), fused=False).flatten(2) if head_dim else y


def convolve_window(past: Tensor, x: Tensor, weight: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """The convolution of one token `[B, 1, C]` per row: a product with the window, a third of the operations of shifts.

    Returns:
        The activated output `[B, 1, C]`, and the new past `[B, C, W - 1]`, a view of the window.
    """
    window = torch.cat([past.to(x.dtype), x.transpose(1, 2)], dim=2)
    total = (at_least_float32(window) * at_least_float32(weight).flatten(1)).sum(2)
    return (F.silu(total) if silu else total).to(x.dtype)[:, None], window[..., 1:]


def causal_sum(
    x: Tensor, weight: Tensor, past: Tensor, sequence: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The result of `depthwise_sum` for a batch whose rows or packed sequences each have a past.

    Args:
        x, weight, sequence, cu_seqlens: see `short_convolution`.
        past: `[N, W - 1, C]` in x's dtype, the inputs before each row or packed sequence, oldest first.

    Returns:
        `[B, T, C]` in float32 (float64 stays).
    """
    if sequence is None or cu_seqlens is None:
        return depthwise_sum(torch.cat([past, x], dim=1), weight)
    # In one long row with the past of each sequence before it, no tap can reach another sequence.
    number, width, _ = past.shape
    begins = cu_seqlens[:-1].long() + width * torch.arange(number, device=x.device)
    outputs = torch.arange(x.shape[1], device=x.device) + width * sequence

    history = x.new_empty(x.shape[1] + width * number, x.shape[2])
    past_rows = begins[:, None] + torch.arange(width, device=x.device)
    history = history.index_copy(0, past_rows.flatten(), past.flatten(0, 1))
    history = history.index_copy(0, outputs + width, x[0])
    return depthwise_sum(history[None], weight).index_select(1, outputs)


def depthwise_sum(history: Tensor, weight: Tensor, positions: Tensor | None = None) -> Tensor:
    """`sum_j w_j x_{t-j}` per channel, as shifted products in float32.

    In training on a CPU these take two thirds of nn.Conv1d's time.

    Args:
        history: `[B, W - 1 + T, C]`, the W - 1 inputs before the first token, then the T inputs.
        weight: see `short_convolution`.
        positions: `[B, T]` integer, position of each token in its document, from 0: no tap reaches past its beginning.
            None if every row is one document.

    Returns:
        `[B, T, C]` in float32 (float64 stays).
    """
    history = at_least_float32(history)
    taps = at_least_float32(weight).flatten(1).T.contiguous()
    last, num_tokens = len(taps) - 1, history.shape[1] - len(taps) + 1
    total = _shifted(history, 0, num_tokens, last, positions) * taps[0]
    for i in range(1, len(taps)):
        total = torch.addcmul(total, _shifted(history, i, num_tokens, last - i, positions), taps[i])
    return total


def _shifted(history: Tensor, start: int, num_tokens: int, lag: int, positions: Tensor | None) -> Tensor:
    x = history[:, start : start + num_tokens]
    return x if positions is None or lag == 0 else x.masked_fill((positions < lag)[..., None], 0)
