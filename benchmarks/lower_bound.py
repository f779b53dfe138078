r"""The least time the hardware allows: bytes over bandwidth or operations over matrix rate, whichever is longer.

Per token and value head, with 64-token chunks, 16-bit q, k, v and o, float32 beta and gate. Every tensor moves once
(K counts once per group of value heads that share it):

    forward   reads q, k, v, beta, gate, writes o:              2 (2K + 2V) + 4 + gate bytes
    backward  reads q, k, v, dO, beta, gate, writes gradients:  2 (4K + 3V) + 8 + 2 gate bytes

(gate bytes: 0, 4 for one decay per head, 4K per channel.) The matrix products of a chunk of C tokens, at 2 operations
per multiply-add, with k = C C K, v = C C V, s = C K V:

    forward   KK^T, QK^T (k); A X, P U (v); K S, Q S, K^T U (s); the inverse C^3 / 2:   2k + 2v + 3s + C^3 / 2
    backward  states recomputed (K S, A X, K^T U), reverse scan (P^T dO, A^T dU, K dS, Q^T dO, K^T Z), then dP, dL,
              dq, dk from chunk-local and state products with N recomputed:                 5k + 5v + 8s

At K = V = 128 that is 168 and 426 thousand operations per token and head.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.shapes import Shape

__all__ = ["Ceilings", "lower_bound_ms"]

_CHUNK = 64


@dataclass(frozen=True)
class Ceilings:
    """Measured on the machine: device-to-device copy (bytes read plus written) and a large bf16 matrix product."""

    copy_tb_s: float
    matmul_tflop_s: float


def lower_bound_ms(shape: Shape, op: str, *, backward: bool, ceilings: Ceilings) -> float:
    """The lower bound of one forward pass, or of forward plus backward, in milliseconds. KeyError for softmax."""
    passes = [(forward_bytes(shape, op), forward_operations(shape))]
    if backward:
        passes.append((backward_bytes(shape, op), backward_operations(shape)))
    bytes_per_ms, operations_per_ms = ceilings.copy_tb_s * 1e9, ceilings.matmul_tflop_s * 1e9
    per_token_head = sum(max(size / bytes_per_ms, work / operations_per_ms) for size, work in passes)
    return shape.token_heads * per_token_head


def _gate_bytes(shape: Shape, op: str) -> int:
    return {"delta": 0, "gdn": 4, "kda": 4 * shape.K}[op]


def forward_bytes(shape: Shape, op: str) -> float:
    """Bytes per token and value head, each tensor once."""
    return 2 * (2 * shape.K / shape.groups + 2 * shape.V) + 4 + _gate_bytes(shape, op)


def backward_bytes(shape: Shape, op: str) -> float:
    """Bytes per token and value head of the backward pass alone."""
    return 2 * (4 * shape.K / shape.groups + 3 * shape.V) + 8 + 2 * _gate_bytes(shape, op)


def forward_operations(shape: Shape) -> float:
    """Matrix operations per token and head."""
    C, K, V = _CHUNK, shape.K, shape.V
    return 2 * (2 * C * K + 2 * C * V + 3 * K * V) + C * C


def backward_operations(shape: Shape) -> float:
    """Matrix operations per token and head of the backward pass alone, states recomputed."""
    C, K, V = _CHUNK, shape.K, shape.V
    return 2 * (5 * C * K + 5 * C * V + 8 * K * V)
