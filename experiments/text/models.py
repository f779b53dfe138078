"""What is compared on text: every rule, softmax attention, hybrids of both, as models with equal parameters."""

from dataclasses import dataclass
from functools import cache

import torch

from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.spec import list_rules
from experiments.configurations import SOFTMAX, parse_configuration
from experiments.loop import rate_factor

HYBRID = "hybrid:"
"""Before the name of a rule: softmax attention in every fourth block."""
_TOLERANCE = 0.02
_FIRST = [
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
]
"""In order of importance; the other rules follow in the zoo's order."""


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """Sizes and schedule of all configurations, fixed before the first of them was trained. Lengths are in tokens."""

    parameters: int = 50_000_000
    """Of a model, embedding included. The MLP's width makes up for what a layer has more or less than others."""
    hidden_size: int = 640
    num_layers: int = 8
    num_heads: int = 5
    """Of 128 channels with these widths, in keys, queries and values, so that all states have one size."""
    softmax_every: int = 4
    """Hybrids have softmax attention in every fourth block."""
    width_multiple: int = 32
    """Of the MLP."""

    row_length: int = 4096
    rows_per_step: int = 32
    steps: int = 1536
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    """Peak learning rates, of which successive halving (arXiv:1502.07943) finds the best for each configuration."""
    rungs: tuple[int, ...] = (256, 512)
    """Steps of the training after which the worst rate is dropped, one rung fewer than rates."""
    judged_steps: int = 64
    """Steps before a rung whose mean loss judges a rate."""
    warmup: float = 0.08
    final_rate: float = 0.1
    """Over the peak, at the end of the cosine."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    scored_lengths: tuple[int, ...] = (4096, 16384, 65536)
    """Lengths of the rows into which the held-out stream is cut, each a multiple of the one before."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step."""
        return self.rows_per_step * self.row_length

    def rate_factor(self, step: int) -> float:
        """Learning rate over its peak: linear warm-up, then a cosine."""
        return rate_factor(step, self.steps, max(1, round(self.warmup * self.steps)), final=self.final_rate)


def base_configurations() -> list[str]:
    """All rules and softmax attention, the most important first."""
    return [*_FIRST, *(name for name in list_rules() if name not in _FIRST)]


def build_model(configuration: str, recipe: TextRecipe, vocab_size: int, *, seed: int) -> DeltaRuleForCausalLM:
    """A configuration's model; `seed` is of its weights and of all that torch draws afterwards."""
    config = _model_config(configuration, recipe, vocab_size, intermediate_size(configuration, recipe, vocab_size))
    torch.manual_seed(seed)  # after the models that were counted
    return DeltaRuleForCausalLM(config)


def _model_config(configuration: str, recipe: TextRecipe, vocab_size: int, width: int) -> DeltaRuleConfig:
    """A model's configuration; options that change a rule's spec are none of this suite's."""
    name = configuration.removeprefix(HYBRID)
    parsed = parse_configuration(name)
    every = recipe.softmax_every if name != configuration else 1 if name == SOFTMAX else None
    return DeltaRuleConfig(
        mixer="gated_deltanet" if parsed.spec is None else parsed.spec.name,
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_heads=recipe.num_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        expand_v=1,
        intermediate_size=width,
        layer_types=[
            "full_attention" if every and index % every == every - 1 else "linear_attention"
            for index in range(recipe.num_layers)
        ],
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
    if abs(found - recipe.parameters) > _TOLERANCE * recipe.parameters:
        raise ValueError(
            f"configuration {configuration!r} has {found:,} parameters with an MLP of width {width}, not within "
            f"{_TOLERANCE:.0%} of {recipe.parameters:,}"
        )
    return width


def _count(configuration: str, recipe: TextRecipe, vocab_size: int, width: int) -> int:
    with torch.device("meta"):
        model = DeltaRuleForCausalLM(_model_config(configuration, recipe, vocab_size, width))
    return sum(parameter.numel() for parameter in model.parameters())
