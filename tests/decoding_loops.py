"""Ways to decode, and one check for all of them: they make the tokens of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny_families import tokens
from torch import Tensor

import deltazoo

Loop = Callable[[Any, Tensor, Tensor, int], Tensor]
"""Of a model, a prompt `[B, T]`, its mask and a number of new tokens; returns `[B, T + new]`, with no row ended."""
IDS = tokens(2, 7)
PADDED = torch.tensor([[1] * 7, [0] * 4 + [1] * 3])


@torch.no_grad()
def assert_decodes_like_forward(
    model: Any, loop: Loop, ids: Tensor = IDS, *, mask: Tensor | None = None, count: int = 9
) -> Tensor:
    """Each new token is the likeliest by one forward pass over its row alone, without padding and without a cache.

    Args:
        model: in evaluation mode; of a few thousand random weights, so that no two tokens are nearly as likely.
        loop: one of these, or another.
        ids: `[B, T]`.
        mask: `[B, T]`, 1 = real, 0 = padding, on the left; default: without padding.
        count: of new tokens.

    Returns:
        The prompts and what the loop made of them, `[B, T + count]`.
    """
    ids = ids.to(model.device)
    mask = torch.ones_like(ids) if mask is None else mask.to(model.device)
    made = loop(model, ids, mask, count).to(model.device)
    assert made.shape == (len(ids), ids.shape[1] + count) and torch.equal(made[:, : ids.shape[1]], ids)
    for row, real in zip(made, mask.bool(), strict=True):
        alone = torch.cat([row[: len(real)][real], row[len(real) :]])
        logits = model(alone[None], use_cache=False).logits[0, -count - 1 : -1]
        assert logits.argmax(-1).tolist() == alone[-count:].tolist()
    return made


def ordinary(model: Any, ids: Tensor, mask: Tensor, count: int, **options: Any) -> Tensor:
    """The loop of transformers over the model's forward pass."""
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": -1, **options}
    return model.generate(ids, attention_mask=mask, max_new_tokens=count, **options)


def uncaptured(model: Any, ids: Tensor, mask: Tensor, count: int, **options: Any) -> Tensor:
    """The same where nothing may be captured."""
    return ordinary(model, ids, mask, count, capture_step=False, **options)


def captured(model: Any, ids: Tensor, mask: Tensor, count: int, **options: Any) -> Tensor:
    """The same over captured steps."""
    return ordinary(model, ids, mask, count, capture_step=True, **options)


def own(model: Any, ids: Tensor, mask: Tensor, count: int, **options: Any) -> Tensor:
    """`deltazoo.generate`."""
    options = {"eos_token_id": [], "pad_token_id": 0, **options}
    return deltazoo.generate(model, ids, mask, max_new_tokens=count, **options)
