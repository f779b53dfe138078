"""lm-evaluation-harness with our models known to it, and a model type `deltazoo` that runs on our operators."""

import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from deltazoo.interop import accelerate
from deltazoo.workbench.diagnose.rule_calls import delta_rule_layers

__all__ = ["DeltazooLM", "run_harness"]


@register_model("deltazoo")
class DeltazooLM(HFLM):
    """`--model hf` whose delta-rule layers of transformers are accelerated; takes the same `--model_args`.

    Raises:
        ValueError: a model without a delta-rule layer.
    """

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        super()._create_model(*args, **kwargs)
        if not delta_rule_layers(self.model):  # ours and swapped ones need no more
            accelerate(self.model)


def run_harness(arguments: Sequence[str]) -> None:
    """Run the command `lm_eval` with these arguments."""
    with patch.object(sys, "argv", ["lm_eval", *arguments]):
        cli_evaluate()
