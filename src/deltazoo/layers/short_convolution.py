"""Short causal depthwise convolutions of queries, keys and values, with a state, for padded and packed sequences."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.layers.sequences import WHOLE_ROWS, PackedSequences, RightPaddedSequences, Sequences, SharedSequences
from deltazoo.layers.state import StateAccess, is_decoding_step
from deltazoo.ops import fused as fused_ops
from deltazoo.ops.context.exchange import last_tokens, tokens_before
from deltazoo.ops.linear_maps import PLAIN_WEIGHTS, is_hooked
from deltazoo.ops.recompute import recomputable

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "identity": lambda x: x}


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of queries, keys and values, before they are split into heads: "silu" or "identity"."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, _ACTIVATIONS))}, got {name!r}")
    return _ACTIVATIONS[name]


def last_inputs(inputs: Sequence[Tensor], past: Tensor, sequences: Sequences) -> Tensor:
    """The last `width` inputs of each row or sequence, together with those before it.

    Args:
        inputs: `[B, T, channels]` each, arranged by `sequences`; C is the sum of their channels.
        past: `[N, width, C]` in their dtype, the inputs before each row or packed sequence, oldest first.

    Returns:
        `[N, C, width]`, oldest first, contiguous.
    """
    width, (rows, num_tokens, _) = past.shape[1], inputs[0].shape
    if not rows * num_tokens:
        return past.transpose(1, 2).contiguous()
    if sequences.whole_rows:
        recent = torch.cat([x[:, max(0, num_tokens - width) :] for x in inputs], dim=-1)
        if num_tokens < width:
            recent = torch.cat([past[:, num_tokens:], recent], dim=1)
        return recent.transpose(1, 2).contiguous()
    assert isinstance(sequences, (RightPaddedSequences, PackedSequences))
    number, token = sequences.last_inputs(width)
    recent = torch.cat([x.flatten(0, 1).index_select(0, token.flatten()) for x in inputs], dim=-1).view_as(past)
    before = past.gather(1, number.clamp(max=max(0, width - 1))[..., None].expand_as(past))
    return torch.where((number < width)[..., None], before, recent).transpose(1, 2).contiguous()


def packing_of(sequences: Sequences) -> dict[str, Any]:
    """The arguments that tell `short_convolution` where packed sequences are; none for others."""
    if not isinstance(sequences, PackedSequences):
        return {}
    return {"sequence": sequences.index, "cu_seqlens": sequences.cu_seqlens}


class ShortConvolution(nn.Module):
    """A convolution over the last `kernel_size` tokens of each channel, then SiLU: `y_t = silu(sum_j w_j x_{t-j})`.

    It has no bias. The delta-rule papers put one on q, k and v, with four taps; without it the ablation of
    arXiv:2406.06484 is clearly worse.

    Args:
        channels: number of channels, each with taps of its own.
        kernel_size: taps per channel.
        activation: "silu", or "identity" for the bare sum.
        unit_heads: size of the heads whose output is divided by its L2 norm; 0 leaves it as it is.
        fused: whether Triton kernels compute it, one each way; None: wherever they run, unless the state wants a
            gradient.
        initializer_range: standard deviation of the initial taps; None: uniform, as in nn.Conv1d.

    Attributes:
        weight: `[channels, 1, kernel_size]` as in nn.Conv1d; the last tap belongs to the current token.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 4,
        activation: str = "silu",
        *,
        unit_heads: int = 0,
        fused: bool | None = False,
        initializer_range: float | None = None,
    ) -> None:
        super().__init__()
        if type(kernel_size) is not int or kernel_size < 1:  # Python takes True for 1
            raise ValueError(f"the short convolution needs at least one tap, got kernel_size={kernel_size!r}")
        activation_function(activation)  # refuses others
        self.channels = channels
        self.kernel_size = kernel_size
        self.activation = activation
        self.unit_heads = unit_heads
        self.fused = fused
        self.initializer_range = initializer_range
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))

    def initialize_(self, weight: Tensor) -> None:
        """Fill the taps; docs/layers.md#how-the-short-convolutions-start."""
        if self.initializer_range is None:
            bound = self.kernel_size**-0.5
            nn.init.uniform_(weight, -bound, bound)
        else:
            nn.init.normal_(weight, std=self.initializer_range)

    def set_fused(self, fused: bool | None) -> None:
        """Choose between the Triton kernel and plain torch."""
        self.fused = fused

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        sequences: Sequences = WHOLE_ROWS,
        *,
        with_state: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The convolved inputs, and the last inputs as the new state.

        Args:
            x: `[B, T, channels]`, arranged by `sequences`.
            state: `[N, channels, kernel_size - 1]`, the inputs before x, oldest first; zeros unless given. N is B, or
                the number of packed sequences.
            with_state: whether the new state is wanted.

        Returns:
            The output in x's shape and dtype, and the new state `[N, channels, kernel_size - 1]` or None.
        """
        if state is not None:
            _checked_state(state, _number(x, sequences), self.channels, self.kernel_size - 1)
        y = fused_ops.short_convolution(
            x, self.weight, state, **packing_of(sequences), activation=self.activation, head_dim=self.unit_heads,
            fused=self.fused,
        )  # fmt: skip
        return y, _state_after([x], state, self.kernel_size - 1, sequences) if with_state else None

    def extra_repr(self) -> str:
        """Channels and taps, for printing."""
        return f"{self.channels}, kernel_size={self.kernel_size}"


Convolutions = tuple[ShortConvolution, ShortConvolution, ShortConvolution]
"""The convolutions of queries, keys and values."""


def convolve(
    convolutions: Convolutions | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: StateAccess,
    sequences: Sequences,
    activation: str = "silu",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Convolved queries, keys and values, computed in one call where no module has to be called by itself.

    Args:
        convolutions: one each, with equal taps, activation and `fused`; None: the activation alone.
        q, k, v: `[B, T, channels]`, arranged by `sequences`.
        past: the state before, that of the three concatenated along the channels.
        activation: name of the activation if there are no convolutions.

    Returns:
        The three outputs, and the new state `[N, C, kernel_size - 1]`, None unless it is wanted.
    """
    if convolutions is None:
        if past.conv is not None:
            raise ValueError(
                f"past_key_values has a convolution state of shape {tuple(past.conv.shape)}, and this layer has no "
                "short convolutions: it is the state of another layer"
            )
        q, k, v = (recomputable(activation_function(activation), x) for x in (q, k, v))
        return q, k, v, None
    inputs, width = (q, k, v), convolutions[0].kernel_size - 1
    if isinstance(sequences, SharedSequences):
        return _convolve_piece(convolutions, inputs, past, sequences)
    widths, before = [x.shape[-1] for x in inputs], None
    if past.recurrent is not None:
        before = _checked_state(past.conv, _number(q, sequences), sum(widths), width)
    outputs: Sequence[Tensor]
    if _can_join(convolutions, q):
        q_conv, k_conv, v_conv = convolutions
        heads, weights = (q_conv.unit_heads, k_conv.unit_heads), tuple(one.weight for one in convolutions)
        options: dict[str, Any] = {"activation": q_conv.activation, "fused": q_conv.fused}
        if before is not None and sequences.whole_rows and is_decoding_step(q):
            options |= {"head_dims": heads, "inplace": past.in_place}
            (q, k, v), state = fused_ops.short_convolution_step(inputs, weights, before, **options)
            return q, k, v, state
        packing = packing_of(sequences)
        outputs = fused_ops.short_convolutions(
            inputs, weights, before, **packing, head_dims=(*heads, v_conv.unit_heads), **options
        )
    else:
        pasts = (None,) * 3 if before is None else before.split(widths, dim=1)
        outputs = [
            one(x, state, sequences, with_state=False)[0]
            for one, x, state in zip(convolutions, inputs, pasts, strict=True)
        ]
    q, k, v = outputs
    return q, k, v, _state_after(inputs, before, width, sequences) if past.wanted else None


