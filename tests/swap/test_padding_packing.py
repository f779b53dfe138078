"""Padding and packing reach swapped layers, and the softmax layers between them."""

from functools import partial

import pytest
import tiny_families
import torch
from tiny_families import OWN, SLIDING, VOCAB, close, tokens
from transformers import DataCollatorWithFlattening

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
swapped = partial(tiny_families.swapped, exact=True)


def left_padded(ids, padding):
    """`ids` [T] after padding, with its mask and the positions of its tokens."""
    row = torch.cat([torch.full((padding,), VOCAB - 1), ids])[None]
    mask = (torch.arange(row.shape[1]) >= padding).long()[None]
    return row, mask, (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def logits_of(model, ids, **kwargs):
    return model(ids, use_cache=False, **kwargs).logits


@pytest.mark.parametrize(("family", "layers"), [*((family, "1:1") for family in OWN), ("mistral", "all")])
def test_left_padding_changes_nothing(family, layers):
    """Longer than the windows of sliding layers, so that padding falls out of them."""
    model, ids = swapped(family, layers), tokens(12)
    row, mask, positions = left_padded(ids, 6)
    padded = logits_of(model, row, attention_mask=mask, position_ids=positions)[:, 6:]
    torch.testing.assert_close(padded, logits_of(model, ids[None]), **close(family))


@pytest.mark.parametrize("family", [*SLIDING, "llama"])
def test_padded_prefill_then_steps(family):
    model, ids = swapped(family, [0, 3]), tokens(12)
    row, mask, positions = left_padded(ids, 6)
    with torch.no_grad():
        out = model(row[:, :10], attention_mask=mask[:, :10], position_ids=positions[:, :10], use_cache=True)
        logits = [out.logits]
        for i in range(10, 18):
            step = {"attention_mask": mask[:, : i + 1], "position_ids": positions[:, i : i + 1]}
            out = model(row[:, i : i + 1], past_key_values=out.past_key_values, **step)
            logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1)[:, 6:], logits_of(model, ids[None]), **close(family))


@pytest.mark.parametrize("family", OWN)
def test_without_position_ids_positions_follow_the_mask(family):
    """A rotation and a decay per channel do not commute, so padding must not shift positions."""
    model, ids = swapped(family, rule="kda"), tokens(12)
    row, mask, _ = left_padded(ids, 6)
    with torch.no_grad():
        prompt = model(row[:, :15], attention_mask=mask[:, :15], use_cache=True)
        steps = model(row[:, 15:], attention_mask=mask, past_key_values=prompt.past_key_values)
    logits = torch.cat([prompt.logits, steps.logits], 1)[:, 6:]
    torch.testing.assert_close(logits, logits_of(model, ids[None]), **close(family))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize("said_by", ["position_ids", "collator", "cu_seqlens"])
def test_packed_documents_do_not_see_each_other(family, said_by):
    model = swapped(family)
    documents = [tokens(n, seed=n) for n in (5, 1, 8)]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    batch = collator([{"input_ids": document.tolist()} for document in documents])
    labels = batch.pop("labels")
    assert (labels == -100).sum() == 3
    if said_by == "position_ids":
        batch = {name: batch[name] for name in ("input_ids", "position_ids")}
    elif said_by == "cu_seqlens":
        batch = {"input_ids": batch["input_ids"], "cu_seqlens": batch["cu_seq_lens_q"]}
    expected = torch.cat([logits_of(model, document[None]) for document in documents], dim=1)
    ids = batch.pop("input_ids")
    torch.testing.assert_close(logits_of(model, ids, **batch), expected, **CLOSE)
    with torch.no_grad():
        assert model(ids, **batch).past_key_values is None  # nothing could continue it


def test_rows_of_packed_documents():
    """Several documents in each of several rows."""
    model, ids = swapped("qwen2"), tokens(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    actual = logits_of(model, ids, position_ids=positions)
    for row, cut in ((0, 4), (1, 2)):
        parts = [logits_of(model, part[None]) for part in (ids[row, :cut], ids[row, cut:])]
        torch.testing.assert_close(actual[row : row + 1], torch.cat(parts, dim=1), **CLOSE)


def test_padding_and_packing_together():
    model, ids = swapped("qwen3"), tokens(1, 9)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0]])
    actual = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    for cut in (slice(0, 3), slice(3, 7)):
        torch.testing.assert_close(actual[:, cut], logits_of(model, ids[:, cut]), **CLOSE)


def test_masks_by_layer_type_are_refused():
    model = swapped("gemma2")
    with pytest.raises(ValueError, match="got a dict"):
        model(tokens(1, 4), attention_mask={"full_attention": None, "sliding_attention": None})
