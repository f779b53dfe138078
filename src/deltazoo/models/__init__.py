"""HuggingFace models: configurations, classes per Hub type, and their registration with the Auto classes."""

from deltazoo.generation.cache import DeltaRuleCacheLayer, prepare_cache
from deltazoo.models.hub import *  # noqa: F403
from deltazoo.models.hub import __all__ as _of_the_hub
from deltazoo.models.hub import register_auto_classes
from deltazoo.models.modeling import DeltaRuleForCausalLM, DeltaRuleModel, DeltaRulePreTrainedModel

__all__ = [  # noqa: PLE0604
    "DeltaRuleCacheLayer",
    "DeltaRuleForCausalLM",
    "DeltaRuleModel",
    "DeltaRulePreTrainedModel",
    "prepare_cache",
    *_of_the_hub,
]

register_auto_classes()
"""Registration with transformers' Auto classes: `AutoModelForCausalLM.from_pretrained` after `import deltazoo`."""
