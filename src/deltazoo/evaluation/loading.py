"""A checkpoint from disk or the Hub, checked to be one model and its own tokenizer."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import deltazoo.models  # noqa: F401  (registers our model types with the Auto classes)
from deltazoo.evaluation.score import check_vocabulary
from deltazoo.training.config import RunConfig, load_config
from deltazoo.training.run import MODEL_CONFIG


def resolve_checkpoint(path: str) -> str:
    """The folder that holds the model: ``path`` itself, the ``model`` folder of a training run, or a Hub name.

    Raises:
        ValueError: a local folder without a model, or no folder and no Hub name either.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        for candidate in (folder, folder / "model"):
            if (candidate / "config.json").is_file():
                return str(candidate)
        raise ValueError(f"{path} holds no model: neither it nor its folder 'model' has a config.json")
    if path.count("/") != 1 or path.startswith((".", "~", "/")):
        raise ValueError(f"there is no folder {path!r}, and it is no Hub name of the form owner/model either")
    return path


def load_checkpoint(path: str, device: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, ready for inference, and its tokenizer.

    Args:
        path: see :func:`resolve_checkpoint`.
        device: such as ``cuda:0`` or ``cpu``; by default the first GPU if there is one.

    Raises:
        ValueError: no checkpoint or no tokenizer there, no such device, or a tokenizer of another model.
    """
    path = resolve_checkpoint(path)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, and torch finds no GPU here")
    model = AutoModelForCausalLM.from_pretrained(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:  # transformers lists file formats instead of saying that there is no file
        raise ValueError(f"{path} holds a model, but no tokenizer that transformers can load: save it there") from error
    check_vocabulary(model, tokenizer)
    model.to(torch.device(device))  # type: ignore[arg-type]
    return model.eval(), tokenizer


def training_config_of(path: str) -> RunConfig | None:
    """The configuration that a model trained by deltazoo was made with; None for any other model."""
    written = Path(resolve_checkpoint(path)) / MODEL_CONFIG
    return load_config(written) if written.is_file() else None
