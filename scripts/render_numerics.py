"""Writes docs/numerics.md from the results of measure_numerics.py and, once there are any, of measure_cells.py.

python scripts/render_numerics.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ERRORS, CELLS = RESULTS / "numerics_h200.json", RESULTS / "cells_h200.json"
PAGE = ROOT / "docs" / "numerics.md"

DECAYS = {"none": "No decay", "scalar": "One decay per head", "channel": "One decay per key channel"}
DTYPES = {"bfloat16": 3, "float16": 3, "float32": 2}
"""Dtype -> columns: Gluon kernels serve no float32."""
KERNELS = {
    "hopper_forward_kernel": "fused forward",
    "hopper_scan_kernel": "scan",
    "hopper_reverse_scan_kernel": "reverse scan",
    "backward_kernel": "fused backward",
}
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}
"""Dtype -> its rounding error, half its epsilon."""
IMPLEMENTATIONS = {"default": "as they run", "plain": "plain Triton"}
TENSORS = {
    "output": "output",
    "final_state": "final state",
    "d_q": "dq",
    "d_k": "dk",
    "d_v": "dv",
    "d_beta": "d beta",
    "d_log_decay": "d log-decay",
    "d_initial_state": "d initial state",
}

TEXT = """\
# Numerics on hard inputs

The Triton backend has two implementations: Gluon kernels on Hopper for 16-bit calls with 128 key and value channels,
and plain Triton kernels for everything else. Both, and plain torch beside them, on inputs that are hard for a chunk
form.

{summary}

Errors are relative, in the root-mean-square sense, against the chunk form in float64 on the same rounded inputs; that
of the gradient of the decay is measured against the terms that cancel in it. "torch" is the chunk form in torch whose
products round their operands to the dtype of the inputs. Inputs are 8 rows of 1,000 tokens and 16 heads of 128 with an
initial state, and gradients flow into the output and the final state. Decay has a mean of -0.05 per token, -0.001 where
keys repeat, unless the case says otherwise. Step sizes lie in (0, 1) unless the case says otherwise, and are at most
2 / |k|^2. Precision is the default ([precision.md](precision.md)).

`scripts/render_numerics.py` writes this page from [numerics_h200.json](../benchmarks/results/numerics_h200.json), which
`scripts/measure_numerics.py` measured: {run}.

## The worst tensor of every case

The largest error of the output, the final state and all gradients, and of the output and the final state of a call
that records no gradients. The Gluon kernels named are those of bfloat16; float16 has no fused forward kernel, and takes
the scan.

{worst}
## Beyond twice plain torch

Most tests allow twice the error of plain torch and two roundings of the dtype. {beyond}
## Every tensor

The backend as it runs, and plain torch in brackets.

{tensors}{cells}"""

CELLS_TEXT = """
## Calls that tuned kernels refuse or get wrong

Times in ms and the largest error of output, states and gradients, on 8 x 4,096 tokens with 16 heads of 128 in bfloat16
unless the row says otherwise, of Gated DeltaNet's operator where there is a gate; every row in one process. fla is
flash-linear-attention with TileLang's kernels in its backward pass, without which it refuses to train Gated DeltaNet on
Hopper with Triton from 3.4 to before 3.7.1. Words in place of numbers are the library's own.

