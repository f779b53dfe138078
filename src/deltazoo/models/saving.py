"""Saving and pushing of models, with a model card and, if asked for, two Python files.

The card, README.md beside the weights, says what the model is, on which data it was trained and how to load it. A card
that exists already, in the folder or on the Hub, stays.

A checkpoint with the two files loads without `import deltazoo`: `from_pretrained(path, trust_remote_code=True)` imports
them, and they import the installed package, or say how to install it. They hold no model code, so a checkpoint never
carries an outdated copy of it. A rule that does not come with the package is copied beside them.
"""

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import EntryNotFoundError
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from deltazoo.models.block import DeltaRuleBlock, make_block_layer
from deltazoo.models.config_keys import (
    CONFIGURATION_FILE,
    HEADS,
    MODELING_FILE,
    auto_class_name,
    auto_map,
    class_name,
    has_remote_code,
)
from deltazoo.models.outside_rules import source_of_rule
from deltazoo.names import did_you_mean

CARD = "README.md"
INSTALL = "pip install ."
"""The command that installs the package from a checkout; it is on no package index."""

_HUB_ARGUMENTS = ("tags", "private", "token", "commit_message", "commit_description", "revision", "create_pr")

_CARD_TEMPLATE = """\
---
{{ card_data }}
---

# {{ kinds | join(" and ") }}, {{ "{:,}".format(parameters) }} parameters

A {{ words }} of deltazoo, the model zoo for delta-rule linear attention.
{% if config.mixer in kinds %}
`{{ spec.name }}`: {{ spec.summary }}

    {{ spec.equation }}

Paper: {{ paper }}
{% endif %}
Its sizes are in `config.json`.

## Training data

{{ config.training_data or "Not recorded." }}

## Use

With deltazoo, which is not on PyPI: in a checkout of it,

    {{ install }}

```python
import deltazoo  # in every process that loads it: transformers alone does not know the model type
{%- if config.mixer_module %}
import {{ config.mixer_module }}  # the layers' rule, which does not come with deltazoo
{%- endif %}
from transformers import {{ auto_class }}

model = {{ auto_class }}.from_pretrained("{{ name }}")
```

"""

_HEADER = '''"""Written by deltazoo: the model's classes, imported from the installed package."""
'''
# A try block, because for an import outside one transformers recommends `pip install deltazoo`.
_IMPORT = f"""
try:
    import deltazoo.models
except ModuleNotFoundError as error:
    if error.name != "deltazoo":
        raise
    message = "this model needs deltazoo, which is not on PyPI: run `{INSTALL}` in a checkout of it"
    raise ModuleNotFoundError(message, name="deltazoo") from None
"""

# Options that decide a layer's results. Loading compares sizes itself, by the shapes of parameters.
_CHOICES = (
    "spec",
    "activation",
    "allow_neg_eigval",
    "neg_eigval",
    "decay_lower_bound",
    "num_micro_steps",
    "conv_size",
    "rope",
)


class SharedModel(PreTrainedModel):
    """A `PreTrainedModel` that is saved and pushed with a model card."""

    def refuse_undescribed_layers(self) -> None:
        """Raise ValueError if the configuration would load another layer than one that the model has."""
        config: Any = self.config
        for name, block in self.named_modules():
            if isinstance(block, DeltaRuleBlock):
                with torch.device("meta"):
                    described = make_block_layer(config, block.layer_idx)
                refuse_undescribed(block.attn, described, f"{name}.attn")

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        *,
        push_to_hub: bool = False,
        remote_code: bool = False,
        **kwargs: Any,
    ) -> CommitInfo | None:
        """Save the model, see transformers, with a model card unless the folder has one.

        Args:
            save_directory: folder of the checkpoint; created if it does not exist.
            is_main_process: whether this process writes, if several call.
            push_to_hub: whether to upload what was saved; `repo_id` defaults to the folder's name.
            remote_code: whether to add the files that `export_remote_code` describes. A model from a checkpoint with
                such files keeps them.
            kwargs: arguments for transformers, such as `max_shard_size`, and with `push_to_hub=True` for that method.

        Returns:
            The commit, if this process pushes.

        Raises:
            ValueError: `push_to_hub=True` together with `distributed_checkpoint=True`; layers that the configuration
                does not describe, such as a subclass inserted by hand, which would load as other layers.
        """
        if push_to_hub and kwargs.get("distributed_checkpoint"):
            raise ValueError("a distributed checkpoint cannot be pushed: save without distributed_checkpoint=True")
        self.refuse_undescribed_layers()
        hub = {key: kwargs.pop(key) for key in ("repo_id", *_HUB_ARGUMENTS) if key in kwargs}
        folder, config = Path(save_directory), type(self.config).__name__
        before = _modification_times(folder)
        remote_code = remote_code or has_remote_code(self.config)
        if remote_code:
            source_of_rule(self.config.mixer)  # raises before anything is written
            self.config.auto_map = auto_map(config)
        super().save_pretrained(save_directory, is_main_process, **kwargs)
        if not is_main_process or (torch.distributed.is_initialized() and torch.distributed.get_rank() > 0):
            return None
        if not getattr(self, "_hf_peft_config_loaded", False):  # a model with adapters saves them alone
            if remote_code:
                write_remote_code(folder, config, source_of_rule(self.config.mixer))
            if not (folder / CARD).exists():
                make_model_card(self).save(folder / CARD)
        return _upload(self, folder, before, hub.pop("repo_id", folder.name), **hub) if push_to_hub else None

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> CommitInfo | None:  # type: ignore[override]
        """Upload the model, its configuration and its model card to the Hub.

        A card that is on the Hub stays, with `tags` added; transformers would replace it by its own.

        Args:
            repo_id: the repository; created if it does not exist.
            kwargs: `max_shard_size`, `tags`, `private`, `token`, `commit_message`, `commit_description`, `revision` and
                `create_pr`, as transformers documents them; `remote_code` as for `save_pretrained`.
        """
        known = ("max_shard_size", "remote_code", *_HUB_ARGUMENTS)
        for name in kwargs:
            if name not in known:
                raise TypeError(f"push_to_hub() got an unexpected argument {name!r}{did_you_mean(name, known)}")
        with tempfile.TemporaryDirectory() as folder:
            return self.save_pretrained(folder, push_to_hub=True, repo_id=repo_id, **kwargs)


