"""Writes the measured parts of docs/training.md and serving.md from committed results.

    python scripts/render_measured_parts.py

Each part stands between two marked lines; the rest of the pages stays as it is. The results are those of
bench_native_training.py and load_servers.sh.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.markdown import filled, table, with_part
from benchmarks.provenance import Run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
BEGIN = "<!-- measured: written by scripts/render_measured_parts.py from benchmarks/results/{name}.json -->"
TRAINING = {
    "whole": "ours, one document in each row",
    "packed": "ours, several documents in each row",
    "transformers": "transformers' own code, one document in each row",
}


def main() -> None:
    for name, (page, _) in PARTS.items():
        page.write_text(filled_in(name, page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page)


def filled_in(name: str, text: str) -> str:
    """A page's text with the part of a result file made again."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return with_part(text, BEGIN.format(name=name), PARTS[name][1](content))


def machine(content: dict[str, Any]) -> str:
    """Where, with what and when a run measured."""
    run = Run(**content)
    versions = f"torch {run.torch}, Triton {run.triton}, transformers {run.transformers}"
    return f"{run.machine}, {versions}, {run.date[:10]}, commit `{run.short_commit}`."


def native_training(content: dict[str, Any]) -> str:
    """Training steps of the presets of transformers' classes."""
    rows = sorted(content["rows"], key=lambda row: (row["preset"], [*TRAINING].index(row["way"])))
    own = {row["preset"]: row for row in rows if row["way"] == "transformers"}
    gains, shares, body = [], [], []
    for row in rows:
        times = row["tokens_per_s"] / own[row["preset"]]["tokens_per_s"]
        if row["way"] != "transformers":
            gains.append(times)
            shares.append(100 * row["peak_gib"] / own[row["preset"]]["peak_gib"])
        speed = f"{row['tokens_per_s']:,.0f} ({row['low']:,.0f} to {row['high']:,.0f})"
        body.append([f"`{row['preset']}`", TRAINING[row["way"]], speed, f"{times:.1f}", f"{row['peak_gib']:.1f}"])
    first = rows[0]
    text = (
        f"The two presets train {min(gains):.1f} to {max(gains):.1f} times as fast as on transformers' own code, in "
        f"{min(shares):.0f}% to {max(shares):.0f}% of its memory. That code is plain torch: transformers runs it where "
        "flash-linear-attention and causal-conv1d are not installed. It does not keep packed documents apart."
    )
    how = (
        "Steps are forward, backward, clipping and AdamW on "
        f"{first['rows']} rows of {first['row_length']:,} random tokens, bfloat16 autocast "
        "(`scripts/bench_native_training.py`). Medians of five steps, with the least and the most. "
        f"{machine(content['run'])}"
    )
    header = ["preset", "operators and rows", "tokens/s", "times", "peak, GiB"]
    return f"{filled(text)}\n\n{filled(how)}\n\n{table(header, body, text_columns=2)}"


def serving(content: dict[str, Any]) -> str:
    """The servers under many clients, beside `deltazoo.generate` on as many rows."""
    loops = [run for run in content["runs"] if run["label"] == "deltazoo.generate"]
    generate: dict[int, float] = {}
    for row in (row for loop in loops for row in loop["rows"]):
        generate[row["rows"]] = max(row["tokens_per_second"], generate.get(row["rows"], 0.0))
    asked = [(run, row) for run in content["runs"] if run not in loops for row in run["rows"]]
    compared = [(run, row) for run, row in asked if run["label"].startswith("gated_deltanet")]
    one, prompts = next(row for _, row in asked if row["clients"] == 1), loops[0]["rows"][0]["prompt_tokens"]
    rounds, new_tokens = one["requests"], one["new_tokens"] / one["requests"]
    body, shares = [], []
    for run, row in asked:
        of_generate = ["", ""]
        if (run, row) in compared:
            alone = generate[row["clients"]]
            shares.append((row["clients"], row["tokens_per_second"] / alone))
            of_generate = [f"{alone:,.0f}", f"{100 * shares[-1][1]:.0f}%"]
        body.append(
            [
                run["label"],
                f"{row['clients']}",
                f"{row['tokens_per_second']:,.0f}",
                *of_generate,
                f"{row['first_token_p50']:.2f}",
                f"{row['first_token_p99']:.2f}",
                f"{row['failed']} of {row['requests']}",
            ]
        )
    many = [share for clients, share in shares if clients > 1]
    text = (
        f"Under load the server reaches {100 * min(many):.0f}% to {100 * max(many):.0f}% of the throughput of "
        "`deltazoo.generate` on one batch of as many rows as there are clients. "
        f"{_hybrid(asked)}"
    )
    how = (
        "The Gated DeltaNet of [model_speed.md](model_speed.md), and a Qwen3-Next of these sizes, with random weights, "
        f"bfloat16. Each client streams {rounds} greedy completions of {new_tokens:.0f} tokens, one after the other, "
        f"after prompts of {prompts:,} tokens without a common beginning (`scripts/load_servers.sh`); clients of "
        "`transformers serve` stream one. Tokens/s count new tokens only; the time includes reading the prompts, also "
        "for `generate`. "
        f"All in one run: {machine(asked[-1][0]['run'])}"
    )
    header = ["model, server", "clients", "tokens/s", "`generate`", "share", "first token, s, p50", "p99", "failed"]
    return f"{filled(text)}\n\n{filled(how)}\n\n{table(header, body, text_columns=1)}"


def _hybrid(asked: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """The hybrid behind both servers, by the most clients that each was asked by."""
    ours, theirs = (
        max((row for run, row in asked if run["label"].startswith(f"qwen3_next, {server}")), key=lambda r: r["clients"])
        for server in ("deltazoo serve", "transformers serve")
    )
    return (
        f"A hybrid, Qwen3-Next, gets {ours['tokens_per_second']:,.0f} tokens/s at {ours['clients']} clients. "
        f"`transformers serve` gets {theirs['tokens_per_second']:,.0f} at {theirs['clients']}: it answers one request "
        "after the other and, without flash-linear-attention installed, runs linear layers in plain torch."
    )


PARTS: dict[str, tuple[Path, Callable[[dict[str, Any]], str]]] = {
    "native_training_h200": (DOCS / "training.md", native_training),
    "serving_http_h200": (DOCS / "serving.md", serving),
}

if __name__ == "__main__":
    main()
