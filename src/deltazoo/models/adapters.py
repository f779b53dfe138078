"""What PEFT adapts by default in our models."""

import sys

__all__ = ["LORA_TARGETS", "offer_lora_targets"]

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The large projections that linear and softmax layers have in common."""


def offer_lora_targets(model_type: str) -> None:
    """Tell PEFT, if it is loaded, which modules LoRA adapts when the caller names none."""
    constants = sys.modules.get("peft.utils.constants")
    if constants is not None:
        constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(model_type, list(LORA_TARGETS))
