"""Implementations that are timed: our operator, other libraries where installed, and softmax attention."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.inputs import Inputs
from benchmarks.operator_options import OPERATORS
from deltazoo.ops import delta_rule, delta_rule_step, linear_attention, linear_attention_step

__all__ = ["Candidate", "candidates_for", "has_peer", "installed_peers", "our_label", "step_candidates"]

_FLA = {
    "delta": ("fla.ops.delta_rule", "chunk_delta_rule", "fused_recurrent_delta_rule"),
    "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda", "fused_recurrent_kda"),
    "comba": ("fla.ops.comba", "chunk_comba", "fused_recurrent_comba"),
    "gdn2": ("fla.ops.gdn2", "chunk_gdn2", "fused_recurrent_gdn2"),
    **{
        f"{rule}-n{n}": ("fla.ops.gated_delta_product", "chunk_gated_delta_product", None)
        for rule in ("delta", "gdn")
        for n in (2, 4)
    },
    "gla": ("fla.ops.gla", "chunk_gla", None),
    "lightning": ("fla.ops.lightning_attn", "chunk_lightning_attn", None),
}
"""Module, function of sequences, and function of one token where it takes the same arguments. The preconditioned rules
(PGDN, PKDA) have kernels there that normalise keys and compute the preconditioner as well, and RWKV-7's rule takes its
two micro-steps as one: neither is an operator of ours."""

_FLASHQLA = ("flash_qla", "chunk_gated_delta_rule", None)

_FLA_KERNELS = {
    "fla": {"FLA_TILELANG": "0", "FLA_FLASH_QLA": "0"},
    "fla-safe-gate": {"FLA_TILELANG": "0", "FLA_FLASH_QLA": "0"},
    "fla-tilelang": {"FLA_TILELANG": "1", "FLA_FLASH_QLA": "0"},
    "fla-flashqla": {"FLA_TILELANG": "0", "FLA_FLASH_QLA": "1"},
}
"""What flash-linear-attention reads from the environment at every call: which kernels besides its own it may take."""

_OPERATORS_OF = {
    "fla-safe-gate": ("kda", "gdn2"),
    "fla-tilelang": ("gdn", "kda", "comba"),
    "fla-flashqla": ("gdn",),
    "flashqla": ("gdn",),
}
"""The operators of the peers that have few."""

_MODULES = {
    "fla": ["fla.ops.delta_rule"],
    "fla-safe-gate": ["fla.ops.delta_rule"],
    "fla-tilelang": ["fla.ops.delta_rule", "tilelang"],
    "fla-flashqla": ["fla.ops.delta_rule", "flash_qla"],
    "flashqla": ["flash_qla"],
    "sdpa": [],
}
"""What must be installed."""


@dataclass(frozen=True)
class Candidate:
    """One implementation of one operator.

    `forward` maps inputs to the output `[B, T, H, V]`. `environment` holds variables that both passes read.
    """

    library: str
    op: str
    forward: Callable[[Inputs], Tensor]
    environment: Mapping[str, str] = field(default_factory=dict)

    def train_step(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Forward, then every gradient for `inputs.d_output`."""
        return torch.autograd.grad(self.forward(inputs), inputs.leaves(self.op), inputs.d_output)


def installed_peers(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Splits peers into those that can be imported and, for the others, the reason."""
    missing = {}
    for name in names:
        try:
            for module in _MODULES[name]:
                importlib.import_module(module)
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
        Candidate(our_label(backend, precision), op, partial(_ours, op=op, backend=backend, precision=precision))
        for precision in precisions
    ]
    for peer in peers:
        if has_peer(op, peer):
            module, chunk_name, _ = _FLASHQLA if peer == "flashqla" else _FLA[op]
            function = getattr(importlib.import_module(module), chunk_name)
            options = {"safe_gate": True} if peer == "fla-safe-gate" else {}
            forward = partial(_fla, op=op, function=function, options=options)
            found.append(Candidate(peer, op, forward, _FLA_KERNELS.get(peer, {})))
    return found


def has_peer(op: str, peer: str) -> bool:
    """Whether another library has kernels for an operator."""
    return op in _OPERATORS_OF[peer] if peer in _OPERATORS_OF else peer == "fla" and op in _FLA


def step_candidates(op: str, *, backend: str | None, peers: list[str]) -> dict[str, Callable[[Inputs, Tensor], Any]]:
    """The same for one decoding token: functions of `(inputs with T = 1, state [B, H, K, V])`, by library."""
    steps: dict[str, Callable[[Inputs, Tensor], Any]] = {}
    if backend is not None:
        steps[our_label(backend, None)] = partial(_our_step, op=op, backend=backend)
    module, _, step_name = _FLA.get(op, ("", None, None))
    if "fla" in peers and step_name is not None:
        function = getattr(importlib.import_module(module), step_name)
        steps["fla"] = partial(_fla_step, op=op, function=function)
    return steps


def _our_arguments(inputs: Inputs, op: str) -> dict[str, Any]:
    """Arguments of `delta_rule` and `delta_rule_step`."""
    operator = OPERATORS[op]
    arguments: dict[str, Any] = dict(
        q=inputs.q, k=inputs.k, v=inputs.v, beta=inputs.beta, log_decay=inputs.log_decay, erase_key=inputs.erase_key
    )
    if inputs.erase_gate is not None and inputs.write_gate is not None:
        arguments |= dict(erase_key=inputs.erase_gate * inputs.k, v=inputs.write_gate * inputs.v)
    reads = "undecayed" if operator.undecayed else "decayed"
    return arguments | dict(erase_reads=reads, num_micro_steps=operator.num_micro_steps)


def _ours(inputs: Inputs, op: str, backend: str, precision: str | None) -> Tensor:
    if not OPERATORS[op].corrects:
        return linear_attention(inputs.q, inputs.k, inputs.v, inputs.log_decay, backend=backend).output
    return delta_rule(**_our_arguments(inputs, op), backend=backend, precision=precision).output


def _our_step(inputs: Inputs, state: Tensor, op: str, backend: str) -> Any:
    if not OPERATORS[op].corrects:
        return linear_attention_step(inputs.q, inputs.k, inputs.v, inputs.log_decay, state=state, backend=backend)
    return delta_rule_step(**_our_arguments(inputs, op), state=state, backend=backend)


def _fla_arguments(inputs: Inputs, op: str) -> dict[str, Any]:
    operator = OPERATORS[op]
    arguments: dict[str, Any] = dict(q=inputs.q, k=inputs.k, v=inputs.v)
    if operator.decay == "fixed":  # the slopes of the first layer, as in `make_inputs`
        return arguments | dict(layer_idx=0, num_layers=1)
    if operator.num_micro_steps > 1:
        arguments |= dict(num_householder=operator.num_micro_steps, g=None)
    if inputs.log_decay is not None:
        arguments["g"] = inputs.log_decay
    if inputs.erase_gate is not None:
        return arguments | dict(b=inputs.erase_gate, w=inputs.write_gate)
    if inputs.beta is not None:
        arguments["beta"] = inputs.beta
    if inputs.erase_key is not None:
        arguments["p"] = inputs.erase_key
    return arguments


def _fla(inputs: Inputs, op: str, function: Callable[..., Any], options: dict[str, Any]) -> Tensor:
    return function(**_fla_arguments(inputs, op), **options)[0]


def _fla_step(inputs: Inputs, state: Tensor, op: str, function: Callable[..., Any]) -> Any:
    return function(**_fla_arguments(inputs, op), initial_state=state, output_final_state=True)


def _sdpa(inputs: Inputs) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
