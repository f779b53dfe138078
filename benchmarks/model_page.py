"""The page on whole-model speed: tables and plots from result files alone, a section per machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks.markdown import picture, table
from benchmarks.model_plots import draw_bars, draw_lines
from benchmarks.model_results import MEASURES, ModelResults, ModelRow
from benchmarks.page_parts import enumerated, run_letters, runs_section
from benchmarks.provenance import Run

__all__ = ["write_model_page"]

_SOURCE = """\
`scripts/render_model_speed.py` writes this page from the files `benchmarks/results/model_*.json`, which
`deltazoo bench model` measured.
"""

_METHOD = """\
## How it was measured

All models of a section have the same hidden size, layers, heads, width of the MLP and vocabulary. They differ in the
token mixer and in whose code runs it. Weights are random. A training step is forward, backward, clipping and fused
AdamW on random tokens. The dtype `autocast` means float32 weights under bfloat16 autocast.

| way to train | options |
| --- | --- |
| `eager` | the default configuration: no option is set |
| `compile` | the default configuration through `torch.compile` |
| `plain` | `fused_kernels: false`, and nothing else fused |
| `fused-loss` | `fuse_linear_cross_entropy` |
| `recompute-...` | `recompute` at that level |
| `fast` | `fused-loss` and `liger` |
| `fast-recompute` | `fast` and `recompute: elementwise` |
| `no-options` | all options off: all logits kept, nothing recomputed, SwiGLU and norms in plain torch |

| way to decode, greedy | |
| --- | --- |
| `generate` | the model's own method |
| `generate-plain` | the same with `capture_step=False` |
| `loop` | `deltazoo.generate` |
| `loop-fast` | the same with the options of `fast` |
| `loop-compiled` | the same with `compile=True` |

On a GPU the steps of the loop and of our models' `generate` are CUDA graphs, on a CPU they are plain calls. What
`generate` takes beyond `loop` is transformers' own loop.

Older runs differ in four points. Before commit `a0f610a` the default configuration kept all logits, recomputed nothing
and ran SwiGLU and norms in plain torch: the rows `eager` of these runs measure what `no-options` measures since. Before
commit `566db21` `generate` captured its steps only with `capture_step=True`: these rows are called `generate-captured`,
and our rows `generate` of these runs are plain. Before commit `f826b2c` the default configuration ran without fused
kernels, also in the rows `compile` and in those against the context. Before commit `f639fb8` it recomputed elementwise
results, and not the states as well: `recompute-elementwise` measures that since.

