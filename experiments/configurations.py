"""Configurations: a rule by name plus options, written in one word such as `kda+neg` or `delta_net+neg+x2`."""

from dataclasses import dataclass, field, replace
from typing import Any

from deltazoo import rules as rules  # importing it registers the rules
from deltazoo.names import unknown
from deltazoo.spec import RuleSpec, get_rule, list_rules

SOFTMAX = "softmax"


@dataclass(frozen=True)
class Configuration:
    """A rule with options, as one experiment trains it."""

    name: str
    """As written."""
    spec: RuleSpec | None
    """Its rule, changed where an option says so; None for softmax attention."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `DeltaRuleAttention`."""

    @property
    def is_doubled(self) -> bool:
        """Whether the step size reaches 2, so that transitions have negative eigenvalues."""
        assert self.spec is not None
        return bool(self.options.get("allow_neg_eigval", self.spec.allow_neg_eigval))


OPTIONS: dict[str, dict[str, Any]] = {
    "neg": {"allow_neg_eigval": True},
    "erase": {"allow_neg_eigval": True, "neg_eigval": "erase"},
    "x2": {"num_micro_steps": 2},
    "x3": {"num_micro_steps": 3},
    "x4": {"num_micro_steps": 4},
}
"""Option -> arguments of the layer."""
SPEC_OPTIONS: dict[str, dict[str, Any]] = {
    "raw-key": {"normalize_k": False},
    "unit-key": {"normalize_k": True},
    "scalar-decay": {"decay": "scalar"},
    "channel-decay": {"decay": "channel"},
    "slow-decay": {"dt_range": (1e-6, 1e-4)},
}
"""Option -> what is changed in the rule; slow-decay starts the decay near 1."""


def parse_configuration(name: str) -> Configuration:
    """The configuration that `rule[+option...]` names, or "softmax".

    Raises:
        ValueError: an unknown rule or option.
    """
    rule, *chosen = name.split("+")
    if rule == SOFTMAX and not chosen:
        return Configuration(name, None)
    if rule not in list_rules():
        raise ValueError(unknown("rule", rule, [*list_rules(), SOFTMAX]))
    spec, options = get_rule(rule), dict[str, Any]()
    for option in chosen:
        if option not in {**OPTIONS, **SPEC_OPTIONS}:
            raise ValueError(f"configuration {name!r}: {unknown('option', option, [*OPTIONS, *SPEC_OPTIONS])}")
        options |= OPTIONS.get(option, {})
        spec = replace(spec, **SPEC_OPTIONS.get(option, {}))
    return Configuration(name, spec, options)
