"""The benchmark page: Markdown tables of measured values, targets and verdicts, from result files alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from benchmarks import lower_bound
from benchmarks.cold_start import FIRST
from benchmarks.markdown import table
from benchmarks.operator_decoding import STEP_SHAPES
from benchmarks.operator_options import GATE_KINDS, GATES, OPS, UNEVEN
from benchmarks.operator_plots import draw_plots, share_of_lower_bound
from benchmarks.operator_results import MEASURES, OperatorResults, OperatorRow
from benchmarks.page_parts import enumerated, run_letters, runs_section
from benchmarks.provenance import Run
from benchmarks.shapes import TABLE
from benchmarks.targets import TARGETS, verdict

__all__ = ["render_page", "write_page"]

_SOURCE = """\
`scripts/render_benchmarks.py` writes this page from the files `benchmarks/results/ops_*.json`, which
`deltazoo bench ops` measured.
"""

_OPERATORS = {
    "delta": "without decay (delta)",
    "gdn": "with one decay per head (gdn, of Gated DeltaNet)",
    "kda": "with one decay per key channel (kda, of Kimi Delta Attention)",
}
"""What the operators compute, for a reader who has not seen the names."""

_METHOD = """\
## How it was measured

- **Inputs**: q, k and v in bfloat16, beta and gates in float32. Keys and queries are normalised and gates computed
  before the clock starts; all of the operator's own preparation counts.
- **Times** are medians of CUDA events around warmed-up calls, with the L2 cache flushed before each: eager, or replayed
  from a CUDA graph where a table says graph. An eager call takes the time of its launches where that is longer than
  the GPU's own, which graphs show. That time depends on the machine's processor.
- **Shapes** read B x T x H x K x V: sequences, tokens, heads, channels of a key and of a value.
- **Operators**: delta has no decay, gdn one decay per head, kda one per key channel. Gates are uniform with a mean
  log-decay per token of {gates}.
- **Peers**: fla is flash-linear-attention's chunk function with its default options. Its own Triton kernels refuse the
  backward pass of gdn on Hopper with Triton from 3.4 to before 3.7.1, which compiles them wrongly. Where TileLang is
  installed it takes a TileLang kernel there, and where FlashQLA is installed it hands gdn to FlashQLA; both train.
  The tables show the faster of its own kernels and those with TileLang, the latter marked so. flashqla is FlashQLA's
  own function, for gdn. sdpa is torch's causal softmax attention on the same q, k and v. A target relative to fla
  refers to the fla value beside it.
- **Runs**: the last column of a table names the runs of its values, the newest of each. Where it names several, our
  value and those of the peers are from different runs.
