"""Implementations that are timed: our operator, flash-linear-attention where installed, and softmax attention."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.ops import delta_rule, delta_rule_step
from deltazoo.workbench.bench.inputs import Inputs

__all__ = ["Candidate", "candidates_for", "installed_peers", "our_label", "step_candidates"]

_FLA = {
    "delta": ("fla.ops.delta_rule", "chunk_delta_rule", "fused_recurrent_delta_rule"),
    "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda", "fused_recurrent_kda"),
}


@dataclass(frozen=True)
class Candidate:
    """One implementation of one operator.

    `forward` maps inputs to the output `[B, T, H, V]`.
    """

    library: str
    op: str
    forward: Callable[[Inputs], Tensor]

    def train_step(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Forward, then every gradient for `inputs.d_output`."""
        return torch.autograd.grad(self.forward(inputs), inputs.leaves(self.op), inputs.d_output)


def installed_peers(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Splits peers into those that can be imported and, for the others, the reason."""
    missing = {}
    for name in names:
        if name.startswith("fla"):
            try:
                importlib.import_module("fla.ops.delta_rule")
            except Exception as error:  # a broken installation may raise anything
                missing[name] = f"{type(error).__name__}: {error}"
    return [name for name in names if name not in missing], missing


def our_label(backend: str, precision: str | None) -> str:
    """The name of our rows: `deltazoo` for the default on a GPU, otherwise with what differs from it."""
    parts = ["deltazoo", *([] if backend == "triton" else [backend]), *([precision] if precision else [])]
    return " ".join(parts)


def candidates_for(op: str, *, backend: str, precisions: list[str | None], peers: list[str]) -> list[Candidate]:
    """The implementations of an operator, ours first.

    Args:
        op: one of `OPS`.
        backend: the backend of our rows.
        precisions: values of `delta_rule(precision=...)`, one candidate each.
        peers: names out of `PEERS`; those that have no such operator are left out.
    """
    if op == "softmax":
        return [Candidate("sdpa", op, _sdpa)] if "sdpa" in peers else []
    found = [
        Candidate(our_label(backend, precision), op, partial(_ours, options=_our_options(backend, precision)))
        for precision in precisions
    ]
    for peer in peers:
        if peer == "fla" or (peer == "fla-safe-gate" and op == "kda"):
            module, chunk_name, _ = _FLA[op]
            function = getattr(importlib.import_module(module), chunk_name)
            options = {"safe_gate": True} if peer == "fla-safe-gate" else {}
            found.append(Candidate(peer, op, partial(_fla, function=function, options=options)))
    return found


def step_candidates(op: str, *, backend: str | None, peers: list[str]) -> dict[str, Callable[[Inputs, Tensor], Any]]:
    """The same for one decoding token: functions of `(inputs with T = 1, state [B, H, K, V])`, by library."""
    steps: dict[str, Callable[[Inputs, Tensor], Any]] = {}
    if backend is not None:
        steps[our_label(backend, None)] = partial(_our_step, backend=backend)
    if "fla" in peers:
        module, _, step_name = _FLA[op]
        function = getattr(importlib.import_module(module), step_name)
        steps["fla"] = partial(_fla_step, function=function)
    return steps


def _our_options(backend: str, precision: str | None) -> dict[str, Any]:
    """Keyword arguments of `delta_rule` for a backend and precision."""
    return {"backend": backend, "precision": precision}


def _ours(inputs: Inputs, options: dict[str, Any]) -> Tensor:
    return delta_rule(inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_decay, **options).output


def _our_step(inputs: Inputs, state: Tensor, backend: str) -> Any:
    return delta_rule_step(inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_decay, state=state, backend=backend)


def _fla(inputs: Inputs, function: Callable[..., Any], options: dict[str, Any]) -> Tensor:
    gate = {} if inputs.log_decay is None else {"g": inputs.log_decay}
    return function(q=inputs.q, k=inputs.k, v=inputs.v, beta=inputs.beta, **gate, **options)[0]


def _fla_step(inputs: Inputs, state: Tensor, function: Callable[..., Any]) -> Any:
    gate = {} if inputs.log_decay is None else {"g": inputs.log_decay}
    return function(
        q=inputs.q, k=inputs.k, v=inputs.v, beta=inputs.beta, **gate, initial_state=state, output_final_state=True
    )


def _sdpa(inputs: Inputs) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
