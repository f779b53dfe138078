"""What tells the variants of the delta rule apart, as data, and the registry that holds them.

Every variant is the recurrence of `deltazoo.ops.delta_rule` after some work on each token alone: how the step size
comes out of the gate, whether the state decays, which of q and k are normalised, how the output is gated. A
`DeltaRuleSpec` says which; `deltazoo.layers.DeltaRuleAttention` reads it.
"""

import difflib
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["DeltaRuleSpec", "get_variant", "list_variants", "register_variant"]

StepSize = Literal["euler", "exact", "implicit", "none"]
Decay = Literal["none", "scalar", "channel"]
OutputGate = Literal["none", "full", "low_rank"]
GateActivation = Literal["silu", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class DeltaRuleSpec:
    """One variant: its equation, its source, and the choices that define it.

    Raises:
        ValueError: choices that contradict each other, named.
    """

    name: str
    """Registry name, file name, value of `mixer` in a config; the Hub type too, where there is one."""
    paper: str
    """Title and arXiv number."""
    summary: str
    """How it differs from its nearest neighbour, in one sentence."""
    equation: str
    """The update of one token, with the state S `[K, V]`."""

    step_size: StepSize
    """From gate b to effective step size: `deltazoo.ops.step_size`; "none" leaves the correction term out."""
    decay: Decay = "none"
    """Of the state: none, one factor per value head, or one per key channel."""
    normalize_q: bool = True
    """L2-normalise the query of each head."""
    normalize_k: bool = True
    """L2-normalise the key of each head."""
    allow_neg_eigval: bool = False
    """Double the step size, so that the transition's eigenvalue along the key lies in [-1, 1]."""
    decay_lower_bound: float | None = None
    """Bounded gate `lower_bound * sigmoid(...)` instead of the softplus gate: log-decay in (lower_bound, 0)."""
    output_gate: OutputGate = "none"
    """Gate on the normalised output: none, a full projection of the input, or one of rank head_v_dim."""
    gate_activation: GateActivation = "silu"
    """Of the output gate."""

    decay_rate_range: tuple[float, float] = (1.0, 16.0)
    """Initial exp(A_log) is uniform on it."""
    dt_range: tuple[float, float] = (1e-3, 0.1)
    """Initial softplus(dt_bias) is log-uniform on it."""

    head_dim: int = 128
    """Key dimension per head in the paper's language models."""
    expand_v: float = 1.0
    """Value dimension over key dimension, per head, in the paper's language models."""
    hub_model_type: str | None = None
    """`model_type` of published checkpoints; None: `delta_rule` with `mixer: <name>`."""

    def __post_init__(self) -> None:
        self._check_choices()
        if self.step_size == "none" and self.allow_neg_eigval:
            raise ValueError(
                f"variant {self.name!r}: allow_neg_eigval needs a correction term, but step_size is 'none'"
            )
        if self.decay_lower_bound is not None:
            if self.decay == "none":
                raise ValueError(f"variant {self.name!r}: decay_lower_bound needs a decay, but decay is 'none'")
            if self.decay_lower_bound >= 0:
                raise ValueError(
                    f"variant {self.name!r}: decay_lower_bound is a log-decay and must be negative, "
                    f"got {self.decay_lower_bound}"
                )

    def _check_choices(self) -> None:
        allowed = {
            "step_size": get_args(StepSize),
            "decay": get_args(Decay),
            "output_gate": get_args(OutputGate),
            "gate_activation": get_args(GateActivation),
        }
        for field, choices in allowed.items():
            value = getattr(self, field)
            if value not in choices:
                raise ValueError(f"variant {self.name!r}: {_unknown(field, value, choices)}")

    @property
    def corrects(self) -> bool:
        """Whether the rule has a correction term at all (linear attention has none)."""
        return self.step_size != "none"


_REGISTRY: dict[str, DeltaRuleSpec] = {}


def register_variant(spec: DeltaRuleSpec) -> DeltaRuleSpec:
    """Make a variant known under `spec.name`, and return it; registering an equal spec again changes nothing.

    Raises:
        ValueError: the name is taken by a different spec.
    """
    known = _REGISTRY.setdefault(spec.name, spec)
    if known != spec:
        raise ValueError(f"the variant name {spec.name!r} is taken by another spec: {known}")
    return spec


def get_variant(name: str) -> DeltaRuleSpec:
    """The registered variant of that name.

    Raises:
        ValueError: no such variant; the message lists them and names the nearest.
    """
    if name not in _REGISTRY:
        raise ValueError(_unknown("variant", name, list_variants()))
    return _REGISTRY[name]


def list_variants() -> list[str]:
    """Names of all registered variants, in the order of registration."""
    return list(_REGISTRY)


def _unknown(kind: str, value: object, known: "list[str] | tuple[str, ...]") -> str:
    close = difflib.get_close_matches(str(value), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {kind} {value!r}; {hint}known: {', '.join(known)}"
