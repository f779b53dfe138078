"""The family suite: every rule enters it, and a miniature of it runs from training to the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from experiments.lab_page import listing, write_page

from deltazoo.spec import list_rules
from experiments import Experiment
from experiments.lab_records import Environment, ResultFile
from experiments.runner import Plan, run_suite
from experiments.suite_selection import Selection, select
from experiments.suites.family import FAMILY

COMPARISON = FAMILY[0]


def shrunk(experiment: Experiment) -> Experiment:
    """The same configurations and test condition, on the smallest model, for one step."""
    recipe, longest = experiment.recipe, max(experiment.task.shortest, 9)
    return replace(
        experiment,
        seeds=(0,),
        recipe=replace(
            recipe,
            num_layers=1,
            hidden_size=16,
            num_heads=1,
            head_dim=8,
            mlp_ratio=12.0,
            mlp_multiple=1,
            train_lengths=(longest, longest),
            test=(experiment.shown,),
            test_sequences=1,
            batch_size=2,
            draw_ahead=1,
            steps=1,
        ),
    )


def test_every_rule_is_on_every_task_of_the_comparison() -> None:
    for experiment in COMPARISON.experiments:
        assert set(list_rules()) <= set(experiment.configurations), experiment.name
    tracking = {e.name: set(e.configurations) for e in COMPARISON.experiments if e.recipe.num_layers == 1}
    assert {"kda+neg", "efla+neg"} <= tracking["parity"] and "mamba2_style+neg" not in tracking["parity"]
    assert "delta_net+neg" not in tracking["parity"]  # neg_delta_net is a rule of its own


def test_the_listing_says_every_rule_in_short_and_names_the_rest() -> None:
    shown = list(listing(select("family", only=["parity", "a5_deep"])).columns[2].cells)
    assert shown[0].startswith("every rule, kda+neg, ") and "gated_deltanet," not in shown[0]
    assert shown[1].startswith("gated_deltanet, neg_gated_deltanet, ")


@pytest.mark.slow
def test_a_miniature_of_the_suite_from_training_to_the_page(tmp_path: Path) -> None:
    whole = select("family")
    small = {experiment.name: shrunk(experiment) for experiment in whole.experiments}
    claims = tuple(replace(c, experiments=tuple(small[e.name] for e in c.experiments)) for c in whole.claims)
    here = Environment(device="a machine", torch="1", triton=None, version="0", commit="abc", code="123")
    results = ResultFile(tmp_path / "results.jsonl", "family", here)
    assert run_suite([*small.values()], claims, results, Plan(workers=0), report=lambda line: None) == 0

    selection = Selection(tuple(small.values()), claims)
    records = list(results.records.values())
    page = write_page(tmp_path / "lab.md", {"family": (selection, records, {})}).read_text()
    assert "not run" not in page and "Cut short" not in page
    assert "![comparison](images/lab_family_comparison.png)" in page
    header, _, *rows = (line.split("|")[1:-1] for line in table_below(page, "Medians of the seeds."))
    assert len(header) == 1 + len(COMPARISON.experiments)
    in_all = [row for row in rows if all(cell.strip() for cell in row)]
    assert len(in_all) == len(list_rules())
    score = results.records["parity kda lr=0.003 seed=0"].scores["128"].accuracy
    assert [row[1].strip() for row in rows if row[0].strip() == "KDA"] == [f"{score:.3f}"]


def table_below(page: str, mark: str) -> list[str]:
    """The lines of the first table after a mark."""
    lines = page[page.index(mark) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    length = next(i for i, line in enumerate([*lines[start:], ""]) if not line.startswith("|"))
    return lines[start : start + length]


def test_a_headline_that_is_not_tested_is_refused() -> None:
    with pytest.raises(ValueError, match="'parity' has the headline 7, which it does not test: 40, 128, 256"):
        replace(COMPARISON.experiments[0], headline=7)
