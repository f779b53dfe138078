"""The YAML configuration: every key has an effect or is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tiny_runs import run_config

from deltazoo.training import (
    DataConfig,
    OptimizationConfig,
    RunConfig,
    TokenizerConfig,
    load_config,
    save_config,
)
from deltazoo.training.config import AlignConfig, DistillConfig, Recipe, StageConfig, from_mapping

MINIMAL = """
output: runs/x
tokenizer: {kind: byte}
model: {mixer: gated_deltanet}
training: {steps: 10, row_length: 64, rows_per_batch: 2, learning_rate: 1e-3}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path


def test_a_minimal_file_gets_the_defaults(minimal: Path) -> None:
    config = load_config(minimal)
    assert config.data == DataConfig()
    assert config.training.learning_rate == 1e-3, "1e-3 is a string in YAML 1.1 and must still be read as a number"
    assert config.training.betas == (0.9, 0.95)


def test_a_written_configuration_reads_back_the_same(minimal: Path, tmp_path: Path) -> None:
    config = load_config(minimal, ["training.betas=[0.8, 0.99]"])
    save_config(config, tmp_path / "written.yaml")
    assert load_config(tmp_path / "written.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rte=1", r"unknown key 'training.learning_rte'; did you mean 'learning_rate'\?"),
        ("datta=1", r"unknown key 'datta'; did you mean 'data'\?"),
        ("training.steps=many", "training.steps must be a valid integer, got 'many'"),
        ("training.steps=true", "training.steps must be a valid integer, got True"),
        ("training.steps=0", "training.steps must be greater than or equal to 1, got 0"),
        ("training.learning_rate=-1", "training.learning_rate must be greater than 0, got -1"),
        ("training.learning_rate=.nan", "training.learning_rate must be a finite number, got nan"),
        ("training.schedule=cosin", "training.schedule must be 'cosine', 'linear' or 'constant', got 'cosin'"),
        ("training.betas=[0.9]", "training.betas.1 is missing"),
        ("training.betas=[0.9, 1.0]", "training.betas.1 must be less than 1, got 1.0"),
        ("training.warmup=11", "training.warmup must be less than or equal to 1, got 11"),
        ("training.warmup_steps=3", r"unknown key 'training.warmup_steps'; did you mean 'warmup'\?"),
        ("training.save_every=15", r"training.save_every \(15\) must be a multiple of log_every"),
        ("training.diagnose_every=0", "training.diagnose_every must be greater than or equal to 1, got 0"),
        ("data.validation_fraction=1.5", "data.validation_fraction must be less than 1, got 1.5"),
        ("data.streaming=true", "data.streaming needs data.max_validation_bytes"),
        ("data=text", "data must be a mapping"),
        ("tokenizer.vocab_size=300", "acts only for kind bpe, not byte"),
        ("tokenizer.kind=bpe", "tokenizer.vocab_size is missing, which kind bpe needs"),
        ("tokenizer.kind=pretrained", "tokenizer.path is missing, which kind pretrained needs"),
        ("tokenizer.path=x", "tokenizer.path acts only for kind pretrained, not byte"),
        ("model.vocab_size=10", "set by the tokenizer: give tokenizer.vocab_size"),
        ("model.bos_token_id=1", "model.bos_token_id is set by the tokenizer: leave it out"),
        ("model.eos_token_id=1", "model.eos_token_id is set by the tokenizer: leave it out"),
        ("model.pad_token_id=3", "model.pad_token_id is set by the tokenizer: leave it out"),
        ("training.row_length=1", "training.row_length must be greater than or equal to 2, got 1"),
        ("training.weight_decay=-0.1", "training.weight_decay must be greater than or equal to 0, got -0.1"),
        ("training.weight_decay=.nan", "training.weight_decay must be a finite number, got nan"),
        ("training.weight_decay=.inf", "training.weight_decay must be a finite number, got inf"),
        ("model={mixer: kda, mixer: gla}", "the key 'mixer' is given twice"),
        ("model={}", "model.mixer is missing"),
        ("nonsense", "an override has the form section.key=value"),
    ],
)
def test_bad_values_are_refused_by_name(minimal: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'--set {override}')}: .*{message}"):
        load_config(minimal, ["seed=3", "training.steps=12", override])


def test_the_file_is_named_for_what_it_says_itself(minimal: Path) -> None:
    minimal.write_text(minimal.read_text() + "sed: 1\n")
    with pytest.raises(ValueError, match="minimal.yaml: unknown key 'sed'"):
        load_config(minimal, ["seed=3"])


