"""The modules of flash-linear-attention around a rule, with the constructors, parameters and results of the originals.

They are norms and the short causal convolution; each also exists as a function. The convolution's state holds the last
W inputs, one more than it reads, where our own layer holds W - 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.layers.sequences import PackedSequences, Sequences, describe_sequences
from deltazoo.layers.short_convolution import last_inputs, packing_of
from deltazoo.names import unknown
from deltazoo.ops import fused
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.fused import takes_kernel

_ACTIVATIONS = ("silu", "swish")
_BACKENDS = ("triton", "cuda", "mix")
_GATE_ACTIVATIONS = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
"""Our names of a gate's activation, by those of flash-linear-attention."""


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """`x / sqrt(sum x^2 + eps)` over the last axis, computed in float32.

    Args:
        x: `[..., D]`.
        eps: added to the sum of squares.
        output_dtype: dtype of the result; None: that of x.
    """
    if output_dtype is None:
        return fused.l2_norm(x, eps)
    return fused.l2_norm(at_least_float32(x), eps).to(output_dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution: `y_t = activation(sum_i w_i x_{t-i} + bias) + residual_t`.

    On an NVIDIA GPU a Triton kernel each way computes it, if there is an activation, no bias, and no gradient of the
    initial state is wanted; otherwise plain torch does. The computation is in float32.

    Args:
        x: `[B, T, D]`, or `[B, T, H, D / H]`.
        weight: `[D, W]`; the last tap belongs to the current token.
        bias: `[D]`.
        residual: tensor of x's shape, added after the activation.
        initial_state: `[N, D, W]`, the last W inputs before each row or packed sequence, oldest first.
        output_final_state: whether to return the last W inputs; otherwise None stands in their place.
        activation: "silu" or "swish", which are the same, or None.
        backend: "triton", "cuda" or "mix", a choice of flash-linear-attention that changes no result.
        cu_seqlens: `[N + 1]`, boundaries of sequences packed along T, with B = 1.
        cu_seqlens_cpu, chunk_indices: further forms of the boundaries, hints that change no result.
        cp_context: None.
        kwargs: none.

    Returns:
        The output in x's shape and dtype, and the state `[N, D, W]` in x's dtype or None.

    Raises:
        ValueError, TypeError: arguments that do not fit together, or are unknown.
        NotImplementedError: a `cp_context`.
    """
    refuse_context_parallelism("causal_conv1d", cp_context)
    require_boundaries(cu_seqlens, cu_seqlens_cpu)
    if kwargs.pop("seq_idx", None) is not None:
        raise ValueError("causal_conv1d takes boundaries of sequences as cu_seqlens, not as seq_idx")
    if kwargs:
        raise TypeError(unknown("argument of causal_conv1d", next(iter(kwargs)), ("seq_idx",)))
    _check_choices(activation, backend, _BACKENDS)
    if weight is None or weight.ndim != 2 or x.ndim < 3 or x.shape[2:].numel() != len(weight):
        shape = None if weight is None else tuple(weight.shape)
        raise ValueError(f"expected x [B, T, D] and weight [D, W], got {tuple(x.shape)} and {shape}")
    tokens = x.flatten(2)
    sequences = describe_sequences(*tokens.shape[:2], cu_seqlens=cu_seqlens)
    past = _past(tokens, initial_state, weight.shape[1], sequences)
    y = _convolve(tokens, weight, bias, None if initial_state is None else past, activation, sequences).view(x.shape)
    if residual is not None:
        if residual.shape != x.shape:
            raise ValueError(f"residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
        y = y + residual
    return y.to(x.dtype), last_inputs([tokens], past, sequences) if output_final_state else None


def _check_choices(activation: str | None, backend: str | None, backends: Sequence[str]) -> None:
    if activation is not None and activation not in _ACTIVATIONS:
        raise ValueError(f"{unknown('activation', activation, _ACTIVATIONS)}, None")
    if backend not in backends:
        raise ValueError(unknown("backend", backend, backends))


def refuse_context_parallelism(function: str, cp_context: object) -> None:
    """Raise NotImplementedError unless `cp_context` is None."""
    if cp_context is not None:
        raise NotImplementedError(
            f"{function} computes whole sequences on one device: pass cp_context=None and every token of a sequence "
            "to one rank. deltazoo.delta_rule and the layers share a sequence between ranks by a context of their own"
        )


def require_boundaries(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> None:
    """Raise ValueError for a copy of boundaries without them, or one that differs where values can be read."""
    if cu_seqlens_cpu is None:
        return
    if cu_seqlens is None:
        raise ValueError("cu_seqlens_cpu is a copy of cu_seqlens, which was not given: pass cu_seqlens as well")
    if cu_seqlens.device.type == "cpu" and not torch.equal(cu_seqlens, cu_seqlens_cpu):
        raise ValueError(f"cu_seqlens_cpu must equal cu_seqlens, got {cu_seqlens_cpu} and {cu_seqlens}")


def _past(x: Tensor, state: Tensor | None, width: int, sequences: Sequences) -> Tensor:
    """The inputs before each row or sequence with time before channels, `[N, W, D]`; zeros if there is no state."""
    num_sequences = sequences.num_sequences if isinstance(sequences, PackedSequences) else x.shape[0]
    if state is None:
        return x.new_zeros(num_sequences, width, x.shape[2])
    expected = (num_sequences, x.shape[2], width)
    if state.shape != expected:
        raise ValueError(f"the convolution's state must have shape {expected} [N, D, W], got {tuple(state.shape)}")
    return state.transpose(1, 2).to(x.dtype)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, activation: str | None, sequences: Sequences
) -> Tensor:
    """Convolved x `[B, T, D]`, in x's dtype from the kernel, else in float32 (float64 stays); no `past` means zeros."""
    if bias is None and x.numel() and takes_kernel(None, x, trained=(past,)):
        before = None if past is None else past[:, 1:].transpose(1, 2)
        known = "identity" if activation is None else "silu"
        return fused.short_convolution(x, weight, before, activation=known, **packing_of(sequences), fused=True)
    if past is None:
        past = _past(x, None, weight.shape[1], sequences)
    total = fused.causal_sum(x, weight, past[:, 1:], **packing_of(sequences))
    if bias is not None:
        total = total + bias
    return total if activation is None else F.silu(total)


class ShortConvolution(nn.Conv1d):
    """`causal_conv1d` as a module, with the parameters of nn.Conv1d: `weight` `[D, 1, W]`, and `bias` `[D]` if wanted.

    Args:
        hidden_size: D, channels.
        kernel_size: W, taps per channel.
        bias: whether there is a bias.
        activation: "silu" or "swish", which are the same, or None.
        backend: "triton" or "cuda", a choice of flash-linear-attention that changes no result.
        device, dtype: device and dtype of the parameters.
        kwargs: `use_fast_conv1d`, which has no effect in flash-linear-attention either.

    Raises:
        ValueError, TypeError: an unknown activation, backend or argument.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("use_fast_conv1d", None)
        if kwargs:
            raise TypeError(unknown("argument of ShortConvolution", next(iter(kwargs)), ("use_fast_conv1d",)))
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        _check_choices(activation, backend, _BACKENDS[:2])
        self.hidden_size = hidden_size
        self.activation = activation
        self.backend = backend

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The convolved inputs, and the state.

        Args:
            x: `[B, T, D]`.
            residual: tensor of x's shape, added after the activation.
            mask: `[B, T]`, factor of each token before the convolution; not with `cu_seqlens`.
            cache: `[N, D, W]`, the last W inputs before x. A call with one token per sequence and without gradients
                writes the new inputs there.
            output_final_state: whether to return the last W inputs, else None; `cache` itself if it was written.
            cu_seqlens, chunk_indices, kwargs: see `causal_conv1d`.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError(
                    "mask and cu_seqlens both say which tokens belong together: pass one of them, not both"
                )
            x = x * mask[..., None].to(x.dtype)
        one_token_each = x.shape[1] == 1 if cu_seqlens is None else bool((cu_seqlens.diff() == 1).all())
        in_place = cache is not None and not torch.is_grad_enabled() and one_token_each
        y, state = causal_conv1d(
            x,
            self.weight.squeeze(1),
            self.bias,
            residual,
            cache,
            output_final_state or in_place,
            self.activation,
            self.backend,
            cu_seqlens,
            chunk_indices=chunk_indices,
            **kwargs,
        )
        if in_place:
            assert cache is not None and state is not None
            state = cache.copy_(state)
        return y, state if output_final_state else None

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The results of `forward` for one token per sequence, for inference."""
        with torch.no_grad():
            return self(x, residual, None, cache, output_final_state, cu_seqlens)

    @property
    def state_size(self) -> int:
        """Elements of the state of one sequence."""
        return self.hidden_size * self.kernel_size[0]

    def extra_repr(self) -> str:
        """Channels, taps, activation and backend, for printing."""
        return f"{super().extra_repr()}, activation={self.activation}, backend={self.backend}"


class _Norm(nn.Module):
    """The parameters of both norms; constructor arguments are those of `RMSNorm`."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            values = torch.empty(hidden_size, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(values) if wanted else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Size, presence of a weight, and epsilon, for printing."""
        affine = "" if self.elementwise_affine else ", elementwise_affine=False"
        return f"{self.hidden_size}{affine}, eps={self.eps}"

    def _scale(self, x: Tensor) -> Tensor:
        return x.new_ones(self.hidden_size, dtype=torch.float32) if self.weight is None else self.weight


def _with_residual(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> tuple[Tensor, Tensor]:
    """The tensor to be normalised, in float32 if it is a sum, and the tensor that `prenorm` returns."""
    if residual is None:
        return x, x.float() if residual_in_fp32 else x
    if residual.shape != x.shape:
        raise ValueError(f"x and residual must have one shape, got {tuple(x.shape)} and {tuple(residual.shape)}")
    total = at_least_float32(x) + residual
    return total, total.to(residual.dtype)


class RMSNorm(_Norm):
    """`x / sqrt(mean x^2 + eps) * weight + bias` over the last axis, in x's dtype.

    Args:
        hidden_size: size of the last axis.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias; it needs a weight.
        eps: added to the mean square.
        device, dtype: device and dtype of the parameters.
    """

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x `[..., hidden_size]`.

        Args:
            x: the input.
            residual: tensor of x's shape, added to x before.
            prenorm: whether to return the sum as well, in the residual's dtype; without a residual x.
            residual_in_fp32: whether `prenorm` returns x in float32 if there is no residual.
        """
        total, kept = _with_residual(x, residual, residual_in_fp32)
        if self.bias is None:
            y = fused.rms_norm(total, self._scale(x), self.eps, dtype=x.dtype)
        else:
            wide = at_least_float32(total)
            y = (fused.rms_norm(wide, self._scale(x), self.eps, fused=False) + self.bias).to(x.dtype)
        return (y, kept) if prenorm else y


class FusedRMSNormGated(_Norm):
    """RMSNorm times an activated gate: `x / sqrt(mean x^2 + eps) * weight * activation(g)`.

    Args:
        hidden_size: size of the last axis.
        elementwise_affine: whether there is a weight.
        eps: added to the mean square.
        activation: activation of the gate: "swish" or "silu", which are the same, or "sigmoid".
        device, dtype: device and dtype of the weight.

    Raises:
        ValueError: another activation.
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        if activation not in _GATE_ACTIVATIONS:
            raise ValueError(unknown("activation of the gate", activation, _GATE_ACTIVATIONS))
        self.activation = activation

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x `[..., hidden_size]` and multiply by the activated gate g of the same shape.

        `residual`, `prenorm` and `residual_in_fp32` are those of `RMSNorm`.
        """
        total, kept = _with_residual(x, residual, residual_in_fp32)
        activation = _GATE_ACTIVATIONS[self.activation]
        y = fused.gated_rms_norm(total, g.reshape(total.shape), self._scale(x), self.eps, activation)
        return (y.to(x.dtype), kept) if prenorm else y.to(x.dtype)

    def extra_repr(self) -> str:
        """Size, epsilon and activation, for printing."""
        return f"{super().extra_repr()}, activation={self.activation}"
