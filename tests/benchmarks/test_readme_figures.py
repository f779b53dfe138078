"""Figures of speed in the README, in its table and its limits, are those of committed result files, rounded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
MODELS = {"DeltaNet": "delta_net", "Gated DeltaNet": "gated_deltanet", "KDA": "kda"}
ROWS = {
    "training, 8 x 4096 tokens a step, tokens/s": dict(measure="train_tok_s", way="eager", batch=8),
    "its peak memory, GiB": dict(measure="train_peak_gib", way="eager", batch=8),
    "`deltazoo.generate`, one row, tokens/s": dict(measure="decode_tok_s", way="loop", batch=1),
}
"""First cell of a row -> what rows of the result file must say beside model and size."""


def content_of(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_the_table_of_speed() -> None:
    section = README.read_text(encoding="utf-8").split("## Speed")[1].split("\n## ")[0]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    (_, *columns), _, *rows = table
    assert {row[0] for row in rows} == ROWS.keys(), "a row of the table that this test does not know"
    content = content_of("models_h200.json")
    assert all(run["gpu"] == "NVIDIA H200" for run in content["runs"])
    for first, *cells in rows:
        for column, cell in zip(columns, cells, strict=True):
            wanted = ROWS[first] | dict(model=MODELS[column], size="340m", library="deltazoo", dtype="bfloat16")
            found = [row["value"] for row in content["rows"] if wanted.items() <= row.items()]
            assert [f"{value:,.0f}" for value in found] == [cell], (first, column)


def test_the_share_of_generate_that_the_server_reaches() -> None:
    said = re.search(r"the server reached (\d+)% to (\d+)%", README.read_text(encoding="utf-8"))
    assert said is not None, "the README no longer says what this test compares"
    speeds: dict[str, dict[int, float]] = {}
    for run in content_of("serving_http_h200.json")["runs"]:
        rows = run["rows"]
        speeds[run["label"]] = {row.get("clients") or row["rows"]: row["tokens_per_second"] for row in rows}
    served = speeds["two processes: gated_deltanet, deltazoo serve"]
    generated = speeds["two processes: deltazoo.generate"]
    shares = [speed / generated[clients] for clients, speed in served.items() if clients > 1]
    assert [int(percent) for percent in said.groups()] == [round(100 * min(shares)), round(100 * max(shares))]


def test_the_speed_of_captured_steps() -> None:
    said = re.search(r"at ([\d,]+) tokens/s with captured steps \(the default\), ([\d,]+) without", README.read_text())
    rows = content_of("captured_training_h200.json")["rows"]
    [row] = [row for row in rows if row["batch"] == [1, 2048] and row["loop"].startswith("plain")]
    assert said is not None
    assert list(said.groups()) == [f"{row[way]['tokens_per_second']:,.0f}" for way in ("captured", "eager")]
