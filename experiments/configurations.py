"""Configurations: a rule by name plus options, written in one word such as `kda+neg` or `delta_net+neg+x2`."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from deltazoo import rules as rules  # importing it registers the rules
from deltazoo.names import unknown
from deltazoo.spec import RuleSpec, get_rule, list_rules

__all__ = ["OPTIONS", "SOFTMAX", "Configuration", "label_of", "parse_configuration"]

SOFTMAX = "softmax"

_TITLES = {
    "linear_attention": "linear attention",
    "mamba2_style": "decay only (Mamba2 style)",
    "delta_net": "DeltaNet",
    "neg_delta_net": "DeltaNet [-1,1]",
    "gated_deltanet": "Gated DeltaNet",
    "neg_gated_deltanet": "Gated DeltaNet [-1,1]",
    "efla": "EFLA",
    "longhorn": "Longhorn step",
    "kda": "KDA",
    "kaczmarz": "Kaczmarz (KLA)",
    "gated_longhorn": "Longhorn step, scalar decay",
    "gated_efla": "EFLA, scalar decay",
    "gated_deltaproduct": "Gated DeltaProduct [-1,1], 2 steps",
    "eda": "EDA",
    "gated_deltanet2": "Gated DeltaNet-2",
    "pkda": "PKDA",
    "pgdn": "PGDN",
    "q_delta": "Q-Delta",
    "qed": "QED",
    "fg2_gdn": "FG2-GDN",
    "comba": "Comba",
    "comba_unit_erase": "Comba, unit erase key",
    "gla": "GLA",
    "lightning_attention": "Lightning Attention",
    SOFTMAX: "softmax attention",
}


@dataclass(frozen=True)
class Configuration:
    """A rule with options, as one experiment trains it.

    Attributes:
        name: as written.
        spec: its rule, changed where an option says so; None for softmax attention.
        options: further arguments of `DeltaRuleAttention`.
    """

    name: str
    spec: RuleSpec | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name on pages and in plots."""
        return label_of(self.name)


_Option = Callable[[RuleSpec, dict[str, Any]], RuleSpec]


def _set(**options: Any) -> _Option:
    def act(spec: RuleSpec, chosen: dict[str, Any]) -> RuleSpec:
        chosen.update(options)
        return spec

    return act


def _spec(**changes: Any) -> _Option:
    def act(spec: RuleSpec, chosen: dict[str, Any]) -> RuleSpec:
        changed = replace(spec, **changes)
        if changed == spec:
            raise ValueError(f"rule {spec.name!r} is so already: {', '.join(f'{k}={v!r}' for k, v in changes.items())}")
        return changed

    return act


OPTIONS: dict[str, tuple[str, _Option]] = {
    "neg": ("[-1,1]", _set(allow_neg_eigval=True)),
    "erase": ("[-1,1] erase only", _set(allow_neg_eigval=True, neg_eigval="erase")),
    "raw-key": ("raw key", _spec(normalize_k=False)),
    "unit-key": ("unit key", _spec(normalize_k=True)),
    "scalar-decay": ("scalar decay", _spec(decay="scalar")),
    "channel-decay": ("channel decay", _spec(decay="channel")),
    "normal-conv": ("convolutions from normal 0.02", _set(conv_initializer_range=0.02)),
    "slow-decay": ("decay from ~1", _spec(dt_range=(1e-6, 1e-4))),
    "bounded-decay": ("bounded decay", _set(decay_lower_bound=-5.0)),
    "x2": ("2 steps", _set(num_micro_steps=2)),
    "x3": ("3 steps", _set(num_micro_steps=3)),
    "x4": ("4 steps", _set(num_micro_steps=4)),
}
"""Option -> how it reads on the page, and what it does."""


def parse_configuration(name: str) -> Configuration:
    """The configuration that `rule[+option...]` names, or "softmax".

    Raises:
        ValueError: an unknown rule or option, or one that changes nothing.
    """
    rule, *options = re.split(r"\+", name)
    if rule == SOFTMAX:
        if options:
            raise ValueError(f"configuration {name!r}: softmax attention takes no options")
        return Configuration(name, None)
    if rule not in list_rules():
        raise ValueError(unknown("rule", rule, [*list_rules(), SOFTMAX]))
    spec, chosen = get_rule(rule), dict[str, Any]()
    for option in options:
        if option not in OPTIONS:
            raise ValueError(f"configuration {name!r}: {unknown('option', option, list(OPTIONS))}")
        spec = OPTIONS[option][1](spec, chosen)
    return Configuration(name, spec, chosen)


def label_of(name: str) -> str:
    """A configuration's name on pages and in plots: `kda+neg` -> "KDA [-1,1]"."""
    rule, *options = name.split("+")
    return ", ".join([_TITLES.get(rule, rule), *(OPTIONS[option][0] for option in options)]).replace(", [", " [")
