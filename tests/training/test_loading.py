"""The configurations that ship with the project: complete, documented key by key, and of the size in their name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from native_runs import INSTALLED
from outside_rule import RULES, forget_rules

import deltazoo
from deltazoo.cli.options import load_rule_file
from deltazoo.training import RunConfig, TokenizerConfig, load_config
from deltazoo.training.config import STAGES, Recipe, load_as
from deltazoo.training.loading import is_for_gpus, presets, resolve_checkpoint, rule_overrides
from deltazoo.training.run import build_model
from deltazoo.training.tokens import build_tokenizer

PRESETS, RECIPES = presets(), presets(recipes=True)  # tests/training/test_recipe.py has the latter
AT_PAPER_SIZE = {"paper_340m": (340e6, 400e6), "paper_1.3b": (1.3e9, 1.4e9), "hybrid_340m": (340e6, 400e6)}
IN_PRODUCTION = ("gated_deltanet", "neg_gated_deltanet", "kda", "mamba2_style", "lightning_attention")
"""Rules of published models, which are hybrids of them."""


def keys(values: dict[str, Any]) -> list[str]:
    return [name for key, value in values.items() for name in [key, *(keys(value) if isinstance(value, dict) else [])]]


def with_rule(preset: str, rule: str) -> RunConfig:
    return load_config(PRESETS[preset], rule_overrides(PRESETS[preset], rule))


def built(config: RunConfig) -> tuple[Any, int]:
    """The model without its weights, and its parameters with the vocabulary of a preset's tokenizer."""
    byte = build_tokenizer(TokenizerConfig("byte"), [])
    with torch.device("meta"):
        model = build_model(config.model, byte, config.runtime)
    entries = (config.tokenizer.vocab_size or 32_000) - len(byte)
    matrices = 1 if model.config.tie_word_embeddings else 2
    return model, model.num_parameters() + matrices * model.config.hidden_size * entries


def softmax_layers(model: Any) -> list[int]:
    return [number for number, kind in enumerate(model.config.layer_types) if kind == "full_attention"]


def test_there_are_eight() -> None:
    assert {*PRESETS} == {"quickstart_cpu", "quickstart_gpu", *AT_PAPER_SIZE, "native_340m"}
    assert {*RECIPES} == {"swap_cpu", "swap_gpu"}


