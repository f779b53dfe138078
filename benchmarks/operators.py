"""Operators timed side by side with peers: forward, training, CUDA graphs, memory, host time.

    python -m benchmarks.operators --out benchmarks/results/operators_h200.json
    python -m benchmarks.operators --out run.json --shapes train small --ops gdn --gates weak strong --peers sdpa
    python -m benchmarks.operators --out run.json --device cpu --shapes 1x512x4x64x64 --measure forward training

Shape by shape, so that implementations of one operator are timed one after the other; each pass of each on its own, as
a peer may run forward and fail to train. A GPU that a faulty kernel breaks costs that measurement only: the run goes on
in a new process. What was measured:

    forward_ms, forward_graph_ms             forward, no gradient recorded: eager, and replayed from a CUDA graph
    forward_backward_ms, ..._graph_ms        forward and every gradient, likewise
    peak_mib                                 peak memory of forward and backward above the inputs
    host_forward_us, host_forward_grad_us    host time of a forward call on 64 tokens without and with gradients
    first_forward_s, first_training_s        first call in the process, compilation and autotuning included
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Results, Row, Spread, Timer, options, side_by_side
from benchmarks.inputs import GATE_KINDS, NAMED, OPERATORS, Inputs, Shape, gates_of, make_inputs, shapes_named
from deltazoo.ops import delta_rule, linear_attention

MEASURES = ("forward", "training", "graphs", "memory", "host")
PEERS = ("fla", "fla-safe-gate", "fla-tilelang", "fla-flashqla", "flashqla", "sdpa")
"""fla: its chunk functions with default options, on its own Triton kernels, also where TileLang or FlashQLA are
installed, whose kernels it would then take for some operators. fla-tilelang: gdn, kda and comba with the backward
kernels that it has in TileLang. fla-flashqla: gdn, handed to FlashQLA. fla-safe-gate: kda and gdn2 with
`safe_gate=True`, its faster path for gates bounded by -5. flashqla: gdn by FlashQLA itself. sdpa:
`torch.nn.functional.scaled_dot_product_attention`, causal."""

_FLA = {
    "delta": ("fla.ops.delta_rule", "chunk_delta_rule"),
    "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
    "comba": ("fla.ops.comba", "chunk_comba"),
    "gdn2": ("fla.ops.gdn2", "chunk_gdn2"),
    **{
        f"{rule}-n{n}": ("fla.ops.gated_delta_product", "chunk_gated_delta_product")
        for rule in ("delta", "gdn")
        for n in (2, 4)
    },
    "gla": ("fla.ops.gla", "chunk_gla"),
    "lightning": ("fla.ops.lightning_attn", "chunk_lightning_attn"),
}
"""Module and function. The preconditioned rules (PGDN, PKDA) have kernels there that normalise keys and compute the
preconditioner as well, and RWKV-7's rule takes its two micro-steps as one: neither is an operator of ours."""

_FLASHQLA = ("flash_qla", "chunk_gated_delta_rule")

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
            module, chunk_name = _FLASHQLA if peer == "flashqla" else _FLA[op]
            function = getattr(importlib.import_module(module), chunk_name)
            options = {"safe_gate": True} if peer == "fla-safe-gate" else {}
            forward = partial(_fla, op=op, function=function, options=options)
            found.append(Candidate(peer, op, forward, _FLA_KERNELS.get(peer, {})))
    return found


def has_peer(op: str, peer: str) -> bool:
    """Whether another library has kernels for an operator."""
    return op in _OPERATORS_OF[peer] if peer in _OPERATORS_OF else peer == "fla" and op in _FLA


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


def _sdpa(inputs: Inputs) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


TINY_TOKENS = 64


