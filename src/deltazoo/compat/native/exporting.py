"""`export`: a model of ours as a checkpoint of another format, written only if it equals the original."""

import copy
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deltazoo.compat.fla.checkpoints import load_fla_checkpoint
from deltazoo.compat.native.formats import FORMATS, TARGETS, fla_type, native_values, needs_of
from deltazoo.compat.native.forms import parameters_of, rows_of
from deltazoo.models.hub import config_class_of, model_class_of
from deltazoo.models.modeling import DeltaRuleForCausalLM
from deltazoo.names import unknown

__all__ = ["ExportCheck", "export", "replaced_tokenizer"]

_TOLERANCE = 1e-4
_TOKENS, _NEW_TOKENS = 90, 16  # more than one chunk of every implementation
_PROBE = "The 1st line,\n\n  and\tits 2 numbers: 12345, 0.6 don't. D\u00e9j\u00e0 vu \u4e2d\u6587 {x: y}  "
"""Text that tokenizers split in different ways."""


class ExportCheck(NamedTuple):
    """The comparison of an exported model with the original, both in float32 on the CPU, for two rows of tokens."""

    difference: float
    """Largest difference of the logits."""
    largest: float
    """Largest logit."""
    new_tokens: int
    """Tokens per row of greedy text, all equal."""


def export(
    model: nn.Module,
    target: str,
    path: str | os.PathLike,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    check: bool = True,
) -> ExportCheck | None:
    """Save a causal language model of ours as a checkpoint that transformers and others read without deltazoo.

    A model without softmax layers gets one of zeros at its end, which adds nothing, since the formats ask for one.
    Weights keep their dtype, but norms that a format stores as their distance from one are stored in float32.

    Args:
        model: a model of any size and dtype, on any device; it is not changed.
        target: `"olmo_hybrid"`, `"qwen3_5_text"`, `"qwen3_next"` or `"kimi_linear"`, model types of transformers, or
            `"fla"`, flash-linear-attention's model type of the rule. docs/generation.md says which rules fit.
        path: folder of the checkpoint: a new one or an empty one.
        tokenizer: tokenizer to be saved beside the model; the generation config is saved too.
        check: whether to load the checkpoint with transformers alone (that of fla: with our reader of its format) and
            compare logits and greedy text, in float32 on the CPU.

    Returns:
        The result of the comparison; None without it.

    Raises:
        TypeError: a model that is no causal language model of ours.
        ValueError: an unknown target, one that the installed transformers lacks, options of the model that it cannot
            express, a folder that is not empty, a tokenizer that transformers would not load with it, or logits
            that differ by more than 1e-4 (1e-4 of the largest, if that is above 1). Nothing is in `path` then.
    """
    if target not in TARGETS:
        raise ValueError(unknown("target", target, TARGETS))
    if not isinstance(model, DeltaRuleForCausalLM):
        raise TypeError(
            f"export takes a causal language model of deltazoo, got {type(model).__name__}: transformers' own have "
            "their format already, swapped ones have none elsewhere, and adapters must be merged first"
        )
    _refuse_obstacles(model.config, target)
    model.refuse_undescribed_layers()
    found = None
    with _appearing(Path(path).absolute()) as folder:
        if target == "fla":
            _write_fla(model, folder)
        else:
            _write_native(model, target, folder)
        if tokenizer is not None:
            _save_tokenizer(tokenizer, folder, target)
        if check:
            found = _compare(model, folder, target)
    return found


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A context with a temporary folder beside `path`, which takes that name if no error leaves the context."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is no empty folder: name a new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as around:
        folder = Path(around) / path.name
        folder.mkdir()
        yield folder
        if path.exists():
            path.rmdir()
        folder.rename(path)


@contextmanager
def _torch_alone(model: nn.Module) -> Iterator[None]:
    """A context in which transformers computes by its definitions in torch, since a CPU cannot run its kernels."""
    module, chosen = type(model).__module__, {}
    names = vars(sys.modules[module])
    if module.startswith("transformers."):
        own = {name: x for name, x in names.items() if inspect.isfunction(x) and x.__module__ == module}
        chosen = {name: x for name, x in own.items() if hasattr(x, "__wrapped__")}
    names.update({name: inspect.unwrap(x) for name, x in chosen.items()})
    try:
        yield
    finally:
        names.update(chosen)


def _refuse_obstacles(config: Any, target: str) -> None:
    """Raise ValueError with everything that the target cannot express, or if transformers lacks the target."""
    rule, known, hybrid = config.mixer, FORMATS.get(target), "full_attention" in config.layer_types
    if known is None and fla_type(rule) is None:
        raise ValueError(f"flash-linear-attention has no model type for the rule {rule!r}")
    if known is not None and rule not in known.rules:
        raise ValueError(f"{target} computes {' and '.join(known.rules)}, and this model's rule is {rule!r}")
    found = [
        f"{need.key}={getattr(config, need.key)!r}, but {need.reason} ({need.key}={wanted!r})"
        for need in needs_of(target, hybrid=hybrid)
        if getattr(config, need.key) != (wanted := need.wanted(config))
    ]
    if "linear_attention" not in config.layer_types:
        found.append("layer_types names no linear_attention")
    if hybrid and known is not None and known.no_hybrids is not None:
        found.append(f"layer_types names full_attention, but {known.no_hybrids}")
    if hybrid and known is None and not {*config.rope_parameters} <= {"rope_type", "rope_theta"}:
        found.append(f"rope_parameters={config.rope_parameters}, but it knows rope_theta alone")
    if found:
        raise ValueError(f"{target} cannot express this model: {'; '.join(found)}")
    if known is not None and target not in CONFIG_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__}, which is installed, has no model type {target}: a newer version "
            "is needed to write it"
        )


