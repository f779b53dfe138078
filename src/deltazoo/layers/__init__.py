"""The delta-rule attention that all rules share, the rules' layers by name, and what a model adds to them."""

from deltazoo._lazy import lazy_names
from deltazoo.layers.delta_attention import DeltaRuleAttention, layer_class, make_layer
from deltazoo.layers.layer_input import LayerInput
from deltazoo.layers.layer_options import LayerOptions
from deltazoo.layers.mlp import SwiGLU, default_intermediate_size
from deltazoo.layers.named_layers import (
    EFLA,
    DeltaNet,
    GatedDeltaNet,
    KimiDeltaAttention,
    LinearAttention,
    Longhorn,
    NegativeEigenvalueDeltaNet,
)
from deltazoo.layers.norm import GatedRMSNorm, RMSNorm, l2_normalize
from deltazoo.layers.parameters import parameter_groups, parameters_without_decay
from deltazoo.layers.rule import RuleInputs, bounded_step, run_rule, run_scan
from deltazoo.layers.sequences import (
    WHOLE_ROWS,
    PackedSequences,
    PaddedSequences,
    RightPaddedSequences,
    Sequences,
    describe_sequences,
)
from deltazoo.layers.short_convolution import ShortConvolution
from deltazoo.layers.state import LayerState, LayerStates, StateStore

__all__ = [
    "EFLA",
    "WHOLE_ROWS",
    "DeltaNet",
    "DeltaRuleAttention",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "KimiDeltaAttention",
    "LayerInput",
    "LayerOptions",
    "LayerState",
    "LayerStates",
    "LinearAttention",
    "Longhorn",
    "NegativeEigenvalueDeltaNet",
    "PackedSequences",
    "PaddedSequences",
    "RMSNorm",
    "RightPaddedSequences",
    "RuleInputs",
    "Sequences",
    "ShortConvolution",
    "StateStore",
    "SwiGLU",
    "bounded_step",
    "default_intermediate_size",
    "describe_sequences",
    "l2_normalize",
    "layer_class",
    "make_layer",
    "parameter_groups",
    "parameters_without_decay",
    "run_rule",
    "run_scan",
]

__getattr__ = lazy_names(__name__, {})  # refuses former names
