"""docs/features.md shows the committed results, and they are counted as the page says."""

from __future__ import annotations

import json
from pathlib import Path

from script_modules import load_script

render_features = load_script("render_features")

REPORT = """<testsuites><testsuite tests="4" failures="1" errors="0" skipped="1">
<testcase name="a"><properties>
  <property name="feature" value="beams"/><property name="model" value="kda, pure"/>
  <property name="model" value="kda, hybrid"/></properties></testcase>
<testcase name="b"><properties>
  <property name="feature" value="beams"/><property name="model" value="kda, pure"/></properties><failure/></testcase>
<testcase name="c"><properties>
  <property name="feature" value="beams"/><property name="model" value="kda, hybrid"/></properties><skipped/></testcase>
<testcase name="d"><properties><property name="feature" value="errors"/></properties></testcase>
</testsuite></testsuites>"""


def test_the_page_shows_the_committed_results() -> None:
    results = json.loads(render_features.RESULTS.read_text(encoding="utf-8"))
    assert render_features.PAGE.read_text(encoding="utf-8") == render_features.page(results)
    assert len(results) >= 2, "the oldest supported transformers and the newest"


def test_tests_are_counted_by_feature_and_model(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    assert render_features.count(report) == {
        "beams": {"kda, pure": (1, 2), "kda, hybrid": (1, 1)},
        "errors": {render_features.NO_MODEL: (1, 1)},
    }


def cell(*counts_by_release: dict[str, tuple[int, int]]) -> tuple[str, list[str]]:
    """The cell of kda's beam search, and the footnotes, for counts by model and version."""
    results = {
        release: {"counts": {"beams": counts, "other": {"kda, pure": (1, 1)}}}
        for release, counts in zip(("5.14.1", "5.23.0"), counts_by_release, strict=True)
    }
    made = render_features._Page(results)
    return made.cell("beams", ["kda"], kinds=True), list(made.footnotes)


def test_a_cell_says_yes_no_or_nothing_and_names_exceptions() -> None:
    both = {"kda, pure": (3, 3), "delta_rule: kda, hybrid": (2, 2)}
    assert cell(both, both) == ("yes", [])
    assert cell({}, {}) == ("-", [])
    assert cell({"efla, pure": (1, 1)}, {"efla, pure": (1, 1)}) == ("-", [])
    assert cell({}, both) == ("yes (1)", ["not tested with transformers 5.14.1"])
    assert cell(*[{"kda, pure": (3, 3)}] * 2) == ("yes (1)", ["not tested in hybrids"])
    failing = both | {"delta_rule: kda, hybrid": (1, 2)}
    assert cell(failing, both) == ("no (1)", ["with transformers 5.14.1, 1 of 2 tests of hybrids fail"])
