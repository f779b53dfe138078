"""The arguments of one call of the operator over whole sequences, in the form that every backend takes."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_decay, float scale, Tensor? initial_state, "
    "Tensor? cu_seqlens, bool? strict, Tensor? erase_key, bool undecayed, int num_micro_steps"
)
"""The fields of `RuleCall` as the first arguments of an operator of torch."""


class RuleCall(NamedTuple):
    """The checked arguments of a call, in the order of the operators' schemas; shapes are in `deltazoo.delta_rule`."""

    q: Tensor
    """`[B, T, H, K]`; autocast has cast q, k, v and the erase key."""
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
        """The call with these fields."""
        q, k, v, beta, log_decay, initial_state, erase_key = differentiable
        scale, strict, *update = options
        return cls._make([q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, strict, erase_key, *update])

    @staticmethod
    def in_order(gradients: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients of `differentiable` in the order of the fields, None for the others."""
        *first, d_initial_state, d_erase_key = gradients
        return *first, None, d_initial_state, None, None, d_erase_key, None, None
