"""Two processes that hold half of the heads each compute what one process computes; and what plans promise."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from several_processes import run_script
from tiny_models import CASES, OPTIONS, tiny_model
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from deltazoo.spec import list_rules, registered_layer

pytestmark = pytest.mark.processes

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
HAVE_OWN_LAYER = [rule for rule in list_rules() if registered_layer(rule)]
"""Rules whose layer says itself how its parameters are divided."""
SHARED_PARAMETERS = Version(transformers.__version__) >= Version("5.17")
"""Whether a layer can have parameters that all heads share, as the rule from outside has."""
DECLARED = [case for case in OPTIONS if case in (*CASES, *HAVE_OWN_LAYER)]
DIVISIBLE = [case for case in DECLARED if case not in ("micro_steps", "gated_deltaproduct")]
DIVIDED = [*DIVISIBLE, *(["outside"] if SHARED_PARAMETERS else [])]
TWO_RANKS = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The difference between two processes and one, by case."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    run_script(2, WORKER, str(folder), *DIVIDED)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", DIVIDED)
def test_two_processes_equal_one(case: str, results: dict[str, dict[str, Any]]) -> None:
    """Loss and gradients (accumulated too), logits, generated tokens, the checkpoint saved from the shares, a step."""
    if case in OPTIONS:
        tiny_model(case)
    result = dict(results[case])
    assert result.pop("held by one") <= 0.5
    assert result.pop("same tokens") and result.pop("saved whole")
    # The gate parameters stay float32, and so do their gradients; those are sums of float64 terms, rounded once.
    for name in [name for name in result if "float32" in name]:
        assert result.pop(name) <= torch.finfo(torch.float32).eps, name
    # AdamW divides by the size of gradients that may be as small as the rounding of a float32 one.
    if SHARED_PARAMETERS:  # older versions of transformers have no DTensors
        assert result.pop("sums") and result.pop("separately") < 1e-10
        assert result.pop("norm") < 1e-6 and result.pop("step") < 1e-5
    assert set(result) == {
        *(f"{what}, {batches}" for what in ("loss", "torch.float64 gradients") for batches in (1, 2)),
        "logits",
    }
    assert all(value < 1e-10 for value in result.values()), result


@pytest.mark.parametrize("case", DIVISIBLE)
def test_every_entry_of_a_plan_names_something_and_every_large_matrix_is_named(case: str) -> None:
    model = tiny_model(case)
    modules = {replace_layer_number_by_wildcard(name) for name, _ in model.named_modules()}
    assert set(model.tp_plan) <= modules
    assert set(model.tp_plan.values()) <= set(ALL_PARALLEL_STYLES)
    matrices = {name for name, p in model.model.layers.named_parameters(prefix="model.layers") if p.ndim == 2}
    divided = {replace_layer_number_by_wildcard(name).removesuffix(".weight") for name in matrices}
    assert divided <= set(model.tp_plan)
    assert set(model._pp_plan) <= modules
    for dtype in (torch.float32, torch.bfloat16):
        assert set(tiny_model(case, dtype=dtype)._fsdp_plan) <= modules
    assert not any(key.startswith("base_model") for key in model.config.to_dict())


@pytest.mark.parametrize("case", [case for case in DECLARED if case not in DIVISIBLE])
def test_no_plan_is_offered_that_would_be_refused(case: str) -> None:
    """The styles refuse layers that project to several micro-steps."""
    for model in (tiny_model(case), tiny_model(case).model):
        assert not model.supports_tp_plan and not model.tp_plan and not model.config.base_model_tp_plan


@pytest.mark.parametrize(
    ("case", "overrides", "message"),
    [
        ("gated_deltanet", {"num_heads": 3}, "num_heads=3 of layer 0 is no multiple of the 2 ranks"),
        ("kda", {"num_heads": 1, "num_v_heads": 2}, "num_heads=1 of layer 0 is no multiple of the 2 ranks"),
        (
            "hybrid_softmax_first",
            {"num_key_value_heads": 1},
            "num_key_value_heads=1 of layer 0 is no multiple of the 2",
        ),
        ("micro_steps", {}, "needs num_micro_steps=1, got 2"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused(case: str, overrides: dict[str, int], message: str) -> None:
    mixer = tiny_model(case, **overrides).model.layers[0].attn
    style = ALL_PARALLEL_STYLES["delta_rule_heads"]
    for install in (style.install_forward, style.validate_module):  # of newer and of older versions of transformers
        with pytest.raises(ValueError, match=message):
            install(mixer, TWO_RANKS)


def test_the_style_is_for_mixers() -> None:
    with pytest.raises(TypeError, match="delta_rule_heads is a style for the attention layers of deltazoo, got Linear"):
        ALL_PARALLEL_STYLES["delta_rule_heads"].validate_module(torch.nn.Linear(2, 2), TWO_RANKS)
