"""Packed documents in accelerated models: each gives what it gives on its own, however packing is described."""

from __future__ import annotations

import copy
import inspect
from functools import cache

import pytest
import torch
from foreign_models import (
    FUSED,
    INSTALLED,
    SPARSE_SOFTMAX,
    accelerated,
    assert_equal_but_for_rounding,
    assert_within_rounding,
    foreign_model,
    mixer_of,
    shaken,
    tokens,
)
from transformers import DataCollatorWithFlattening, PreTrainedModel

from deltazoo.compat.transformers.packing import FORWARD_ARGUMENTS
from deltazoo.generation.cache import CACHE

LENGTHS = [5, 1, 66, 2]
PACKED = [family for family in FUSED if family not in SPARSE_SOFTMAX]
BOUNDARIES = torch.tensor([0, 5, 6, 72, 74], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
NUMBERS = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None].int()
DESCRIPTIONS = {
    "position_ids": {"position_ids": POSITIONS},
    "cu_seqlens": {"cu_seqlens": BOUNDARIES},
    "cu_seq_lens_q": {"cu_seq_lens_q": BOUNDARIES, "cu_seq_lens_k": BOUNDARIES},
    "seq_idx": {"seq_idx": NUMBERS},
    "all": {"position_ids": POSITIONS, "cu_seq_lens_q": BOUNDARIES, "seq_idx": NUMBERS},
    "with_full_mask": {"position_ids": POSITIONS, "attention_mask": torch.ones(1, 74, dtype=torch.long)},
}


def one_by_one(ids):
    """Logits of every document on its own, and the gradients of their summed loss."""

    def run(model):
        model = copy.deepcopy(model).train()
        logits = []
        for document in ids.split(LENGTHS, dim=1):
            logits.append(model(input_ids=document, use_cache=False).logits)
            summed_loss(logits[-1], document).backward()
        return {"logits": torch.cat(logits, dim=1).detach(), **gradients_of(model)}

    return run


@cache
def of_documents(family):
    """What transformers' unaccelerated model gives, one document at a time; and the shaken one."""
    theirs, run = foreign_model(family), one_by_one(tokens(1, sum(LENGTHS)))
    return run(theirs), run(shaken(theirs))


def summed_loss(logits, ids):
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("description", DESCRIPTIONS)
@pytest.mark.parametrize("family", PACKED)
def test_a_packed_row_equals_its_documents(family, description):
    ids, model = tokens(1, sum(LENGTHS)), accelerated(family).train()
    logits = model(input_ids=ids, **DESCRIPTIONS[description]).logits
    parts = zip(logits.split(LENGTHS, dim=1), ids.split(LENGTHS, dim=1), strict=True)
    sum(summed_loss(part, document) for part, document in parts).backward()
    results = {"logits": logits.detach(), **gradients_of(model)}
    assert_within_rounding(*of_documents(family), results)


@pytest.mark.parametrize("family", PACKED)
def test_rows_may_be_packed_differently(family):
    model = accelerated(family)
    ids = tokens(2, 12)
    positions = torch.stack([torch.cat([torch.arange(7), torch.arange(5)]), torch.arange(12)])
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions).logits
        torch.testing.assert_close(logits[:1, :7], model(input_ids=ids[:1, :7]).logits)
        torch.testing.assert_close(logits[:1, 7:], model(input_ids=ids[:1, 7:]).logits)
        torch.testing.assert_close(logits[1:], model(input_ids=ids[1:]).logits)


@pytest.mark.parametrize("kwargs", [False, True], ids=["positions_only", "flash_kwargs"])
@pytest.mark.parametrize("family", PACKED)
def test_flattening_collator(family, kwargs):
    model, documents = accelerated(family), tokens(1, sum(LENGTHS))[0].split(LENGTHS)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=kwargs, return_seq_idx=kwargs)
    batch = collate([{"input_ids": document.tolist()} for document in documents])
    with torch.no_grad():
        loss = model(**batch, use_cache=False).loss
        counts = [len(document) - 1 for document in documents]
        losses = [model(input_ids=d[None], labels=d[None]).loss for d in documents if len(d) > 1]
    expected = sum(loss * n for loss, n in zip(losses, filter(None, counts), strict=True)) / sum(counts)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("family", PACKED)
def test_nothing_leaks_between_documents(family):
    """Another document changes no bit of the rest."""
    model, ids = accelerated(family), tokens(1, sum(LENGTHS))
    changed = ids.clone()
    changed[:, 6:72] = tokens(1, 66, seed=1)
    with torch.no_grad():
        before, after = (model(input_ids=x, position_ids=POSITIONS).logits for x in (ids, changed))
    assert torch.equal(before[:, :6], after[:, :6])
    # Softmax layers see the whole row behind a mask, in whatever order of summation.
    torch.testing.assert_close(before[:, 72:], after[:, 72:])
    assert not torch.equal(before[:, 6:72], after[:, 6:72])


@pytest.mark.parametrize("family", SPARSE_SOFTMAX)
def test_sparse_softmax_layers_refuse_packing(family):
    if family not in FUSED:
        pytest.skip(f"this version of transformers has no {family}")
    with pytest.raises(NotImplementedError, match="cannot take packed documents: its sparse softmax layers"):
        accelerated(family)(input_ids=tokens(1, sum(LENGTHS)), position_ids=POSITIONS)


