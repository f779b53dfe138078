"""Specs, which describe a rule as data, and the registry of rules.

Every rule is the recurrence of `deltazoo.ops.delta_rule` after some work on each token alone: how the step size follows
from the gate, whether the state decays, which of q and k are normalised, how the output is gated. A `RuleSpec` holds
these choices; `deltazoo.layers.DeltaRuleAttention` reads it. A rule that needs more is registered with a subclass of
that layer. docs/new_rules.md shows both.

This module imports no torch, so that the command line can list the rules at once.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module  # noqa: TID251 (a registered rule names its layer)
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from deltazoo._lazy import lazy_names
from deltazoo.names import unknown

if TYPE_CHECKING:
    from torch import Tensor

__getattr__ = lazy_names(__name__, {})  # refuses former names

Decay = Literal["none", "scalar", "channel"]
OutputGate = Literal["none", "full", "low_rank"]
EraseKey = Literal["tied", "separate"]
EraseReads = Literal["decayed", "undecayed"]
Nonexpansive = Literal["yes", "conditional", "no"]
Layer = TypeVar("Layer", bound=type[Any])

NONEXPANSIVE_MEANING: dict[Nonexpansive, str] = {
    "yes": "no input lets the state grow",
    "conditional": "one token repeated lets the state grow at most by a factor that its keys decide, different tokens "
    "may let it grow without bound",
    "no": "one token repeated may let the state grow without bound",
}
"""The values of `RuleSpec.nonexpansive` in words."""


class StepForm(NamedTuple):
    """Decay and keys of a layer class, in the terms of the decoding kernel."""

    decay: Literal["softplus", "saturating", "log_sigmoid", "fixed"] | None = None
    """Form of the log-decay; None: that of the spec. "softplus": `-exp(A_log) softplus(a + dt_bias)`; "saturating": a
    bounded softplus (`saturating_decay`); "log_sigmoid": `logsigmoid(a) / 16`; "fixed": one for all tokens."""
    decay_gate: str | None = None
    """Name of the map from the layer's input to a: a plain map to a decay per head, or one made by `low_rank` to a
    decay per channel. None: the usual name, for a decay of the spec."""
    keys: str = "tied"
    """Keys under which a token erases and writes: one of `deltazoo.ops.decoding.step_form.STEP_KEYS`."""
    key_maps: tuple[str, ...] = ()
    """Names of further maps of the layer's input that `keys` needs besides that to b."""
    first_key: str | None = None
    """Name of the map, made by `low_rank`, to the key of "erase_first"."""
    key_parameters: tuple[str, ...] = ()
    """Names of the parameters `[H]` in float32 that `keys` needs."""


class Promises(NamedTuple):
    """Statements about the layer class registered with a rule, not about subclasses. Nothing checks them."""

    step_form: StepForm | None = None
    """Decay and keys, if these terms describe them completely: decoding steps then run fused."""
    gain_at_most_one: bool = False
    """Whether no keys of the layer let the erase gain exceed 1 with a step size of at most 1: the operator then does
    not look for larger gains."""


