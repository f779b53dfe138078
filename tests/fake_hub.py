"""Stand-ins for the Hub: one that takes uploads, and one that cannot be reached."""

from __future__ import annotations

from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError


class Hub:
    """Keeps what would have been uploaded: `files` by name, `commits` as name of the repository and options."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[str, bytes] = {}
        self.commits: list[tuple[str, dict[str, Any]]] = []
        self.branches: list[str] = []
        monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", self.create_repo)
        monkeypatch.setattr(huggingface_hub.HfApi, "create_branch", self.create_branch)
        monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", self.create_commit)
        load = huggingface_hub.ModelCard.load
        monkeypatch.setattr(
            huggingface_hub.ModelCard, "load", lambda name, **kw: self.card() if isinstance(name, str) else load(name)
        )

    def create_repo(self, repo_id: str, **kwargs: Any) -> huggingface_hub.RepoUrl:
        return huggingface_hub.RepoUrl(f"https://huggingface.co/me/{repo_id.rpartition('/')[2]}")

    def create_branch(self, repo_id: str, *, branch: str, **kwargs: Any) -> None:
        self.branches.append(branch)

    def create_commit(self, repo_id: str, operations: list[Any], **kwargs: Any) -> None:
        self.commits.append((repo_id, kwargs))
        for operation in operations:
            with operation.as_file() as file:
                self.files[operation.path_in_repo] = file.read()

    def card(self) -> huggingface_hub.ModelCard:
        if "README.md" not in self.files:
            raise EntryNotFoundError("no card")
        return huggingface_hub.ModelCard(self.files["README.md"].decode())


def names_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From here on the Hub cannot be reached; the list gets the names that it is asked for."""
    asked: list[str] = []

    def repo_info(self: object, name: str, **options: object) -> None:
        asked.append(name)
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    return asked
