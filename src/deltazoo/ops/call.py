"""One call of the operator over whole sequences, as every backend takes it."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["RuleCall"]


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
