"""A model and its tokenizer loaded from disk or the Hub, and the text that it is scored on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltazoo.training.config import DataConfig
from deltazoo.training.console import no_transformers_bars, say
from deltazoo.training.data import Corpus, first_texts, open_text, read_corpus
from deltazoo.training.locate import resolve_checkpoint, training_config_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def choose_documents(path: str, text: DataConfig | None = None, max_bytes: int | None = None) -> Corpus:
    """The text that a model is scored on, as ``validation``, and that it was trained on, empty if unknown.

    The first is the held-out part of the second, or a text of the caller's. Imports no torch.

    Args:
        path: of the model, see `resolve_checkpoint`.
        text: all of this text instead; nothing of it is held out.
        max_bytes: of ``text``, from its beginning.

    Raises:
        ValueError: no ``text`` for a model that does not say what it was trained on, or there is no text.
    """
    config = training_config_of(path)
    source = None if text is None else open_text(text)
    if text is None and config is None:
        where = path if Path(path).expanduser().is_dir() else f"{path}, which is no folder here,"
        raise ValueError(f"{where} does not say what text it was trained on: name a text with --text")
    try:
        corpus = read_corpus(open_text(config.data), config.data) if config else None
    except ValueError as error:  # the model may have been trained on another machine
        if text is None:
            raise
        say(f"the baselines do without the training text: {error}")
        corpus = None
    if source is None:
        assert corpus is not None
        return replace(corpus, description=f"held-out part of {corpus.description}")
    held_out = first_texts(source, max_bytes)
    return Corpus(corpus.train if corpus else [], held_out, source.description)


def check_device(name: str) -> None:
    """Raise ValueError unless torch can compute on the device `name` on this machine.

    torch is imported only if the name has the right form and is not ``cpu``.
    """
    if not re.fullmatch(r"cpu|(cuda|mps|xpu)(:\d+)?", name):
        raise ValueError(f"there is no device {name!r}: give cpu, cuda (the first GPU), or cuda:1 and so on")
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        wanted = "NVIDIA GPU" if kind == "cuda" else f"{kind} device"
        raise ValueError(f"device {name!r} was asked for, and torch sees no {wanted} here")
    count = torch.accelerator.device_count()
    if index and int(index) >= count:
        raise ValueError(f"device {name!r} was asked for, and torch sees {count} here, numbered from 0")


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
    from transformers import AutoTokenizer

    from deltazoo.training.evaluate import check_vocabulary

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

    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    import deltazoo.models  # noqa: F401  (registers our model types with the Auto classes)
    from deltazoo.compat.fla.checkpoints import refuse_missing_weights
    from deltazoo.compat.transformers import accelerate, has_known_layers

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    try:
        with no_transformers_bars():
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
