"""Checkpoints of fla-hub, old and new, as models of ours.

Today's fla-hub checkpoints have our parameter names, so the Auto classes load them. Older ones have other names:
`load_fla_checkpoint` reads both.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from deltazoo.models.configuration import DeltaRuleConfig
from deltazoo.models.hub import config_class_of, model_class_of
from deltazoo.models.modeling import DeltaRuleForCausalLM

_SHOWN = 5


def load_fla_checkpoint(path: str | Path, **kwargs: Any) -> DeltaRuleForCausalLM:
    """A causal language model from an fla-hub checkpoint of any age, even while fla's classes own the Auto classes.

    For checkpoints with today's names `from_pretrained` is enough. `save_pretrained` writes today's names.

    Args:
        path: a directory with `config.json` and safetensors files.
        kwargs: arguments of `from_pretrained`, such as `dtype`.

    Raises:
        ValueError: the directory holds no safetensors files, or a model type that is not ours; a file of its index or a
            weight is missing.
    """
    path = Path(path)
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config = config_class_of(values.get("model_type"), path).from_dict(values)
    return model_of_weights(config, modernize_state_dict(read_weights(path)), path, **kwargs)


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name; ValueError if there are none, or a file is missing.

    They are those of the files that the index names; those of all files without an index, or with an older one beside
    a file of all weights.
    """
    files, index = sorted(path.glob("*.safetensors")), path / "model.safetensors.index.json"
    if index.is_file() and not (path / "model.safetensors").is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if absent := sorted(name for name in names if not (path / name).is_file()):
            raise ValueError(f"{path} lacks {', '.join(absent)}, which {index.name} names")
        files = sorted(path / name for name in names)
    if not files:
        raise ValueError(f"no safetensors files in {path}; pickled weights are not read")
    return {name: x for file in files for name, x in load_file(file).items()}


def model_of_weights(
    config: DeltaRuleConfig, state: dict[str, Tensor], path: Path, **kwargs: Any
) -> DeltaRuleForCausalLM:
    """The causal language model of a configuration with all its weights; ValueError if `state`, of `path`, lacks some.

    `kwargs` are for `from_pretrained`.
    """
    model_class = model_class_of(type(config), "ForCausalLM")
    model, info = model_class.from_pretrained(None, config=config, state_dict=state, output_loading_info=True, **kwargs)
    refuse_missing_weights(info["missing_keys"], path)
    return model


# Names that older fla-hub checkpoints and Moonshot's Kimi Linear use for parameters of a layer.
_OLD_NAMES = (
    (re.compile(r"\.attn\.norm\.weight$"), ".attn.o_norm.weight"),
    (re.compile(r"\.attn\.g_norm\.weight$"), ".attn.g_norm_swish_gate.weight"),
    (re.compile(r"\.attn\.([fg])_a_proj\."), r".attn.\1_proj.0."),
    (re.compile(r"\.attn\.([fg])_b_proj\."), r".attn.\1_proj.1."),
)
_GATE_AND_UP = re.compile(r"\.mlp\.gate_proj\.weight$")


def modernize_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of an older fla-hub checkpoint under the names of today; those of a current one stay.

    Older ones call the output norm `norm`, keep the MLP's gate and up projections in one matrix, carry a parameter `D`
    that nothing reads (Comba's, beside `decay`, is another), give `A_log` axes of length one, and name the two halves
    of a low-rank projection `*_a`, `*_b`. GLA models made with `fuse_norm=False` call the output norm `g_norm`.
    """
    modern: dict[str, Tensor] = {}
    for name, x in state.items():
        for pattern, replacement in _OLD_NAMES:
            name = pattern.sub(replacement, name)
        up = _GATE_AND_UP.sub(".mlp.up_proj.weight", name)
        if name.endswith(".attn.D") and f"{name.removesuffix('D')}decay" not in state:
            continue
        if name.endswith(".attn.A_log"):
            modern[name] = x.flatten()
        elif up != name and up not in state:
            modern[name], modern[up] = x.chunk(2)
        else:
            modern[name] = x
    return modern


def whole_model(path: str | Path, **kwargs: Any) -> Any:
    """The causal language model of a checkpoint; ValueError if it lacks weights, which transformers would draw anew.

    `kwargs` are for `from_pretrained`.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **kwargs)
    model, info = loaded
    refuse_missing_weights(info["missing_keys"], path)
    return model


_PACKED = re.compile(r"\.(weight_packed|qweight)$")


def missing_weights(config: Any, names: Iterable[str]) -> set[str]:
    """Names of the parameters of a causal language model that are not among those of a checkpoint.

    Args:
        config: configuration of a model of ours or of a swapped one. A tied head is no parameter of its own.
        names: names of the checkpoint's tensors; a quantised weight may have the name of its packed form.
    """
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    with torch.device("meta"):
        model = model_class(config)
    found = {_PACKED.sub(".weight", name) for name in names}
    return {name for name, _ in model.named_parameters()} - found


def refuse_missing_weights(missing: Collection[str], path: str | Path) -> None:
    """Raise ValueError if weights are missing.

    Args:
        missing: `missing_keys` of transformers' loading info, in which tied weights are left out.
        path: path of the checkpoint.
    """
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ValueError(f"{path} lacks weights of its model: {', '.join(names[:_SHOWN])}{more}")
