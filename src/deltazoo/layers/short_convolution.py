"""Short causal depthwise convolutions of queries, keys and values, with a state, for padded and packed sequences."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.layers.initialization import short_conv_
from deltazoo.layers.norm import l2_normalize
from deltazoo.layers.sequences import WHOLE_ROWS, PackedSequences, RightPaddedSequences, Sequences, SharedSequences
from deltazoo.layers.state import StateAccess, is_decoding_step
from deltazoo.ops.context.token_exchange import last_tokens, tokens_before
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.fused import fused_kernels_fit, fused_short_conv, fused_short_conv_step, fused_short_convs
from deltazoo.ops.linear_maps import PLAIN_WEIGHTS, is_hooked
from deltazoo.ops.recompute import recomputable

__all__ = [
    "Convolutions",
    "ShortConvolution",
    "activation_function",
    "causal_sum",
    "convolve",
    "convolve_token",
    "depthwise_sum",
    "last_inputs",
    "packing_of",
]


def _identity(x: Tensor) -> Tensor:
    return x


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "identity": _identity}


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of queries, keys and values, before they are split into heads: "silu" or "identity"."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, _ACTIVATIONS))}, got {name!r}")
    return _ACTIVATIONS[name]


def depthwise_sum(history: Tensor, weight: Tensor, positions: Tensor | None = None) -> Tensor:
    """`sum_j w_j x_{t-j}` per channel, as shifted products in float32.

    Args:
        history: `[B, taps - 1 + T, C]`, the `taps - 1` inputs before the first token, then the T inputs.
        weight: `[C, 1, taps]` as in nn.Conv1d; the last tap belongs to the current token.
        positions: `[B, T]` integer, position of each token in its document, from 0: no tap reaches past its beginning.
            None if every row is one document.

    Returns:
        `[B, T, C]` in float32 (float64 stays).
    """
    history = at_least_float32(history)
    taps = at_least_float32(weight)[:, 0].T.contiguous()
    last, num_tokens = len(taps) - 1, history.shape[1] - len(taps) + 1
    total = _shifted(history, 0, num_tokens, last, positions) * taps[0]
    for i in range(1, len(taps)):
        total = torch.addcmul(total, _shifted(history, i, num_tokens, last - i, positions), taps[i])
    return total


def _shifted(history: Tensor, start: int, num_tokens: int, lag: int, positions: Tensor | None) -> Tensor:
    x = history[:, start : start + num_tokens]
    return x if positions is None or lag == 0 else x.masked_fill((positions < lag)[..., None], 0)


def causal_sum(x: Tensor, weight: Tensor, past: Tensor, sequences: Sequences) -> Tensor:
    """`depthwise_sum` of a batch whose sequences each have a past.

    Args:
        x: `[B, T, C]`, arranged by `sequences`.
        weight: `[C, 1, taps]`.
        past: `[N, taps - 1, C]` in x's dtype, the inputs before each row or packed sequence, oldest first.
        sequences: of the batch.

    Returns:
        `[B, T, C]` in float32 (float64 stays).
    """
    if not isinstance(sequences, PackedSequences):
        return depthwise_sum(torch.cat([past, x], dim=1), weight)
    # Put the past of each sequence before it in one long row; then no tap can reach another sequence.
    width = past.shape[1]
    begins = sequences.cu_seqlens[:-1].long() + width * torch.arange(sequences.num_sequences, device=x.device)
    outputs = torch.arange(x.shape[1], device=x.device) + width * sequences.index

    history = x.new_empty(x.shape[1] + width * sequences.num_sequences, x.shape[2])
    past_rows = begins[:, None] + torch.arange(width, device=x.device)
    history = history.index_copy(0, past_rows.flatten(), past.flatten(0, 1))
    history = history.index_copy(0, outputs + width, x[0])
    return depthwise_sum(history[None], weight).index_select(1, outputs)


def last_inputs(inputs: Sequence[Tensor], past: Tensor, sequences: Sequences) -> Tensor:
    """The last `width` inputs of each row or sequence, those before it included.

    Args:
        inputs: `[B, T, channels]` each, arranged by `sequences`; C is the sum of their channels.
        past: `[N, width, C]` in their dtype, the inputs before each row or packed sequence, oldest first.
        sequences: of the batch.

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
    """The arguments that tell `fused_short_conv` where packed sequences are; none for others."""
    if not isinstance(sequences, PackedSequences):
        return {}
    return {"sequence": sequences.index, "cu_seqlens": sequences.cu_seqlens}


