"""deltazoo: delta-rule linear attention, with many rules as one operator.

    S_t = (I - beta_t k_t e_t^T) D_t S_{t-1} + beta_t k_t v_t^T,     o_t = scale * S_t^T q_t

This recurrence (`delta_rule`) gives all rules (`list_rules()`): DeltaNet, Gated DeltaNet, Kimi Delta
Attention and many others. Layers, transformers models, generation, swapping and acceleration are built on it. Importing
the package makes our models known to transformers' Auto classes. It imports neither torch nor transformers: every
public name is imported from its module on first access.
"""

from typing import TYPE_CHECKING

from deltazoo import rules as rules  # importing it registers the rules
from deltazoo import spec as spec
from deltazoo._auto_registration import announce_model_types
from deltazoo._lazy import lazy_names
from deltazoo.spec import RuleSpec, get_rule, list_rules, register_rule

if TYPE_CHECKING:  # the names below, for editors and type checkers
    from deltazoo import checks as checks
    from deltazoo import compat as compat
    from deltazoo import diagnosis as diagnosis
    from deltazoo import distributed as distributed
    from deltazoo import generation as generation
    from deltazoo import layers as layers
    from deltazoo import models as models
    from deltazoo import ops as ops
    from deltazoo import serving as serving
    from deltazoo import swap as swap
    from deltazoo import training as training
    from deltazoo._report import report as report
    from deltazoo.compat import accelerate as accelerate
    from deltazoo.compat import export as export
    from deltazoo.compat import restore as restore
    from deltazoo.diagnosis import DiagnoseCallback as DiagnoseCallback
    from deltazoo.diagnosis import diagnose as diagnose
    from deltazoo.distributed import context_parallel as context_parallel
    from deltazoo.generation import generate as generate
    from deltazoo.layers import EFLA as EFLA
    from deltazoo.layers import DeltaNet as DeltaNet
    from deltazoo.layers import DeltaRuleAttention as DeltaRuleAttention
    from deltazoo.layers import GatedDeltaNet as GatedDeltaNet
    from deltazoo.layers import KimiDeltaAttention as KimiDeltaAttention
    from deltazoo.layers import LayerStates as LayerStates
    from deltazoo.layers import LinearAttention as LinearAttention
    from deltazoo.layers import Longhorn as Longhorn
    from deltazoo.layers import NegativeEigenvalueDeltaNet as NegativeEigenvalueDeltaNet
    from deltazoo.models import DeltaRuleConfig as DeltaRuleConfig
    from deltazoo.models import DeltaRuleForCausalLM as DeltaRuleForCausalLM
    from deltazoo.models import DeltaRuleModel as DeltaRuleModel
    from deltazoo.ops import DeltaRuleOutput as DeltaRuleOutput
    from deltazoo.ops import delta_rule as delta_rule
    from deltazoo.ops import delta_rule_step as delta_rule_step
    from deltazoo.ops import linear_attention as linear_attention
    from deltazoo.ops import linear_attention_step as linear_attention_step
    from deltazoo.swap import swap_attention as swap_attention
    from deltazoo.swap import unswap_attention as unswap_attention

__version__ = "0.2.0"

_NAMES = {
    "_report": ("report",),
    "distributed": ("context_parallel",),
    "generation": ("generate",),
    "compat": ("accelerate", "export", "restore"),
    "layers": (
        "EFLA",
        "DeltaNet",
        "DeltaRuleAttention",
        "GatedDeltaNet",
        "KimiDeltaAttention",
        "LayerStates",
        "LinearAttention",
        "Longhorn",
        "NegativeEigenvalueDeltaNet",
    ),
    "models": ("DeltaRuleConfig", "DeltaRuleForCausalLM", "DeltaRuleModel"),
    "ops": ("DeltaRuleOutput", "delta_rule", "delta_rule_step", "linear_attention", "linear_attention_step"),
    "swap": ("swap_attention", "unswap_attention"),
    "diagnosis": ("DiagnoseCallback", "diagnose"),
}
"""Public names by the module from which each is imported on first access."""

__all__ = ["RuleSpec", "get_rule", "list_rules", "register_rule"]
__all__ += [name for names in _NAMES.values() for name in names]

_SUBPACKAGES = (
    "checks",
    "compat",
    "diagnosis",
    "distributed",
    "generation",
    "layers",
    "models",
    "ops",
    "serving",
    "swap",
    "training",
)
"""Subpackages that are attributes of `deltazoo`, also imported on first access."""

__getattr__ = lazy_names(__name__, _NAMES, _SUBPACKAGES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})


announce_model_types()
