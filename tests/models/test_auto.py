"""Registration, in fresh processes: the order of imports must not matter."""

import re
import subprocess
import sys
import textwrap

import pytest
from tiny_models import CONFIGS, tiny_named
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deltazoo import _auto_registration
from deltazoo.models import model_types


def run(code):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)


# Another library with models for the same Hub types, as flash-linear-attention is one.
RIVAL = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

def model_type(name):
    class RivalConfig(PreTrainedConfig):
        model_type = name
    class RivalForCausalLM(PreTrainedModel):
        config_class = RivalConfig
        def __init__(self, config):
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.post_init()
    AutoConfig.register(name, RivalConfig, exist_ok=EXIST_OK)
    AutoModelForCausalLM.register(RivalConfig, RivalForCausalLM, exist_ok=EXIST_OK)
    return RivalForCausalLM

MODELS = {name: model_type(name) for name in ("delta_net", "gated_deltanet", "kda")}
"""


def test_every_configuration_is_registered():
    assert model_types() == list(CONFIGS) == list(_auto_registration.MODEL_TYPES)


@pytest.mark.parametrize(
    ("given", "use"),
    [
        ("longhorn", "'delta_rule', mixer='longhorn', ..."),
        ("Long-Horn", "'delta_rule', mixer='longhorn', ..."),
        ("gated_delta_net", "'gated_deltanet', ..."),
    ],
)
def test_a_rule_without_a_model_type_and_a_misspelt_type_say_what_to_use(given, use):
    with pytest.raises(ValueError, match=re.escape(f"{given!r} is no model type; use AutoConfig.for_model({use})")):
        AutoConfig.for_model(given)


def test_a_rule_without_a_model_type_is_no_type():
    assert AutoConfig.for_model("delta_rule", mixer="longhorn").mixer == "longhorn"
    assert AutoConfig.for_model("kda").mixer == "kda"  # a rule with one
    assert "longhorn" not in CONFIG_MAPPING  # a type that others may use for their own models
    with pytest.raises(ValueError, match="Unrecognized model identifier: long_goat"):
        AutoConfig.for_model("long_goat")


@pytest.mark.parametrize(
    "imports",
    [
        "import deltazoo; from transformers import AutoModelForCausalLM",
        "import deltazoo; from transformers import AutoConfig, AutoModelForCausalLM; AutoConfig.for_model('kda')",
    ],
)
def test_import_is_enough_to_load(imports, tmp_path):
    """The other order of imports: `rival`, below, imports transformers."""
    tiny_named("gated_deltanet").save_pretrained(tmp_path)
    result = run(f"{imports}; print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__module__)")
    assert result.stdout.strip() == "deltazoo.models.hub", result.stderr


@pytest.mark.parametrize(
    ("imports", "exist_ok", "warned"),
    [
        ("import rival, deltazoo", True, True),
        pytest.param("import deltazoo, rival", True, True, marks=pytest.mark.slow),
        ("import deltazoo.models, rival", False, False),
        pytest.param("import deltazoo.models, rival", True, False, marks=pytest.mark.slow),
    ],
)
def test_a_library_with_the_same_names(imports, exist_ok, warned, tmp_path):
    """fla keeps the names in any order of import. Our classes load our checkpoints by name; `override=True` takes over.

    Registered after `deltazoo.models`, it takes the names from us, which only it could warn about.
    """
    (tmp_path / "rival.py").write_text(RIVAL.replace("EXIST_OK", str(exist_ok)))
    for name in ("delta_net", "gated_deltanet", "kda", "delta_rule", "efla"):
        tiny_named(name).save_pretrained(tmp_path / name)
    result = run(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        {imports}
        from transformers import AutoModelForCausalLM
        import deltazoo.models
        for name, rival_class in rival.MODELS.items():
            path = {str(tmp_path)!r} + "/" + name
            model = rival_class(rival_class.config_class())
            model.save_pretrained(path + "_rival")
            assert type(AutoModelForCausalLM.from_pretrained(path + "_rival")) is rival_class, name
            ours = {{
                "delta_net": deltazoo.models.DeltaNetForCausalLM,
                "gated_deltanet": deltazoo.models.GatedDeltaNetForCausalLM,
                "kda": deltazoo.models.KDAForCausalLM,
            }}[name]
            model, info = ours.from_pretrained(path, output_loading_info=True)
            assert type(model) is ours and not info["missing_keys"] and not info["unexpected_keys"], info
        for name in ("delta_rule", "efla"):
            model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r} + "/" + name)
            assert type(model).__module__.startswith("deltazoo"), name
        deltazoo.models.register_auto_classes(override=True)
        for name in rival.MODELS:
            model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r} + "/" + name)
            assert type(model).__module__ == "deltazoo.models.hub", name
        """
    )
    assert result.returncode == 0, result.stderr
    for name in ("delta_net", "gated_deltanet", "kda"):
        assert (f"'{name}' is taken by rival." in result.stderr) == warned
    assert "'efla' is taken" not in result.stderr
