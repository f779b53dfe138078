"""`export`: a model of ours as a checkpoint of another format, written only if it equals the original.

`load_native_checkpoint` is the way back: a checkpoint of transformers' own delta-rule models as a model of ours.
"""

import copy
import inspect
import json
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

from deltazoo.compat.fla.checkpoints import (
    load_fla_checkpoint,
    model_of_weights,
    read_weights,
    refuse_missing_weights,
)
from deltazoo.compat.native.formats import FORMATS, TARGETS, Format, fla_type, native_values, needs_of
from deltazoo.compat.native.forms import BLOCK, parameters_of, rows_of
from deltazoo.models.configuration import DeltaRuleConfig
from deltazoo.models.hub import config_class_of
from deltazoo.models.modeling import DeltaRuleForCausalLM
from deltazoo.names import unknown
from deltazoo.spec import get_rule

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
    with _appearing(Path(path).absolute()) as folder:
        if target == "fla":
            _write_fla(model, folder)
        else:
            _write_native(model, target, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
            if (replaced := replaced_tokenizer(tokenizer, folder)) is not None:
                raise ValueError(
                    f"transformers {transformers.__version__} loads a {replaced} with every checkpoint of {target}, "
                    "which splits text in another way than this model's tokenizer: export without tokenizer, or to "
                    "another target"
                )
        return _compare(model, folder, target) if check else None


def refuse_occupied(path: Path) -> None:
    """Raise ValueError if there is a file, or anything in a folder, at the path of a new checkpoint."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is no empty folder: name a new one")


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A context with a temporary folder beside `path`, which takes that name if no error leaves the context."""
    refuse_occupied(path)
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
    module = type(model).__module__
    names = vars(sys.modules[module])
    own = {name: x for name, x in names.items() if inspect.isfunction(x) and x.__module__ == module}
    chosen = {name: x for name, x in own.items() if hasattr(x, "__wrapped__") and module.startswith("transformers.")}
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
    state = _state_of(model)
    # A gate without bias is one with a bias of zeros.
    state |= {name: torch.zeros(shape) for name, shape in parameters_of(config).items() if name not in state}
    copied = model_of_weights(config, state, folder, dtype=model.dtype)
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


def _compare(model: DeltaRuleForCausalLM, folder: Path, target: str) -> ExportCheck:
    config: Any = copy.deepcopy(model.config)
    state = {name: x.float() for name, x in _state_of(model).items()}
    original = model_of_weights(config, state, folder, dtype=torch.float32)
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
                mask = torch.ones_like(tokens)
                texts.append(compared.generate(tokens, attention_mask=mask, generation_config=options))
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


def load_native_checkpoint(path: str | Path, **kwargs: Any) -> DeltaRuleForCausalLM:
    """A causal language model of ours from a checkpoint of a model type that `deltazoo.export` writes.

    A checkpoint from any source loads if our layers compute all of it: one that `export` has written, or one without
    softmax layers. A block of zeros is left out. The model gets the rule's own model type.

    Args:
        path: a directory with `config.json` and safetensors files.
        kwargs: arguments of `from_pretrained`, such as `dtype`.

    Raises:
        ValueError: another model type, parts that our layers do not compute, missing files or weights.
    """
    path = Path(path)
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    target = values.get("model_type")
    if target not in FORMATS:
        raise ValueError(f"model type {target!r} in {path} is none of {', '.join(FORMATS)}")
    if target not in CONFIG_MAPPING:
        raise ValueError(f"transformers {transformers.__version__}, which is installed, has no model type {target}")
    known, theirs = FORMATS[target], CONFIG_MAPPING[target].from_dict(values)
    state = {}
    for name, x in read_weights(path).items():
        for part, meant in known.also_named.items():
            name = name.replace(part, meant)
        state[name] = x
    zeros = {n for n, layer_type in enumerate(theirs.layer_types) if layer_type == "full_attention"}
    # What is left are softmax blocks of zeros, such as `export` appends.
    zeros -= {_block_of(name) for name, x in state.items() if _block_of(name) in zeros and x.any()}
    blocks = [n for n in range(theirs.num_hidden_layers) if n not in zeros]
    state = {name: x for name, x in state.items() if _block_of(name) in (None, *blocks)}
    config = _our_config(known, theirs, [theirs.layer_types[n] for n in blocks])
    rows, shapes = rows_of(known, config, blocks), parameters_of(config)
    refuse_missing_weights(rows.keys() - state.keys(), path)
    if further := sorted(state.keys() - rows.keys() - {"lm_head.weight"}):
        raise ValueError(f"our layers do not compute all of this {target}: {path} holds {', '.join(further[:5])}")
    ours: dict[str, Tensor] = {}
    for name, row in rows.items():
        ours |= zip(row.ours, row.form.apart(state[name], [shapes[part][0] for part in row.ours], config), strict=True)
    return model_of_weights(config, ours, path, **kwargs)


def _block_of(name: str) -> int | None:
    found = BLOCK.match(name)
    return None if found is None else int(found[1])


def _our_config(known: Format, theirs: Any, layer_types: list[str]) -> DeltaRuleConfig:
    """Our configuration of a model, in the model type of the rule.

    Raises:
        ValueError: the configuration says something that our layers do not compute.
    """
    target, hybrid = theirs.model_type, "full_attention" in layer_types
    if hybrid and known.no_hybrids is not None:
        raise ValueError(f"our layers do not compute the softmax layers of {target}: {known.no_hybrids}")
    needs = needs_of(target, hybrid=hybrid)
    values = {need.key: need.value for need in needs if not isinstance(need.value, str)}
    values |= {ours: getattr(theirs, name) for name, ours in known.keys.items()}
    values["expand_v"] = getattr(theirs, "linear_value_head_dim", values["head_dim"]) / values["head_dim"]
    values |= {"layer_types": layer_types, "num_hidden_layers": len(layer_types), "dtype": theirs.dtype}
    if hybrid:
        values |= {key: getattr(theirs, key) for key in ("num_attention_heads", "num_key_value_heads")}
        rope = {key: value for key, value in theirs.rope_parameters.items() if not key.startswith("mrope")}
        values["rope_parameters"] = rope
    config = config_class_of(get_rule(known.rules[0]).hub_model_type, Path())(**values)

    computed = native_values(target, config)
    for name in (*known.constants, *(("head_dim",) if hybrid else ())):
        if (found := getattr(theirs, name, computed[name])) != computed[name]:
            raise ValueError(f"our layers do not compute {target} with {name}={found!r}, only with {computed[name]!r}")
    for need in needs:
        if (value := getattr(config, need.key)) != need.wanted(config):
            raise ValueError(f"our layers do not compute {target} with {need.key}={value!r}: {need.reason}")
    return config
