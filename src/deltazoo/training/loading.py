"""Load a model and its tokenizer from disk or the Hub, and check that they fit."""

from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import deltazoo.models  # noqa: F401  (registers our model types with the Auto classes)
from deltazoo.compat.fla.checkpoints import refuse_missing_weights
from deltazoo.compat.transformers import accelerate, has_known_layers
from deltazoo.training.checkpoint_path import resolve_checkpoint
from deltazoo.training.console import say
from deltazoo.training.device import check_device
from deltazoo.training.evaluate import check_vocabulary


def load_checkpoint(
    path: str, device: str | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, ready for inference, and its tokenizer; one of transformers' delta-rule models is accelerated.

    Args:
        path: see `resolve_checkpoint`.
        device: such as ``cuda:0`` or ``cpu``; by default the first GPU if there is one.
        dtype: of the weights; by default the one they are saved in.

    Raises:
        ValueError: no checkpoint or tokenizer, damaged files, missing weights, no such device, a tokenizer of another
            model.
    """
    model = load_model(path, device, dtype)
    path = resolve_checkpoint(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:  # the message of transformers does not say that there is no file
        raise ValueError(f"{path} holds a model, but no tokenizer that transformers can load: save it there") from error
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def load_model(path: str, device: str | None = None, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the model alone; arguments and errors as for `load_checkpoint`."""
    path = resolve_checkpoint(path)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", output_loading_info=True)
    except SafetensorError as error:
        raise ValueError(f"the weights in {path} are damaged or incomplete: {error}") from error
    model, info = loaded
    refuse_missing_weights(info["missing_keys"], path)
    model.to(torch.device(device))
    if has_known_layers(model):
        try:
            accelerate(model)
        except ValueError as error:
            say(f"transformers' own code runs the delta-rule layers: {error}")
    return model.eval()