@dataclass(frozen=True, kw_only=True)
class RuleSpec:
    """One rule: its equation, its source, and the choices that define it.

    A spec that `register_rule` has returned is also a decorator: it registers the layer class below it.

    Raises:
        ValueError: choices that contradict each other, named.
    """

    name: str
    """Name in the registry, of the file, and in the configuration key `mixer`."""
    paper: str
    """Title and arXiv number."""
    summary: str
    """The difference from the nearest other rule, in one sentence."""
    equation: str
    """The update of one token, with the state S `[K, V]`."""

    step_size: "str | Callable[[Tensor, Tensor], Tensor]"
    """Function `f(b, k)` of the gate b `[B, T, HV]` and the key `[B, T, H, K]` that gives the effective step size
    `[B, T, HV]`, or its name in `deltazoo.ops.step_size.STEP_SIZES`. "none" leaves the correction term out."""
    decay: Decay = "none"
    """Decay of the state: none, one factor per value head, or one per key channel."""
    erase_key: EraseKey = "tied"
    """The key under which a token erases: "tied", the key under which it writes, or "separate", another."""
    erase_reads: EraseReads = "decayed"
    """State whose read the correction subtracts: after its decay, or before it ("undecayed")."""
    num_micro_steps: int = 1
    """Keys, values and step sizes per token, applied one after another; the state decays before the first."""
    nonexpansive: Nonexpansive = "yes"
    """Whether the state stays bounded without writes. "yes": no token lets it grow, whatever the gates are.
    "conditional": one token repeated lets it grow at most by one over the cosine of the angle between its two keys, or
    1 + 2 over it if the erase gain exceeds 1; a product of different tokens has no bound. "no": one token repeated can
    make it grow without bound."""
    nonexpansive_per_channel: Nonexpansive | None = None
    """`nonexpansive` with one decay per key channel, where it differs."""
    decay_gate: "str | Callable[[Tensor, Tensor, Tensor], Tensor]" = "softplus"
    """Function `f(a, A_log, dt_bias)` of a `[B, T, HV]` or `[B, T, HV, K]` that gives the log-decay in a's shape, or
    its name in `deltazoo.ops.decay.DECAY_GATES`."""
    normalize_q: bool = True
    """L2-normalise the query of each head."""
    normalize_k: bool = True
    """L2-normalise the key of each head."""
    scale_queries: bool = True
    """Multiply queries by K^-1/2. A norm follows the read-out, so this matters where that norm's epsilon does."""
    allow_neg_eigval: bool = False
    """Double the step size, so that the transition's eigenvalue along the key lies in [-1, 1]."""
    decay_lower_bound: float | None = None
    """Bounded gate `lower_bound * sigmoid(...)` in place of the softplus gate: log-decay in (lower_bound, 0)."""
    output_gate: OutputGate = "none"
    """Gate on the normalised output: none, a full projection of the input, or one of rank head_v_dim."""
    gate_activation: "str | Callable[[Tensor], Tensor]" = "silu"
    """Activation of the output gate: a function of each element, or its name in
    `deltazoo.layers.norm.GATE_ACTIVATIONS`."""

    decay_rate_range: tuple[float, float] = (1.0, 16.0)
    """Range on which the initial exp(A_log) is uniform."""
    dt_range: tuple[float, float] = (1e-3, 0.1)
    """Range on which the initial softplus(dt_bias) is log-uniform."""

    head_dim: int = 128
    """Key dimension per head in the paper's language models."""
    expand_v: float = 1.0
    """Value dimension over key dimension, per head, in the paper's language models."""
    paper_shape: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of a model configuration of 1,024 channels and about 340 M parameters, which `deltazoo train paper_340m
    --rule NAME` trains, and `learning_rate` where the paper's is not 4e-4. Without a key the heads have the sizes
    above, keys are as wide as the model, and there are 24 blocks. A model twice as wide has twice as many heads."""
    hub_model_type: str | None = None
    """`model_type` of published checkpoints, where deltazoo has one; None: `delta_rule` with `mixer: <name>`."""
    earlier: "RuleSpec | None" = None
    """The rule before a correction. Models that were saved with it load with it (`revision`)."""

    def __post_init__(self) -> None:
        self._check_choices()
        for choice, usual in {"allow_neg_eigval": False, "erase_key": "tied", "num_micro_steps": 1}.items():
            if self.step_size == "none" and getattr(self, choice) != usual:
                raise ValueError(
                    f"rule {self.name!r}: {choice}={getattr(self, choice)!r} needs a correction term, but step_size "
                    "is 'none'"
                )
        if self.decay == "none" and self.decay_gate != "softplus":
            raise ValueError(
                f"rule {self.name!r}: decay_gate={choice_name(self.decay_gate)!r} needs decay='scalar' or "
                "decay='channel', but decay is 'none'"
            )
        if self.decay_lower_bound is not None:
            if self.decay == "none":
                raise ValueError(f"rule {self.name!r}: decay_lower_bound needs a decay, but decay is 'none'")
            if self.decay_lower_bound >= 0:
                raise ValueError(
                    f"rule {self.name!r}: decay_lower_bound is a log-decay and must be negative, "
                    f"got {self.decay_lower_bound}"
                )
            if self.decay_gate != "softplus":
                raise ValueError(
                    f"rule {self.name!r}: decay_lower_bound takes the place of the softplus gate, but decay_gate is "
                    f"{choice_name(self.decay_gate)!r}"
                )

    def _check_choices(self) -> None:
        for choice, kind in {
            "decay": Decay,
            "output_gate": OutputGate,
            "erase_key": EraseKey,
            "erase_reads": EraseReads,
            "nonexpansive": Nonexpansive,
        }.items():
            value = getattr(self, choice)
            if value not in get_args(kind):
                raise ValueError(f"rule {self.name!r}: {unknown(choice, value, get_args(kind))}")
        for choice in ("num_micro_steps", "head_dim"):
            value = getattr(self, choice)
            if type(value) is not int or value < 1:  # Python takes True for 1
                raise ValueError(f"rule {self.name!r}: {choice} must be a whole number of at least 1, got {value!r}")
        # Names are looked up when a layer is made: the functions need torch.
        for choice in ("step_size", "decay_gate", "gate_activation"):
            value = getattr(self, choice)
            if not isinstance(value, str) and not callable(value):
                raise ValueError(f"rule {self.name!r}: {choice} must be a name or a function, got {value!r}")

    def __call__(self, layer: Layer) -> Layer:
        """Register `layer` as the class that computes this rule, and return it: the spec as a decorator."""
        register_rule(self, layer=layer)
        return layer

    @property
    def nonexpansive_class(self) -> Nonexpansive:
        """`nonexpansive`, or `nonexpansive_per_channel` where the decay is per channel and the two differ."""
        if self.decay == "channel" and self.nonexpansive_per_channel is not None:
            return self.nonexpansive_per_channel
        return self.nonexpansive

    @property
    def revision(self) -> int:
        """Number of this spec among the corrections of its rule, from 1; saved with a model."""
        return 1 if self.earlier is None else self.earlier.revision + 1

    @property
    def corrects(self) -> bool:
        """Whether the rule has a correction term (linear attention has none)."""
        return self.step_size != "none"


def choice_name(choice: object) -> str:
    """The name of a step size, decay gate or activation in a spec, which is a name or a function."""
    return choice if isinstance(choice, str) else getattr(choice, "__name__", repr(choice))


class _Entry(NamedTuple):
    spec: RuleSpec
    layer: type[Any] | str | None
    """The subclass of `DeltaRuleAttention` that computes the rule, or its full name; None: that class itself."""
    module: str
    """Name of the module that registered it."""
    promises: Promises = Promises()

    @property
    def comes_with_deltazoo(self) -> bool:
        return self.module.partition(".")[0] == "deltazoo"


_REGISTRY: dict[str, _Entry] = {}


def register_rule(
    spec: RuleSpec,
    layer: type[Any] | str | None = None,
    *,
    step_form: StepForm | None = None,
    gain_at_most_one: bool = False,
) -> RuleSpec:
    """Make a rule known under `spec.name`, and return its spec.

    A rule that a spec can express needs no class:

        MY_RULE = register_rule(RuleSpec(name="my_rule", ...))

    One that needs more is a subclass of `DeltaRuleAttention`, passed as `layer` or decorated, since the spec that comes
    back registers the class it is applied to:

        @register_rule(RuleSpec(name="my_rule", ...))
        class MyRule(DeltaRuleAttention): ...

    Registering an equal spec again, with the same layer or none, changes nothing. In `__main__` (a script, a notebook)
    a rule replaces one of its name from there: a cell that runs again makes other functions and classes.

    Args:
        spec: the rule.
        layer: subclass of `DeltaRuleAttention` that computes the rule, called with its arguments. A full name,
            `"package.module.Class"`, is imported when a layer is first made: deltazoo lists its rules without torch.
        step_form, gain_at_most_one: the promises that hold for `layer` (`Promises`). Without `layer` they follow from
            the spec.

    Raises:
        ValueError: the name is taken by a different spec, or by another layer class; a spec from outside deltazoo with
            a `hub_model_type`, a layer from outside for a rule that comes with deltazoo; promises without a layer.
        TypeError: `layer` is no subclass of `DeltaRuleAttention`.
    """
    if not (layer is None or isinstance(layer, str) or _is_layer_class(layer)):
        raise TypeError(
            f"rule {spec.name!r}: layer must be a subclass of deltazoo.layers.DeltaRuleAttention, got {layer!r}"
        )
    caller = sys._getframe(1).f_globals.get("__name__", "__main__")
    module = layer.__module__ if isinstance(layer, type) else caller
    promises = Promises(step_form, gain_at_most_one)
    if layer is None and promises != Promises():
        raise ValueError(f"rule {spec.name!r}: step_form and gain_at_most_one describe a layer class: pass it as layer")
    entry = _Entry(spec, layer, module, promises)
    known = _REGISTRY.get(spec.name, entry)
    if known.module == module == "__main__" and (known.spec != spec or layer not in (None, known.layer)):
        known = entry
    if known.spec != spec:
        raise ValueError(
            f"the rule name {spec.name!r} is taken by another spec, registered by {known.module}: choose another"
        )
    if known is entry and spec.hub_model_type is not None and not entry.comes_with_deltazoo:
        raise ValueError(
            f"rule {spec.name!r}: hub_model_type={spec.hub_model_type!r} would load as another model; leave it None"
        )
    if layer is not None and known.layer != layer:
        if known.layer is not None:
            raise ValueError(f"rule {spec.name!r} has a layer class already: {known.layer}, got {layer}")
        if known.comes_with_deltazoo and not entry.comes_with_deltazoo:
            raise ValueError(
                f"rule {spec.name!r} comes with deltazoo and has no layer class of its own: register {layer} with a "
                "spec of another name"
            )
        known = entry
    if promises != Promises():
        known = known._replace(promises=promises)
    _REGISTRY[spec.name] = known
    return spec


@contextmanager
def forgotten_on_error() -> Iterator[None]:
    """A context that removes the rules registered inside it if an exception leaves it."""
    before = dict(_REGISTRY)
    try:
        yield
    except BaseException:
        _REGISTRY.clear()
        _REGISTRY.update(before)
        raise


def _is_layer_class(layer: object) -> bool:
    # By name: a program with such a class has imported torch, and this module must not.
    names = (f"{base.__module__}.{base.__qualname__}" for base in getattr(layer, "__mro__", ()))
    return "deltazoo.layers.delta_attention.DeltaRuleAttention" in names


def get_rule(name: str, revision: int | None = None) -> RuleSpec:
    """The registered rule of a name: its newest revision, or the revision of a number.

    Raises:
        ValueError: no such rule, with all rules and the nearest in the message; no such revision.
    """
    newest = spec = _entry(name).spec
    while revision is not None and spec.revision > revision and spec.earlier is not None:
        spec = spec.earlier
    if revision not in (None, spec.revision):
        raise ValueError(f"rule {name!r} has the revisions 1 to {newest.revision}, got {revision}")
    return spec


def registered_layer(name: str) -> type[Any] | None:
    """The layer class registered with a rule; None: it has none of its own, or there is no rule of that name."""
    layer = _REGISTRY[name].layer if name in _REGISTRY else None
    if isinstance(layer, str):
        module, _, layer_name = layer.rpartition(".")
        layer = getattr(import_module(module), layer_name)
    return layer


def registered_promises(name: str) -> Promises:
    """The promises of the layer class registered with a rule; none if there is no rule of that name."""
    return _REGISTRY[name].promises if name in _REGISTRY else Promises()


def registering_module(name: str) -> str | None:
    """The module to import before a rule is known; None: it comes with deltazoo.

    Raises:
        ValueError: no such rule.
    """
    entry = _entry(name)
    return None if entry.comes_with_deltazoo else entry.module


ANOTHER_FORM = (
    "another recurrence is an nn.Module of its own, which keeps its state in a deltazoo.layers.StateStore "
    "(docs/new_rules.md#a-module-of-another-form)"
)
"""The advice for a rule that the operator cannot compute."""

OTHER_FORMS = {
    *("mdn", "falcon2", "falcon3", "vla", "mesanet", "gatedkalmanet", "loglinear", "loglinearattention"),
    *("mamba3", "ttt", "titans", "atlas", "oja", "gatedoja", "path", "cyfa"),
}
"""Names of such rules, in small letters and nothing else; docs/layers.md says why each is one."""


def list_rules() -> list[str]:
    """Names of all registered rules, in the order of registration: deltazoo's own by kind, then others."""
    return list(_REGISTRY)


def _entry(name: str) -> _Entry:
    if name not in _REGISTRY:
        if name.lower().replace("-", "").replace("_", "") in OTHER_FORMS:
            raise ValueError(f"rule {name!r} does not have the form of the operator: {ANOTHER_FORM}")
        raise ValueError(
            f"{unknown('rule', name, list_rules())} (a rule of your own is known once its module is imported, "
            "on the command line by --load FILE.py)"
        )
    return _REGISTRY[name]
