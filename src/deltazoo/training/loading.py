"""Names of configurations, runs and models, here or on the Hub: their files are found, and models loaded.

This module imports torch only to load a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deltazoo.names import nearest, unknown
from deltazoo.spec import RuleSpec, get_rule, list_rules
from deltazoo.training.config import MODEL_CONFIG, RUN_CONFIG, RunConfig, load_config
from deltazoo.training.console import no_transformers_bars, say

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED, _CHECKOUT = _PACKAGE / "configs", _PACKAGE.parents[1] / "configs"

# Parts of the names of configurations.
_RECIPE = "swap_"  # a recipe to train a swapped model
_FOR_CPUS = "_cpu"  # the comments in all other files name GPUs
_PAPER, _HYBRID = "paper_", "hybrid_"  # models in the shape of a paper, which a rule brings along
_EARLIER = re.compile(r"(neg_(?=kda))?(\w+?)(_hybrid)?_(340m|1\.3b)")  # names with a rule in them


def presets(*, recipes: bool = False) -> dict[str, Path]:
    """Name and file of every training configuration, or of every distillation recipe, that comes with the project."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
    found = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {name: path for name, path in found.items() if name.startswith(_RECIPE) == recipes}


def find_config(name: str, *, recipes: bool = False) -> Path:
    """The configuration file of a name: a path, the folder of a run, or a configuration that comes with the project.

    Raises:
        ValueError: there is no such name; the message has the nearest.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / RUN_CONFIG).is_file():
            raise ValueError(
                f"the folder {name!r} holds no run: it has no {RUN_CONFIG}; to train on the text in it: --text {name}"
            )
        return path / RUN_CONFIG
    known = presets(recipes=recipes)
    if name in known:
        return known[name]
    near = nearest_run(path)
    if near or path.parent != Path():
        raise ValueError(f"there is no file or folder {name!r}{near}")
    if successor := _successor(name):
        raise ValueError(f"there is no preset {name!r}; a rule is an option: did you mean `{successor}`?")
    raise ValueError(f"there is no file or folder {name!r}, and it names no preset: {unknown('preset', name, known)}")


def nearest_run(path: Path) -> str:
    """The clause "; did you mean 'runs/mine'?" for a mistyped run or configuration file, or nothing if none is near."""
    names = [file.name for file in path.parent.glob("*.yaml")]
    names += [file.parent.name for file in path.parent.glob(f"*/{RUN_CONFIG}")]
    return nearest_path(path, names)


def nearest_path(path: Path, names: Iterable[str] | None = None) -> str:
    """The clause "; did you mean 'texts/mine'?" for one of the names beside a path (all by default), or nothing."""
    near = nearest(path.name, [file.name for file in path.parent.glob("*")] if names is None else names)
    return f"; did you mean {str(path.parent / near)!r}?" if near else ""


def _successor(name: str) -> str | None:
    """The command in place of a rule's name or a former preset; None: the name is neither."""
    if name in list_rules():
        return f"deltazoo train quickstart_cpu --rule {name}"
    found = _EARLIER.fullmatch(name)
    if found is None:
        return None
    doubled, rule, hybrid, size = found.groups()
    if rule in ("qwen3_5_text", "olmo"):
        return "deltazoo train native_340m"
    if rule not in list_rules():
        return None
    step = " --set model.allow_neg_eigval=true" if doubled else ""
    return f"deltazoo train {'hybrid_340m' if hybrid else f'paper_{size}'} --rule {rule}{step}"


def is_for_gpus(name: str) -> bool:
    """Whether a name or path for `find_config` is that of a training configuration of the project for GPUs."""
    path = find_config(name).resolve()
    return path in presets().values() and not path.stem.endswith(_FOR_CPUS)


