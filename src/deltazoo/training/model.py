"""Build a new model from the ``model`` section of a configuration."""

import warnings
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from deltazoo.models import DeltaRuleConfig  # registers our model types with the Auto classes, too
from deltazoo.runtime import RuntimeOptions
from deltazoo.spec import get_rule
from deltazoo.training.native_model import build_native_model
from deltazoo.training.tokenizer import begin_id


def build_model(
    section: dict[str, Any], tokenizer: PreTrainedTokenizerBase, runtime: RuntimeOptions | None = None
) -> PreTrainedModel:
    """A new model, its weights drawn from torch's global generator.

    Args:
        section: ``mixer`` and keys of ``DeltaRuleConfig``. A rule with a Hub type of its own gets it, any other
            the model type ``delta_rule``. With ``architecture`` instead, see `build_native_model`.
        tokenizer: gives the vocabulary size and the ids of the special tokens.
        runtime: how the model runs; by default the model decides.

    Raises:
        ValueError: an unknown rule or key, a value of the wrong type, or sizes that do not fit together.
    """
    runtime = runtime or RuntimeOptions()
    if "architecture" in section:
        return build_native_model(section, tokenizer, runtime)
    keys = dict(section)
    # A preset's default ratio may stand beside a width that is set for one run.
    if keys.get("intermediate_size") is not None and keys.get("hidden_ratio") not in (
        None,
        DeltaRuleConfig.hidden_ratio,
    ):
        raise ValueError("model.hidden_ratio has no effect beside model.intermediate_size: leave one of them out")
    spec = get_rule(keys.pop("mixer"))
    if spec.hub_model_type is None:
        keys["mixer"] = spec.name
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*keys that do not act on this model")
            config = AutoConfig.for_model(
                spec.hub_model_type or "delta_rule",
                vocab_size=len(tokenizer),
                bos_token_id=begin_id(tokenizer),
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                **keys,
            )
    except UserWarning as idle:
        raise ValueError(f"model: {idle}") from idle
    except StrictDataclassError as error:  # a value of the wrong type
        raise ValueError(f"model: {str(error).splitlines()[-1].strip()}") from error
    return AutoModelForCausalLM.from_config(config, **runtime.given())
