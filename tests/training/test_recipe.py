"""The recipe of a distillation: documented keys; unknown keys and keys without effect are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltazoo.training import load_config
from deltazoo.training.config import STAGES, Recipe, load_as, save_config
from deltazoo.training.distill import _as_run

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("swap_*.yaml"))
STAGE = {"steps": 4, "row_length": 16, "rows_per_batch": 2, "learning_rate": 1e-3}


def written(folder: Path, **values: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"output": str(folder / "run"), **values}))  # JSON is YAML, without aliases
    return path


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    return load_as(Recipe, path, list(overrides))


def test_every_stage_is_optional_and_they_run_in_order(tmp_path: Path) -> None:
    both = load_recipe(written(tmp_path, finetune=STAGE, align=STAGE))
    assert {name: stage.trains for name, stage in both.stages.items()} == {"align": "swapped", "finetune": "all"}
    assert list(both.stages) == ["align", "finetune"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("distil.steps=3", "unknown key 'distil'; did you mean 'distill'"),
        ("align.stepps=3", "unknown key 'align.stepps'; did you mean 'steps'"),
        ("align.steps=0", "align.steps must be greater than or equal to 1, got 0"),
        ("distill.trains=some", "distill.trains must be 'swapped' or 'all', got 'some'"),
        ("align.trains=all", "align.trains must be 'swapped'"),
        ("distill.context_parallel=2", "distill.context_parallel must be 1, got 2"),
        ("finetune.fully_shard=true", "finetune.fully_shard must be False, got True"),
        ("align.compile=true", "align.compile must be False, got True"),
        ("align.gradient_checkpointing=true", "align.gradient_checkpointing must be False, got True"),
        ("distill.text_weight=-0.5", "distill.text_weight must be greater than or equal to 0, got -0.5"),
        ("align.text_weight=0.5", "unknown key 'align.text_weight'"),
        ("distill.save_every=15", r"distill.save_every \(15\) must be a multiple of log_every"),
    ],
)
def test_a_bad_recipe_names_the_key(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(written(tmp_path, align=STAGE, distill=STAGE, finetune=STAGE), [override])


def test_the_missing_keys_of_all_stages_are_named_at_once(tmp_path: Path) -> None:
    some = {"steps": 4, "learning_rate": 1e-3}
    message = "align.row_length, align.rows_per_batch, distill.rows_per_batch are missing; they have no default"
    with pytest.raises(ValueError, match=message):
        load_recipe(written(tmp_path, align=some, distill={**some, "row_length": 16}, finetune=None))


def test_a_recipe_without_a_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of the stages"):
        load_recipe(written(tmp_path))


def test_the_written_recipe_is_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, align=STAGE, distill={**STAGE, "trains": "swapped"}, data={"text": "Größe"}))
    save_config(recipe, tmp_path / "again.yaml")
    assert load_recipe(tmp_path / "again.yaml") == recipe
    assert "text: Größe" in (tmp_path / "again.yaml").read_text(encoding="utf-8")


def test_a_stage_is_a_run_that_training_reads(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, finetune=STAGE))
    run = _as_run("finetune", recipe, "kda")
    save_config(run, tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml") == run


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_recipe_that_ships_is_complete_and_explains_each_key_once(path: Path) -> None:
    recipe = load_recipe(path)
    assert tuple(recipe.stages) == STAGES
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    commented = {line.split(":")[0].strip() for line in lines if "  # " in line}
    values = yaml.safe_load(path.read_text())
    keys = {name for key, value in values.items() for name in (value if isinstance(value, dict) else [key])}
    assert keys == commented
