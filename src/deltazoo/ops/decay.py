"""Decay gates: functions from a projection of the input to the log-decay, a natural logarithm that is never positive.

A spec names one of them (`DECAY_GATES`) or brings a function of its own, `f(a, A_log, dt_bias) -> log_decay`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from deltazoo.ops import fused as fused_ops
from deltazoo.ops.recompute import recomputable

__all__ = ["DECAY_GATES", "DecayGate", "bounded_decay", "log_decay", "saturating_decay", "softplus_decay"]

DecayGate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of `a` `[B, T, HV]` or `[B, T, HV, K]`, `A_log` `[HV]` and `dt_bias` `[HV]` or `[HV * K]`: the log-decay."""


def softplus_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """`log_decay = -exp(A_log) * softplus(a + dt_bias)`, the gate of Mamba2 and Gated DeltaNet (arXiv:2412.06464).

    Args:
        a: `[B, T, HV]` (one decay per head) or `[B, T, HV, K]` (one per key channel, arXiv:2510.26692).
        A_log: `[HV]`, logarithm of the decay rate.
        dt_bias: `[HV]`, or `[HV * K]` with a decay per channel.

    Returns:
        log-decay in a's shape, float32 (float64 stays), <= 0.
    """
    return fused_ops.softplus_log_decay(a, A_log, dt_bias, fused=False)


def bounded_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float = -5.0) -> Tensor:
    """`log_decay = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))`, the bounded gate of Kimi Delta Attention.

    Args:
        a, A_log, dt_bias: see `softplus_decay`.
        lower_bound: the strongest log-decay per token, negative; -5 in the published models.

    Returns:
        log-decay in a's shape, float32 (float64 stays), in (lower_bound, 0).

    Raises:
        ValueError: a `lower_bound` that is not negative, or shapes that do not fit each other.
    """
    if not lower_bound < 0:
        raise ValueError(f"lower_bound is a log-decay and must be negative, got {lower_bound}")
    rate, x = fused_ops.rate_and_logit(a, A_log, dt_bias)
    return lower_bound * torch.sigmoid(rate * x)


def saturating_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """`log_decay = -5 (1 - exp(g / 5))`, with `g` the log-decay of `softplus_decay`, which it bounds by -5.

    Source: the safe decay gate of erase-then-delta attention, arXiv:2606.26560, eq. 15.

    Args:
        a, A_log, dt_bias: see `softplus_decay`.

    Returns:
        log-decay in a's shape, float32 (float64 stays), in [-5, 0]; weak decays are those of `softplus_decay`.
    """
    return fused_ops.softplus_log_decay(a, A_log, dt_bias, saturating=True, fused=False)


DECAY_GATES: dict[str, DecayGate] = {"softplus": softplus_decay, "saturating": saturating_decay}
"""The decay gates that a spec can name; `decay_lower_bound` chooses `bounded_decay`."""


def log_decay(gate: DecayGate, a: Tensor, A_log: Tensor, dt_bias: Tensor, *, fused: bool | None = None) -> Tensor:
    """The log-decay of a gate; the backward pass keeps only `a`, unless that is as small as `[B, T, HV]`.

    Args:
        gate, a, A_log, dt_bias: see `DecayGate`.
        fused: whether a kernel computes `softplus_decay` and `saturating_decay`, see `deltazoo.ops.fused.takes_kernel`.
    """
    saturating = gate is saturating_decay
    if saturating or gate is softplus_decay:
        gate = partial(fused_ops.softplus_log_decay, saturating=saturating, fused=fused)
    return gate(a, A_log, dt_bias) if a.ndim == 3 else recomputable(gate, a, A_log, dt_bias)
