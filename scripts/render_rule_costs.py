"""Writes docs/rule_costs.md from results of measure_rules.py, `deltazoo bench ops` and measure_erase_keys.py.

python scripts/render_rule_costs.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deltazoo  # noqa: F401  # registers the rules
from benchmarks.markdown import table
from benchmarks.operator_results import OperatorResults
from benchmarks.provenance import Run
from deltazoo.spec import list_rules

DTYPES = ("bfloat16", "float16", "float32")
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LAYERS = RESULTS / "rule_layers_h200.json"
OPERATORS = RESULTS / "rules_h200.json"
ERRORS = RESULTS / "erase_keys_h200.json"
PAGE = ROOT / "docs" / "rule_costs.md"

MEASURES = {"forward_ms": "forward, ms", "forward_backward_ms": "with backward, ms", "peak_mib": "peak memory, MiB"}
COMPARED = {
    "gdn-erase": ("gdn", "an erase key of its own, one decay per head"),
    "comba": ("gdn", "the same, read before the decay"),
    "kda-erase": ("kda", "an erase key of its own, one decay per channel"),
    "gdn2": ("kda", "the same, keys and values multiplied by their gates in the call (Gated DeltaNet-2)"),
    "delta-n2": ("delta", "two micro-steps, no decay"),
    "delta-n4": ("delta", "four micro-steps, no decay"),
    "gdn-n2": ("gdn", "two micro-steps, one decay per head"),
    "gdn-n4": ("gdn", "four micro-steps, one decay per head"),
    "kda-n2": ("kda", "two micro-steps, one decay per channel"),
    "kda-n4": ("kda", "four micro-steps, one decay per channel"),
}
"""Operator -> the plain one it is compared with, and what it has in addition."""

TEXT = """\
# What the rules cost

Time and memory of one layer of each rule, and of the operator with an erase key or several micro-steps beside the plain
one, on one GPU. [benchmarks.md](benchmarks.md) compares the plain operators with other libraries.

## A layer of every rule

All layers have the same sizes, whatever their papers chose: {sizes}.
bfloat16, no option set. In brackets: relative to `gated_deltanet`. "decode" is a step for {rows} rows, replayed as a
CUDA graph. Memory is the peak of forward and backward above the layer and its input.

{layers}

Most of the time of a layer is not the operator's, as the next table shows. Rules with gates per channel project to them
and multiply keys and values by them in plain torch, and `pgdn` and `pkda` compute their running moment by a second call
of the operator.

{layer_run}

## The operator

In brackets: relative to the plain operator in the same run. Shapes are batch, tokens, heads, key channels and value
channels. Below about a millisecond the host's launches bound a call with its backward pass, which flatters the ratios
of micro-steps there.

{operators}

{operator_run}

## Errors with erase keys and micro-steps

Relative errors, in the root-mean-square sense, against float64 on the same rounded inputs: the largest of the output,
the final state and all gradients, and over no decay, one per head and one per channel, of mean -0.001 and -5 per token.
{error_sizes}.
In brackets: where the largest error is. "gated" erase keys are the key times a number in [0, 1] per channel, "free"
ones random unit vectors. Repeated keys: one key for all tokens, step size 1, decay -0.001. No erase gain exceeds 1
there, so the default precision computes them in one 16-bit term.

{errors}

{error_run}

`scripts/render_rule_costs.py` writes this page.
"""


def source(run: Run, path: Path) -> str:
    """Where numbers come from."""
    return (
        f"{run.gpu}, torch {run.torch}, Triton {run.triton}, commit {run.short_commit}, "
        f"`{path.relative_to(ROOT).as_posix()}`."
    )


def layer_rows(results: dict[str, Any]) -> list[list[str]]:
    """A row of every rule, in the order of the zoo."""
    rows = {row["rule"]: row for row in results["rows"]}
    base = rows["gated_deltanet"]

    def cell(row: dict[str, Any], measure: str, digits: int) -> str:
        return f"{row[measure]:,.{digits}f} ({row[measure] / base[measure]:.2f})"

    return [
        [
            f"`{rule}`",
            f"{rows[rule]['parameters'] / 1e6:.1f} M",
            cell(rows[rule], "forward_ms", 2),
            cell(rows[rule], "forward_backward_ms", 2),
            cell(rows[rule], "decode_ms", 3),
            cell(rows[rule], "peak_mib", 0),
        ]
        for rule in list_rules()
        if rule in rows
    ]


def operator_rows(results: OperatorResults) -> list[list[str]]:
    """A row of every operator in `COMPARED` and shape: its numbers, and their ratio to the plain operator's."""
    found = {(row.op, row.shape, row.measure): row.value for row in results.rows.values() if row.library == "deltazoo"}
    rows = []
    for op, (plain, what) in COMPARED.items():
        for shape in dict.fromkeys(shape for name, shape, _ in found if name == op):
            cells = []
            for measure in MEASURES:
                value, base = found.get((op, shape, measure)), found.get((plain, shape, measure))
                cells.append("" if value is None or base is None else f"{value:,.4g} ({value / base:.2f})")
            rows.append([f"`{op}`", what, shape, *cells])
    return rows


def error_rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """A row of every kind of update and of keys, with the worst result per dtype."""
    worst: dict[tuple[str, str, str], dict[str, tuple[float, str]]] = {}
    for result in results:
        case, errors = result["case"], result["errors"]
        erase = "the key itself" if case["erase"] == "tied" else case["erase"]
        if case["erase_reads"] == "undecayed":
            erase += ", read before the decay"
        where = max(errors, key=errors.__getitem__)
        kind = worst.setdefault((case["keys"], erase, str(case["num_micro_steps"])), {})
        kind[case["dtype"]] = max(kind.get(case["dtype"], (0.0, "")), (errors[where], f"`{where}`, {case['decay']}"))
    return [
        [keys, erase, steps, *(f"{error:.1e} ({name})" for error, name in (kind[dtype] for dtype in DTYPES))]
        for (keys, erase, steps), kind in sorted(worst.items())
    ]


def page() -> str:
    """The text of docs/rule_costs.md."""
    layers = json.loads(LAYERS.read_text())
    errors = json.loads(ERRORS.read_text())
    sizes = layers["sizes"]
    operators = OperatorResults.load([OPERATORS])
    rows = operator_rows(operators)
    runs = {row.run for row in operators.rows.values()}
    newest = max((operators.runs[run] for run in runs), key=lambda run: run.date)
    columns = ["operator", "beyond the plain one", "shape", *MEASURES.values()]
    header = ["rule", "parameters", "forward, ms", "with backward, ms", "decode, ms", "peak memory, MiB"]
    return TEXT.format(
        sizes=f"width {sizes['hidden_size']:,}, {sizes['num_heads']} heads of {sizes['head_dim']} channels, "
        f"{sizes['B']} rows of {sizes['T']:,} tokens",
        rows=sizes["decoded_rows"],
        layers=table(header, layer_rows(layers), text_columns=1).strip(),
        layer_run=source(Run(**layers["run"]), LAYERS),
        operators=table(columns, rows, text_columns=3).strip(),
        operator_run=source(newest, OPERATORS),
        error_sizes="{T} micro-steps, {H} heads of {K} channels, an initial state".format(**errors["rows"][0]["case"]),
        errors=table(["keys", "erase key", "micro-steps", *DTYPES], error_rows(errors["rows"]), text_columns=2).strip(),
        error_run=source(Run(**errors["run"]), ERRORS),
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