def _write_fla(model: DeltaRuleForCausalLM, folder: Path) -> None:
    own_type = fla_type(model.config.mixer)
    values = {key: value for key, value in model.config.to_dict().items() if key not in ("model_type", "mixer")}
    config_class = config_class_of(own_type, folder)
    config = config_class.from_dict({**values, "gate_bias": True})
    copied_class, state = model_class_of(config_class, "ForCausalLM"), _state_of(model)
    # A gate without bias is one with a bias of zeros.
    state |= {name: torch.zeros(shape) for name, shape in parameters_of(config).items() if name not in state}
    copied = copied_class.from_pretrained(None, config=config, state_dict=state, dtype=model.dtype)
    copied.generation_config = model.generation_config
    copied.save_pretrained(folder)


def _write_native(model: DeltaRuleForCausalLM, target: str, folder: Path) -> None:
    config: Any = model.config
    theirs = CONFIG_MAPPING[target](**native_values(target, config), dtype=model.dtype)
    theirs.architectures = [FORMATS[target].architecture]
    ours = _state_of(model)
    rows = rows_of(FORMATS[target], config, range(config.num_hidden_layers))
    tensors = {name: row.form.made([ours[part] for part in row.ours], config) for name, row in rows.items()}
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(theirs).state_dict()
    for name, x in parameters.items():
        if name.startswith(f"model.layers.{config.num_hidden_layers}."):  # the block of zeros, if there is one
            tensors[name] = torch.zeros(x.shape, dtype=model.dtype)
    theirs.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_torch_state_dict(tensors, folder, metadata={"format": "pt"})


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().cpu() for name, x in model.state_dict().items()}


def replaced_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike) -> str | None:
    """The class of the tokenizer that transformers loads from a folder if it is another one; None: it loads the same.

    `tokenizer` and a configuration have been saved in the folder. For some model types transformers takes the class of
    their published checkpoints, whatever a checkpoint says.
    """
    loaded = AutoTokenizer.from_pretrained(folder)
    same = len(loaded) == len(tokenizer) and loaded(_PROBE).input_ids == tokenizer(_PROBE).input_ids
    return None if same else type(loaded).__name__


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, target: str) -> None:
    tokenizer.save_pretrained(folder)
    if (replaced := replaced_tokenizer(tokenizer, folder)) is not None:
        raise ValueError(
            f"transformers {transformers.__version__} loads a {replaced} with every checkpoint of {target}, which "
            "splits text in another way than this model's tokenizer: export without tokenizer, or to another target"
        )


def _compare(model: DeltaRuleForCausalLM, folder: Path, target: str) -> ExportCheck:
    config: Any = copy.deepcopy(model.config)
    state = {name: x.float() for name, x in _state_of(model).items()}
    original_class = model_class_of(type(config), "ForCausalLM")
    original = original_class.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    if target == "fla":
        loaded: Any = load_fla_checkpoint(folder, dtype=torch.float32)
    else:
        found: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        loaded, info = found
        wrong = sorted({*info["missing_keys"], *info["unexpected_keys"]})
        if wrong:
            raise ValueError(
                f"transformers {transformers.__version__} has other parameters in {target} than were written: "
                f"{', '.join(wrong[:5])}"
            )
    tokens = torch.randint(config.vocab_size, (2, _TOKENS), generator=torch.Generator().manual_seed(0))
    options = GenerationConfig(max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=0)
    logits, texts = [], []
    for compared in (original.eval(), loaded.eval()):
        try:
            with torch.no_grad(), _torch_alone(compared):
                logits.append(compared(tokens).logits)
                text = compared.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=options)
            texts.append(text)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"transformers {transformers.__version__} cannot run its own {target}, so nothing was compared or "
                f"written; a newer version may: {type(error).__name__}: {error}"
            ) from error
    difference, largest = (logits[0] - logits[1]).abs().max().item(), logits[0].abs().max().item()
    allowed = _TOLERANCE * max(1.0, largest)
    if not difference <= allowed:
        raise ValueError(
            f"the exported model's logits differ from the original's by {difference:.2g} (largest logit {largest:.3g}, "
            f"allowed {allowed:.2g}), so nothing was written: {target} computes something else than this model"
        )
    if not torch.equal(*texts):
        raise ValueError(
            f"the exported model's greedy text differs from the original's, so nothing was written ({target})"
        )
    return ExportCheck(difference, largest, texts[0].shape[1] - _TOKENS)