class ShortConvolution(nn.Module):
    """Each channel mixes its last `kernel_size` tokens, then SiLU: `y_t = silu(sum_j w_j x_{t-j})`, without a bias.

    The delta-rule papers put one on q, k and v, with four taps (arXiv:2406.06484, whose ablation without it is clearly
    worse). Computed as shifted products in float32, which on a CPU takes two thirds of nn.Conv1d's time for training.

    Args:
        channels: how many, each with taps of its own.
        kernel_size: taps per channel.
        activation: "silu", or "identity" for the bare sum.
        unit_heads: divide the output by the L2 norm of every head of so many channels; 0 leaves it as it is.
        fused: one Triton kernel each way instead of plain torch; None: wherever it runs, unless the state wants a
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
        self.channels = channels
        self.kernel_size = kernel_size
        self.activation = activation
        self.activate = activation_function(activation)
        self.unit_heads = unit_heads
        self.set_fused(fused)
        self.initializer_range = initializer_range
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))

    def initialize_(self, weight: Tensor) -> None:
        """Fill the taps as the module starts them."""
        short_conv_(weight, self.initializer_range)

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
        """Convolve the inputs, and return the last of them as the new state.

        Args:
            x: `[B, T, channels]`, arranged by `sequences`.
            state: `[N, channels, kernel_size - 1]`, the inputs before x, oldest first; zeros unless given. N is B, or
                the number of packed sequences.
            sequences: how many tokens of each row are real, or where packed sequences begin.
            with_state: whether the new state is wanted.

        Returns:
            The output in x's shape and dtype, and the new state `[N, channels, kernel_size - 1]` or None.
        """
        fused = self.fuses(x, state) and x.numel()
        if state is not None and sequences.whole_rows and x.shape[1] == 1 and not fused:
            y, window = _convolve_window(self._checked(state, x.shape[0]), x, self.weight, self.activate)
            return self.normalized(y), window
        compute = self._convolve_fused if fused else self._convolve_plainly
        y = recomputable(partial(compute, state=state, sequences=sequences), x, self.weight)
        return y, last_inputs([x], self._past(x, state, sequences), sequences) if with_state else None

    def fuses(self, x: Tensor, state: Tensor | None = None) -> bool:
        """Whether the kernel takes inputs like `x`, after this state."""
        return fused_kernels_fit(x, state) if self.fused is None else self.fused

    def _convolve_fused(self, x: Tensor, weight: Tensor, *, state: Tensor | None, sequences: Sequences) -> Tensor:
        past = None if state is None else self._past(x, state, sequences).transpose(1, 2)
        packing, heads = packing_of(sequences), self.unit_heads
        return fused_short_conv(x, weight.squeeze(1), past, activation=self.activation, head_dim=heads, **packing)

    def _convolve_plainly(self, x: Tensor, weight: Tensor, *, state: Tensor | None, sequences: Sequences) -> Tensor:
        total = causal_sum(x, weight, self._past(x, state, sequences), sequences)
        return self.normalized(self.activate(total).to(x.dtype))

    def normalized(self, y: Tensor) -> Tensor:
        """The output divided by the norms of its heads, if that is wanted."""
        return l2_normalize(y.unflatten(2, (-1, self.unit_heads))).flatten(2) if self.unit_heads else y

    def _past(self, x: Tensor, state: Tensor | None, sequences: Sequences) -> Tensor:
        """The state with time before channels `[N, kernel_size - 1, channels]`, zeros if there is none."""
        num_sequences = sequences.num_sequences if isinstance(sequences, PackedSequences) else x.shape[0]
        if state is None:
            return x.new_zeros(num_sequences, self.kernel_size - 1, self.channels)
        return self._checked(state, num_sequences).transpose(1, 2).to(x.dtype)

    def _checked(self, state: Tensor, num_sequences: int) -> Tensor:
        expected = (num_sequences, self.channels, self.kernel_size - 1)
        if state.shape != expected:
            raise ValueError(f"the convolution state must have shape {expected}, got {tuple(state.shape)}")
        return state

    def extra_repr(self) -> str:
        """Channels and taps, for printing."""
        return f"{self.channels}, kernel_size={self.kernel_size}"


Convolutions = tuple[ShortConvolution, ShortConvolution, ShortConvolution]
"""Of queries, keys and values."""


def convolve(
    convolutions: Convolutions, q: Tensor, k: Tensor, v: Tensor, past: StateAccess, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Convolve queries, keys and values; a decoding step computes all three at once.

    Args:
        convolutions: one each.
        q, k, v: `[B, T, channels]`, arranged by `sequences`.
        past: the state before, that of the three concatenated along the channels.
        sequences: of the batch.

    Returns:
        The three outputs, and the new state `[N, C, kernel_size - 1]`, None unless it is wanted.
    """
    q_conv, k_conv, v_conv = convolutions
    widths = [q.shape[-1], k.shape[-1], v.shape[-1]]
    if isinstance(sequences, SharedSequences):
        return _convolve_piece(convolutions, (q, k, v), past, sequences)
    q_past = k_past = v_past = None
    if past.recurrent is not None:
        before = _checked_state(past.conv, sum(widths))
        if sequences.whole_rows and is_decoding_step(q) and _can_join(convolutions, q):
            (q, k, v), after = convolve_token(convolutions, (q, k, v), before, inplace=past.in_place)
            return q, k, v, after
        q_past, k_past, v_past = before.split(widths, dim=1)
    elif not past.wanted and _fuse_together(convolutions, (q, k, v), sequences):
        heads = (q_conv.unit_heads, k_conv.unit_heads, v_conv.unit_heads)
        together = partial(_convolve_together, activation=q_conv.activation, heads=heads, sequences=sequences)
        return *recomputable(together, q, k, v, q_conv.weight, k_conv.weight, v_conv.weight), None
    new_q, _ = q_conv(q, q_past, sequences, with_state=False)
    new_k, _ = k_conv(k, k_past, sequences, with_state=False)
    new_v, _ = v_conv(v, v_past, sequences, with_state=False)
    state = _state_after(convolutions, q, k, v, past, sequences) if past.wanted else None
    return new_q, new_k, new_v, state


