"""docs/rules.md and its picture show every registered rule."""

from __future__ import annotations

from pathlib import Path

from script_modules import ROOT, load_script

from deltazoo.spec import list_rules
from experiments.configurations import SOFTMAX
from experiments.text.results import TextResults
from experiments.text.text_comparison import compare
from experiments.text.text_configurations import hybrid_of

render = load_script("render_rules")


def test_the_page_is_that_of_the_specs() -> None:
    assert render.PAGE.read_text() == render.page(), "run scripts/render_rules.py"


def test_the_readme_counts_the_rules() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"one recurrence, {len(list_rules())} rules" in readme
    assert f"Eight of the {len(list_rules())};" in readme
    section = readme.partition("## The rules")[2].partition("## ")[0]
    shown = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")][1:]
    assert len(shown) == 8 and set(shown) <= set(list_rules())


def test_what_the_page_says_of_real_text_is_what_was_found() -> None:
    results = TextResults.read(ROOT / "benchmarks" / "results" / "text.jsonl")
    known = {configuration for configuration, _ in results.configurations}
    hybrids = {hybrid_of(rule) for rule in ("comba", "eda", "pgdn", "gated_longhorn")}
    rules = known - hybrids - {SOFTMAX}
    assert hybrids < known and len(rules) == len(known) - 5

    def is_ahead(configuration: str, other: str) -> bool:
        difference = compare(configuration, other, results)
        return difference.called and difference.interval.value < 0

    assert all(is_ahead(hybrid, other) for hybrid in hybrids for other in {*rules, SOFTMAX})
    assert not any(is_ahead(rule, SOFTMAX) for rule in rules)
    assert [rule for rule in rules if is_ahead(rule, "gated_deltanet")] == ["gated_longhorn"]


def test_everybody_named_is_a_rule_and_the_picture_is_drawn(tmp_path: Path) -> None:
    assert set(render.USED_BY) <= set(list_rules())
    assert render.draw(tmp_path / "rules.png").stat().st_size > 10_000 and render.PICTURE.exists()