{table}
[cells_h200.json](../benchmarks/results/cells_h200.json) by `scripts/measure_cells.py`: {run}.
"""

Row = dict[str, Any]


def number(value: float | None) -> str:
    """Two digits, or what there is instead of a number."""
    if value is None:
        return "not finite"
    if value == 0 or 1e-2 <= value < 100:
        return f"{value:.2g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def worst_of(row: Row) -> float | None:
    """The largest error of a row, of calls with and without gradients; None if one is not finite."""
    found = [*row["errors"].values(), *row.get("forward", {}).values()]
    return None if None in found else max(found)


def miss(row: Row, name: str, limit: float) -> bool:
    """Whether a result errs more than allowed, or is not finite."""
    error = row["errors"][name]
    return error is None or error > limit


def described(run: dict[str, Any]) -> str:
    """Where and with what numbers were measured."""
    versions = f"torch {run['torch']}, Triton {run['triton']}"
    for name in ("fla", "flashqla", "tilelang"):
        versions += f", {name} {run[name]}" if run.get(name) else ""
    return f"{run['gpu']}, {versions}, commit `{run['commit'][:10]}`, {run['date'][:10]}"


def kernels_of(row: Row) -> str:
    """The Gluon kernels of a call without gradients, and of one with them."""
    parts = [" + ".join(KERNELS[name] for name in row[key]) or "none" for key in ("gluon_forward", "gluon_training")]
    return "; ".join(parts) if parts != ["none"] * 2 else "none"


class Errors:
    """Rows of measure_numerics.py by decay, dtype, case and implementation."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = {(row["decay"], row["dtype"], row["case"], row["implementation"]): row for row in rows}
        self.cases = list(dict.fromkeys(row["case"] for row in rows))

    def find(self, decay: str, dtype: str, case: str, implementation: str) -> Row | None:
        return self.rows.get((decay, dtype, case, implementation))

    def summary(self) -> str:
        """How the two implementations compare, and both with plain torch."""
        pairs = [
            (row, plain)
            for (decay, dtype, case, implementation), row in self.rows.items()
            if implementation == "default" and (plain := self.find(decay, dtype, case, "plain"))
        ]
        ratios = [(worst_of(row) or 0) / (worst_of(plain) or 1) for row, plain in pairs]
        largest = {
            dtype: max(worst_of(row) or 0 for key, row in self.rows.items() if key[1] == dtype and key[3] == "default")
            for dtype in DTYPES
        }
        shown = ", ".join(f"{number(error)} in {dtype}" for dtype, error in largest.items())
        return (
            f"On {len(pairs)} calls that Gluon kernels serve, the largest error is {min(ratios):.2f} to "
            f"{max(ratios):.2f} times that of the plain kernels.\nThe largest error of the backend on any input "
            f"is {shown}."
        )

    def beyond(self) -> str:
        """The calls with a tensor that errs more than twice as much as plain torch, and two roundings."""
        lines, calls = [], 0
        for (decay, dtype, case, implementation), row in self.rows.items():
            torch = self.find(decay, dtype, case, "torch")
            if implementation == "torch" or torch is None:
                continue
            calls += 1
            limits = {n: 2 * e + 2 * ROUNDING[dtype] for n, e in torch["errors"].items() if e is not None}
            missed = {
                n: (row["errors"][n] or math.inf) / torch["errors"][n] for n, x in limits.items() if miss(row, n, x)
            }
            if missed:
                worst = max(missed, key=lambda name: missed[name])
                shown = f"{TENSORS[worst]}: {number(row['errors'][worst])} ({number(torch['errors'][worst])})"
                lines.append([DECAYS[decay], dtype, IMPLEMENTATIONS[implementation], case, str(len(missed)), shown])
        if not lines:
            return f"All {calls} calls keep that, tensor by tensor.\n"
        header = ["decay", "dtype", "kernels", "case", "tensors", "the one furthest beyond (torch)"]
        return f"Of {calls} calls these do not keep it:\n\n" + table(header, lines)

    def worst(self) -> str:
        """A table for each decay."""
        header = ["case", "Gluon kernels: no gradients; training"]
        for dtype, columns in DTYPES.items():
            header += [f"{dtype}: {name}" for name in ("Gluon", "plain", "torch")[-columns:]]
        parts = []
        for decay, title in DECAYS.items():
            lines = [self._worst_line(decay, case) for case in self.cases if self.find(decay, "float32", case, "torch")]
            parts.append(f"### {title}\n\n" + table(header, lines))
        return "\n".join(parts)

    def _worst_line(self, decay: str, case: str) -> list[str]:
        half = self.find(decay, "bfloat16", case, "default")
        line = [case, kernels_of(half) if half else ""]
        for dtype, columns in DTYPES.items():
            default = self.find(decay, dtype, case, "default")
            plain = self.find(decay, dtype, case, "plain")
            torch = self.find(decay, dtype, case, "torch")
            found = [default, plain, torch] if plain else [None, default, torch]
            line += [number(worst_of(row)) if row else "" for row in found[-columns:]]
        return line

    def tensors(self) -> str:
        """A table for each decay and dtype."""
        parts = []
        for decay, title in DECAYS.items():
            names = {name: shown for name, shown in TENSORS.items() if decay != "none" or name != "d_log_decay"}
            for dtype in DTYPES:
                lines = []
                for case in self.cases:
                    default, torch = (self.find(decay, dtype, case, name) for name in ("default", "torch"))
                    if default and torch:
                        cells = [f"{number(default['errors'][n])} ({number(torch['errors'][n])})" for n in names]
                        lines.append([case, *cells])
                parts.append(f"### {title}, {dtype}\n\n" + table(["case", *names.values()], lines))
        return "\n".join(parts)


def cells(content: dict[str, Any]) -> str:
    """The section on calls that peers refuse."""
    found = {(row["cell"], row["library"]): row for row in content["rows"]}
    libraries = {"deltazoo": "deltazoo", "flashqla": "FlashQLA", "fla-tilelang": "fla"}
    header = ["call"]
    for shown in libraries.values():
        header += [f"{shown}: forward", "with backward", "error"]
    lines = []
    for cell in dict.fromkeys(row["cell"] for row in content["rows"]):
        line = [cell]
        for library in libraries:
            row = found.get((cell, library))
            if row is None:
                line += ["not measured", "", ""]
                continue
            forward = f"{row['forward_ms']:.3g}" if "forward_ms" in row else ""
            if "error" in row:
                line += [forward, row["error"].replace("|", "/")[:160], ""]
            else:
                line += [forward, f"{row['forward_backward_ms']:.3g}", number(worst_of(row))]
        lines.append(line)
    return CELLS_TEXT.format(table=table(header, lines), run=described(content["run"]))


def render() -> str:
    """The page."""
    content = json.loads(ERRORS.read_text())
    errors = Errors([row for row in content["rows"] if "error" not in row])
    more = cells(json.loads(CELLS.read_text())) if CELLS.exists() else ""
    return TEXT.format(
        summary=errors.summary(),
        run=described(content["run"]),
        worst=errors.worst(),
        beyond=errors.beyond(),
        tensors=errors.tensors(),
        cells=more,
    )


def main() -> None:
    PAGE.write_text(render())
    print(PAGE)


if __name__ == "__main__":
    main()
