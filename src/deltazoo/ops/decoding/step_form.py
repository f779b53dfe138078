"""The description of a layer's rule in a decoding step, in plain numbers and words; this module imports no Triton.

A layer's spec and step form (`deltazoo.spec.StepForm`) determine it; `deltazoo.generation.fused_blocks` makes it once.
Its fields are the constants of the kernel in `deltazoo.ops.decoding.rule`.
"""

from typing import NamedTuple

from deltazoo.ops.step_size import largest_gain

STEP_KEYS = (
    "tied", "gated", "gated_query", "roots", "query_share", "feedback", "unit_feedback", "erase_first", "scaled",
)  # fmt: skip
"""Keys under which a token erases and writes, with s for the sigmoid:

"tied": both under k.
"gated": it erases under `s(b) * k` and writes `s(w) * v`, with w `[HV, V]`; b and w are per channel, the step is 1.
"gated_query": like "gated", but it erases under `s(b) * k + s(p0) / 4 (I - k k^T) (s(b) * q)`.
"roots": `sqrt(s(b)) * k` and `sqrt(s(w)) * v` take the place of k and v.
"query_share": it erases under `k + s(lambda - 0.9) q`, with lambda `[H]`.
"feedback": it erases under `s(p0) k`, and reads with `q - p1 k`.
"unit_feedback": k and the query `q - p1 s(p0) k` are normalised after that.
"erase_first": a first step erases under a further unit key, from `low_rank_maps`, with the size s(c), c `[HV]`.
"scaled": it writes under the result of `scaled_keys`.

In a layer's `StepForm` the maps and parameters of "scaled" are those of the moment: decay gate and step gate; `A_log`,
`dt_bias` and `log_scale`. p0 and p1 are the parameters of the other forms, in this order.
"""

STEP_SIZES = ("none", "euler", "exact", "implicit", "kaczmarz")
"""Step sizes that the kernel knows, by name; "none" if the rule erases nothing."""


class RuleShape(NamedTuple):
    """Sizes and choices of a layer's rule, and the columns at which its inputs begin in the product `mixed`."""

    H: int
    HV: int
    K: int
    V: int
    normalize_q: bool
    doubled_step: bool
    """Whether the step size is doubled; with gates per channel those of the keys are."""
    decay: str
    """"none", "scalar" or "channel"."""
    gate: str
    """Output gate: "none", "silu" or "sigmoid"."""
    low_rank_gate: bool = False
    """Whether the output gate comes from `low_rank_maps`, from which a decay per channel always comes."""
    normalize_k: bool = True
    step: str = "euler"
    """Name of the step size in `STEP_SIZES`; with "none" `mixed` has no b."""
    decay_form: str = "softplus"
    """Form of the log-decay: "softplus", "saturating", "log_sigmoid", or "fixed", which is per head and has no a."""
    keys: str = "tied"
    """One of `STEP_KEYS`."""
    micro_steps: int = 1
    """Steps per token, each with a key, a value and b."""
    undecayed: bool = False
    """Whether the erased value is read before the decay."""
    turned: int = 0
    """Number of the first channels of queries and keys that a rotary embedding turns before they are normalised."""
    scale_queries: bool = True
    """Whether queries are multiplied by K^-1/2."""
    gate_at: int = 0
    """First column of the output gate, `[HV, V]`, unless it is of low rank. Columns of missing inputs are ignored."""
    decay_at: int = 0
    """First column of a `[HV]` of a decay per head."""
    step_at: int = 0
    """First column of b, `[HV]` per micro-step; with gates per channel `[H, K]`, those of the keys."""
    keys_at: int = 0
    """First column of the further input of `keys`."""

    @property
    def largest_gain(self) -> float:
        """Upper bound of the erase gain `beta e . k`; 0 if no bound is needed."""
        if self.keys in ("feedback", "unit_feedback"):
            return 1.0
        may_exceed = self.doubled_step or (self.step == "euler" and not self.normalize_k) or self.keys == "query_share"
        return largest_gain(decays=self.decay != "none") if may_exceed else 0.0
