"""Loading from safetensors files alone, because reading a pickle can run code: our own models and swapped ones."""

import json
import os
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath
from typing import Any, Self

from transformers.modeling_utils import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file

__all__ = ["SafetensorsOnly"]

_OF_DOWNLOADS = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of `from_pretrained` that say which file of a repository is meant."""


class SafetensorsOnly(PreTrainedModel):
    """A `PreTrainedModel` that never unpickles weights."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | None, *args: Any, **kwargs: Any
    ) -> Self:
        """As transformers documents it, from safetensors files only.

        Raises:
            ValueError: pickled weights are asked for, by `use_safetensors=False`, by the name of a file or by an index
                of shards; the index names a file outside the checkpoint's folder. Nothing has been read then.
            OSError: there is no safetensors file.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False asks for pickled weights, which are never read; pass nothing")
        path = pretrained_model_name_or_path
        if path is not None and os.path.isfile(path) and not os.fspath(path).endswith(".safetensors"):
            raise ValueError(f"{path} is no safetensors file; pickled weights are never read")
        if path is not None:
            _check_shards(_shards_of(path, kwargs))
        return super().from_pretrained(path, *args, **{**kwargs, "use_safetensors": True})

    @staticmethod
    def _load_pretrained_model(  # type: ignore[override]
        model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, **kwargs: Any
    ) -> Any:
        # Files that are found in another way: adapters, the model below an adapter, an index that a config.json names.
        _check_shards((getattr(load_config, "sharded_metadata", None) or {}).get("weight_map", {}).values())
        _check_shards(Path(file).name for file in checkpoint_files or ())
        load = super(SafetensorsOnly, type(model))._load_pretrained_model
        return load(model, state_dict, checkpoint_files, load_config, **kwargs)


def _shards_of(path: str | os.PathLike, options: dict[str, Any]) -> Iterable[Any]:
    """Names of the shards in the index that a folder or a repository on the Hub may have."""
    stem, end = SAFE_WEIGHTS_INDEX_NAME.rsplit(".", 1)
    variant = options.get("variant")
    name = SAFE_WEIGHTS_INDEX_NAME if variant is None else f"{stem}.{variant}.{end}"
    download = {key: options[key] for key in _OF_DOWNLOADS if options.get(key) is not None}
    try:
        index = cached_file(os.fspath(path), name, **download)
    except OSError:  # no index, or out of reach: transformers says what is missing
        return ()
    return () if index is None else json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()


def _check_shards(names: Iterable[Any]) -> None:
    """ValueError unless these are names of safetensors files in the checkpoint's folder."""
    for name in names:
        parts = PureWindowsPath(str(name))  # which knows the separators and roots of all systems
        if not str(name).endswith(".safetensors") or parts.anchor or ".." in parts.parts:
            raise ValueError(
                f"{name!r} is named as a file of the model's weights: pickled weights are never read, nor are files "
                "outside the checkpoint's folder; only safetensors files in it are"
            )