def test_the_warm_up_is_a_share_of_the_steps(minimal: Path) -> None:
    for steps, expected in ((1500, 30), (5, 0), (1, 0)):
        assert (
            load_config(minimal, [f"training.steps={steps}", "training.warmup=0.02"]).training.warmup_steps == expected
        )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("seed: 1\nseed: 2\n", r"minimal.yaml: the key 'seed' is given twice, again in line 7$"),
        ("data: {text: a, text: b}\n", r"minimal.yaml: the key 'text' is given twice, again in line 6$"),
    ],
)
def test_a_repeated_key_is_refused(minimal: Path, more: str, message: str) -> None:
    minimal.write_text(minimal.read_text() + more)
    with pytest.raises(ValueError, match=message):
        load_config(minimal)


def test_merged_keys_may_be_replaced(minimal: Path) -> None:
    assert load_config(minimal, ["model={<<: {mixer: kda, num_heads: 2}, num_heads: 4}"]).model["num_heads"] == 4


def test_what_is_no_yaml_is_a_string(minimal: Path) -> None:
    assert load_config(minimal, ["data.pattern=**/*.py"]).data.pattern == "**/*.py"
    with pytest.raises(ValueError, match=r"training.betas must be a list, got '\[0.9'$"):
        load_config(minimal, ["training.betas=[0.9"])


def test_another_kind_of_tokenizer_leaves_the_keys_of_the_first_out(minimal: Path) -> None:
    """A preset with a vocabulary takes ``--set tokenizer.kind=byte`` alone."""
    minimal.write_text(minimal.read_text().replace("{kind: byte}", "{kind: bpe, vocab_size: 2048}"))
    assert load_config(minimal, ["tokenizer.kind=byte"]).tokenizer == TokenizerConfig("byte")
    assert load_config(minimal, ["tokenizer.kind=bpe"]).tokenizer.vocab_size == 2048
    found = load_config(minimal, ["tokenizer.path=a", "tokenizer.kind=pretrained"]).tokenizer
    assert found == TokenizerConfig("pretrained", path="a")


def test_an_empty_section_has_its_defaults(minimal: Path) -> None:
    minimal.write_text(minimal.read_text() + "data:\n")
    assert load_config(minimal).data == DataConfig()


def test_a_missing_key_is_named(minimal: Path) -> None:
    values = yaml.safe_load(minimal.read_text())
    del values["training"]["steps"]
    with pytest.raises(ValueError, match=r"^training.steps is missing; it has no default$"):
        from_mapping(RunConfig, values)


def test_all_missing_keys_are_named(minimal: Path) -> None:
    values = yaml.safe_load(minimal.read_text())
    del values["output"], values["training"]["steps"], values["training"]["row_length"]
    message = "^output, training.steps, training.row_length are missing; they have no default$"
    with pytest.raises(ValueError, match=message):
        from_mapping(RunConfig, values)
    values["training"]["stepps"] = 10
    with pytest.raises(ValueError, match="unknown key 'training.stepps'; did you mean 'steps'"):
        from_mapping(RunConfig, values)


@pytest.mark.parametrize(("text", "message"), [("a: [1", "not a YAML file"), ("- 1", "must hold a mapping")])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / "bad.yaml")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"there is no configuration file 'nowhere.yaml'"):
        load_config("nowhere.yaml")


def test_every_key_of_every_section_is_documented() -> None:
    own = (Recipe, StageConfig, AlignConfig, DistillConfig)
    for section in (DataConfig, TokenizerConfig, OptimizationConfig, RunConfig, *own):
        documented = "".join(cls.__doc__ or "" for cls in (section.__mro__ if section in own else [section]))
        for name in section.__dataclass_fields__:
            assert f"{name}: " in documented, f"{section.__name__}.{name} is not described in its docstring"


def test_the_tiny_run_of_the_tests_is_valid(tmp_path: Path) -> None:
    assert run_config(tmp_path, tmp_path, training={"steps": 3}).training.steps == 3


def test_rows_divided_over_devices_cannot_be_diagnosed(minimal: Path) -> None:
    with pytest.raises(ValueError, match=r"needs whole rows on a device, and context_parallel is 2"):
        load_config(minimal, ["training.diagnose_every=5", "training.context_parallel=2"])
