"""The softmax model that is converted: that of the suite, trained once per machine and kept in the user's cache."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from deltazoo.models import DeltaRuleForCausalLM
from experiments.configurations import SOFTMAX
from experiments.text.text_configurations import build_model
from experiments.text.text_corpus import TextCorpus
from experiments.text.text_recipe import TextRecipe
from experiments.text.training import Training

__all__ = ["Teacher", "as_llama", "default_teacher_path", "load_teacher", "train_teacher"]

_LLAMA_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rope_parameters",
    "tie_word_embeddings",
)
_LLAMA_NAMES = (
    ("model.embeddings.", "model.embed_tokens."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".attn.", ".self_attn."),
)


@dataclass(frozen=True)
class Teacher:
    """The trained softmax model and what was measured of its training."""

    model: DeltaRuleForCausalLM
    training: dict[str, Any]
    """`rate`, `curve`, `seconds`, `tokens_per_second`."""

    @property
    def digest(self) -> str:
        """Of the weights; conversions name the softmax model by it."""
        content = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            content.update(name.encode() + tensor.float().cpu().numpy().tobytes())
        return content.hexdigest()[:12]

    def save(self, path: Path, corpus: TextCorpus, recipe: TextRecipe) -> None:
        """Write the file at once or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        weights = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
        torch.save({"of": _made_of(corpus, recipe), "weights": weights, "training": self.training}, draft)
        draft.replace(path)


def default_teacher_path() -> Path:
    """Where the softmax model is kept: in the user's cache folder."""
    return Path.home() / ".cache" / "deltazoo" / "text_softmax_model.pt"


def load_teacher(path: Path, corpus: TextCorpus, recipe: TextRecipe, rate: float, device: str) -> Teacher | None:
    """The softmax model that `Teacher.save` wrote; None if there is none of this recipe, corpus and learning rate."""
    if not path.is_file():
        return None
    kept = torch.load(path, map_location="cpu", weights_only=True)
    if kept["of"] != _made_of(corpus, recipe) or kept["training"]["rate"] != rate:
        return None
    with torch.device(device):
        model = build_model(SOFTMAX, recipe, corpus.vocab_size)
    model.load_state_dict(kept["weights"])
    return Teacher(model.eval(), kept["training"])


def train_teacher(
    corpus: TextCorpus, recipe: TextRecipe, rate: float, device: str, watch: Callable[[float], None]
) -> Teacher:
    """Train the softmax model as the suite `text` trains it with seed 0.

    Args:
        corpus, recipe: of that suite.
        rate: the learning rate that it found.
        device: where.
        watch: called now and then with the seconds that the rest will take at the present pace.

    Raises:
        ArithmeticError: the loss is not finite.
    """
    trained = Training(SOFTMAX, recipe, corpus, rate=rate, seed=0, device=device)
    trained.advance(recipe.steps, watch)
    if not trained.is_finite:
        raise ArithmeticError(f"the softmax model's loss is not finite after {trained.steps} steps")
    training = {
        "rate": rate,
        "curve": trained.curve(),
        "seconds": round(trained.seconds, 2),
        "tokens_per_second": round(trained.tokens_per_second, 1),
    }
    return Teacher(trained.model.eval(), training)


def as_llama(model: DeltaRuleForCausalLM) -> LlamaForCausalLM:
    """The same model as transformers' Llama, in its dtype. Llama is a family that can be swapped.

    Raises:
        ValueError: a model with other layers than softmax attention.
    """
    config = model.config
    if set(config.layer_types or ()) != {"full_attention"}:
        raise ValueError(f"only softmax attention becomes a Llama, got layers {config.layer_types}")
    kept: dict[str, Any] = {name: getattr(config, name) for name in _LLAMA_KEYS}
    no_tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    llama_config = LlamaConfig(**kept, **no_tokens, rms_norm_eps=config.norm_eps)
    with torch.device(model.device):  # made in its dtype: a later cast would round Llama's rotary frequencies
        llama = AutoModelForCausalLM.from_config(llama_config, dtype=model.dtype)
    llama.load_state_dict({_llama_name(name): tensor for name, tensor in model.state_dict().items()})
    return llama.eval()


def _llama_name(name: str) -> str:
    for ours, theirs in _LLAMA_NAMES:
        name = name.replace(ours, theirs)
    return name


def _made_of(corpus: TextCorpus, recipe: TextRecipe) -> dict[str, Any]:
    return {"corpus": corpus.digest, "recipe": recipe.as_json()}
