"""The modules of our models that PEFT's LoRA adapts by default."""

import sys

__all__ = ["LORA_TARGETS", "offer_lora_targets"]

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The large projections that linear and softmax layers have in common."""


def offer_lora_targets(model_type: str, like: str | None = None) -> None:
    """Register the default targets of LoRA with PEFT, if it is imported.

    Args:
        model_type: of one of our models.
        like: a model type whose default targets are added, for a model that has its layers too.
    """
    constants = sys.modules.get("peft.utils.constants")
    if constants is not None:
        targets = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        targets.setdefault(model_type, list(dict.fromkeys([*LORA_TARGETS, *targets.get(like, ())])))