@pytest.mark.parametrize("family", INSTALLED)
def test_the_first_arguments_of_every_base_model(family):
    base = next(
        module
        for module in foreign_model(family).modules()
        if isinstance(module, PreTrainedModel) and isinstance(getattr(module, "layers", None), torch.nn.ModuleList)
    )
    assert tuple(inspect.signature(base.forward).parameters)[: len(FORWARD_ARGUMENTS)] == FORWARD_ARGUMENTS


def test_positional_arguments():
    base, ids = accelerated("qwen3_next").model, tokens(1, 74)
    with torch.no_grad():
        expected = base(input_ids=ids, position_ids=POSITIONS).last_hidden_state
        torch.testing.assert_close(base(ids, None, POSITIONS).last_hidden_state, expected)


def test_text_positions_among_those_of_pictures():
    model, ids = accelerated("qwen3_5"), tokens(1, 74)
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=POSITIONS).logits
        four_rows = POSITIONS.expand(4, 1, -1)
        torch.testing.assert_close(model(input_ids=ids, position_ids=four_rows).logits, expected)
        unpacked = model(input_ids=ids, position_ids=torch.arange(74).expand(3, 1, -1)).logits
        torch.testing.assert_close(unpacked, model(input_ids=ids).logits)


def test_one_document_is_not_packing():
    model, ids = accelerated("qwen3_next"), tokens(1, 7)
    output = model(input_ids=ids, position_ids=torch.arange(7)[None])
    assert output.past_key_values.get_seq_length() == 7
    output = model(input_ids=tokens(1, 1), position_ids=torch.tensor([[7]]), past_key_values=output.past_key_values)
    assert output.past_key_values.get_seq_length() == 8


def test_padded_positions_are_no_documents():
    """`generate` numbers real tokens from 0 and gives padding any position."""
    model, ids = accelerated("qwen3_next"), tokens(2, 6)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        for filler in (0, 1):
            positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, filler)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
            torch.testing.assert_close(logits[:1, 3:], model(input_ids=ids[:1, 3:]).logits)


@pytest.mark.parametrize("pieces", [[9], [4, 5], [3, 1, 1, 4]], ids=str)
@pytest.mark.parametrize("family", [family for family in FUSED if family != "glm5_next"])
def test_padding_changes_no_row_in_any_piece(family, pieces):
    """transformers does not tell linear layers of padding in single tokens, nor 5.14 in any piece after the first.

    It does not tell the sparse softmax layers of GLM-5-Next either, so that no whole model of them can be right.
    """
    ids, mask = tokens(2, 9), torch.tensor([[1] * 7 + [0] * 2, [0] * 4 + [1] * 5])

    def one_by_one(model):
        with torch.no_grad():
            return {str(row): model(ids[row : row + 1, mask[row].bool()]).logits[0] for row in range(2)}

    model, cache, done, logits = accelerated(family), None, 0, []
    with torch.no_grad():
        for piece in ids.split(pieces, dim=1):
            done += piece.shape[1]
            output = model(piece, attention_mask=mask[:, :done], use_cache=True, **({CACHE: cache} if cache else {}))
            cache = output[CACHE]
            logits.append(output.logits)
    whole = torch.cat(logits, dim=1)
    padded = {str(row): whole[row, mask[row].bool()] for row in range(2)}
    assert_equal_but_for_rounding(one_by_one, foreign_model(family), padded)


class TestBadInput:
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls):
        return accelerated("qwen3_next")

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"seq_idx": NUMBERS, "position_ids": torch.arange(74).expand(3, 1, -1)}, "first of four rows"),
            ({"cu_seqlens": BOUNDARIES, "use_cache": True}, "cannot fill or continue a cache"),
            ({"position_ids": POSITIONS, "use_cache": True}, "cannot fill or continue a cache"),
            ({"cu_seqlens": BOUNDARIES, "attention_mask": (tokens(1, 74) > 9).long()}, "packed documents and padding"),
            ({"position_ids": POSITIONS, "attention_mask": (torch.arange(74) > 1)[None]}, "and there is padding"),
        ],
    )
    def test_descriptions_that_do_not_fit(self, model, kwargs, message):
        with pytest.raises(ValueError, match=message):
            model(input_ids=tokens(1, 74), **kwargs)

    @pytest.mark.parametrize("num_tokens", [1, 4])
    @pytest.mark.parametrize(
        ("mask", "message"),
        [
            (torch.tensor([[2]]), "only 0 and 1"),
            (torch.ones(1, 1, 4, 4).bool(), "must have shape"),
            (torch.ones(2, 1).bool(), "must have shape"),
            (torch.tensor([[0.5]]), "must be bool or integer"),
        ],
        ids=["numbers", "pairs", "rows", "fractions"],
    )
    def test_masks_of_a_layer_on_its_own(self, model, num_tokens, mask, message):
        mask = mask.expand(-1, num_tokens) if mask.ndim == 2 else mask
        with pytest.raises(ValueError, match=message):
            mixer_of(model)(torch.randn(1, num_tokens, 32), attention_mask=mask)

    def test_a_layer_on_its_own(self, model):
        with pytest.raises(ValueError, match="no accelerated model around it has described: call the whole model"):
            mixer_of(model)(torch.randn(1, 74, 32), cu_seq_lens_q=BOUNDARIES)