def rule_overrides(config: Path, rule: str) -> list[str]:
    """Overrides for `load_config` that change the rule of a configuration.

    A preset of a paper's size gets the shape and the learning rate of the rule's own paper, and a preset writes into
    another folder for each rule.

    Raises:
        ValueError: no such rule, or a configuration of a model of transformers.
    """
    spec = get_rule(rule)
    name, model = config.stem, load_config(config).model
    if "architecture" in model:
        raise ValueError(f"--rule acts on our own models, and {name} trains {model['architecture']} of transformers")
    values: dict[str, Any] = {"model.mixer": rule}
    if config.resolve() in presets().values():
        values["output"] = f"runs/{name}_{rule}"
        if name.startswith((_PAPER, _HYBRID)):
            shape = paper_shape(spec, model["hidden_size"])
            if "learning_rate" in shape:
                values["training.learning_rate"] = shape.pop("learning_rate")
            if name.startswith(_HYBRID):
                blocks = shape["num_hidden_layers"]
                shape["layer_types"] = ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(blocks)]
            values |= {f"model.{key}": value for key, value in shape.items()}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def paper_shape(spec: RuleSpec, hidden_size: int = 1024) -> dict[str, Any]:
    """`RuleSpec.paper_shape` with its defaults, for a model of width `hidden_size`."""
    usual = {"head_dim": spec.head_dim, "expand_v": spec.expand_v, "num_heads": 1024 // spec.head_dim}
    shape = {**usual, "num_hidden_layers": 24, **spec.paper_shape}
    return {**shape, "num_heads": shape["num_heads"] * hidden_size // 1024}


def resolve_checkpoint(path: str) -> str:
    """The folder that holds the model: ``path`` itself, the ``model`` folder of a training run, or a Hub name.

    Raises:
        ValueError: a local folder without a model, a file, or neither a folder nor a model on the Hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        for candidate in (folder, folder / "model"):
            if (candidate / "config.json").is_file():
                return str(candidate)
        if (folder / "adapter_config.json").is_file():
            raise ValueError(
                f"{path} holds an adapter of PEFT without its model: merge them first, "
                "AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...)"
            )
        advice = f"the run in it is not finished: deltazoo train {path} --resume"
        if not (folder / RUN_CONFIG).is_file():
            advice = (
                f"give the folder of a model or of a run; to train on the texts in it: deltazoo train --text {path}"
            )
        raise ValueError(f"{path} holds no model: neither it nor its folder 'model' has a config.json; {advice}")
    if folder.is_file():
        raise ValueError(f"{path} is a file: give the folder of a model or of a run, or a name on the Hub")
    check_on_hub(path, "model")
    return path


def training_config_of(path: str) -> RunConfig | None:
    """The configuration with which deltazoo trained a model; None for any other model."""
    written = Path(resolve_checkpoint(path)) / MODEL_CONFIG
    return load_config(written) if written.is_file() else None


def check_on_hub(name: str, kind: Literal["model", "dataset"]) -> None:
    """Raise ValueError unless ``name`` is on the Hub or in this machine's cache of the Hub.

    transformers and datasets ask the Hub for every file up to six times, so without this check a mistyped local path
    takes half a minute per file until it is refused.

    Raises:
        ValueError: no such name on the Hub, or the Hub cannot be reached and nothing of that name is cached.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    caches = [Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"]
    if kind == "dataset":
        import datasets

        caches.append(Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___"))
    if any(folder.is_dir() for folder in caches):
        return
    missing = f"there is no {'folder' if kind == 'model' else 'file or folder'} {name!r}"
    near = nearest_path(Path(name).expanduser())
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=10)
    except HFValidationError as error:
        raise ValueError(f"{missing}, and it is no name of a {kind} on the Hub (owner/name){near}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{missing}, and the Hub has no {kind} of that name (or your token does not see it){near}"
        ) from error
    except HfHubHTTPError:
        return  # an error of the Hub's server: loading asks again
    except Exception as error:  # types of the HTTP library, which differ between versions of huggingface_hub
        raise ValueError(f"{missing}, and the Hub cannot be asked for it: {error}{near}") from error


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
    """A model, ready for inference, and its tokenizer; transformers' own delta-rule models are accelerated.

    Args:
        path: see `resolve_checkpoint`.
        device: device such as ``cuda:0`` or ``cpu``; by default the first GPU if there is one.
        dtype: dtype of the weights; by default the saved one.

    Raises:
        ValueError: no checkpoint or tokenizer, damaged files, missing weights, a tokenizer of another model.
    """
    model = load_model(path, device, dtype)
    path = resolve_checkpoint(path)
    try:
        tokenizer = load_tokenizer(path)
    except ValueError as error:  # the message of transformers does not say that there is no file
        raise ValueError(f"{path} holds a model, but no tokenizer that transformers can load: save it there") from error
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or on the Hub.

    Raises:
        ValueError: there is none that transformers can load. For many model types transformers makes one of special
            tokens alone if there is no file, which turns every text into no tokens.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if {*tokenizer.get_vocab()} <= {*tokenizer.all_special_tokens}:
            raise ValueError("it has special tokens alone")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no tokenizer that transformers can load: {error}") from error
    return tokenizer


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the tokenizer has tokens for which the model has no embedding."""
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} entries, the checkpoint's vocabulary only {model.config.vocab_size}: "
            "they do not belong together"
        )


def load_model(path: str, device: str | None = None, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model alone; see `load_checkpoint` for arguments and errors."""
    path = resolve_checkpoint(path)

    import torch
    from safetensors import SafetensorError

    import deltazoo.models  # noqa: F401  (registers our model types with the Auto classes)
    from deltazoo.compat.fla.checkpoints import whole_model
    from deltazoo.compat.transformers import accelerate, has_known_layers

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with no_transformers_bars():
            model = whole_model(path, dtype=dtype or "auto")
    except SafetensorError as error:
        raise ValueError(f"the weights in {path} are damaged or incomplete: {error}") from error
    model.to(torch.device(device))
    if has_known_layers(model):
        try:
            accelerate(model)
        except ValueError as error:
            say(f"transformers' own code runs the delta-rule layers: {error}")
    return model.eval()
