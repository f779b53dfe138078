"""Saving and pushing as in transformers, with model cards. A card that is not ours stays."""

import inspect
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers.modeling_utils import PreTrainedModel

from deltazoo.models.auto_map import auto_map, has_remote_code
from deltazoo.models.model_card import CARD, is_own_card, make_model_card, write_model_card
from deltazoo.models.outside_rules import source_of_rule
from deltazoo.models.remote_code import write_remote_code

__all__ = ["SharedModel"]


class SharedModel(PreTrainedModel):
    """A `PreTrainedModel` that writes model cards."""

    def refuse_undescribed_layers(self) -> None:
        """Raise ValueError if loading would make other layers than the model has."""
        raise NotImplementedError

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        *,
        push_to_hub: bool = False,
        remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save as transformers documents it, with a model card.

        Args:
            save_directory: folder of the checkpoint; created if it does not exist.
            is_main_process: whether this process writes, if several call.
            push_to_hub: upload what was saved; `repo_id` defaults to the folder's name.
            remote_code: add the files that `export_remote_code` describes. A model from a checkpoint with such files
                keeps them.
            kwargs: for transformers, such as `max_shard_size`, and with `push_to_hub=True` for the method of that name.

        Raises:
            ValueError: `push_to_hub=True` together with `distributed_checkpoint=True`; token mixers that the
                configuration does not describe, such as a subclass inserted by hand: they would load as others.
        """
        if push_to_hub and kwargs.get("distributed_checkpoint"):
            raise ValueError("a distributed checkpoint cannot be pushed: save without distributed_checkpoint=True")
        self.refuse_undescribed_layers()
        hub = {key: kwargs.pop(key) for key in _HUB_ARGUMENTS if key in kwargs}
        folder, config = Path(save_directory), type(self.config).__name__
        before = _modification_times(folder)
        remote_code = remote_code or has_remote_code(self.config)
        if remote_code:
            source_of_rule(self.config.mixer)  # raises before anything is written
            self.config.auto_map = auto_map(config)
        super().save_pretrained(save_directory, is_main_process, **kwargs)
        only_adapters = getattr(self, "_hf_peft_config_loaded", False)
        if not _writes(is_main_process) or only_adapters:
            return
        if remote_code:
            write_remote_code(folder, config, source_of_rule(self.config.mixer))
        write_model_card(self, folder)
        if push_to_hub:
            after = _modification_times(folder)
            written = [path for path, time in after.items() if before.get(path) != time or path.name == CARD]
            _upload(self, written, hub.pop("repo_id", folder.name), **hub)

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        max_shard_size: int | str = "50GB",
        remote_code: bool = False,
        tags: list[str] | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> CommitInfo:
        """Upload the model, its configuration and its model card to the Hub.

        A card on the Hub that somebody else has written or edited stays, with `tags` added. Arguments as transformers
        documents them; `remote_code` as for `save_pretrained`.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size, remote_code=remote_code)
            return _upload(
                self,
                sorted(Path(folder).iterdir()),
                repo_id,
                tags=tags,
                private=private,
                token=token,
                commit_message=commit_message,
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )


def _upload(
    model: PreTrainedModel,
    files: Sequence[Path],
    repo_id: str,
    *,
    tags: list[str] | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Commit the files to the Hub; a card there that somebody else has written stays."""
    api = HfApi(token=token, library_name="deltazoo")
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    card = _written_by_others(files, repo_id, token)
    if card is None:
        card = make_model_card(model, repo_id, tags)
    else:
        card.data["tags"] = list(dict.fromkeys([*(card.data.get("tags") or ()), *(tags or ())]))
    contents: dict[str, Path | bytes] = {path.name: path for path in files}
    contents[CARD] = str(card).encode()
    return api.create_commit(
        repo_id,
        [CommitOperationAdd(name, content) for name, content in contents.items()],
        commit_message=commit_message or f"Upload {type(model).__name__}",
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )


_HUB_ARGUMENTS = ("repo_id", *inspect.getfullargspec(_upload).kwonlyargs)
"""Arguments of `save_pretrained` for `push_to_hub=True`."""


def _written_by_others(files: Sequence[Path], repo_id: str, token: bool | str | None) -> ModelCard | None:
    """The card that must not be replaced: the Hub's, or else the one among the files; None: both are ours."""
    cards = [ModelCard.load(path) for path in files if path.name == CARD]
    with suppress(EntryNotFoundError):
        cards.insert(0, ModelCard.load(repo_id, token=token))  # type: ignore[arg-type]
    return next((card for card in cards if not is_own_card(str(card))), None)


def _writes(is_main_process: bool) -> bool:
    """Whether this process writes the files."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return is_main_process and rank == 0


def _modification_times(folder: Path) -> dict[Path, int]:
    """Modification times of the files in a folder in nanoseconds; empty if there is no such folder."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("*") if path.is_file()}
