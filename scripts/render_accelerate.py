"""Writes docs/accelerate.md from the committed results of bench_accelerate.py: python scripts/render_accelerate.py."""

import json
from pathlib import Path
from typing import Any

from benchmarks.markdown import filled, table
from deltazoo.compat.transformers.transformers_layers import LAYER_ARRANGEMENTS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "accelerate.md"

SOURCE = """\
`scripts/render_accelerate.py` writes this page from the files `benchmarks/results/accelerate_*.json`, which
`scripts/bench_accelerate.py` measured.
"""

METHOD = """\
## How it was measured

Each model has four layers (three of delta rule and one of softmax attention) with the widths of its configuration's
defaults, random weights, dense MLPs in place of experts, and a vocabulary of 32,768. Eager mode, before and after in
turns; numbers are medians of three rounds, with the least and the most in brackets. "Overlap" marks rows whose two
ranges overlap: there the host varied as much as the two ways differ, and the row shows no difference. transformers'
code launches more kernels than ours and depends more on the host, so what one model gains differs between runs.
"""
EXPERTS = """
Qwen3.5 MoE and Qwen4-Exp, which have no dense MLPs, have 16 experts per layer.
"""
BEFORE = """
"Before" is transformers' plain torch code: transformers runs it where flash-linear-attention and causal-conv1d are not
installed. It cannot keep packed documents apart, so that row has no "before".
"""
PHASES = {
    "prompt": "forward into a new cache",
    "training": "forward and backward",
    "packed training": "the same on packed documents",
    "step": "one token after the prompt",
    "generate": "`model.generate` of 64 tokens after 128; after: one CUDA graph per step, where the family allows it",
    "loop": "`deltazoo.generate`'s loop, beside transformers' `generate`",
}
HEADER = [
    "model",
    "phase",
    "parameters",
    "before, tokens/s",
    "after, tokens/s",
    "times",
    "peak before, MiB",
    "after, MiB",
]


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


def page() -> str:
    """The page from all committed files."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("accelerate_*.json")]
    files.sort(key=lambda content: content["run"]["date"], reverse=True)
    rows = [row for content in files for row in content["rows"]]
    machines = " and an ".join(dict.fromkeys(machine(content) for content in reversed(files)))
    parts = ["# transformers' models on our operators: speed\n", answer(machines, rows)]
    parts += [text for text in (missing(rows), SOURCE) if text] + [method(rows)]
    for content in files:
        parts += [heading(content), table(HEADER, map(cells, content["rows"]), text_columns=2), *uncaptured(content)]
    return "\n".join([*parts, runs(files)])


def answer(gpu: str, rows: list[dict[str, Any]]) -> str:
    """What a reader wants to know who wants no table."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if (ratio := speed_up(row)) is not None and is_captured(row) and not overlaps(row):
            found.setdefault(row["phase"], []).append(ratio)
    ranges = {phase: f"{min(ratios):.1f} to {max(ratios):.1f}" for phase, ratios in found.items()}
    text = (
        "With [`deltazoo.accelerate`](other_libraries.md#their-models-on-our-operators), transformers' own delta-rule "
        f"models run prompts {ranges['prompt']} times as fast on an {gpu}, and training {ranges['training']} times."
    )
    if "generate" in ranges:
        text += f" `generate` decodes {ranges['generate']} times as fast where its step can be captured"
        text += f", and our loop {ranges['loop']} times" if "loop" in ranges else ""
        text += "."
    overlap = all(overlaps(row) for row in rows if row["phase"] == "step")
    text += " Single steps in eager mode, whose kernels the host launches one by one, " + (
        "show no difference." if overlap else f"run {ranges['step']} times as fast."
    )
    if same := sorted({row["model"] for row in rows} - gaining(rows)):
        text += f" Nothing that was measured of {', '.join(same)} became faster beyond the ranges of the measurements."
    return filled(text) + "\n"


def gaining(rows: list[dict[str, Any]]) -> set[str]:
    """Models that run faster in at least one phase, beyond the ranges."""
    return {row["model"] for row in rows if (speed_up(row) or 0.0) > 1.0 and not overlaps(row)}