def _upload(
    model: PreTrainedModel,
    folder: Path,
    before: dict[Path, int],
    repo_id: str,
    *,
    tags: list[str] | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    **commit: Any,
) -> CommitInfo:
    """Commit the card and what has changed in the folder since `before`; a card that is on the Hub stays."""
    api = HfApi(token=token, library_name="deltazoo")
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not commit.get("create_pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    after = _modification_times(folder)
    files: dict[str, Path | bytes] = {path.name: path for path in after if before.get(path) != after[path]}
    card = ModelCard.load(folder / CARD) if folder / CARD in before else make_model_card(model, repo_id)
    with suppress(EntryNotFoundError):
        card = ModelCard.load(repo_id, token=token)  # type: ignore[arg-type]
    if tags:
        card.data["tags"] = list(dict.fromkeys([*(card.data.get("tags") or ()), *tags]))
    files[CARD] = str(card).encode()
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    commit["commit_message"] = commit.get("commit_message") or f"Upload {type(model).__name__}"
    return api.create_commit(repo_id, operations, revision=revision, **commit)


def _modification_times(folder: Path) -> dict[Path, int]:
    """Modification times of the files in a folder in nanoseconds; empty if there is no such folder."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("*") if path.is_file()}


def make_model_card(model: PreTrainedModel, name: str = "PATH") -> ModelCard:
    """The card of a model, made from it and its configuration; the card's example loads `name`."""
    config, spec = model.config, model.config.spec
    head = next(end for end in HEADS if type(model).__name__.endswith(end))
    task, words = HEADS[head]
    kinds = {"linear_attention": config.mixer, "full_attention": "softmax attention"}
    layers = dict.fromkeys(kinds[layer_type] for layer_type in config.layer_types)
    hybrid = ["hybrid"] if "full_attention" in config.layer_types else []
    tags = ["deltazoo", "linear-attention", "delta-rule", config.model_type, config.mixer, *hybrid]
    number = re.search(r"\d{4}\.\d{5}", spec.paper)
    return ModelCard.from_template(
        ModelCardData(
            library_name="deltazoo",
            pipeline_tag=task,
            tags=list(dict.fromkeys([*tags, *(model.model_tags or ())])),
        ),
        template_str=_CARD_TEMPLATE,
        config=config,
        spec=spec,
        kinds=list(layers),
        words=words,
        parameters=model.num_parameters(),
        paper=f"[{spec.paper}](https://arxiv.org/abs/{number[0]})" if number else spec.paper,
        install=INSTALL,
        auto_class=auto_class_name(head),
        name=name,
    )


def write_remote_code(folder: Path, config: str, rule: Path | None = None) -> None:
    """Write the two files; transformers marks the classes in such files as custom code, so they are subclasses of ours.

    Args:
        config: name of the configuration class.
        rule: the file that registers the rule, copied beside them; None: it comes with deltazoo.
    """
    imported = ""
    if rule is not None:
        if rule.resolve() != (folder / rule.name).resolve():
            shutil.copyfile(rule, folder / rule.name)
        # transformers downloads the files that it finds in relative imports. Importing a rule registers it, which may
        # be done once per name.
        imported = f"""
if {rule.stem!r} not in deltazoo.models.outside_rules.loaded_modules():
    from .{rule.stem} import __name__ as _rule
"""
    source = f"{_HEADER}{_IMPORT}{imported}\n\nclass {config}(deltazoo.models.{config}):\n    pass\n"
    (folder / f"{CONFIGURATION_FILE}.py").write_text(source, encoding="utf-8")
    names = [class_name(config, head) for head in HEADS]
    classes = [f"class {name}(deltazoo.models.{name}):\n    config_class = {config}\n" for name in names]
    source = "\n\n".join([f"{_HEADER}\nfrom .{CONFIGURATION_FILE} import {config}, deltazoo\n", *classes])
    (folder / f"{MODELING_FILE}.py").write_text(source, encoding="utf-8")


def refuse_undescribed(layer: nn.Module, described: nn.Module, path: str) -> None:
    """Raise ValueError unless loading would make a layer that computes what `layer` computes.

    Args:
        layer: a layer of a model that is to be saved.
        described: the layer that the model's configuration makes instead.
        path: name of the layer in the model, for the message.

    Raises:
        ValueError: another class, rule or option.
    """
    found, expected = _own_class(layer), _own_class(described)
    if found is not expected:
        raise ValueError(
            f"{path} is a {found.__module__}.{found.__qualname__}, and the configuration would load a "
            f"{expected.__qualname__} in its place, with other results. Register the layer class with a spec of its "
            "own name (deltazoo.register_rule), and make the model of a configuration with that rule"
        )
    for name in _CHOICES:
        ours, theirs = getattr(layer, name, None), getattr(described, name, None)
        if ours != theirs:
            raise ValueError(
                f"{path} has {name}={ours!r}, and the configuration would load a layer with {theirs!r} in its place: "
                "change the configuration and make the model of it"
            )


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without the one that FSDP2 derives from it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed"))
