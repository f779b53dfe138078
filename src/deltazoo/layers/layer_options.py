"""Sizes and options of a layer: their types, defaults, meaning and checks."""

import inspect
import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields
from types import NoneType
from typing import Any, get_args

from deltazoo.names import function_of, unknown
from deltazoo.ops.step_size import STEP_SIZES
from deltazoo.runtime import BACKENDS
from deltazoo.spec import RuleSpec, choice_name

_DIVIDED = frozenset(
    {"A_log", "dt_bias", "o_norm", "q_conv1d", "k_conv1d", "v_conv1d"}
    | {f"{name}_proj" for name in ("q", "k", "v", "o", "b", "a", "f", "g")}
)
"""Parameters and modules of every layer of which each rank of tensor parallelism knows its part."""
_EXPECTED = {int: "a whole number", float: "a number", bool: "True or False"}


@dataclass(frozen=True)
class LayerOptions:
    """The arguments of `DeltaRuleAttention` after the rule; those from `num_v_heads` on by keyword.

    Raises:
        ValueError: options of the wrong type or that are not finite, an unknown backend, options of short convolutions
            that do not fit together.
    """

    hidden_size: int
    """Width of the input and output."""
    num_heads: int
    """Query and key heads."""
    head_dim: int | None = None
    """Channels per query and key head; `hidden_size / num_heads` unless given."""
    _: KW_ONLY
    num_v_heads: int | None = None
    """Value heads, a multiple of `num_heads`, sharing key heads in groups; `num_heads` unless given."""
    expand_v: float | None = None
    """Channels per value head over `head_dim`; the rule's own unless given."""
    use_short_conv: bool = True
    """Short convolutions on q, k and v; without them the activation alone."""
    conv_size: int = 4
    """Taps of the short convolutions."""
    conv_initializer_range: float | None = None
    """Standard deviation of the initial taps; unless given, the taps are uniform within 1 / sqrt(conv_size)."""
    activation: str = "silu"
    """Activation of q, k and v after the convolution: "silu" as in the papers, or "identity"."""
    allow_neg_eigval: bool | None = None
    """Double the step size (arXiv:2411.12537); the rule's own unless given."""
    neg_eigval: str = "both"
    """The terms that `allow_neg_eigval` doubles. "both": erase and write, as in the paper's code and the checkpoints on
    the Hub. "erase": the erase term alone, as in the paper's equations."""
    decay_lower_bound: float | None = None
    """Bound of a log-decay `bound * sigmoid(...)`, in place of the softplus gate; the rule's own unless given."""
    beta_bias: bool = False
    """Give `b_proj` a bias, as NVlabs' Gated DeltaNet does."""
    gate_bias: bool = True
    """Give a low-rank output gate a bias, as the released KDA models do; Kimi Linear in transformers has none."""
    num_micro_steps: int | None = None
    """Householder steps per token, each with a key, a value and a step size of its own (DeltaProduct,
    arXiv:2502.10297). The state decays before the first and is read after the last; the rule's own unless given."""
    norm_eps: float = 1e-5
    """Epsilon of the output norm."""
    initializer_range: float = 0.02
    """Standard deviation of the linear weights."""
    layer_idx: int | None = None
    """The layer's number in `past_key_values`."""
    num_layers: int | None = None
    """Layers of the model, for rules that depend on the depth of the layer (`lightning_attention`)."""
    backend: str | None = None
    """Backend of the operator: "triton", "chunkwise", "reference", or None, which chooses."""
    fused_kernels: bool | None = None
    """Whether Triton kernels compute what surrounds the operator (`deltazoo.ops.fused`): convolutions, norms, gates,
    step sizes, the keys of some rules and the rotary embedding. None: wherever Triton runs."""

    def __post_init__(self) -> None:
        for field in fields(self):
            kinds = get_args(field.type) or (field.type,)
            value, kind = getattr(self, field.name), kinds[0]
            if kind not in _EXPECTED or (value is None and NoneType in kinds):
                continue
            fits = isinstance(value, int | float if kind is float else kind)
            if not fits or isinstance(value, bool) != (kind is bool):  # Python takes True for 1
                raise ValueError(f"{field.name} must be {_EXPECTED[kind]}, got {value!r}")
        if not 0 < self.norm_eps < math.inf:  # with 0 the norm of a zero vector, as padding gives, has no gradient
            raise ValueError(f"norm_eps must be finite and positive, got {self.norm_eps}")
        for name in ("initializer_range", "conv_initializer_range"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        for name in ("expand_v", "decay_lower_bound"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        if self.backend not in (None, *BACKENDS):
            raise ValueError(unknown("backend", self.backend, BACKENDS))
        if self.use_short_conv and self.conv_size < 1:
            raise ValueError(
                f"conv_size must be at least 1, got {self.conv_size}: use_short_conv=False leaves convolutions out"
            )
        if not self.use_short_conv and self.conv_size != 4:
            raise ValueError(f"conv_size={self.conv_size} acts only with use_short_conv=True")
        if not self.use_short_conv and self.conv_initializer_range is not None:
            raise ValueError(f"conv_initializer_range={self.conv_initializer_range} acts only with use_short_conv=True")

    def of(self, spec: RuleSpec, name: str) -> Any:
        """The option's value, or the rule's own choice where it is not given."""
        value = getattr(self, name)
        return getattr(spec, name) if value is None else value


def option_names(layer: type) -> list[str]:
    """Names of a layer class's arguments after the rule, its own and those of the classes that it extends."""
    constructors = [vars(kind)["__init__"] for kind in layer.__mro__[:-1] if "__init__" in vars(kind)]
    own = [name for made in constructors for name in inspect.signature(made).parameters]
    fields_of_all = [field.name for field in fields(LayerOptions)]
    return [*fields_of_all, *sorted({*own} - {*fields_of_all, "self", "rule", "args", "kwargs", "options"})]


def refuse_unknown_options(layer: type, options: Iterable[str]) -> None:
    """Raise TypeError for an option that is no field of `LayerOptions`; the message names the nearest."""
    known = {field.name for field in fields(LayerOptions)}
    for name in options:
        if name not in known:
            raise TypeError(f"{layer.__name__}: {unknown('option', name, option_names(layer))}")


def check_sizes(layer: Any) -> None:
    """Raise ValueError for heads, channels or a layer's number that do not fit together."""
    for option in ("hidden_size", "num_heads", "head_k_dim", "num_v_heads", "num_micro_steps"):
        if getattr(layer, option) < 1:
            raise ValueError(f"{option.replace('_k_', '_')} must be at least 1, got {getattr(layer, option)}")
    index, count = layer.layer_idx, layer.num_layers
    if index is not None and count is not None and not 0 <= index < count:
        raise ValueError(f"layer_idx={index} must be at least 0 and less than num_layers={count}")
    if layer.num_v_heads % layer.num_heads:
        raise ValueError(f"num_v_heads={layer.num_v_heads} must be a multiple of num_heads={layer.num_heads}")
    if layer.head_v_dim < 1 or not math.isclose(layer.head_v_dim, layer.head_k_dim * layer.expand_v):
        raise ValueError(
            f"expand_v={layer.expand_v} times head_dim={layer.head_k_dim} must be a positive whole number, "
            f"got {layer.head_k_dim * layer.expand_v}"
        )


def check_steps(layer: Any, beta_bias: bool) -> None:
    """Raise ValueError for a step size, negative eigenvalues or micro-steps that the rule cannot have."""
    spec, name = layer.spec, layer.spec.name
    if spec.corrects:
        function_of("step_size", spec.step_size, STEP_SIZES)  # a misspelt name raises here
    if layer.neg_eigval not in ("both", "erase"):
        raise ValueError(f"neg_eigval must be 'both' or 'erase', got {layer.neg_eigval!r}")
    if layer.neg_eigval == "erase" and not layer.allow_neg_eigval:
        raise ValueError("neg_eigval='erase' acts only with allow_neg_eigval=True")
    for option, usual in (("allow_neg_eigval", False), ("num_micro_steps", 1)):
        if not spec.corrects and (value := getattr(layer, option)) != usual:
            raise ValueError(f"rule {name!r} has no correction term, so {option}={value} cannot act")
    if not layer.projects_micro_steps and layer.num_micro_steps != spec.num_micro_steps:
        raise ValueError(
            f"rule {name!r} has num_micro_steps={spec.num_micro_steps}, which cannot be changed, got "
            f"{layer.num_micro_steps}"
        )
    if beta_bias and not spec.corrects:
        raise ValueError(f"rule {name!r} has no step size, so beta_bias=True cannot act")


def check_decay(layer: Any, *, of_its_own: bool) -> None:
    """Raise ValueError for a lower bound that cannot act; `of_its_own`: the class of the layer makes its decay gate."""
    spec, bound = layer.spec, layer.decay_lower_bound
    if bound is None:
        return
    if spec.decay == "none":
        raise ValueError(f"rule {spec.name!r} has no decay, so decay_lower_bound={bound} cannot act")
    if bound >= 0:
        raise ValueError(f"decay_lower_bound is a log-decay and must be negative, got {bound}")
    if of_its_own:
        raise ValueError(f"rule {spec.name!r} has a decay of its own, so decay_lower_bound={bound} cannot act")
    if spec.decay_gate != "softplus":
        raise ValueError(
            f"decay_lower_bound={bound} takes the place of the softplus gate, and rule {spec.name!r} has the decay "
            f"gate {choice_name(spec.decay_gate)!r}"
        )


def check_shares(layer: Any, ranks: int) -> None:
    """Raise ValueError unless tensor parallelism can divide a layer's heads among so many ranks."""
    if layer.projected_steps > 1:
        raise ValueError(
            f"tensor parallelism needs num_micro_steps=1, got {layer.projected_steps}: keys of several steps are "
            "in one matrix, which would be divided between the steps instead of between the heads"
        )
    own = [name for name, _ in layer.named_parameters(recurse=False)]
    own += [name for name, child in layer.named_children() if any(True for _ in child.parameters())]
    for name in own:
        if name not in _DIVIDED and name not in layer.tensor_parallel:
            raise ValueError(
                f'{type(layer).__name__} does not say in tensor_parallel how {name!r} is divided: "heads" if its rows '
                'belong to heads, "whole" if all heads share it, "low_rank" if `low_rank` made it'
            )
    if layer.num_heads % ranks:
        raise ValueError(
            f"tensor parallelism divides heads: num_heads={layer.num_heads} of layer {layer.layer_idx} is no multiple "
            f"of the {ranks} ranks"
        )
