"""What is compared: every rule of the zoo, softmax attention, hybrids of both, as models with equal parameters."""

from functools import cache

import torch

from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.spec import list_rules
from experiments.configurations import SOFTMAX, label_of, parse_configuration
from experiments.text.text_recipe import TextRecipe

__all__ = [
    "HYBRID",
    "TOLERANCE",
    "base_configurations",
    "build_model",
    "configuration_label",
    "hybrid_of",
    "intermediate_size",
    "model_config",
]

HYBRID = "hybrid:"
TOLERANCE = 0.02
"""Of the number of parameters."""

_FIRST = (
    "gated_deltanet",
    "kda",
    SOFTMAX,
    "delta_net",
    "mamba2_style",
    "gla",
    "neg_gated_deltanet",
    "neg_delta_net",
    "efla",
    "gated_deltanet2",
    "eda",
    "gated_deltaproduct",
    "kda+neg",
    "linear_attention",
)
"""In order of importance; the other rules follow in the zoo's order."""


def base_configurations() -> list[str]:
    """All rules and softmax attention, the most important first."""
    return [*_FIRST, *(name for name in list_rules() if name not in _FIRST)]


def hybrid_of(configuration: str) -> str:
    """The hybrid of a rule: softmax attention in every fourth block."""
    return HYBRID + configuration


def configuration_label(configuration: str) -> str:
    """A configuration's name on the page."""
    name = configuration.removeprefix(HYBRID)
    return label_of(name) if name == configuration else f"{label_of(name)}, 3:1 hybrid"


def model_config(configuration: str, recipe: TextRecipe, vocab_size: int, intermediate_size: int) -> DeltaRuleConfig:
    """The configuration of a model of transformers.

    Raises:
        ValueError: an unknown configuration, or one with options that are no keys of a model's configuration.
    """
    name = configuration.removeprefix(HYBRID)
    parsed = parse_configuration(name)
    every = recipe.softmax_every if name != configuration else 1 if name == SOFTMAX else None
    if name == SOFTMAX and name != configuration:
        raise ValueError(f"configuration {configuration!r}: a hybrid needs a rule beside softmax attention")
    if parsed.spec is not None and parsed.spec != parse_configuration(name.partition("+")[0]).spec:
        raise ValueError(f"configuration {configuration!r}: this suite has no options that change a rule's spec")
    types = [
        "full_attention" if every and index % every == every - 1 else "linear_attention"
        for index in range(recipe.num_layers)
    ]
    return DeltaRuleConfig(
        mixer="gated_deltanet" if parsed.spec is None else parsed.spec.name,
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_heads=recipe.num_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        expand_v=1,
        intermediate_size=intermediate_size,
        layer_types=types,
        tie_word_embeddings=True,
        max_position_embeddings=recipe.scored_lengths[-1],
        num_attention_heads=recipe.num_heads if every else None,
        **parsed.options,
    )


@cache
def intermediate_size(configuration: str, recipe: TextRecipe, vocab_size: int) -> int:
    """The MLP's width that gives a configuration's model the recipe's number of parameters.

    Raises:
        ValueError: no multiple of the recipe's width gives that number within 2%.
    """
    one, two = (_count(configuration, recipe, vocab_size, width) for width in (1, 2))
    columns = 1 + (recipe.parameters - one) / (two - one)  # each column adds as many parameters as the second
    width = max(1, recipe.width_multiple * round(columns / recipe.width_multiple))
    found = one + (width - 1) * (two - one)
    if abs(found - recipe.parameters) > TOLERANCE * recipe.parameters:
        raise ValueError(
            f"configuration {configuration!r} has {found:,} parameters with an MLP of width {width}, not within "
            f"{TOLERANCE:.0%} of {recipe.parameters:,}"
        )
    return width


def build_model(
    configuration: str, recipe: TextRecipe, vocab_size: int, *, seed: int | None = None, **runtime: object
) -> DeltaRuleForCausalLM:
    """A configuration's model.

    Args:
        configuration, recipe, vocab_size: what is built.
        seed: of its weights and of all that torch draws afterwards; None: torch's generators go on as they are.
        runtime: runtime options of the model.
    """
    config = model_config(configuration, recipe, vocab_size, intermediate_size(configuration, recipe, vocab_size))
    if seed is not None:
        torch.manual_seed(seed)  # after the models that were counted
    return DeltaRuleForCausalLM(config, **runtime)


def _count(configuration: str, recipe: TextRecipe, vocab_size: int, width: int) -> int:
    with torch.device("meta"):
        model = DeltaRuleForCausalLM(model_config(configuration, recipe, vocab_size, width))
    return sum(parameter.numel() for parameter in model.parameters())