def missing(rows: list[dict[str, Any]]) -> str:
    """Which families' phases no run has."""
    phases: dict[str, set[str]] = {layers.family: set() for layers in LAYER_ARRANGEMENTS.values()}
    for row in rows:
        phases[row["model"].removesuffix("_text")].add(row["phase"])
    nothing = sorted(family for family, measured in phases.items() if not measured)
    eager = sorted(family for family, measured in phases.items() if measured and "generate" not in measured)
    parts = []
    if nothing:
        parts.append(f"every phase of {', '.join(nothing)}")
    if eager:
        parts.append(f"decoding by `generate` and by our loop of {', '.join(eager)}")
    return filled(f"Not measured: {'; '.join(parts)}.") + "\n" if parts else ""


def overlaps(row: dict[str, Any]) -> bool:
    """Whether the ranges before and after have speeds in common."""
    before, after = row["before"], row["after"]
    return before["low"] <= after["high"] and after["low"] <= before["high"]


def is_captured(row: dict[str, Any]) -> bool:
    """False for decoding by `generate` whose step is no CUDA graph."""
    return row["phase"] != "generate" or "the last call: captured" in row["decoding"]


def uncaptured(content: dict[str, Any]) -> list[str]:
    """Why steps of some models are not captured."""
    reasons = {
        row["model"]: row["decoding"].partition("the last call: the ordinary loop: ")[2].removesuffix(")")
        for row in content["rows"]
        if not is_captured(row)
    }
    return [f"The step of {model} is not captured: {reason}.\n" for model, reason in reasons.items()]


def method(rows: list[dict[str, Any]]) -> str:
    """How the rows were measured."""
    measured = {row["phase"] for row in rows}
    phases = table(["phase", "what runs"], [[name, text] for name, text in PHASES.items() if name in measured])
    experts = EXPERTS if any(row["model"] in ("qwen3_5_moe_text", "qwen4_exp_text") for row in rows) else ""
    return f"{METHOD}{experts}\n{phases}{BEFORE}"


def machine(content: dict[str, Any]) -> str:
    return content["run"]["gpu"] or content["run"]["cpu"]


def heading(content: dict[str, Any]) -> str:
    """Title of a file's table and what all its rows share."""
    first = content["rows"][0]
    way = "default options" if first["fused_kernels"] is None else f"`fused_kernels={first['fused_kernels']}`"
    fewer = {row["model"]: row["tokens"] for row in content["rows"] if row["tokens"] != first["tokens"]}
    rest = "".join(f"; {model} {first['batch']} x {tokens:,}" for model, tokens in fewer.items())
    title = f"## {machine(content)}, {way}, {content['run']['date'][:10]}"
    return f"{title}\n\n{first['dtype']}, {first['batch']} x {first['tokens']:,} tokens{rest}.\n"


def runs(files: list[dict[str, Any]]) -> str:
    packages = ("torch", "triton", "transformers")
    rows = []
    for content in files:
        run = content["run"]
        rows.append([run["date"][:10], f"`{run['commit'][:10]}`", machine(content), *(run[name] for name in packages)])
    return "## Runs\n\n" + table(["date", "commit", "machine", *packages], rows)


def speed_up(row: dict[str, Any]) -> float | None:
    before, after = row["before"], row["after"]
    both = before and after and "tokens_per_s" in before and "tokens_per_s" in after
    return after["tokens_per_s"] / before["tokens_per_s"] if both else None


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    before, after, ratio = row["before"], row["after"], speed_up(row)
    first = [row["model"], row["phase"], f"{row['parameters'] / 1e6:,.0f} M", speed(before), speed(after)]
    times = "" if ratio is None else f"{ratio:.2f}" + ", overlap" * overlaps(row)
    return [*first, times, peak(before), peak(after)]


def speed(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    if "error" in result:
        return result["error"].partition(":")[0]
    return f"{result['tokens_per_s']:,.0f} ({result['low']:,.0f} to {result['high']:,.0f})"


def peak(result: dict[str, Any] | None) -> str:
    return f"{result['peak_mib']:,.0f}" if result and "peak_mib" in result else ""


if __name__ == "__main__":
    main()