def _state_after(inputs: Sequence[Tensor], state: Tensor | None, width: int, sequences: Sequences) -> Tensor:
    """The state `[N, C, width]` after the inputs, concatenated along the channels, from the state before them."""
    if state is None:
        past = inputs[0].new_zeros(_number(inputs[0], sequences), width, sum(x.shape[2] for x in inputs))
    else:
        past = state.transpose(1, 2).to(inputs[0].dtype)
    return last_inputs(inputs, past, sequences)


def _number(x: Tensor, sequences: Sequences) -> int:
    """Number of sequences in x `[B, T, C]`."""
    return sequences.num_sequences if isinstance(sequences, PackedSequences) else x.shape[0]


def _convolve_piece(
    convolutions: Convolutions, inputs: tuple[Tensor, Tensor, Tensor], past: StateAccess, sequences: SharedSequences
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The results of `convolve` for a piece of shared rows, whose inputs before it come from other ranks."""
    width, context = convolutions[0].kernel_size - 1, sequences.context
    state = last_tokens(inputs, width, context).mT if past.wanted else None
    if width and not torch.compiler.is_compiling() and _can_join(convolutions, inputs[0]):
        q_conv, k_conv, v_conv = convolutions
        heads = q_conv.unit_heads, k_conv.unit_heads, v_conv.unit_heads
        weights = q_conv.weight, k_conv.weight, v_conv.weight
        if fused_ops.takes_joint_kernel(inputs, weights, heads, q_conv.fused):
            from deltazoo.ops.context.convolution import PieceBounds, convolved_piece  # imports Triton

            bounds, silu = PieceBounds(context, sequences.cu_seqlens), fused_ops.is_silu(q_conv.activation)
            return *convolved_piece(inputs, weights, bounds, silu, heads[0], heads[2] == heads[0]), state
    joined = sequences.with_tokens_before(width)
    before = tokens_before(inputs, width, context)
    q, k, v = (torch.cat(parts, 1) for parts in zip(before, inputs, strict=True))
    q, k, v, _ = convolve(convolutions, q, k, v, StateAccess(None, None), joined)
    return q[:, width:], k[:, width:], v[:, width:], state


def _checked_state(state: Tensor | None, number: int, channels: int, width: int) -> Tensor:
    if state is None or state.shape != (number, channels, width):
        given = (
            "None"
            if state is None
            else (
                f"{tuple(state.shape)}: it belongs to another layer, or to another number of rows or packed sequences"
            )
        )
        raise ValueError(f"the convolution state must have shape {(number, channels, width)}, got {given}")
    return state


def _can_join(convolutions: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether `convolve` may read the weights of these modules instead of calling them.

    It may not if they are of another class or have hooks, or if only a call brings the weights to this device (sharded
    or offloaded weights).
    """
    return all(
        type(convolution) is ShortConvolution
        and not is_hooked(convolution)
        and type(convolution.weight) in PLAIN_WEIGHTS
        and convolution.weight.device == x.device
        for convolution in convolutions
    )
