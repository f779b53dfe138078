"""The conversion recipe: documented keys; unknown keys and keys without effect are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltazoo.training import load_config
from deltazoo.training.config import save_config
from deltazoo.training.conversion_config import (
    AlignmentConfig,
    ConversionConfig,
    DistillationConfig,
    FineTuningConfig,
    load_conversion,
)

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("swap_*.yaml"))
STAGE = {"steps": 4, "row_length": 16, "rows_per_batch": 2, "learning_rate": 1e-3}


def written(folder: Path, **values: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"output": str(folder / "run"), **values}))  # JSON is YAML, without aliases
    return path


def test_every_stage_is_optional_and_they_run_in_order(tmp_path: Path) -> None:
    both = load_conversion(written(tmp_path, finetune=STAGE, align=STAGE))
    assert [stage.section for stage in both.stages] == ["align", "finetune"]
    assert [stage.trains for stage in both.stages] == ["swapped", "all"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("distil.steps=3", "unknown key 'distil'; did you mean 'distill'"),
        ("align.stepps=3", "unknown key 'align.stepps'; did you mean 'steps'"),
        ("align.steps=0", "align.steps must be greater than or equal to 1, got 0"),
        ("distill.trains=some", "distill.trains must be 'swapped' or 'all', got 'some'"),
        ("align.trains=all", "align.trains must be 'swapped'"),
        ("align.compile=true", "align.compile has no meaning"),
        ("align.gradient_checkpointing=true", "align.gradient_checkpointing has no meaning"),
        ("distill.text_weight=-0.5", "distill.text_weight must be greater than or equal to 0, got -0.5"),
        ("align.text_weight=0.5", "unknown key 'align.text_weight'"),
        ("distill.save_every=15", r"distill.save_every \(15\) must be a multiple of log_every"),
    ],
)
def test_a_bad_recipe_names_the_key(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_conversion(written(tmp_path, align=STAGE, distill=STAGE), [override])


def test_the_missing_keys_of_all_stages_are_named_at_once(tmp_path: Path) -> None:
    some = {"steps": 4, "learning_rate": 1e-3}
    message = "align.row_length, align.rows_per_batch, distill.rows_per_batch are missing; they have no default"
    with pytest.raises(ValueError, match=message):
        load_conversion(written(tmp_path, align=some, distill={**some, "row_length": 16}, finetune=None))


def test_a_recipe_without_a_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of the stages"):
        load_conversion(written(tmp_path))


def test_the_written_recipe_is_the_recipe(tmp_path: Path) -> None:
    recipe = load_conversion(written(tmp_path, align=STAGE, distill={**STAGE, "trains": "swapped"}))
    save_config(recipe, tmp_path / "again.yaml")
    assert load_conversion(tmp_path / "again.yaml") == recipe


def test_a_stage_is_a_run_that_training_reads(tmp_path: Path) -> None:
    recipe = load_conversion(written(tmp_path, finetune=STAGE))
    run = recipe.stages[0].as_run(tmp_path, "kda", tmp_path / "tokenizer", recipe.data, seed=3)
    save_config(run, tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml") == run


def test_every_key_is_documented() -> None:
    for section in (ConversionConfig, AlignmentConfig, DistillationConfig, FineTuningConfig):
        documented = "".join(cls.__doc__ or "" for cls in section.__mro__)
        for name in section.__dataclass_fields__:
            assert f"{name}: " in documented, f"{section.__name__}.{name} is not described in its docstring"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_recipe_that_ships_is_complete_and_explains_each_key_once(path: Path) -> None:
    recipe = load_conversion(path)
    assert [stage.section for stage in recipe.stages] == ["align", "distill", "finetune"]
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    commented = {line.split(":")[0].strip() for line in lines if "  # " in line}
    values = yaml.safe_load(path.read_text())
    keys = {name for key, value in values.items() for name in (value if isinstance(value, dict) else [key])}
    assert keys == commented
