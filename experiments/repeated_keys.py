"""Errors on one key that repeats, the hardest input of the rule, of every form and of a peer's kernel."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.inputs import Inputs
from benchmarks.operator_candidates import candidates_for, installed_peers
from deltazoo.checks.errors import relative_error
from deltazoo.layers import bounded_step, l2_normalize
from deltazoo.ops import delta_rule, resolve_backend
from experiments.claims import Check

__all__ = ["BOUNDS", "PATTERNS", "bound_of", "judge_repeated_keys", "measure_repeated_keys"]

PATTERNS = {"one key": 1, "two keys in turn": 2}
"""Name -> how many keys take turns."""
_BETAS = tuple(1 + step / 10 for step in range(11))
BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}
"""dtype -> the largest relative error that counts as right; in float32 below step size 2, see `bound_of`."""
_HEADS, _DIM = 16, 128
_LOOP = "token loop"


def bound_of(row: dict[str, Any], tokens: int, dim: int) -> float:
    """The largest relative error of a measured row that counts as right.

    At step size 2 a unit key that repeats has the eigenvalue -1: the state forgets nothing. The chunk form computes
    the key's squared length as a product, whose rounding is the same for every token of the key, so the eigenvalue is
    off by the same amount every time, and the error grows with the length. With this product alone in float32 and all
    else in float64 the error is that of the whole form (tests/workbench/lab); the inverse, the corrections and the
    state add a hundredth of it. The token loop multiplies the state instead, with another rounding at every token.

    A float32 sum of K products is off by about sqrt(K) 2^-24 of itself, twice that with step size 2. An eigenvalue off
    by d leaves an output whose state is a sum of T random values off by d T / sqrt(6). The gate was 1e-3 at every
    length and step size, and FAIL, before this was found.
    """
    if row["dtype"] == "float32" and row["beta"] == 2.0 and row["who"] != _LOOP:
        return 2 * math.sqrt(dim) * 2**-24 * tokens / math.sqrt(6)
    return BOUNDS[row["dtype"]]


@torch.no_grad()
def measure_repeated_keys(device: str, *, tokens: int) -> dict[str, Any]:
    """Relative errors of the output against the chunk form in float64 on the same inputs, beta from 1 to 2.

    Args:
        device: on a GPU the kernels are measured in every precision, and flash-linear-attention's where installed.
        tokens: length of the sequences, 16 heads of K = V = 128; two heads on a CPU.

    Returns:
        `tokens`, `dim`, `heads` and `rows` of dtype, pattern, beta, `who`, and `error`, None if it is not finite.
    """
    heads = _HEADS if torch.device(device).type == "cuda" else 2
    rows = []
    for dtype, pattern, beta in product((torch.float32, torch.bfloat16), PATTERNS, _BETAS):
        inputs = _inputs(tokens, heads, PATTERNS[pattern], beta, dtype, device)
        assert inputs.beta is not None
        wide = [x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.beta)]
        exact = delta_rule(*wide, backend="chunkwise").output
        for who, run in _forms(dtype, device).items():
            error = relative_error(run(inputs), exact)
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "pattern": pattern,
                    "beta": beta,
                    "who": who,
                    "error": error if math.isfinite(error) else None,
                }
            )
    return {"tokens": tokens, "dim": _DIM, "heads": heads, "rows": rows}


def judge_repeated_keys(measured: dict[str, Any]) -> list[Check]:
    """The gates: what layers with negative eigenvalues use stays near float64; every other form is printed."""

    def excess(row: dict[str, Any]) -> float:
        return _size(row) / bound_of(row, measured["tokens"], measured["dim"])

    checks = []
    for dtype in BOUNDS:
        rows = [row for row in measured["rows"] if row["dtype"] == dtype]
        for who in dict.fromkeys(row["who"] for row in rows):
            worst = max((row for row in rows if row["who"] == who), key=excess)
            verdict = "printed" if who in ("fla", "triton fast") else "pass" if excess(worst) <= 1 else "fail"
            bound = bound_of(worst, measured["tokens"], measured["dim"])
            why = (
                f": at step size 2 the rounding of the key's squared length adds up, here over {measured['tokens']:,} "
                "tokens (the gate was 1e-3 at every length and step size, and FAIL on a GPU, before this was found; "
                f"below step size 2 it is now {BOUNDS[dtype]:g})"
            )
            wanted = f", wanted at most {bound:.2g}{why if bound != BOUNDS[dtype] else ''}"
            found = f"{_size(worst):.1e}" if math.isfinite(_size(worst)) else "not finite"
            checks.append(
                Check(
                    verdict,  # type: ignore[arg-type]
                    f"repeated keys, {dtype}, {who}: worst error {found} "
                    f"(beta {worst['beta']:.1f}, {worst['pattern']}){'' if verdict == 'printed' else wanted}",
                )
            )
    return checks


def _size(row: dict[str, Any]) -> float:
    return math.inf if row["error"] is None else row["error"]


def _inputs(tokens: int, heads: int, turns: int, beta: float, dtype: torch.dtype, device: str) -> Inputs:
    """Random values and queries; step sizes are limited as in the layers, so that a rounded key cannot expand."""
    generator = torch.Generator().manual_seed(0)
    keys = l2_normalize(torch.randn(1, turns, heads, _DIM, generator=generator)).to(dtype)
    k = keys.repeat(1, -(-tokens // turns), 1, 1)[:, :tokens]
    q = l2_normalize(torch.randn(1, tokens, heads, _DIM, generator=generator)).to(dtype)
    v = torch.randn(1, tokens, heads, _DIM, generator=generator).to(dtype)
    steps = bounded_step(torch.full((1, tokens, heads), beta), k)
    q, k, v, steps = (x.to(device) for x in (q, k, v, steps))
    return Inputs(q, k, v, steps, None, torch.zeros_like(v))


def _forms(dtype: torch.dtype, device: str) -> dict[str, Callable[[Inputs], Tensor]]:
    """All implementations of the delta rule on this device, by name."""
    backend = resolve_backend(None, device=device, dtype=dtype, head_k_dim=_DIM, head_v_dim=_DIM)[0]
    # In float32 every precision is the same, and the peer has no kernels.
    kernels = backend == "triton" and dtype != torch.float32
    precisions: list[str | None] = [None, "fast", "strict"] if kernels else [None]
    peers = installed_peers(["fla"])[0] if kernels else []
    found = candidates_for("delta", backend=backend, precisions=precisions, peers=peers)
    names = [*(f"{backend} {precision}" if precision else backend for precision in precisions), *peers]
    return {**{name: each.forward for name, each in zip(names, found, strict=True)}, _LOOP: _loop}


def _loop(inputs: Inputs) -> Tensor:
    assert inputs.beta is not None
    return delta_rule(inputs.q, inputs.k, inputs.v, inputs.beta, backend="reference").output
