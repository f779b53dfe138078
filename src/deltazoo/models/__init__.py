"""HuggingFace models: configurations, classes per Hub type, and their registration with the Auto classes."""

from deltazoo.generation.cache import DeltaRuleCacheLayer, prepare_cache
from deltazoo.models.configuration import DeltaRuleConfig
from deltazoo.models.hub import *  # noqa: F403
from deltazoo.models.hub import __all__ as _of_the_hub
from deltazoo.models.hub import export_remote_code, model_types, register_auto_classes
from deltazoo.models.modeling import DeltaRuleForCausalLM, DeltaRuleModel, DeltaRulePreTrainedModel

__all__ = [  # noqa: PLE0604
    "DeltaRuleCacheLayer",
    "DeltaRuleConfig",
    "DeltaRuleForCausalLM",
    "DeltaRuleModel",
    "DeltaRulePreTrainedModel",
    "export_remote_code",
    "model_types",
    "prepare_cache",
    "register_auto_classes",
    *_of_the_hub,
]

register_auto_classes()
"""Registration with transformers' Auto classes: `AutoModelForCausalLM.from_pretrained` after `import deltazoo`."""