def measure_candidate(
    results: Results, timer: Timer, candidate: Candidate, setting: Row, shape: Shape, arguments: argparse.Namespace
) -> None:
    """Everything about one candidate on one shape; all measures of a pass fail if its first call does."""
    device, wanted = arguments.device, set(arguments.measure)
    os.environ.update(candidate.environment)
    try:
        inputs = make_inputs(shape, candidate.op, setting["gates"], device=device)
        tiny = make_inputs(replace(shape, B=1, T=TINY_TOKENS), candidate.op, setting["gates"], device=device)
    except torch.OutOfMemoryError as error:
        results.fail({**setting, "measure": "forward_ms"}, error)
        return
    no_gradient = torch.no_grad()
    forward = no_gradient(lambda: candidate.forward(inputs))
    on_tiny = partial(candidate.forward, tiny)
    train = partial(candidate.train_step, inputs)

    def first(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        timer.wait()
        return time.perf_counter() - began

    passes: list[tuple[str, Callable[[], object], dict[str, tuple[set[str], Callable[[], Spread | float]]]]] = [
        (
            "first_forward_s",
            forward,
            {
                "forward_ms": ({"forward"}, lambda: timer.milliseconds(forward)),
                "forward_graph_ms": ({"forward", "graphs"}, lambda: timer.graph_milliseconds(forward)),
                "host_forward_us": ({"host"}, lambda: timer.host_microseconds(no_gradient(on_tiny))),
                "host_forward_grad_us": ({"host"}, lambda: timer.host_microseconds(on_tiny)),
            },
        ),
        (
            "first_training_s",
            train,
            {
                "forward_backward_ms": ({"training"}, lambda: timer.milliseconds(train)),
                "forward_backward_graph_ms": ({"training", "graphs"}, lambda: timer.graph_milliseconds(train)),
                "peak_mib": ({"memory"}, lambda: timer.peak_mib(train)),
            },
        ),
    ]
    for first_call, call, measures in passes:
        chosen = {name: measurement for name, (groups, measurement) in measures.items() if groups <= wanted}
        if not chosen:
            continue
        row = results.measure({**setting, "measure": first_call}, partial(first, call))
        for name, measurement in chosen.items():
            if "error" in row:
                results.add({**setting, "measure": name}, {"value": None, "error": row["error"]})
            elif not arguments.warm_up_only:
                results.measure({**setting, "measure": name}, measurement)


def chosen_candidates(arguments: argparse.Namespace, peers: list[str]) -> Iterator[tuple[Row, Shape, Candidate]]:
    """What is timed, in order."""
    precisions = [] if arguments.peers_only else [None if name == "default" else name for name in arguments.precision]
    for shape, op in product(shapes_named(arguments.shapes), arguments.ops):
        if op == "softmax" and shape.groups > 1:  # several values per key are no attention
            continue
        found = candidates_for(op, backend=arguments.backend, precisions=precisions, peers=peers)
        for gates, candidate in product(gates_of(op), found):
            if gates == "none" or gates in arguments.gates:
                yield {"shape": str(shape), "op": op, "gates": gates, "library": candidate.library}, shape, candidate


def warm_up(arguments: argparse.Namespace, peers: list[str]) -> None:
    """Compile the kernels of peers that tune themselves, hundreds of them, in processes side by side.

    One process per operator, peer and set of head sizes. The run itself tunes again, without waiting for the compiler.
    """
    command = ["-m", "benchmarks.operators", "--warm-up-only", "--peers-only", "--device", arguments.device]
    command += ["--gates", "medium", "--measure", "forward", "training"]
    chosen = [
        ["--shapes", str(shape), "--ops", op, "--peers", peer]
        for op, peer in product(arguments.ops, peers)
        if op != "softmax" and has_peer(op, peer)
        for shape in dict.fromkeys(_compiling(shape, peer) for shape in shapes_named(arguments.shapes))
    ]
    with TemporaryDirectory() as folder:
        commands = [[*command, *rest, "--out", f"{folder}/{number}.json"] for number, rest in enumerate(chosen)]
        for rest, (status, _) in zip(chosen, side_by_side(commands, arguments.warm_up_jobs), strict=True):
            print("warmed up" if status == 0 else f"status {status}:", *rest, flush=True)


def _compiling(shape: Shape, peer: str) -> Shape:
    """The smallest shape that compiles the kernels of a shape."""
    if peer.endswith("flashqla"):  # which kernels it takes depends on all sizes
        return shape
    # A batch of one may be compiled separately, as 1 is a constant of its own to Triton, and every batch may be to
    # TileLang; longer sequences are not.
    return replace(shape, B=shape.B if peer == "fla-tilelang" else min(shape.B, 2), T=min(shape.T, 1024))


def check_device(timer: Timer) -> None:
    """After a failure: go on in a new process if the GPU no longer answers this one."""
    if not timer.on_gpu:
        return
    try:
        timer.wait()
        torch.ones(1, device="cuda").sum().item()
    except RuntimeError as error:
        print(f"the GPU no longer answers this process ({error}); going on in a new one", flush=True)
        os.execv(sys.executable, [*sys.orig_argv, *([] if "--resume" in sys.argv else ["--resume"])])
    torch.cuda.empty_cache()


def main() -> int:
    """Command line; exit status 1 if a measurement failed."""
    parser = options(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["table"], help=f"of {', '.join(NAMED)}, or BxTxH[/HV]xKxV")
    parser.add_argument("--ops", nargs="+", default=["delta", "gdn", "kda", "softmax"], choices=[*OPERATORS, "softmax"])
    parser.add_argument("--gates", nargs="+", default=["weak", "medium", "strong"], choices=GATE_KINDS)
    parser.add_argument("--measure", nargs="+", default=list(MEASURES), choices=MEASURES)
    parser.add_argument("--peers", nargs="*", default=["fla", "sdpa"], choices=PEERS)
    parser.add_argument("--peers-only", action="store_true", help="leave deltazoo out")
    parser.add_argument("--precision", nargs="+", default=["default"], choices=("default", "fast", "strict"))
    parser.add_argument("--backend", choices=("triton", "chunkwise"), help="ours; triton on a GPU, chunkwise on a CPU")
    parser.add_argument("--warm-up-jobs", type=int, default=0, help="processes that compile for peers first")
    parser.add_argument("--warm-up-only", action="store_true", help="first calls only")
    parser.add_argument("--resume", action="store_true", help="leave out what has rows in --out already")
    arguments = parser.parse_args()
    arguments.backend = arguments.backend or ("chunkwise" if arguments.device == "cpu" else "triton")
    peers, missing = installed_peers(arguments.peers)
    if arguments.warm_up_jobs and not arguments.resume:
        warm_up(arguments, peers)
    timer, results = Timer(arguments.device), Results(arguments)
    results.run["missing_peers"] = missing
    print(*(f"{name} is not measured: {reason}" for name, reason in missing.items()), sep="\n", end="")
    for setting, shape, candidate in chosen_candidates(arguments, peers):
        if not (arguments.resume and results.has(setting)):
            measure_candidate(results, timer, candidate, setting, shape, arguments)
            if any("error" in row for row in results.rows if setting.items() <= row.items()):
                check_device(timer)
    return results.status()


if __name__ == "__main__":
    sys.exit(main())
