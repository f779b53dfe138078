"""Writes docs/accelerate.md from the committed results of bench_accelerate.py: python scripts/render_accelerate.py."""

import json
from pathlib import Path
from typing import Any

from deltazoo.workbench.markdown import table

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
defaults, random weights, dense MLPs in place of experts, and a vocabulary of 32,768. Measured in eager mode, before and
after in turns; numbers are medians of three rounds, with the least and the most in brackets.
"""
EXPERTS = """
Qwen3.5 MoE and Qwen4-Exp, which have no dense MLPs, have 16 experts per layer.
"""
BEFORE = """
"Before" is transformers' plain torch code, which it runs where flash-linear-attention and causal-conv1d are not
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
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("accelerate_*.json"))]
    parts = ["# transformers' models on our operators: speed\n", answer(files[0]), SOURCE]
    for content in files:
        parts += [heading(content), table(HEADER, map(cells, content["rows"]), text_columns=2), *uncaptured(content)]
    return "\n".join([*parts, method([row for content in files for row in content["rows"]]), runs(files)])


def answer(content: dict[str, Any]) -> str:
    """What a reader wants to know who wants no table."""
    found: dict[str, list[float]] = {}
    for row in content["rows"]:
        if (ratio := speed_up(row)) is not None and is_captured(row):
            found.setdefault(row["phase"], []).append(ratio)
    ranges = {phase: f"{min(ratios):.1f} to {max(ratios):.1f}" for phase, ratios in found.items()}
    step = found["step"]
    steps = "are unchanged" if all(0.85 < ratio < 1.15 for ratio in step) else "run at other speeds"
    generate = ""
    if "generate" in ranges:
        generate = f" `generate` decodes {ranges['generate']} times as fast where its step can be captured."
    return (
        "With [`deltazoo.accelerate`](other_libraries.md#their-models-on-our-operators), transformers' own delta-rule "
        f"models run prompts {ranges['prompt']} times as fast on an {machine(content)}, and training "
        f"{ranges['training']} times; single steps of decoding {steps} ({ranges['step']}).{generate}\n"
    )


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
    return f"## {machine(content)}, {way}\n\n{first['dtype']}, {first['batch']} x {first['tokens']:,} tokens{rest}.\n"


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
    return [*first, "" if ratio is None else f"{ratio:.2f}", peak(before), peak(after)]


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
