"""Find the model that a path names, and its training configuration, without torch and without reading weights."""

from pathlib import Path

from deltazoo.training.config import MODEL_CONFIG, RunConfig, load_config
from deltazoo.training.hub import check_on_hub


def resolve_checkpoint(path: str) -> str:
    """The folder that holds the model: ``path`` itself, the ``model`` folder of a training run, or a Hub name.

    Raises:
        ValueError: a local folder without a model, or neither a folder nor a model on the Hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        for candidate in (folder, folder / "model"):
            if (candidate / "config.json").is_file():
                return str(candidate)
        raise ValueError(f"{path} holds no model: neither it nor its folder 'model' has a config.json")
    check_on_hub(path, "model")
    return path


def training_config_of(path: str) -> RunConfig | None:
    """The configuration that a model was trained with by deltazoo; None for any other model."""
    written = Path(resolve_checkpoint(path)) / MODEL_CONFIG
    return load_config(written) if written.is_file() else None
