"""The measured parts of training.md and serving.md show the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from script_modules import load_script

from benchmarks.markdown import END_OF_PART

render = load_script("render_measured_parts")


@pytest.mark.parametrize("name", render.PARTS)
def test_a_page_shows_the_committed_results(name: str) -> None:
    text = render.PARTS[name][0].read_text(encoding="utf-8")
    assert text.count(render.BEGIN.format(name=name)) == 1, "the part has no place on the page"
    assert render.filled_in(name, text) == text, "run scripts/render_measured_parts.py"


def test_what_stands_around_a_part_stays() -> None:
    begin = render.BEGIN.format(name="native_training_h200")
    text = render.filled_in("native_training_h200", f"before\n{begin}\nold\n{END_OF_PART}\nafter\n")
    assert text.startswith(f"before\n{begin}\n\n") and text.endswith(f"\n{END_OF_PART}\nafter\n")
    assert "old" not in text and "ours, several documents in each row" in text


def test_no_converted_model_is_larger_than_the_readme_says() -> None:
    root = Path(__file__).resolve().parents[2]
    results = root / "benchmarks" / "results"
    files = [results / f"{name}.json" for name in ("swap_cpu", "swap_gpu", "conversion_gpu_half")]
    sizes = [arm["parameters"] for file in files for arm in json.loads(file.read_text(encoding="utf-8"))["arms"]]
    lines = (results / "text_conversions.jsonl").read_text(encoding="utf-8").splitlines()
    sizes += [found["parameters"] for found in map(json.loads, lines) if found.get("kind") == "conversion"]
    limit = re.search(
        r"no converted model had over (\d+) M parameters", (root / "README.md").read_text(encoding="utf-8")
    )
    assert limit is not None and 0 <= int(limit[1]) * 1e6 - max(sizes) < 1e6
