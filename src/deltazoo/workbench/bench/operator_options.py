"""Values that the options of the operator benchmark take; imports no torch."""

from __future__ import annotations

from deltazoo.names import unknown

__all__ = ["GATES", "GROUPS", "OPS", "PEERS", "gates_of", "parse_peers"]

GROUPS = ("forward", "training", "graphs", "memory", "host", "cold", "decode")
"""Groups of measures: eager forward, eager forward and backward, CUDA graphs of those of the two that are measured,
peak memory, host overhead, first calls in fresh processes, and decoding steps."""

OPS = ("delta", "gdn", "kda", "softmax")
"""delta: no decay. gdn: one decay per head. kda: one decay per key channel. softmax: causal attention, the baseline."""

GATES = {"weak": -1e-3, "medium": -0.05, "strong": -1.0}
"""Mean log-decay per token. Each gate is uniform between 0 and twice its mean, so strong stays above -2."""

PEERS = ("fla", "fla-safe-gate", "sdpa")
"""fla: its chunk functions with default options. fla-safe-gate: `chunk_kda(safe_gate=True)`, its faster path for gates
bounded by -5. sdpa: `torch.nn.functional.scaled_dot_product_attention`, causal."""


def gates_of(op: str) -> list[str]:
    """The gate strengths an operator can be timed with: `none` where there is no gate."""
    return list(GATES) if op in ("gdn", "kda") else ["none"]


def parse_peers(text: str) -> list[str]:
    """Peers from a comma-separated list; `none` is the empty list. ValueError for an unknown name."""
    names = [name for name in (part.strip() for part in text.split(",")) if name and name != "none"]
    for name in names:
        if name not in PEERS:
            raise ValueError(unknown("peer", name, [*PEERS, "none"]))
    return names
