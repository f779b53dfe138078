"""One call of the operator: its arguments checked, as every backend takes them, and the backend that is to run it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.names import unknown
from deltazoo.ops.autograd_modes import refuse_transforms, transforming
from deltazoo.ops.backends import resolve_backend
from deltazoo.ops.dtypes import autocast_dtype
from deltazoo.ops.validation import check_scale, check_shapes, check_tensor, reads_undecayed, warn_of_heads_first

__all__ = ["SCHEMA", "Given", "RuleCall", "checked_call"]

PRECISIONS = {None: None, "fast": False, "strict": True}
"""Precision -> whether the Triton backend is strict; None: as the erase gain needs."""

Given = tuple[
    Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float | None, Tensor | None, Tensor | None, Tensor | None, int
]
"""Arguments as given: q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, erase_key, num_micro_steps."""

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_decay, float scale, Tensor? initial_state, "
    "Tensor? cu_seqlens, bool? strict, Tensor? erase_key, bool undecayed, int num_micro_steps"
)
"""The fields of `RuleCall` as the first arguments of an operator of torch."""


class RuleCall(NamedTuple):
    """The checked arguments of one call, in the order of the operators' schemas; shapes as of `deltazoo.delta_rule`."""

    q: Tensor
    """`[B, T, H, K]`; q, k, v and the erase key as autocast casts them."""
    k: Tensor
    """`[B, T * n, H, K]`, n = `num_micro_steps`."""
    v: Tensor
    """`[B, T * n, HV, V]`."""
    beta: Tensor | None
    """`[B, T * n, HV]`; None: no correction term (linear attention)."""
    log_decay: Tensor | None
    """`[B, T, HV]` or `[B, T, HV, K]`, natural log; None: no decay."""
    scale: float
    """Factor on q."""
    initial_state: Tensor | None
    """`[N, HV, K, V]`; None: zeros."""
    cu_seqlens: Tensor | None
    """`[N + 1]`; None: every row is one sequence."""
    strict: bool | None = None
    """Precision of the triton backend: strict, fast (False), or by each chunk's erase gain (None)."""
    erase_key: Tensor | None = None
    """`[B, T * n, H, K]`; None: k."""
    undecayed: bool = False
    """Whether the erase reads the state before the decay; False without a decay, where both are the same."""
    num_micro_steps: int = 1
    """n, updates per token."""

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """q, k, v, beta, log_decay, initial_state and erase_key: the tensors that get gradients."""
        return *self[:5], self.initial_state, self.erase_key

    @property
    def options(self) -> tuple[float, bool | None, bool, int]:
        """The fields that are no tensors."""
        return self.scale, self.strict, self.undecayed, self.num_micro_steps

    @classmethod
    def of(cls, differentiable: Iterable[Tensor | None], cu_seqlens: Tensor | None, options: Any) -> "RuleCall":
        """The call that consists of these."""
        q, k, v, beta, log_decay, initial_state, erase_key = differentiable
        scale, strict, *update = options
        return cls._make([q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict, erase_key, *update])

    @staticmethod
    def in_order(gradients: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients of `differentiable` in the order of the fields, None for the others."""
        *first, d_initial_state, d_erase_key = gradients
        return *first, None, d_initial_state, None, None, d_erase_key, None, None


def checked_call(
    given: Given,
    backend: str | None,
    precision: str | None,
    erase_reads: str,
    corrects: bool,
    one_token: bool = False,
) -> tuple[RuleCall, str]:
    """The call as backends take it, and the name of the one that is to run it.

    Args:
        given: the caller's arguments.
        backend, precision, erase_reads: as given, by their names.
        corrects: whether there must be step sizes.
        one_token: whether it is a step, whose state is the initial one.
    """
    q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, erase_key, num_micro_steps = given
    if corrects and beta is None:  # which would mean linear attention below
        raise TypeError("beta must be a tensor, got None; without a correction term call linear_attention")
    undecayed = reads_undecayed(erase_reads) and log_decay is not None
    if precision not in PRECISIONS:
        raise ValueError(unknown("precision", precision, [name for name in PRECISIONS if name is not None]))
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, required=True)
    check_tensor("erase_key", erase_key)
    check_scale(scale)
    dtype = autocast_dtype(v.device)
    if dtype is not None and v.dtype != torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        erase_key = None if erase_key is None else erase_key.to(dtype)
    check_shapes(q, k, v, beta, log_decay, initial_state, cu_seqlens, erase_key, num_micro_steps, one_token)
    if not one_token:
        warn_of_heads_first(q)
    K, V = k.shape[-1], v.shape[-1]
    scale = float(K) ** -0.5 if scale is None else float(scale)
    per_channel = undecayed and not one_token and log_decay is not None and log_decay.ndim == 4
    name, _ = resolve_backend(
        backend, device=v.device, dtype=v.dtype, head_k_dim=K, head_v_dim=V, undecayed_channels=per_channel
    )
    if transforming():
        if backend == "triton":
            refuse_transforms("the triton backend", "use backend='chunkwise'")
        name = "reference"
    strict = PRECISIONS[precision]
    call = RuleCall(
        q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict, erase_key, undecayed, num_micro_steps
    )
    return call, name