Ranges are the 20th to 80th percentile of single steps or tokens. With one CPU thread the clock counts the time that the
process computed, which other work on the machine hardly changes. Prompts are the first of a fresh model, so compilation
and the capture of the step count; on a GPU they are most of the time of a short prompt. A plot shows one way of each
model: the one measured at most sizes, and of several the fastest. It names the run if newer ones exist.
[log.md](log.md) has more about single runs.
"""

_SECTIONS = (
    ("Training", ("train_tok_s", "train_peak_gib", "kept_kib", "first_step_s")),
    ("Decoding against the batch", ("decode_tok_s",)),
    ("One more token against the context", ("token_ms", "context_peak_gib", "prefill_tok_s")),
)

_CAPTIONS = {**MEASURES, "profile_ms": "parts of a training step"}

_PLOTS: dict[str, tuple[str, Callable[[ModelRow], int], str]] = {
    "train_tok_s": ("training tokens/s", lambda row: row.tokens, "tokens per row"),
    "decode_tok_s": ("new tokens/s, all rows", lambda row: row.batch, "rows"),
    "token_ms": ("ms per token", lambda row: row.tokens, "context, tokens"),
    "context_peak_gib": ("peak memory, GiB", lambda row: row.tokens, "context, tokens"),
}


def write_model_page(results: ModelResults, page: Path, plots: Path) -> list[Path]:
    """Writes the page and its plots; returns what was written. Links in the page are relative to it."""
    written = [page]
    parts = ["# Speed of whole models\n", _answer(results), _SOURCE]
    machines = dict.fromkeys(results.runs[row.run].machine for row in results.rows.values())
    for machine in sorted(machines, key=lambda machine: machine not in {run.gpu for run in results.runs.values()}):
        rows = [row for row in results.rows.values() if results.runs[row.run].machine == machine]
        for size in dict.fromkeys(row.size for row in rows):
            own = ModelResults(results.runs, {row.key: row for row in rows if row.size == size})
            folder = plots / re.sub(r"\W+", "-", f"{machine} {size}".lower())
            drawn = _draw(results, own, folder)
            written += drawn.values()
            pictures = {measure: picture(path, page, _CAPTIONS[measure]) for measure, path in drawn.items()}
            parts.append(f"## {machine}, size {size}\n\n" + _section(results, own, pictures))
    parts += [_METHOD, runs_section(results, _RUN_COLUMNS)]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(part for part in parts if part))
    return written


_RUN_COLUMNS: dict[str, Callable[[Run], str | None]] = {
    "machine": lambda run: run.machine,
    "torch": lambda run: run.torch,
    "Triton": lambda run: run.triton,
    "transformers": lambda run: run.transformers,
    "fla": lambda run: run.fla,
    "Liger": lambda run: run.liger,
}


def _answer(results: ModelResults) -> str:
    """One sentence for a reader who wants no table: training in the default configuration, the commonest batch."""
    rows = [row for row in results.of("train_tok_s") if row.way == "eager" and row.dtype == "bfloat16" and row.value]
    if not rows:
        return ""
    size, batch, tokens = Counter((row.size, row.batch, row.tokens) for row in rows).most_common(1)[0][0]
    shown = [row for row in rows if (row.size, row.batch, row.tokens) == (size, batch, tokens)]
    speeds = enumerated([f"{row.name} at {_value(row)}" for row in shown])
    machine = results.runs[shown[0].run].machine
    return (
        f"On an {machine}, models of size {size} in their default configuration train at these tokens per second, in "
        f"steps of {batch} x {tokens:,} tokens: {speeds}.\n"
    )


def _older_run(everything: ModelResults, results: ModelResults, rows: Iterable[ModelRow]) -> str:
    """`, run c` for rows of a commit that is not the newest of a section."""
    rows = list(rows)
    newest = max((results.runs[row.run] for row in results.rows.values()), key=lambda run: run.date).commit
    if all(results.runs[row.run].commit == newest for row in rows):
        return ""
    letters = run_letters(everything)
    found = sorted({letters[row.run] for row in rows})
    return f", run{'s' * (len(found) > 1)} {', '.join(found)}"


def _profile_rows(everything: ModelResults, results: ModelResults) -> list[ModelRow]:
    """Where steps go, with older runs named in the way."""
    return [replace(row, way=row.way + _older_run(everything, results, [row])) for row in results.of("profile_ms")]


def _draw(everything: ModelResults, results: ModelResults, folder: Path) -> dict[str, Path]:
    drawn = {}
    for measure, (ylabel, along, xlabel) in _PLOTS.items():
        lines: dict[tuple[str, str, str], list[ModelRow]] = {}
        for row in results.of(measure):
            if row.value is not None:
                lines.setdefault((row.name, _kind(row), results.runs[row.run].commit), []).append(row)
        labelled = {
            (name, kind + _older_run(everything, results, rows)): [(along(row), row.value or 0.0) for row in rows]
            for (name, kind, _), rows in lines.items()
        }
        path = folder / f"{measure}.png"
        if draw_lines(path, labelled, xlabel, ylabel, lower_is_better=measure in ("token_ms", "context_peak_gib")):
            drawn[measure] = path
    path = folder / "profile.png"
    if draw_bars(path, _profile_rows(everything, results), "ms of one training step"):
        drawn["profile_ms"] = path
    return drawn


def _kind(row: ModelRow) -> str:
    """What rows on one line of a plot share: of training speeds, those whose steps have as many tokens compare."""
    return f"{row.way}, steps of {row.batch * row.tokens:,}" if row.measure == "train_tok_s" else row.way


def _section(everything: ModelResults, results: ModelResults, pictures: dict[str, str]) -> str:
    letters = run_letters(everything)
    parts = []
    for title, measures in _SECTIONS:
        tables = []
        for measure in measures:
            header = ["rows x tokens", "model", "way", "dtype", MEASURES[measure], "range", "run"]
            rows = [
                [f"{row.batch} x {row.tokens:,}", row.name, row.way, row.dtype, _value(row), _spread(row),
                 letters[row.run]]
                for row in results.of(measure)
            ]  # fmt: skip
            if rows:
                tables.append(table(header, rows))
            if measure in pictures:
                tables.append(pictures[measure])
        if tables:
            parts.append(f"### {title}\n\n" + "\n".join(tables))
    profile = _profile_rows(everything, results)
    if profile:
        parts.append(_profile(profile) + "\n" + pictures.get("profile_ms", ""))
    return "\n".join(parts)


def _profile(rows: list[ModelRow]) -> str:
    batch, tokens = rows[0].batch, rows[0].tokens
    totals: dict[tuple[str, str], float] = {}
    for row in rows:
        totals[row.name, row.way] = totals.get((row.name, row.way), 0.0) + (row.value or 0.0)
    header = ["part", *(f"{name}, {way}" for name, way in totals)]
    parts = sorted({row.part for row in rows})
    found = {(row.part, row.name, row.way): row.value for row in rows}
    body = [
        [part, *(f"{found.get((part, *who)) or 0:.1f} ms, {(found.get((part, *who)) or 0) / total:.0%}"
                 for who, total in totals.items())]
        for part in parts
    ]  # fmt: skip
    return f"### Where a training step of {batch} x {tokens:,} goes\n\n" + table(header, body)


def _value(row: ModelRow) -> str:
    if row.value is None:
        return f"fails: {row.error}"
    return f"{row.value:,.0f}" if row.value >= 100 else f"{row.value:.3g}"


def _spread(row: ModelRow) -> str:
    if row.low is None or row.high is None:
        return ""
    return f"{row.low:,.0f} to {row.high:,.0f}" if row.high >= 100 else f"{row.low:.3g} to {row.high:.3g}"
