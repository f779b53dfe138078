"""Which options of a layer fit together; all functions raise ValueError for those that do not."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deltazoo.names import function_of, unknown
from deltazoo.ops.step_size import STEP_SIZES
from deltazoo.runtime import BACKENDS
from deltazoo.spec import choice_name

if TYPE_CHECKING:
    from deltazoo.layers.delta_attention import DeltaRuleAttention

__all__ = ["check_convolutions", "check_decay", "check_sizes", "check_steps", "check_types"]

_WHOLE_NUMBERS = {
    **dict.fromkeys(("hidden_size", "num_heads", "conv_size"), int),
    **dict.fromkeys(("head_dim", "num_v_heads", "num_micro_steps", "layer_idx", "num_layers"), int | None),
}
_NUMBERS = {
    **dict.fromkeys(("norm_eps", "initializer_range"), int | float),
    **dict.fromkeys(("expand_v", "decay_lower_bound", "conv_initializer_range"), int | float | None),
}
_SWITCHES = {
    **dict.fromkeys(("use_short_conv", "beta_bias"), bool),
    **dict.fromkeys(("allow_neg_eigval", "fused_kernels"), bool | None),
}


def check_types(options: Mapping[str, Any]) -> None:
    """Types of the options as given, which all others are computed from; numbers must be finite."""
    for kinds, expected in ((_WHOLE_NUMBERS, "a whole number"), (_NUMBERS, "a number"), (_SWITCHES, "True or False")):
        for name, kind in kinds.items():
            value = options[name]
            is_switch = isinstance(value, bool) and kinds is not _SWITCHES  # Python takes True for 1
            if is_switch or not isinstance(value, kind):
                raise ValueError(f"{name} must be {expected}, got {value!r}")
    if not 0 < options["norm_eps"] < math.inf:  # with 0 the norm of a zero vector, as padding gives, has no gradient
        raise ValueError(f"norm_eps must be finite and positive, got {options['norm_eps']}")
    for name in ("initializer_range", "conv_initializer_range"):
        if options[name] is not None and not 0 <= options[name] < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {options[name]}")
    for name in ("expand_v", "decay_lower_bound"):
        if options[name] is not None and not math.isfinite(options[name]):
            raise ValueError(f"{name} must be finite, got {options[name]}")
    if options["backend"] not in (None, *BACKENDS):
        raise ValueError(unknown("backend", options["backend"], BACKENDS))


def check_convolutions(use_short_conv: bool, conv_size: int, initializer_range: float | None) -> None:
    """The taps of the short convolutions and their start; 4 taps, the default, may be given to a layer without any."""
    if use_short_conv and conv_size < 1:
        raise ValueError(f"conv_size must be at least 1, got {conv_size}: use_short_conv=False leaves convolutions out")
    if not use_short_conv and conv_size != 4:
        raise ValueError(f"conv_size={conv_size} acts only with use_short_conv=True")
    if not use_short_conv and initializer_range is not None:
        raise ValueError(f"conv_initializer_range={initializer_range} acts only with use_short_conv=True")


def check_sizes(layer: "DeltaRuleAttention") -> None:
    """Heads and channels; the layer's number in its model."""
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


def check_steps(layer: "DeltaRuleAttention", beta_bias: bool) -> None:
    """The step size, negative eigenvalues, micro-steps."""
    spec, name = layer.spec, layer.spec.name
    if spec.corrects:
        function_of("step_size", spec.step_size, STEP_SIZES)  # a misspelt name raises here
    if layer.neg_eigval not in ("both", "erase"):
        raise ValueError(f"neg_eigval must be 'both' or 'erase', got {layer.neg_eigval!r}")
    if layer.neg_eigval == "erase" and not layer.allow_neg_eigval:
        raise ValueError("neg_eigval='erase' acts only with allow_neg_eigval=True")
    if layer.allow_neg_eigval and not spec.corrects:
        raise ValueError(f"rule {name!r} has no correction term, so allow_neg_eigval=True cannot act")
    if layer.num_micro_steps > 1 and not spec.corrects:
        raise ValueError(f"rule {name!r} has no correction term, so num_micro_steps={layer.num_micro_steps} cannot act")
    if not layer.projects_micro_steps and layer.num_micro_steps != spec.num_micro_steps:
        raise ValueError(
            f"rule {name!r} has num_micro_steps={spec.num_micro_steps}, which cannot be changed, got "
            f"{layer.num_micro_steps}"
        )
    if beta_bias and not spec.corrects:
        raise ValueError(f"rule {name!r} has no step size, so beta_bias=True cannot act")


def check_decay(layer: "DeltaRuleAttention", *, of_its_own: bool) -> None:
    """The lower bound of the decay; `of_its_own`: the layer's class makes its decay gate itself."""
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
