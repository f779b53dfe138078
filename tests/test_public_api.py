"""The names and signatures others build on: they may be added to, not changed."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest
from fresh_process import run_well_after_transformers

import deltazoo
import deltazoo.layers
import deltazoo.ops

PROMISED = {
    "deltazoo": [
        "EFLA",
        "DeltaNet",
        "DeltaRuleAttention",
        "DeltaRuleConfig",
        "DeltaRuleForCausalLM",
        "DeltaRuleModel",
        "DeltaRuleOutput",
        "RuleSpec",
        "DiagnoseCallback",
        "GatedDeltaNet",
        "KimiDeltaAttention",
        "LayerStates",
        "LinearAttention",
        "Longhorn",
        "NegativeEigenvalueDeltaNet",
        "accelerate",
        "delta_rule",
        "delta_rule_step",
        "diagnose",
        "generate",
        "get_rule",
        "linear_attention",
        "linear_attention_step",
        "list_rules",
        "register_rule",
        "report",
        "restore",
        "swap_attention",
        "unswap_attention",
    ],
    "deltazoo.ops": [
        "DeltaRuleOutput",
        "decay",
        "delta_rule",
        "delta_rule_step",
        "linear_attention",
        "linear_attention_step",
        "resolve_backend",
        "step_size",
    ],
    "deltazoo.ops.step_size": ["euler", "exact", "implicit"],
    "deltazoo.ops.decay": ["bounded_decay", "softplus_decay"],
    "deltazoo.layers": [
        "EFLA",
        "DeltaNet",
        "DeltaRuleAttention",
        "GatedDeltaNet",
        "KimiDeltaAttention",
        "LinearAttention",
        "Longhorn",
        "NegativeEigenvalueDeltaNet",
    ],
}

SIGNATURES = {
    "delta_rule": (
        ["q", "k", "v", "beta", "log_decay"],
        ["scale", "initial_state", "cu_seqlens", "backend"],
    ),
    "delta_rule_step": (["q", "k", "v", "beta", "log_decay"], ["state", "scale", "backend"]),
    "linear_attention": (["q", "k", "v", "log_decay"], ["scale", "initial_state", "cu_seqlens", "backend"]),
    "linear_attention_step": (["q", "k", "v", "log_decay"], ["state", "scale", "backend"]),
}

MODULES = [importlib.import_module(name) for name in PROMISED]


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m in MODULES for n in PROMISED[m.__name__]], ids=lambda x: getattr(x, "__name__", x)
)
def test_promised_name_is_there_and_announced(module: ModuleType, name: str) -> None:
    assert hasattr(module, name), f"{module.__name__}.{name} is gone"
    assert name in module.__all__
    assert name in dir(module)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_everything_announced_exists_and_is_documented(module: ModuleType) -> None:
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value) or inspect.isclass(value) or inspect.ismodule(value):
            assert inspect.getdoc(value), f"{module.__name__}.{name} has no docstring"


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_a_star_import_brings_no_stray_names(module: ModuleType) -> None:
    names: dict[str, object] = {}
    exec(f"from {module.__name__} import *", names)
    assert set(names) - {"__builtins__"} == set(module.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_contract(name: str) -> None:
    positional, keyword_only = SIGNATURES[name]
    parameters = inspect.signature(getattr(deltazoo.ops, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][: len(positional)] == positional
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} >= set(keyword_only)
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters), "a misspelt argument would vanish"
    for parameter in parameters:
        required = parameter.name in ("q", "k", "v", "beta", "state")
        assert (parameter.default is parameter.empty) == required, parameter.name
        assert parameter.annotation is not parameter.empty, parameter.name


def test_the_package_and_its_operators_are_the_same_objects() -> None:
    for name in ("delta_rule", "delta_rule_step", "linear_attention", "linear_attention_step", "DeltaRuleOutput"):
        assert getattr(deltazoo, name) is getattr(deltazoo.ops, name)


def test_editors_see_the_names_that_are_imported_when_asked_for() -> None:
    """The block under TYPE_CHECKING, which only editors and type checkers read, lists the same names."""
    (block,) = (node for node in ast.parse(inspect.getsource(deltazoo)).body if isinstance(node, ast.If))
    shown = {f"{node.module}.{alias.name}" for node in block.body for alias in node.names}
    functions = {f"deltazoo.{module}.{name}" for module, names in deltazoo._NAMES.items() for name in names}
    assert shown == functions | {f"deltazoo.{name}" for name in deltazoo._SUBPACKAGES}
    assert {name for names in deltazoo._NAMES.values() for name in names} <= set(deltazoo.__all__)
    parts = {path.parent.name for path in Path(deltazoo.__file__).parent.glob("*/__init__.py")}
    assert set(deltazoo._SUBPACKAGES) == parts - {"rules", "cli"}  # always imported; a program


def test_unknown_attributes_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        deltazoo.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", ["spec.DeltaRuleSpec", "register_variant", "spec.get_variant", "list_variants"])
def test_a_former_name_says_the_new_one(name: str) -> None:
    """A file of a rule written for it stops with the line to write."""
    package, _, name = f"deltazoo.{name}".rpartition(".")
    new = {"DeltaRuleSpec": "RuleSpec"}.get(name, name.replace("variant", "rule"))
    with pytest.raises(ImportError, match=f"^{package}.{name} is {package}.{new} now"):
        exec(f"from {package} import {name}")


def test_version_is_a_release_number() -> None:
    assert [part.isdigit() for part in deltazoo.__version__.split(".")[:2]] == [True, True]


def test_no_module_hides_a_public_name() -> None:
    """An imported submodule becomes an attribute of its package, in place of a function of its name."""
    code = """
import importlib, pkgutil, sys, types
import deltazoo

for module in pkgutil.walk_packages(deltazoo.__path__, "deltazoo."):
    if not module.name.startswith(("deltazoo.__main__", "deltazoo.serving.vllm")):  # a program; a plugin of vLLM
        importlib.import_module(module.name)
for name, package in sorted(sys.modules.items()):
    if name.partition(".")[0] == "deltazoo" and hasattr(package, "__path__"):
        for public in getattr(package, "__all__", ()):
            if isinstance(getattr(package, public), types.ModuleType):
                print(f"{name}.{public}")
"""
    assert run_well_after_transformers(code).split() == [
        "deltazoo.compat.fla",
        "deltazoo.ops.decay",
        "deltazoo.ops.step_size",
    ]
