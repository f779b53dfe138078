"""Ways to decode, and one check for all of them: they make the tokens of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import pytest
import torch
from foreign_models import FUSED, SPARSE_SOFTMAX, accelerated
from tiny_families import swapped, tokens
from tiny_models import OPTIONS, tiny_model
from torch import Tensor
from transformers import StaticCache

import deltazoo
from deltazoo.generation import Sampling, Snapshot
from deltazoo.generation.row_table import PromptRows, RowTable
from deltazoo.generation.sampling import Way

Loop = Callable[[Any, Tensor, Tensor, int], Tensor]
"""Of a model, a prompt `[B, T]`, its mask and a number of new tokens; returns `[B, T + new]`, with no row ended."""
SWAPPED = [
    *("llama 1:1", "llama all", "mistral 1:1", "gemma3_text 1:1"),
    *("gemma3_text all", "gpt2 1:1", "gpt_neox all", "mixtral 1:1"),
]
"""With all layers swapped, nothing is left of softmax attention but the model's masks; windows are 5 tokens long."""
ACCELERATED = [family for family in FUSED if family not in SPARSE_SOFTMAX]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IDS = tokens(2, 7)
PADDED = torch.tensor([[1] * 7, [0] * 4 + [1] * 3])


def model_of(kind: str, **sizes: Any) -> Any:
    """A tiny model: of our own by its case, a swapped one of `SWAPPED`, an accelerated one by its family."""
    if kind in OPTIONS:
        return tiny_model(kind, **sizes)
    family, _, layers = kind.partition(" ")
    if not layers:
        return accelerated(family, **sizes)
    model = swapped(family, layers, sizes=sizes)
    if family == "mixtral":
        model.set_experts_implementation("batched_mm")  # as generate does on a GPU
    return model


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


@torch.no_grad()
def assert_one_graph_decodes(model: Any, prompt: Tensor, ids: Tensor, **close: float) -> None:
    """Compiled steps over a static cache give the logits of the full forward pass, by one graph for every length."""
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(prompt, past_key_values=cache)
    compiled = torch.compile(model, backend=count, fullgraph=True)
    for token in ids.split(1, dim=1):
        prompt = torch.cat([prompt, token], dim=1)
        logits = compiled(token.contiguous(), past_key_values=cache).logits
        torch.testing.assert_close(logits, model(prompt, use_cache=False).logits[:, -1:], **close)
    torch._dynamo.reset()
    assert len(graphs) == 1


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


def same(one: Snapshot, other: Snapshot) -> bool:
    """Whether two snapshots are equal bit for bit."""
    pairs = list(zip_longest(one.layers, other.layers, fillvalue={}))
    return (
        one.num_tokens == other.num_tokens
        and one.kinds == other.kinds
        and all(x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x) for x, y in pairs)
    )


PIECE = 4


def state_after(prompts: PromptRows, row: int, ids: list[int]) -> Any:
    """The state of a prompt without its last token, run alone."""
    prompts.load(row, None)
    for start in range(0, len(ids) - 1, prompts.piece):
        prompts.run({row: (start, ids[start : min(start + prompts.piece, len(ids) - 1)])})
    return prompts.take(row, len(ids) - 1)


def in_a_table(
    model: Any, ids: Tensor, mask: Tensor, count: int, *, padded: bool = True, sampling: Sampling | None = None,
    seed: int = 0,
) -> Tensor:  # fmt: skip
    """Rows of a table that begin apart and move half-way, in steps of two widths; row i has the seed `seed + i`."""
    sampling, rows, most = sampling or Sampling(), len(ids), ids.shape[1] + count
    table = RowTable(model, [rows, 2 * rows], most)
    prompts = PromptRows(table, [2], PIECE, padded=padded)
    prompts.capture()
    waits = model.device.type == "cuda" and "experts" in str(model).lower()  # in float32: `NoWaiting`
    assert prompts.padded == (padded and not waits)
    for row in reversed(range(rows)):
        prompt = ids[row][mask[row].bool()].tolist()
        state = state_after(prompts, row % 2, prompt)
        table.put(rows + row, state, prompt[-1], len(prompt) - 1, sampling, seed + row)
    made = []
    for step in range(count):
        if step == count // 2:
            table.move([*range(rows, 2 * rows)], [*range(rows)])
        width, first = (2 * rows, rows) if step < count // 2 else (rows, 0)
        table.step(width, Way.of(sampling))
        made.append(table.read_tokens(width)()[first : first + rows])
    return torch.cat([ids, torch.stack(made, dim=1).to(ids.device)], dim=1)
