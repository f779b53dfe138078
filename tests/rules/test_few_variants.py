"""That the few rules on which shared code is tested leave no choice of a spec and no method of a layer out."""

from typing import Any

from few_variants import FEW_VARIANTS

from deltazoo.layers import DeltaRuleAttention, layer_class
from deltazoo.spec import get_variant, list_variants

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


def choices(variants: list[str]) -> set[tuple[str, Any]]:
    return {(field, getattr(get_variant(variant), field)) for variant in variants for field in CHOICES}


def overridden(variants: list[str]) -> set[str]:
    """Methods and attributes of `DeltaRuleAttention` that the layers of these variants replace."""
    layers = [layer for variant in variants for layer in layer_class(variant).__mro__]
    own = {name for layer in layers if layer not in DeltaRuleAttention.__mro__ for name in vars(layer)}
    return {name for name in own if hasattr(DeltaRuleAttention, name) and not name.startswith("__")}


def test_the_few_are_registered_once_each() -> None:
    assert set(FEW_VARIANTS) <= set(list_variants()) and len(set(FEW_VARIANTS)) == len(FEW_VARIANTS)


def test_every_choice_in_a_spec_is_among_the_few() -> None:
    missing = choices(list_variants()) - choices(FEW_VARIANTS)
    assert not missing, f"add a variant with {missing} to tests/few_variants.py"


def test_every_method_that_a_layer_overrides_is_overridden_among_the_few() -> None:
    missing = overridden(list_variants()) - overridden(FEW_VARIANTS)
    assert not missing, f"add a variant that overrides {missing} to tests/few_variants.py"
