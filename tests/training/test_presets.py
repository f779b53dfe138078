"""The configurations that ship with the project: complete, documented key by key, and of the size in their name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from native_runs import INSTALLED
from transformers import AutoConfig, AutoModelForCausalLM

import deltazoo
import deltazoo.models  # noqa: F401
from deltazoo.training import TokenizerConfig, load_config
from deltazoo.training.conversion_config import STAGES, load_conversion
from deltazoo.training.model import build_model
from deltazoo.training.presets import is_for_gpus
from deltazoo.training.tokenizer import build_tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "configs"
CONVERSIONS = sorted(FOLDER.glob("swap_*.yaml"))  # tests/training/test_conversion_config.py
FILES = sorted(set(FOLDER.glob("*.yaml")) - set(CONVERSIONS))
NATIVE = {"qwen3_5_text_340m", "olmo_hybrid_340m"}
OTHERS = {"quickstart_cpu", "quickstart_gpu"} | NATIVE
IN_PRODUCTION = ("gated_deltanet", "neg_gated_deltanet", "kda", "neg_kda", "mamba2_style", "lightning_attention")
"""Rules of published models, which are hybrids of them."""
SIZES = {"340m": (340e6, 400e6), "1.3b": (1.3e9, 1.4e9)}


def keys(values: dict[str, Any]) -> list[str]:
    return [name for key, value in values.items() for name in [key, *(keys(value) if isinstance(value, dict) else [])]]


def test_every_rule_has_a_preset() -> None:
    names = {path.stem for path in FILES} - OTHERS
    rules = [*deltazoo.list_rules(), "neg_kda", *(f"{rule}_hybrid" for rule in IN_PRODUCTION)]
    assert {f"{rule}_340m" for rule in rules} <= names <= {f"{rule}_{size}" for rule in rules for size in SIZES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_preset_says_what_each_key_does(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    values = yaml.safe_load(path.read_text())
    sections = {key for key, value in values.items() if isinstance(value, dict)}
    commented = {line.split(":")[0].strip() for line in lines if "  # " in line}
    assert set(keys(values)) - sections == commented


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_preset_for_gpus_says_so_in_its_comment(path: Path) -> None:
    comment = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert ("GPU" in comment) == is_for_gpus(path.stem)


def test_every_preset_can_be_shortened_to_a_few_steps() -> None:
    for path in FILES:
        assert load_config(path, ["training.steps=5"]).training.warmup_steps <= 1
    for path in CONVERSIONS:
        load_conversion(path, [f"{stage}.steps=5" for stage in STAGES])


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_a_preset_of_a_native_architecture_is_a_model_of_its_size(name: str) -> None:
    config = load_config(FOLDER / f"{name}.yaml")
    if config.architecture not in INSTALLED:
        pytest.skip(f"deltazoo cannot accelerate {config.architecture} of this version of transformers")
    assert name == f"{config.architecture}_340m"
    byte = build_tokenizer(TokenizerConfig("byte"), [])
    with torch.device("meta"):
        model = build_model(config.model, byte, config.runtime)
    smallest, largest = SIZES["340m"]
    assert smallest < model.num_parameters() + 2 * model.config.hidden_size * (32_000 - len(byte)) < largest
    softmax = [number for number, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    assert softmax == list(range(3, model.config.num_hidden_layers, 4))
    ours = load_config(FOLDER / "gated_deltanet_hybrid_340m.yaml")
    one_pass = replace(ours.training, rows_per_batch=config.training.rows_per_batch)
    assert config.training == one_pass and config.data == ours.data and config.tokenizer == ours.tokenizer


@pytest.mark.parametrize("path", [path for path in FILES if path.stem not in NATIVE], ids=lambda path: path.stem)
def test_a_preset_is_the_model_of_its_name(path: Path) -> None:
    config = load_config(path)
    section = dict(config.model)
    spec = deltazoo.get_rule(section.pop("mixer"))
    model_type = spec.hub_model_type or "delta_rule"
    named = {} if spec.hub_model_type else {"mixer": spec.name}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, vocab_size=config.tokenizer.vocab_size or 32_000, **named, **section)
        )
    rule, _, size = path.stem.rpartition("_")
    if size in SIZES:
        smallest, largest = SIZES[size]
        hybrid, rule = rule.endswith("_hybrid"), rule.removesuffix("_hybrid")
        if rule == "neg_kda":
            assert spec.name == "kda" and model.config.allow_neg_eigval
        else:
            assert spec.name == rule and model.config.allow_neg_eigval == spec.allow_neg_eigval
        softmax = [number for number, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
        first = 0 if rule == "neg_kda" else 3
        assert softmax == (list(range(first, len(model.config.layer_types), 4)) if hybrid else [])
        assert smallest < model.num_parameters() < largest
        tokens = config.training.rows_of_a_step * config.training.row_length
        assert tokens in (2**19, 2**21), "half a million or two million tokens per step"


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
