"""That the few rules on which shared code is tested leave no choice of a spec and no method of a layer out."""

from typing import Any

from few_rules import FEW_RULES

from deltazoo.layers import DeltaRuleAttention, layer_class
from deltazoo.spec import get_rule, list_rules

CHOICES = [
    "corrects",
    "decay",
    "erase_key",
    "erase_reads",
    "num_micro_steps",
    "normalize_q",
    "normalize_k",
    "allow_neg_eigval",
    "output_gate",
]
"""Of a spec: what shared code branches on. Functions such as the step size act on a token alone."""


def choices(rules: list[str]) -> set[tuple[str, Any]]:
    return {(field, getattr(get_rule(rule), field)) for rule in rules for field in CHOICES}


def overridden(rules: list[str]) -> set[str]:
    """Methods and attributes of `DeltaRuleAttention` that the layers of these rules replace."""
    layers = [layer for rule in rules for layer in layer_class(rule).__mro__]
    own = {name for layer in layers if layer not in DeltaRuleAttention.__mro__ for name in vars(layer)}
    return {name for name in own if hasattr(DeltaRuleAttention, name) and not name.startswith("__")}


def test_the_few_are_registered_once_each() -> None:
    assert set(FEW_RULES) <= set(list_rules()) and len(set(FEW_RULES)) == len(FEW_RULES)


def test_every_choice_in_a_spec_is_among_the_few() -> None:
    missing = choices(list_rules()) - choices(FEW_RULES)
    assert not missing, f"add a rule with {missing} to tests/few_rules.py"


def test_every_method_that_a_layer_overrides_is_overridden_among_the_few() -> None:
    missing = overridden(list_rules()) - overridden(FEW_RULES)
    assert not missing, f"add a rule that overrides {missing} to tests/few_rules.py"
