"""Registration, in fresh processes: the order of imports must not matter."""

import subprocess
import sys
import textwrap

import pytest
from tiny_models import CONFIGS, tiny_named

from deltazoo import _auto_registration
from deltazoo.models import model_types


def run(code):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)


RIVAL = """
import warnings
from transformers import AutoConfig, PreTrainedConfig
class RivalConfig(PreTrainedConfig):
    model_type = "gated_deltanet"
AutoConfig.register("gated_deltanet", RivalConfig, exist_ok=True)
"""


def test_every_configuration_is_registered():
    assert model_types() == list(CONFIGS) == list(_auto_registration.MODEL_TYPES)


@pytest.mark.parametrize(
    "imports",
    [
        "import deltazoo; from transformers import AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM; import deltazoo",
        "import deltazoo; from transformers import AutoConfig, AutoModelForCausalLM; AutoConfig.for_model('kda')",
    ],
)
def test_import_is_enough_to_load(imports, tmp_path):
    tiny_named("gated_deltanet").save_pretrained(tmp_path)
    result = run(f"{imports}; print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__module__)")
    assert result.stdout.strip() == "deltazoo.models.named", result.stderr


def test_import_is_light():
    """Neither transformers nor triton is loaded before somebody needs it."""
    result = run("import deltazoo, sys; print({'transformers', 'triton'} & set(sys.modules))")
    assert result.stdout.strip() == "set()", result.stderr


def test_import_without_transformers():
    result = run(
        "import sys; sys.modules['transformers'] = None; import deltazoo.layers; print(deltazoo.list_variants())"
    )
    assert "gated_deltanet" in result.stdout, result.stderr


def test_name_taken_before_us_is_left_alone_until_overridden(tmp_path):
    tiny_named("gated_deltanet").save_pretrained(tmp_path)
    result = run(
        f"""{RIVAL}
import deltazoo.models
print(type(AutoConfig.from_pretrained({str(tmp_path)!r})).__name__)
print(type(deltazoo.models.GatedDeltaNetForCausalLM.from_pretrained({str(tmp_path)!r})).__name__)
deltazoo.models.register_auto_classes(override=True)
print(type(AutoConfig.from_pretrained({str(tmp_path)!r})).__name__)
"""
    )
    assert result.stdout.split() == ["RivalConfig", "GatedDeltaNetForCausalLM", "GatedDeltaNetConfig"], result.stderr
    assert "'gated_deltanet' is taken by __main__.RivalConfig" in result.stderr


@pytest.mark.parametrize("ours", ["import deltazoo", "import deltazoo.models"])
def test_name_taken_after_us_breaks_nothing(ours, tmp_path):
    tiny_named("gated_deltanet").save_pretrained(tmp_path)
    result = run(
        f"""{ours}
{RIVAL}
print(type(AutoConfig.from_pretrained({str(tmp_path)!r})).__name__)
import deltazoo.models
print(type(deltazoo.models.GatedDeltaNetForCausalLM.from_pretrained({str(tmp_path)!r})).__name__)
"""
    )
    assert result.stdout.split() == ["RivalConfig", "GatedDeltaNetForCausalLM"], result.stderr