def _state_after(
    convolutions: Convolutions, q: Tensor, k: Tensor, v: Tensor, past: StateAccess, sequences: Sequences
) -> Tensor:
    """The new state that `convolve` returns, without the outputs."""
    width = convolutions[0].kernel_size - 1
    if isinstance(sequences, SharedSequences):
        return last_tokens((q, k, v), width, sequences.context).mT
    channels = q.shape[2] + k.shape[2] + v.shape[2]
    if past.recurrent is not None:
        before = _checked_state(past.conv, channels).transpose(1, 2).to(q.dtype)
    else:
        num_sequences = sequences.num_sequences if isinstance(sequences, PackedSequences) else q.shape[0]
        before = q.new_zeros(num_sequences, width, channels)
    return last_inputs([q, k, v], before, sequences)


def _convolve_piece(
    convolutions: Convolutions, inputs: tuple[Tensor, Tensor, Tensor], past: StateAccess, sequences: SharedSequences
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Convolve a piece of rows that several ranks share, together with the inputs before it, from other ranks."""
    width = convolutions[0].kernel_size - 1
    before = tokens_before(inputs, width, sequences.context)
    q, k, v = (torch.cat(parts, 1) for parts in zip(before, inputs, strict=True))
    q, k, v, _ = convolve(convolutions, q, k, v, StateAccess(None, None), sequences.with_tokens_before(width))
    state = _state_after(convolutions, *inputs, past, sequences) if past.wanted else None
    return q[:, width:], k[:, width:], v[:, width:], state


def _checked_state(state: Tensor | None, channels: int) -> Tensor:
    if state is None or state.ndim != 3 or state.shape[1] != channels:
        shape = None if state is None else tuple(state.shape)
        raise ValueError(f"the convolution state must have shape [N, {channels}, conv_size - 1], got {shape}")
    return state


def _fuse_together(convolutions: Convolutions, inputs: tuple[Tensor, ...], sequences: Sequences) -> bool:
    """Whether one call of the kernels' function may take the place of the modules' calls."""
    if torch.compiler.is_compiling() or not inputs[0].numel():
        return False
    return _can_join(convolutions, inputs[0]) and all(
        convolution.fuses(x) and x.dtype == inputs[0].dtype for convolution, x in zip(convolutions, inputs, strict=True)
    )


def _convolve_together(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    *,
    activation: str,
    heads: tuple[int, int, int],
    sequences: Sequences,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (q_weight.squeeze(1), k_weight.squeeze(1), v_weight.squeeze(1))
    return fused_short_convs((q, k, v), weights, activation=activation, head_dims=heads, **packing_of(sequences))


def _can_join(convolutions: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether `convolve_token` may read the weights of these modules instead of calling them.

    It may not if they are of another kind or have hooks, or if only a call brings the weights to this device: sharded
    or offloaded ones.
    """
    return all(
        type(convolution) is ShortConvolution
        and not is_hooked(convolution)
        and type(convolution.weight) in PLAIN_WEIGHTS
        and convolution.weight.device == x.device
        for convolution in convolutions
    )


def convolve_token(
    convolutions: Convolutions, inputs: tuple[Tensor, Tensor, Tensor], state: Tensor, *, inplace: bool = False
) -> tuple[Sequence[Tensor], Tensor]:
    """Convolve one token of queries, keys and values at once, with a third of the operations. For inference.

    Args:
        convolutions: of queries, keys and values; the same taps, activation and way to compute.
        inputs: a `[B, 1, channels]` for each.
        state: their states, concatenated along the channels.
        inplace: the caller keeps `state` at its address. The fused kernel overwrites it; plain torch returns a view
            that the caller copies.

    Returns:
        The three outputs, and their new states, concatenated.
    """
    q, k, v = convolutions
    channels = [convolution.channels for convolution in convolutions]
    expected = (inputs[0].shape[0], sum(channels), q.kernel_size - 1)
    if state.shape != expected:
        raise ValueError(f"the convolution state must have shape {expected}, got {tuple(state.shape)}")
    if q.fuses(inputs[0]):
        weights = (q.weight[:, 0], k.weight[:, 0], v.weight[:, 0])
        may_write = inplace and state.dtype == inputs[0].dtype and state.is_contiguous()
        heads = (q.unit_heads, k.unit_heads)
        y, state = fused_short_conv_step(
            inputs, weights, state, activation=q.activation, head_dims=heads, inplace=may_write
        )
        return y.split(channels, dim=-1), state
    weight = torch.cat([convolution.weight for convolution in convolutions])
    y, state = _convolve_window(state, torch.cat(inputs, dim=-1), weight, q.activate)
    state = state if inplace else state.contiguous()
    if q.unit_heads and q.unit_heads == k.unit_heads:
        directions, values = y.split([channels[0] + channels[1], channels[2]], dim=-1)
        directions = l2_normalize(directions.unflatten(2, (-1, q.unit_heads))).flatten(2)
        return (*directions.split(channels[:2], dim=-1), values), state
    parts = y.split(channels, dim=-1)
    return tuple(one.normalized(part) for one, part in zip(convolutions, parts, strict=True)), state


def _convolve_window(
    state: Tensor, x: Tensor, weight: Tensor, activate: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """One token `[B, 1, C]` per row: one product with the window, in a third of the operations that shifting takes.

    Returns:
        The activated output `[B, 1, C]`, and the new state `[B, C, taps - 1]`, a view of the window.
    """
    window = torch.cat([state.to(x.dtype), x.transpose(1, 2)], dim=2)
    total = (at_least_float32(window) * at_least_float32(weight)[:, 0]).sum(2)
    return activate(total).to(x.dtype)[:, None], window[..., 1:]
