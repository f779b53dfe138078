"""lm-evaluation-harness with our models known to it, and a model type `deltazoo` that runs on our operators."""

import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from deltazoo.compat import accelerate
from deltazoo.diagnosis.rule_calls import delta_rule_layers

__all__ = ["DeltazooLM", "run_harness"]


@register_model("deltazoo")
class DeltazooLM(HFLM):
    """`--model hf` whose delta-rule layers of transformers are accelerated; takes the same `--model_args`.

    Raises:
        ValueError: a model without a delta-rule layer.
        FloatingPointError: on scoring, if logits hold NaN.
    """

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        super()._create_model(*args, **kwargs)
        if not delta_rule_layers(self.model):  # ours and swapped ones need no more
            accelerate(self.model)

    def _model_call(self, *args: Any, **kwargs: Any) -> Any:
        logits = super()._model_call(*args, **kwargs)
        if bool(logits.isnan().any()):  # the harness would compare it, and average it
            raise FloatingPointError("the model computed NaN: deltazoo diagnose says in which module it comes first")
        return logits


def run_harness(arguments: Sequence[str]) -> None:
    """Run the command `lm_eval` with these arguments."""
    with patch.object(sys, "argv", ["lm_eval", *arguments]):
        cli_evaluate()
