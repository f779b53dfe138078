"""docs/rule_costs.md shows committed numbers of every rule."""

from __future__ import annotations

import json

from script_modules import load_script

from deltazoo.spec import list_rules

render = load_script("render_rule_costs")


def test_the_page_is_that_of_the_results() -> None:
    assert render.PAGE.read_text() == render.page(), "run scripts/render_rule_costs.py"


def test_every_rule_was_measured() -> None:
    assert {row["rule"] for row in json.loads(render.LAYERS.read_text())["rows"]} == set(list_rules())
