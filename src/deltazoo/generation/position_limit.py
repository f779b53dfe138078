"""How many tokens in a row a model has positions for."""

from typing import Any

from torch import nn

__all__ = ["check_positions", "learned_positions", "max_positions"]

_LEARNED = ("wpe", "embed_positions", "position_embeddings")
"""Names under which models of transformers hold a table of learned positions."""


def max_positions(model: Any) -> int | None:
    """The `max_position_embeddings` of a model's configuration, None without one.

    Rotary embeddings can be computed beyond it, learned positions end there.
    """
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def learned_positions(model: Any) -> int | None:
    """The number of learned positions, as GPT-2 has them; None for models without, which take longer rows."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _LEARNED:
            return min(module.num_embeddings, max_positions(model) or module.num_embeddings)
    return None


def check_positions(model: Any, num_tokens: int, what: str) -> None:
    """ValueError if a row of so many tokens exceeds a model's learned positions; the message begins with `what`."""
    limit = learned_positions(model)
    if limit is not None and num_tokens > limit:
        raise ValueError(f"{what} exceed the {limit} learned positions of {type(model).__name__}")