@pytest.mark.parametrize("path", PRESETS.values(), ids=lambda path: path.stem)
def test_a_preset_says_what_each_key_does(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    values = yaml.safe_load(path.read_text())
    sections = {key for key, value in values.items() if isinstance(value, dict)}
    commented = {line.split(":")[0].strip() for line in lines if "  # " in line}
    assert set(keys(values)) - sections == commented


@pytest.mark.parametrize("path", PRESETS.values(), ids=lambda path: path.stem)
def test_a_preset_for_gpus_says_so_in_its_comment(path: Path) -> None:
    comment = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert ("GPU" in comment) == is_for_gpus(path.stem)


def test_every_preset_can_be_shortened_to_a_few_steps() -> None:
    for path in PRESETS.values():
        assert load_config(path, ["training.steps=5"]).training.warmup_steps <= 1
    for path in RECIPES.values():
        load_as(Recipe, path, [f"{stage}.steps=5" for stage in STAGES])


def test_the_preset_of_a_native_architecture_is_a_model_of_its_size() -> None:
    config = load_config(PRESETS["native_340m"])
    if config.architecture not in INSTALLED:
        pytest.skip(f"deltazoo cannot accelerate {config.architecture} of this version of transformers")
    model, parameters = built(config)
    assert 340e6 < parameters < 400e6
    assert softmax_layers(model) == list(range(3, model.config.num_hidden_layers, 4))
    ours = load_config(PRESETS["hybrid_340m"])
    one_pass = replace(ours.training, rows_per_batch=config.training.rows_per_batch)
    assert config.training == one_pass and config.data == ours.data and config.tokenizer == ours.tokenizer


@pytest.mark.parametrize("preset", ["quickstart_cpu", "quickstart_gpu"])
def test_a_quickstart_takes_another_rule_in_its_own_shape(preset: str) -> None:
    config, own = with_rule(preset, "kda"), load_config(PRESETS[preset])
    assert config == replace(own, model={**own.model, "mixer": "kda"}, output=f"runs/{preset}_kda")
    assert built(config)[0].config.mixer == "kda"


@pytest.mark.parametrize(
    ("preset", "rule"),
    [
        *(("paper_340m", rule) for rule in deltazoo.list_rules()),
        *(("paper_1.3b", rule) for rule in ("delta_net", "gated_deltanet", "kda", "mamba2_style")),
        *(("hybrid_340m", rule) for rule in IN_PRODUCTION),
    ],
)
def test_a_rule_at_paper_size_is_a_model_of_that_size(preset: str, rule: str) -> None:
    config = with_rule(preset, rule)
    model, parameters = built(config)
    smallest, largest = AT_PAPER_SIZE[preset]
    assert smallest < parameters < largest
    assert config.output == f"runs/{preset}_{rule}"
    assert config.model["mixer"] == rule
    assert model.config.allow_neg_eigval == deltazoo.get_rule(rule).allow_neg_eigval
    hybrid = preset.startswith("hybrid")
    assert softmax_layers(model) == (list(range(3, model.config.num_hidden_layers, 4)) if hybrid else [])
    assert config.training.tokens_per_step == 2**19, "half a million tokens per step"
    own = load_config(PRESETS[preset])
    assert replace(config.training, learning_rate=own.training.learning_rate) == own.training


@pytest.mark.parametrize("preset", AT_PAPER_SIZE)
def test_a_preset_at_paper_size_is_gated_deltanet_unless_told_otherwise(preset: str) -> None:
    own = load_config(PRESETS[preset])
    assert with_rule(preset, "gated_deltanet") == replace(own, output=f"{own.output}_gated_deltanet")


def test_the_shape_of_a_rule_is_its_specs() -> None:
    sizes = {"num_heads": 3, "head_dim": 256, "expand_v": 2, "num_hidden_layers": 18}
    assert sizes.items() <= with_rule("paper_340m", "gated_deltaproduct").model.items()
    assert with_rule("paper_1.3b", "gated_deltaproduct").model["num_heads"] == 6
    assert with_rule("paper_340m", "gla").model["use_short_conv"] is False
    assert with_rule("paper_340m", "delta_net").training.learning_rate == 3e-4
    with forget_rules():
        load_rule_file(RULES / "trapezoid.py")  # names no shape: heads of 128 as wide as the model, 24 blocks
        model, parameters = built(with_rule("paper_340m", "trapezoid"))
        assert (model.config.num_heads, model.config.num_hidden_layers) == (8, 24) and 340e6 < parameters < 400e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 48, "hidden_ratio": 9}, "hidden_ratio has no effect beside model.intermediate_size"),
        ({"qkv_bias": True}, "keys that do not act on this model are kept: 'qkv_bias'"),
        ({"use_short_conv": False, "conv_size": 7}, "keys that do not act on this model are kept: 'conv_size'"),
    ],
)
def test_keys_without_effect_are_refused(changes: dict[str, Any], message: str) -> None:
    section = {"mixer": "delta_net", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, **changes}
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        build_model(section, build_tokenizer(TokenizerConfig("byte"), []))


def test_a_width_may_be_set_beside_a_presets_ratio() -> None:
    section = {"mixer": "delta_net", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "hidden_ratio": 4}
    with torch.device("meta"):
        model = build_model({**section, "intermediate_size": 48}, build_tokenizer(TokenizerConfig("byte"), []))
    assert model.config.intermediate_size == 48


def test_a_run_without_a_model_yet_says_how_to_finish_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ValueError, match=f"not finished: deltazoo train {tmp_path} --resume"):
        resolve_checkpoint(str(tmp_path))
