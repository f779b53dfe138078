"""The record that describes a layer's rule in a decoding step, in plain numbers and words: it imports no Triton.

A layer's spec and step form (`deltazoo.spec.StepForm`) say all of it; `deltazoo.generation.fused_blocks` makes it once.
Its fields are the constants of the kernel in `deltazoo.ops.decoding.rule`.
"""

from typing import NamedTuple

from deltazoo.ops.step_size import largest_gain

__all__ = ["STEP_KEYS", "STEP_SIZES", "RuleShape"]

STEP_KEYS = (
    "tied", "gated", "gated_query", "roots", "query_share", "feedback", "unit_feedback", "erase_first", "scaled",
)  # fmt: skip
"""Keys under which a token erases and writes, with s for the sigmoid:

"tied": both under k.
"gated": it erases under `s(b) * k` and writes `s(w) * v`, with w `[HV, V]`; b and w are per channel, the step is 1.
"gated_query": likewise, erasing under `s(b) * k + s(p0) / 4 (I - k k^T) (s(b) * q)` too.
"roots": `sqrt(s(b)) * k` and `sqrt(s(w)) * v` take the place of k and v.
"query_share": it erases under `k + s(lambda - 0.9) q`, with lambda `[H]`.
"feedback": it erases under `s(p0) k`, and is read by `q - p1 k`.
"unit_feedback": k and the query `q - p1 s(p0) k` are normalised after that.
"erase_first": a step before k's erases under a unit key of its own, from `low_rank_gates`, with the size s(c), c
    `[HV]`.
"scaled": it writes under what `scaled_keys` makes of k.

In a layer's `StepForm` the maps, or the parameters, of "scaled" are those of the moment: decay gate and step gate;
`A_log`, `dt_bias` and `log_scale`. p0 and p1 are the parameters of the others, in this order.
"""

STEP_SIZES = ("none", "euler", "exact", "implicit", "kaczmarz")
"""Step sizes that the kernel knows, by name; "none" if the rule erases nothing."""


class RuleShape(NamedTuple):
    """Sizes and choices of a layer's rule, and the columns of its products' result `mixed` where its inputs begin."""

    H: int
    HV: int
    K: int
    V: int
    normalize_q: bool
    doubled_step: bool
    """The step size is twice as large; with gates per channel those of the keys are."""
    decay: str
    """"none", "scalar" or "channel"."""
    gate: str
    """Of the output: "none", "silu" or "sigmoid"."""
    low_rank_gate: bool = False
    """The output gate comes from `low_rank_gates`, as a decay per channel always does."""
    normalize_k: bool = True
    step: str = "euler"
    """Name of the step size, of `STEP_SIZES`; without one `mixed` has no b."""
    decay_form: str = "softplus"
    """Of the log-decay: "softplus", "saturating", "log_sigmoid", or "fixed", which is per head and takes no a."""
    keys: str = "tied"
    """One of `STEP_KEYS`."""
    micro_steps: int = 1
    """Steps per token with keys, values and b of their own."""
    undecayed: bool = False
    """The erased value is read before the decay."""
    turned: int = 0
    """The first channels of queries and keys, which a rotary embedding turns before they are normalised."""
    scale_queries: bool = True
    """By K^-1/2."""
    gate_at: int = 0
    """Column of the output gate, `[HV, V]`, unless it is of low rank. Columns of inputs that a rule lacks are ignored.
    """
    decay_at: int = 0
    """Column of a of a decay per head, `[HV]`."""
    step_at: int = 0
    """Column of b, `[HV]` per micro-step; with gates per channel that of the keys, `[H, K]`."""
    keys_at: int = 0
    """Column of what `keys` takes besides."""

    @property
    def largest_gain(self) -> float:
        """Upper bound on the erase gain `beta e . k`; 0 if no bound is needed."""
        if self.keys in ("feedback", "unit_feedback"):
            return 1.0
        may_exceed = self.doubled_step or (self.step == "euler" and not self.normalize_k) or self.keys == "query_share"
        return largest_gain(decays=self.decay != "none") if may_exceed else 0.0
