"""Layers of the kernel-hub folder, which `hub_kernel.py` builds: transformers' delta-rule functions on our operators.

A layer has the name by which a user asks for it and the arguments of the function or module that it replaces. The
library `kernels` binds its `forward` to the replaced module, and demands that a layer has no constructor and no other
members. transformers passes all keyword arguments of a model to these functions; of them, boundaries of packed
sequences (`cu_seqlens`, `cu_seq_lens_q` or `seq_idx`) act here, and the others do not concern a layer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.ops import delta_rule, delta_rule_step, fused

__all__ = [
    "RMSNormGated",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
]


class chunk_gated_delta_rule(nn.Module):
    """The delta rule with one decay per head over whole sequences, with gradients."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output `[B, T, HV, V]` in query's dtype, and the final state `[N, HV, K, V]` float32 or None.

        Args:
            query, key: `[B, T, H, K]`.
            value: `[B, T, HV, V]`, HV a multiple of H.
            g: `[B, T, HV]`, log-decay; of `chunk_kda` `[B, T, HV, K]`.
            beta: `[B, T, HV]`, step size.
            chunk_size: changes no result; the kernels choose their own.
            initial_state: `[N, HV, K, V]`; N = B, or the number of packed sequences.
            output_final_state: return the final state.
            use_qk_l2norm_in_kernel: first divide each query and key by its L2 norm.
            kwargs: boundaries of packed sequences.
        """
        return _rule(
            query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, _boundaries(kwargs)
        )


class fused_recurrent_gated_delta_rule(nn.Module):
    """`chunk_gated_delta_rule` with the arguments of the recurrent form; a single token takes the decoding kernel."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and final state as of `chunk_gated_delta_rule`."""
        return _rule(
            query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, _boundaries(kwargs)
        )


class chunk_kda(chunk_gated_delta_rule):
    """The delta rule with one decay per key channel over whole sequences, with gradients."""


class fused_recurrent_kda(fused_recurrent_gated_delta_rule):
    """`chunk_kda` with the arguments of the recurrent form; a single token takes the decoding kernel."""


class causal_conv1d_fn(nn.Module):
    """Causal depthwise convolution of whole sequences, with gradients."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Convolved and activated `[B, C, T]` in the input's dtype.

        Args:
            hidden_states: `[B, C, T]`.
            weight: `[C, W]`; the last tap belongs to the current token.
            bias: `[C]`.
            activation: "silu", "swish" or None.
            kwargs: boundaries of packed sequences.
        """
        return _convolve(hidden_states, weight, None, bias, activation, _boundaries(kwargs))


class causal_conv1d_update(nn.Module):
    """Causal depthwise convolution of the tokens after a state, which it moves on in place; with gradients."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """Convolved and activated `[B, C, T]` in the input's dtype.

        Args:
            hidden_states: `[B, C, T]`.
            conv_state: `[B, C, S]`, the last S >= W - 1 inputs before these, oldest first; overwritten.
            weight, bias, activation: as of `causal_conv1d_fn`.
        """
        past = conv_state[..., conv_state.shape[-1] - weight.shape[-1] + 1 :].clone()
        y = _convolve(hidden_states, weight, past, bias, activation, None)
        conv_state.copy_(torch.cat([conv_state, hidden_states], dim=-1)[..., hidden_states.shape[-1] :])
        return y


class RMSNormGated(nn.Module):
    """RMS norm times the activated gate, with the weight, epsilon and activation of the replaced module."""

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """`rms_norm(hidden_states) * activation(gate)` `[..., D]` in the input's dtype, computed in float32."""
        return fused.gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, self.activation)


def _rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    keep_state: bool,
    unit_length: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Output in q's dtype, and the final state if it is kept."""
    dtype = q.dtype
    if unit_length:
        q, k = fused.l2_norm(q), fused.l2_norm(k)
    if state is not None and cu_seqlens is None and v.shape[1] == 1 and not torch.is_grad_enabled():
        output, state = delta_rule_step(q, k, v, beta, log_decay, state=state)
    else:
        output, state = delta_rule(q, k, v, beta, log_decay, initial_state=state, cu_seqlens=cu_seqlens)
    return output.to(dtype), state if keep_state else None


def _convolve(
    x: Tensor,
    weight: Tensor,
    past: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """`[B, C, T]` of x `[B, C, T]` and the W - 1 inputs before it, None for zeros."""
    if activation not in ("silu", "swish", None):
        raise ValueError(f"the convolution's activation must be 'silu', 'swish' or None, got {activation!r}")
    tokens, sequence = x.transpose(1, 2), None
    if cu_seqlens is not None:
        places = torch.arange(x.shape[2], device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:].long(), places, right=True)
    name = "identity" if activation is None or bias is not None else "silu"
    y = fused.short_convolution(tokens, weight, past, sequence=sequence, cu_seqlens=cu_seqlens, activation=name)
    if bias is not None:
        y = y + bias.to(y.dtype)
        y = y if activation is None else F.silu(y)
    return y.transpose(1, 2)


def _boundaries(kwargs: dict[str, Any]) -> Tensor | None:
    """`[N + 1]` boundaries of packed sequences among the keyword arguments of a model; None without."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if kwargs.get(name) is not None:
            return kwargs[name]
    numbers = kwargs.get("seq_idx")
    if numbers is None:
        return None
    if len(numbers) != 1:
        raise ValueError(f"seq_idx of packed sequences must have shape [1, T], got {tuple(numbers.shape)}")
    starts = (numbers[0, 1:] != numbers[0, :-1]).nonzero().flatten() + 1
    return F.pad(F.pad(starts, (1, 0)), (0, 1), value=numbers.shape[1]).to(torch.int32)
