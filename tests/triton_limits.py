"""What the GPU kernels refuse for now, so that tests over many cases can ask for the refusal instead of a result."""

from __future__ import annotations

import torch
from delta_rule_cases import DeltaRuleCase


def refused_on_a_gpu(case: DeltaRuleCase, dtype: torch.dtype) -> bool:
    """16-bit inputs with decay per channel and V <= 64: their gradients were wrong (docs/log.md)."""
    return case.decay == "channel" and dtype != torch.float32 and case.V <= 64
