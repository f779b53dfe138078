"""The delta-rule attention that all variants share, the variants' layers by name, and what a model adds to them."""

from deltazoo.layers.delta_attention import DeltaRuleAttention, layer_class, make_layer
from deltazoo.layers.layout import PackedLayout, PaddedLayout, TokenLayout, token_layout
from deltazoo.layers.mlp import SwiGLU, default_intermediate_size
from deltazoo.layers.named import (
    EFLA,
    DeltaNet,
    GatedDeltaNet,
    KimiDeltaAttention,
    LinearAttention,
    Longhorn,
    NegativeEigenvalueDeltaNet,
)
from deltazoo.layers.norm import GatedRMSNorm, RMSNorm, l2_normalize
from deltazoo.layers.report import LayerReport, ModelReport, report
from deltazoo.layers.rule import RuleInputs, nonexpansive
from deltazoo.layers.short_conv import ShortConvolution
from deltazoo.layers.state import LayerStates, MixerState, StateStore
from deltazoo.layers.weight_decay import parameters_without_decay

__all__ = [
    "EFLA",
    "DeltaNet",
    "DeltaRuleAttention",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "KimiDeltaAttention",
    "LayerReport",
    "LayerStates",
    "LinearAttention",
    "Longhorn",
    "MixerState",
    "ModelReport",
    "NegativeEigenvalueDeltaNet",
    "PackedLayout",
    "PaddedLayout",
    "RMSNorm",
    "RuleInputs",
    "ShortConvolution",
    "StateStore",
    "SwiGLU",
    "TokenLayout",
    "default_intermediate_size",
    "l2_normalize",
    "layer_class",
    "make_layer",
    "nonexpansive",
    "parameters_without_decay",
    "report",
    "token_layout",
]
