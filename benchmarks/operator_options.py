"""Values that the options of the operator benchmark take; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from deltazoo.names import unknown

__all__ = [
    "GATES",
    "GATE_KINDS",
    "GROUPS",
    "OPERATORS",
    "OPS",
    "PEERS",
    "UNEVEN",
    "Operator",
    "gates_of",
    "parse_peers",
]

GROUPS = ("forward", "training", "graphs", "memory", "host", "cold", "decode")
"""Groups of measures: eager forward, eager forward and backward, CUDA graphs of those of the two that are measured,
peak memory, host overhead, first calls in fresh processes, and decoding steps."""

OPS = ("delta", "gdn", "kda", "softmax")
"""Those measured unless others are named. delta: no decay. gdn: one decay per head. kda: one decay per key channel.
softmax: causal attention, the baseline."""


@dataclass(frozen=True)
class Operator:
    """The inputs of an operator.

    `gated`: the erase key is k times a gate and the value v times another, both multiplied by the operator.
    """

    decay: str = "none"  # or scalar, channel, or fixed: one per head that needs no gradient
    corrects: bool = True  # with step sizes
    erase_key: bool = False
    undecayed: bool = False
    num_micro_steps: int = 1
    gated: bool = False


OPERATORS = {
    "delta": Operator(),
    "gdn": Operator("scalar"),
    "kda": Operator("channel"),
    "gdn-erase": Operator("scalar", erase_key=True),
    "kda-erase": Operator("channel", erase_key=True),
    "comba": Operator("scalar", erase_key=True, undecayed=True),
    "gdn2": Operator("channel", gated=True),
    **{f"delta-n{n}": Operator(num_micro_steps=n) for n in (2, 4)},
    **{f"gdn-n{n}": Operator("scalar", num_micro_steps=n) for n in (2, 4)},
    **{f"kda-n{n}": Operator("channel", num_micro_steps=n) for n in (2, 4)},
    "gla": Operator("channel", corrects=False),
    "lightning": Operator("fixed", corrects=False),
}
"""All operators but softmax. `-erase`: a separate erase key. `-n2`, `-n4`: micro-steps per token (Gated DeltaProduct,
EDA). comba: its erase reads before the decay. gdn2: Gated DeltaNet-2. gla and lightning: linear attention."""

GATES = {"weak": -1e-3, "medium": -0.05, "strong": -1.0}
"""Mean log-decay per token. Each gate is uniform between 0 and twice its mean, so strong stays above -2."""

UNEVEN = (-1e-3, -5.0)
"""Of `uneven` gates: means from the first to the second, evenly in their logarithm, from channel to channel or from
head to head. Trained models have such gates: a few channels forget within tokens, and most remember."""

GATE_KINDS = (*GATES, "uneven")

PEERS = ("fla", "fla-safe-gate", "fla-tilelang", "fla-flashqla", "flashqla", "sdpa")
"""fla: its chunk functions with default options, on its own Triton kernels, also where TileLang or FlashQLA are
installed, whose kernels it would then take for some operators. fla-tilelang: gdn, kda and comba with the backward
kernels that it has in TileLang. fla-flashqla: gdn, handed to FlashQLA. fla-safe-gate: kda and gdn2 with
`safe_gate=True`, its faster path for gates bounded by -5. flashqla: gdn by FlashQLA itself. sdpa:
`torch.nn.functional.scaled_dot_product_attention`, causal."""


def gates_of(op: str) -> list[str]:
    """The gate strengths an operator can be timed with: `none` where there is no gate."""
    return list(GATE_KINDS) if op in OPERATORS and OPERATORS[op].decay in ("scalar", "channel") else ["none"]


def parse_peers(text: str) -> list[str]:
    """Peers from a comma-separated list; `none` is the empty list. ValueError for an unknown name."""
    names = [name for name in (part.strip() for part in text.split(",")) if name and name != "none"]
    for name in names:
        if name not in PEERS:
            raise ValueError(unknown("peer", name, [*PEERS, "none"]))
    return names
