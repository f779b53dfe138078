"""The model card, README.md beside the weights: what the model is, its size, its training data, how to load it.

All of it is read from the model and its configuration. A card that somebody else has written or edited is never
replaced: ours contains a digest of its text, and only a card that matches its digest counts as ours.
"""

import hashlib
import re
from collections import Counter
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from deltazoo.layers import DeltaRuleAttention
from deltazoo.models.auto_map import auto_class_name, has_remote_code
from deltazoo.models.remote_code import INSTALL
from deltazoo.models.softmax_attention import SoftmaxAttention
from deltazoo.spec import RuleSpec

__all__ = ["is_own_card", "make_model_card", "state_bytes", "write_model_card"]

CARD = "README.md"
_MARK = "<!-- Written by deltazoo, which replaces this card when it saves again and leaves an edited one alone: {} -->"
_MARK_PATTERN = re.compile(re.escape(_MARK).replace(r"\{\}", "([0-9a-f]{16})"))

# By the end of the class name: the Hub's task, and the model in words.
_HEADS = {
    "ForCausalLM": ("text-generation", "causal language model"),
    "ForSequenceClassification": ("text-classification", "sequence classification model"),
    "ForTokenClassification": ("token-classification", "token classification model"),
    "ForQuestionAnswering": ("question-answering", "question answering model"),
    "Model": ("feature-extraction", "language model without a head"),
}


def write_model_card(model: PreTrainedModel, folder: Path) -> None:
    """Write the model's card as README.md, unless the folder has somebody else's.

    Args:
        model: one of our models.
        folder: where its weights are saved.
    """
    path = folder / CARD
    if not path.exists() or is_own_card(path.read_text(encoding="utf-8")):
        make_model_card(model).save(path)


def is_own_card(text: str) -> bool:
    """Whether a card is exactly as `make_model_card` made it."""
    mark = _MARK_PATTERN.search(text)
    return mark is not None and mark[1] == _digest(text.replace(mark[0], ""))


def make_model_card(model: PreTrainedModel, name: str | None = None, tags: list[str] | None = None) -> ModelCard:
    """The card of one of our models.

    Args:
        model: the model.
        name: the argument of `from_pretrained`; a placeholder unless given.
        tags: for the Hub, in addition to those that describe the model.
    """
    config = model.config
    head = next(end for end in _HEADS if type(model).__name__.endswith(end))
    task, words = _HEADS[head]
    mixers = Counter(_mixers(model))
    hybrid = "full_attention" in config.layer_types
    data = ModelCardData(
        library_name="deltazoo",
        pipeline_tag=task,
        tags=list(
            dict.fromkeys(
                ["deltazoo", "linear-attention", "delta-rule", config.model_type, config.mixer]
                + (["hybrid"] if hybrid else [])
                + [*(model.model_tags or ()), *(tags or ())]
            )
        ),
    )
    sections = [
        f"# {' and '.join(mixers)}, {_short(model.num_parameters())} parameters",
        f"A {words} of deltazoo, the model zoo for delta-rule linear attention.",
        *([_rule_section(config.spec)] if config.mixer in mixers else []),
        _table(_sizes(model, mixers)),
        f"## Training data\n\n{config.training_data or 'Not recorded.'}",
        _loading_section(auto_class_name(head), name or "PATH", config.mixer_module, has_remote_code(config)),
    ]
    content = f"---\n{data.to_yaml()}\n---\n\n{_MARK.format('')}\n\n" + "\n\n".join(sections) + "\n"
    unsigned = content.replace(_MARK.format(""), "")
    return ModelCard(content.replace(_MARK.format(""), _MARK.format(_digest(unsigned))))


def state_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """The memory of one sequence in decoding.

    Returns:
        Bytes that do not depend on the length (float32 states, and convolution windows in the model's dtype), and bytes
        per token (keys and values of softmax layers).
    """
    constant = per_token = 0
    size = model.dtype.itemsize
    for module in model.modules():
        if isinstance(module, DeltaRuleAttention):
            constant += module.state_bytes(model.dtype)
        elif isinstance(module, SoftmaxAttention):
            per_token += size * (module.k_proj.out_features + module.v_proj.out_features)
    return constant, per_token


def _mixers(model: PreTrainedModel) -> list[str]:
    """The token mixer of every layer, in words."""
    kinds = {"linear_attention": model.config.mixer, "full_attention": "softmax attention"}
    return [kinds[layer_type] for layer_type in model.config.layer_types]


def _rule_section(spec: RuleSpec) -> str:
    number = re.search(r"\d{4}\.\d{5}", spec.paper)
    paper = f"[{spec.paper}](https://arxiv.org/abs/{number[0]})" if number else spec.paper
    return f"`{spec.name}`: {spec.summary}\n\n    {spec.equation}\n\nPaper: {paper}"


def _sizes(model: PreTrainedModel, mixers: Counter[str]) -> dict[str, str]:
    config = model.config
    constant, per_token = state_bytes(model)
    state = f"{constant:,} bytes at any length" if constant else ""
    if per_token:
        state += f"{' and ' if state else ''}{per_token:,} bytes per token"
    sizes = {
        "parameters": f"{model.num_parameters():,}, of which embeddings "
        f"{model.num_parameters() - model.num_parameters(exclude_embeddings=True):,}",
        "layers": f"{config.num_hidden_layers}: " + ", ".join(f"{n} {mixer}" for mixer, n in mixers.items()),
        "width": f"{config.hidden_size}, {config.intermediate_size} in the MLPs",
    }
    if config.mixer in mixers:
        value_dim = round(config.head_dim * config.expand_v)
        sizes["heads of a linear layer"] = (
            f"{config.num_heads} of {config.head_dim} channels for queries and keys, "
            f"{config.num_v_heads} of {value_dim} for values"
        )
        sizes["short convolutions"] = f"{config.conv_size} tokens" if config.use_short_conv else "none"
    if "full_attention" in (config.layer_types or ()):
        sizes["heads of a softmax layer"] = f"{config.num_attention_heads}, {config.num_key_value_heads} for keys"
    return sizes | {
        "vocabulary": f"{config.vocab_size:,}",
        "state of one sequence": state,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _loading_section(auto_class: str, name: str, rule: str | None, remote_code: bool) -> str:
    loading = f"## Use\n\nWith deltazoo, which is not on PyPI: in a checkout of it,\n\n    {INSTALL}\n\n```python\n"
    loading += "import deltazoo  # in every process that loads it: transformers alone does not know the model type\n"
    if rule is not None:
        loading += f"import {rule}  # the layers' rule, which does not come with deltazoo\n"
    loading += f"from transformers import {auto_class}\n\n"
    loading += f'model = {auto_class}.from_pretrained("{name}")\n```'
    if remote_code:
        loading += "\n\nWith `trust_remote_code=True` it loads without `import deltazoo`, from the installed package."
    return loading


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _short(number: int) -> str:
    """A number in three digits, such as 1.30 B or 46.1 M."""
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _digest(text: str) -> str:
    # Hubs and editors may change line ends and trailing white space.
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()