"""

_FLA = {"fla": "", "fla-tilelang": " (TileLang)"}
"""Libraries that share a column, and what marks them in it."""


def write_page(results: OperatorResults, page: Path, plots: Path) -> list[Path]:
    """Writes the page and its plots; returns what was written. Links in the page are relative to it."""
    pictures = draw_plots(results, plots)
    links = {name: picture.relative_to(page.parent).as_posix() for name, picture in pictures.items()}
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render_page(results, links))
    return [page, *pictures.values()]


def render_page(results: OperatorResults, pictures: dict[str, str]) -> str:
    """The page as Markdown.

    Args:
        results: merged results.
        pictures: links by name (`time`, `share`, `memory`), those that could be drawn.
    """
    page = _Page(results)
    gates = ", ".join(f"{mean:g} ({name})" for name, mean in GATES.items())
    gates += f", {UNEVEN[0]:g} to {UNEVEN[1]:g} from channel to channel (uneven)"
    parts = ["# Benchmarks\n", page.answer(), _SOURCE, page.summary(), page.times()]
    parts += [page.memory_and_host(), page.decoding(), page.cold_start()]
    captions = {
        "time": "Time against sequence length, one sequence, 16 heads, K = V = 128",
        "share": "Share of the speed that the hardware allows, same sizes",
        "memory": "Peak memory of forward and backward above the inputs, same sizes",
    }
    drawn = [f"![{caption}]({pictures[name]})\n" for name, caption in captions.items() if name in pictures]
    if drawn:
        parts.append("## Against the sequence length\n\n" + "\n".join(drawn))
    parts += [
        f"## The least time the hardware allows\n\n```text\n{(lower_bound.__doc__ or '').strip()}\n```\n",
        page.footnotes(),
        _METHOD.format(gates=gates),
        page.runs(),
    ]
    return "\n".join(part for part in parts if part)


class _Page:
    """Tables that share the letters of the runs and the numbers of the footnotes."""

    def __init__(self, results: OperatorResults) -> None:
        self.results = results
        self.letters = run_letters(results)
        self.errors: dict[str, int] = {}

    def answer(self) -> str:
        """One sentence for a reader who wants no table: forward and backward pass at the shape `train`.

        By the GPU's own time, from replays of a graph, where that was measured: eager calls may wait for the host.
        """
        shape, eager, graph = TABLE["train"], "forward_backward_ms", "forward_backward_graph_ms"

        def ours(measure: str) -> list[tuple[str, OperatorRow, OperatorRow | None]]:
            return [
                (op, row, self._peer(row))
                for op in OPS
                for gates in ("none", "medium")
                if (row := self.results.find(shape, op, gates, "deltazoo", measure)) and row.value
            ]

        measure, found = (graph, replayed) if (replayed := ours(graph)) else (eager, ours(eager))
        if not found:
            return ""

        def of_peer(op: str, gates: str, library: str) -> str:
            """Its time, of an eager call where it has no other."""
            for known in (measure, eager):
                row = self.results.find(shape, op, gates, library, known)
                if row and row.value:
                    return f"{_number(row.value)} ms" + (" in an eager call" if known != measure else "")
            return ""

        times = enumerated([f"{_number(row.value)} ms {_OPERATORS[op]}" for op, row, _ in found])
        faster = {op: peer.value / row.value for op, row, peer in found if peer and peer.value and row.value}
        ratios = list(faster.values())
        flashqla, softmax = of_peer("gdn", "medium", "flashqla"), of_peer("softmax", "none", "sdpa")
        sentence = (
            f"Forward and backward pass of {shape.B} x {shape.T:,} tokens with {shape.H} heads of {shape.K}"
            f"{', replayed from a CUDA graph,' if measure == graph else ''} take {times} on an "
            f"{self.results.runs[found[0][1].run].machine}"
        )
        if ratios:
            of_which = "" if len(faster) == len(found) else f" ({enumerated(list(faster))})"
            sentence += f", {min(ratios):.1f} to {max(ratios):.1f} times as fast as flash-linear-attention{of_which}"
        if flashqla:
            sentence += f"; FlashQLA takes {flashqla} for gdn"
        if softmax:
            sentence += f"; causal softmax attention (sdpa) takes {softmax}"
        return f"{sentence}.\n"

    def runs(self) -> str:
        """Date, commit, versions and the measured rates of the hardware."""
        columns: dict[str, Callable[[Run], str | None]] = {
            "GPU": lambda run: run.gpu or run.cpu,
            "driver": lambda run: run.driver,
            "torch": lambda run: run.torch,
            "Triton": lambda run: run.triton,
            "fla": lambda run: run.fla,
            "flashqla": lambda run: run.flashqla,
            "copy TB/s": lambda run: _number(run.copy_tb_s),
            "bf16 TFLOP/s": lambda run: _number(run.matmul_tflop_s),
        }
        return runs_section(self.results, columns)

    def summary(self) -> str:
        """How many of the measured targets are met, and which are not."""
        verdicts = [(row, *self._target(row)) for row in self.results.rows.values() if row.library == "deltazoo"]
        judged = [verdict for verdict in verdicts if verdict[2].startswith(("met", "missed"))]
        missed = [
            [row.shape, row.op, row.gates, MEASURES[row.measure], self._value(row), target, outcome, self._runs(row)]
            for row, target, outcome in judged
            if outcome != "met"
        ]
        if not judged:
            return ""
        met = f"{len(judged) - len(missed)} of {len(judged)} measured values meet their target"
        counts = []
        for letter in self.letters.values():
            outcomes = [outcome for row, _, outcome in judged if self._runs(row) == letter]
            if outcomes:
                counts.append(f"{outcomes.count('met')} of {len(outcomes)} of run {letter}")
        if len(counts) > 1:
            met += f" ({', '.join(counts)})"
        if not missed:
            return f"## Targets\n\n{met}.\n"
        header = ["shape", "op", "gates", "measure", "ours", "target", "verdict", "run"]
        return f"## Targets\n\n{met}; these do not:\n\n" + table(header, missed)

    def ours(self, row: OperatorRow) -> bool:
        return row.library.startswith("deltazoo")

    def times(self) -> str:
        header = ["op", "gates", "library", "measure", "time, ms", "target", "verdict", "fla", "fla / ours", "flashqla",
                  "flashqla / ours", "sdpa", "of bound", "runs"]  # fmt: skip
        sections = []
        for name, shape in TABLE.items():
            rows = [
                self._time_line(row)
                for measure in _TIMES
                for row in self._ordered(str(shape), measure)
                if self.ours(row)
            ]
            if rows:
                sections.append(f"### {name}: {shape}\n\n" + table(header, rows))
        return "## Times\n\n" + "\n".join(sections) if sections else ""

    def _time_line(self, row: OperatorRow) -> list[str]:
        peer = self._peer(row)
        flashqla = self.results.find(row.shape, row.op, row.gates, "flashqla", row.measure)
        softmax = self.results.find(row.shape, "softmax", "none", "sdpa", row.measure)
        cells = [row.op, row.gates, row.library, _TIMES[row.measure], self._value(row), *self._target(row)]
        cells += [self._value(peer), _ratio(peer, row), self._value(flashqla), _ratio(flashqla, row)]
        return [*cells, self._value(softmax), self._share(row), self._runs(row, peer, flashqla, softmax)]

    def _peer(self, row: OperatorRow) -> OperatorRow | None:
        """The better of flash-linear-attention's rows beside one of ours; one that failed if none worked."""
        found = [
            peer
            for library in _FLA
            if (peer := self.results.find(row.shape, row.op, row.gates, library, row.measure)) is not None
        ]
        return min(found, key=lambda peer: math.inf if peer.value is None else peer.value, default=None)

    def _share(self, row: OperatorRow) -> str:
        share = share_of_lower_bound(self.results, row)
        return "" if share is None else f"{share:.0%}"

    def memory_and_host(self) -> str:
        rows = [
            [row.shape, row.op, row.gates, row.library, MEASURES[measure], self._value(row), *self._target(row),
             self._value(peer := self._peer(row)),
             self._value(flashqla := self.results.find(row.shape, row.op, row.gates, "flashqla", measure)),
             self._runs(row, peer, flashqla)]
            for measure in ("peak_mib", "host_forward_us", "host_forward_grad_us")
            for shape in TABLE.values()
            for row in self._ordered(str(shape), measure)
            if self.ours(row) and row.gates in ("none", "medium")
        ]  # fmt: skip
        header = [
            "shape",
            "op",
            "gates",
            "library",
            "measure",
            "MiB or us",
            "target",
            "verdict",
            "fla",
            "flashqla",
            "runs",
        ]
        return "## Memory and host time\n\n" + table(header, rows) if rows else ""

    def decoding(self) -> str:
        rows = [
            [row.shape, row.op, row.library, measure.removeprefix("step_"), self._value(row),
             *(self._target(row) if self.ours(row) else ["", ""]), self._runs(row)]
            for shape in STEP_SHAPES.values()
            for measure in ("step_us", "step_tb_s")
            for row in self._ordered(str(shape), measure)
        ]  # fmt: skip
        header = ["shape", "op", "library", "unit", "value", "target", "verdict", "runs"]
        return "## One decoding token\n\n" + table(header, rows) if rows else ""

    def cold_start(self) -> str:
        rows = [
            [row.op, row.library, MEASURES[measure], self._value(row), *self._target(row), row.note or "",
             self._runs(row)]
            for measure in ("cold_first_call_s", "warm_first_call_s", "kernels", "new_kernels")
            for row in self._ordered(str(FIRST), measure)
        ]  # fmt: skip
        header = ["op", "library", "measure", "value", "target", "verdict", "kernels", "runs"]
        return f"## First call ({FIRST})\n\n" + table(header, rows) if rows else ""

    def footnotes(self) -> str:
        lines = [f"{number}. {text}" for text, number in self.errors.items()]
        return "## Calls that failed\n\n" + "\n".join(lines) + "\n" if lines else ""

    def _ordered(self, shape: str, measure: str) -> list[OperatorRow]:
        rows = [row for row in self.results.rows.values() if (row.shape, row.measure) == (shape, measure)]
        return sorted(rows, key=lambda row: (OPS.index(row.op), ["none", *GATE_KINDS].index(row.gates), row.library))

    def _target(self, row: OperatorRow) -> tuple[str, str]:
        for target in TARGETS:
            if target.applies_to(row):
                limit = target.limit(self.results, row)
                if limit is None:
                    return f"{target.bound:.3g} x {target.relative_to}", f"no {target.relative_to} value"
                shown = f"{'>=' if target.at_least else '<='} {_number(limit)}"
                if row.value is None:
                    return shown, "missed: no value"
                return shown, verdict(row.value, limit, target.at_least)
        return "", ""

    def _value(self, row: OperatorRow | None) -> str:
        if row is None:
            return ""
        if row.value is None:
            number = self.errors.setdefault(f"{row.library} {row.op}: {row.error}", len(self.errors) + 1)
            return f"fails ({number})"
        return _number(row.value) + _FLA.get(row.library, "")

    def _runs(self, *rows: OperatorRow | None) -> str:
        return ", ".join(sorted({self.letters[row.run] for row in rows if row is not None}))


_TIMES = {
    "forward_ms": "fwd",
    "forward_graph_ms": "fwd, graph",
    "forward_backward_ms": "fwd+bwd",
    "forward_backward_graph_ms": "fwd+bwd, graph",
}


def _ratio(peer: OperatorRow | None, row: OperatorRow) -> str:
    return f"{peer.value / row.value:.2f}x" if peer and peer.value and row.value else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"
