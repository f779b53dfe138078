"""A padded row equals the row without padding, and a packed document the document on its own: outputs and gradients.

In float64, so that what is left of a leak cannot hide in rounding. Every way to pad and to pack is tried on every
kind of model in test_promises_of_all_kinds.py, on every rule by `deltazoo check`, on layers in rules/test_all_rules.py.
"""

import pytest
import torch
from model_kinds import KINDS, model_of_kind
from tiny_models import CASES, FEW, tiny_model, tokens
from transformers import DataCollatorWithFlattening, DynamicCache

from deltazoo.generation.cache import CACHE

TWO = ["gated_deltanet", "hybrid"]
LENGTHS = [7, 1, 12, 2, 3]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
LOSS = 1e-6  # transformers' loss function computes in float32


def exact_model(case):
    return tiny_model(case).double()


def documents():
    return [tokens(n, seed=10 + n) for n in LENGTHS]


def padded(rows, side):
    """ids and mask `[B, T]` with padding on a side, or scattered; the ids of padding must not matter."""
    length = max(map(len, rows)) + 3
    ids, mask = tokens(len(rows), length, seed=99), torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        if side == "left":
            places = torch.arange(length - len(row), length)
        elif side == "right":
            places = torch.arange(len(row))
        else:
            places = torch.randperm(length, generator=torch.Generator().manual_seed(i))[: len(row)].sort().values
        ids[i, places], mask[i, places] = row, 1
    return ids, mask


def packed(rows):
    """ids `[1, T]`, boundaries, document numbers and positions."""
    lengths = torch.tensor([len(row) for row in rows])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    seq_idx = torch.repeat_interleave(torch.arange(len(rows)), lengths)[None].int()
    position_ids = torch.cat([torch.arange(len(row)) for row in rows])[None]
    return torch.cat(rows)[None], cu_seqlens, seq_idx, position_ids


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def summed_loss(model, ids, **kwargs):
    """The loss summed over all predicted tokens."""
    return model(ids, labels=kwargs.pop("labels", ids), num_items_in_batch=1, use_cache=False, **kwargs).loss


def assert_same_gradients(ours, expected):
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-6, atol=1e-9 * float(gradient.abs().max()))


@pytest.mark.parametrize("case", CASES)
def test_padded_rows_equal_rows_alone(case):
    model, rows = exact_model(case), documents()
    ids, mask = padded(rows, "scattered")
    with torch.no_grad():
        batch = model(ids, attention_mask=mask, use_cache=False).logits
        for row, logits, real in zip(rows, batch, mask.bool(), strict=True):
            torch.testing.assert_close(logits[real], model(row[None], use_cache=False).logits[0], **CLOSE)


@pytest.mark.parametrize("side", ["left", "right", "scattered"])
@pytest.mark.parametrize("case", TWO)
def test_padding_changes_no_gradient(case, side):
    model, rows = exact_model(case), documents()
    ids, mask = padded(rows, side)
    expected = gradients(model, sum(summed_loss(model, row[None]) for row in rows if len(row) > 1))
    # Right-shifted by hand: with scattered padding the next real token is not the next token.
    shift_labels = torch.full_like(ids, -100)
    for i, real in enumerate(mask.bool()):
        places = real.nonzero()[:, 0]
        shift_labels[i, places[:-1]] = ids[i, places[1:]]
    loss = summed_loss(model, ids, attention_mask=mask, shift_labels=shift_labels)
    assert_same_gradients(gradients(model, loss), expected)


@pytest.mark.parametrize("case", FEW)
def test_padded_second_turn(case):
    """Turns of different lengths, padded on the left, continue one cache."""
    model, ids = exact_model(case), tokens(2, 6)
    turn, turn_mask = tokens(2, 4, seed=3), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    mask = torch.cat([torch.ones(2, 6, dtype=torch.long), turn_mask], dim=1)
    with torch.no_grad():
        cache = model(ids).past_key_values
        logits = model(turn, attention_mask=mask, past_key_values=cache).logits
        for i in range(2):
            alone = torch.cat([ids[i], turn[i][turn_mask[i].bool()]])[None]
            torch.testing.assert_close(logits[i, -2:], model(alone).logits[0, -2:], **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_packed_loss_and_gradients(case):
    model, rows = exact_model(case), documents()
    ids, cu_seqlens, _, _ = packed(rows)
    losses = [summed_loss(model, row[None]) for row in rows if len(row) > 1]
    expected = gradients(model, sum(losses))
    loss = summed_loss(model, ids, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(loss, sum(losses), rtol=LOSS, atol=0)
    assert_same_gradients(gradients(model, loss), expected)


@pytest.mark.parametrize("case", TWO)
def test_mean_loss_counts_only_predicted_tokens(case):
    model, rows = exact_model(case), documents()
    ids, cu_seqlens, _, _ = packed(rows)
    predicted = sum(len(row) - 1 for row in rows)
    mean = model(ids, labels=ids, cu_seqlens=cu_seqlens).loss
    torch.testing.assert_close(mean, summed_loss(model, ids, cu_seqlens=cu_seqlens) / predicted)


@pytest.mark.parametrize("training", [False, True])
def test_shifted_labels_of_segments_give_the_loss_of_the_whole_rows(training):
    model, ids = tiny_model("hybrid").train(training), tokens(2, 12)
    segments = zip(ids.split(4, 1), torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100).split(4, 1), strict=True)
    cache, total = DynamicCache(config=model.config), torch.tensor(0.0)
    for segment, labels in segments:
        total += model(segment, shift_labels=labels, num_items_in_batch=22, use_cache=True, **{CACHE: cache}).loss
    torch.testing.assert_close(total, model(ids, labels=ids).loss)


@pytest.mark.parametrize("labels", [False, True])
def test_shifted_labels_leave_out_first_tokens_too(labels):
    model, rows = exact_model("hybrid"), documents()
    ids, cu_seqlens, seq_idx, _ = packed(rows)
    shifted = {"shift_labels": torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100), "seq_idx": seq_idx}
    if labels:
        shifted["labels"] = ids
    loss = model(ids, cu_seqlens=cu_seqlens, **shifted).loss
    torch.testing.assert_close(loss, model(ids, labels=ids, cu_seqlens=cu_seqlens).loss)
    shifted["shift_labels"] = shifted["shift_labels"][:, -9:]
    last = model(ids, logits_to_keep=9, **shifted).loss
    predicted = shifted["shift_labels"].clone()
    predicted[:, [3, 5]] = -100  # the last two documents have 2 and 3 tokens
    logits = model(ids, cu_seqlens=cu_seqlens).logits[0, -9:]
    torch.testing.assert_close(last, torch.nn.functional.cross_entropy(logits, predicted[0]).float())


@pytest.mark.parametrize("case", TWO)
def test_nothing_leaks_between_documents(case):
    model, rows = exact_model(case), documents()
    _, cu_seqlens, _, _ = packed(rows)
    changed = [rows[0], rows[1], (rows[2] + 1) % 60, rows[3], rows[4]]
    with torch.no_grad():
        before = model(torch.cat(rows)[None], cu_seqlens=cu_seqlens).logits[0].split(LENGTHS)
        after = model(torch.cat(changed)[None], cu_seqlens=cu_seqlens).logits[0].split(LENGTHS)
    for i in (0, 1, 3, 4):
        assert torch.equal(before[i], after[i])
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("case", TWO)
def test_flattening_collator(case, flash):
    model, rows = exact_model(case), documents()
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=flash, return_seq_idx=flash)
    batch = collate([{"input_ids": row.tolist()} for row in rows])
    expected = sum(summed_loss(model, row[None]) for row in rows if len(row) > 1)
    torch.testing.assert_close(summed_loss(model, batch.pop("input_ids"), **batch), expected, rtol=LOSS, atol=0)


@pytest.mark.parametrize("case", TWO)
def test_packed_rows_of_a_batch(case):
    """Several packed rows, as trainers with fixed row length make them."""
    model, rows = exact_model(case), documents()
    first, second = [rows[0], rows[3], rows[4]], [rows[2]]
    ids = torch.stack([torch.cat(first), torch.cat(second)])
    position_ids = torch.stack([packed(first)[3][0], packed(second)[3][0]])
    with torch.no_grad():
        logits = model(ids, position_ids=position_ids, use_cache=False).logits
    for row_logits, row in zip(logits, (first, second), strict=True):
        for document, part in zip(row, row_logits.split([len(d) for d in row]), strict=True):
            torch.testing.assert_close(part, model(document[None]).logits[0], **CLOSE)


@pytest.mark.parametrize("case", TWO)
def test_packed_rows_with_padding(case):
    model, rows = exact_model(case), documents()
    first, second = [rows[0], rows[3]], [rows[2]]
    ids = torch.stack([torch.cat([*first, tokens(3)]), torch.cat(second)])
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    position_ids = torch.stack([torch.cat([packed(first)[3][0], torch.zeros(3, dtype=torch.long)]), torch.arange(12)])
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
        torch.testing.assert_close(logits[0, :7], model(rows[0][None]).logits[0], **CLOSE)
        torch.testing.assert_close(logits[0, 7:9], model(rows[3][None]).logits[0], **CLOSE)
        torch.testing.assert_close(logits[1], model(rows[2][None]).logits[0], **CLOSE)


@pytest.mark.parametrize("way", ["cu_seqlens", "seq_idx", "position_ids"])
def test_padding_inside_a_packed_document_is_refused(way):
    ids, *descriptions = packed(documents())
    described = dict(zip(("cu_seqlens", "seq_idx", "position_ids"), descriptions, strict=True))
    mask = torch.ones(1, sum(LENGTHS), dtype=torch.long)
    mask[0, 10] = 0
    with pytest.raises(ValueError, match=r"not inside, got it before token 11 of row 0: leave the padded tokens out"):
        exact_model("gated_deltanet")(ids, attention_mask=mask, **{way: described[way]})


def test_empty_documents_are_allowed():
    model, ids = tiny_model("hybrid"), tokens(1, 6)
    with torch.no_grad():
        with_empty = model(ids, cu_seqlens=torch.tensor([0, 0, 4, 4, 6, 6])).logits
        torch.testing.assert_close(with_empty, model(ids, cu_seqlens=torch.tensor([0, 4, 6])).logits)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_or_no_tokens_are_refused(kind, shape):
    """The softmax layers of transformers cannot compute them."""
    model, ids = model_of_kind(kind), torch.zeros(shape, dtype=torch.long)
    mask, embeddings = torch.ones_like(ids), torch.zeros(*shape, 32)
    calls = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}, {"inputs_embeds": embeddings}]
    for call in calls:
        for use_cache in (True, False):
            with pytest.raises(ValueError, match="expected at least one row and one token per row, got input of shape"):
                model(**call, use_cache=use_cache)
    with pytest.raises(ValueError, match="expected at least one row and one token per row, got input of shape"):
        model.generate(ids, max_new_tokens=2)


def test_left_padded_positions_are_no_documents():
    """`generate` numbers real tokens from 0 and gives padding any position."""
    model, ids = tiny_model("hybrid"), tokens(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        for filler in (0, 1):
            position_ids = (mask.cumsum(1) - 1).masked_fill(mask == 0, filler)
            logits = model(ids, attention_mask=mask, position_ids=position_ids).logits
            torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()])


def test_descriptions_move_between_devices():
    model, ids = tiny_model("hybrid"), tokens(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for kwargs in ({"attention_mask": mask}, {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}, {}):
        described = model.model.describe(ids, None, kwargs)
        moved = described.to("meta", non_blocking=True)
        tensors = [moved.position_ids, moved.attention_mask, *vars(moved.sequences).values()]
        devices = {x.device.type for x in tensors if isinstance(x, torch.Tensor)}
        assert devices == {"meta"}


def ready(mask):
    """Masks by layer type, as `generate` prepares them."""
    return {"linear_attention": mask, "full_attention": None}


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_ready_masks_equal_plain_ones(dtype):
    """Of floats those of ones and zeros, as PEFT's prompt tuning writes them."""
    model, ids = tiny_model("gated_deltanet"), tokens(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    torch.testing.assert_close(model(ids, attention_mask=ready(mask.to(dtype))).logits, model(ids, mask).logits)


class TestBadInput:
    @pytest.fixture
    def model(self):
        return tiny_model("hybrid")

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"attention_mask": ready(torch.zeros(2, 6))}, "bool or integer"),
            ({"attention_mask": ready(torch.tensor([[1, 1, 2, 2, 2, 3]] * 2))}, "only 0 and 1.*from 1 to 3.*seq_idx"),
            ({"attention_mask": ready(torch.ones(2, 5, dtype=torch.long))}, r"shape \(2, 6\).*got \(2, 5\)"),
            ({"attention_mask": ready(torch.ones(2, 1, 6, 6).bool())}, r"shape \(2, 6\).*got \(2, 1, 6, 6\)"),
            ({"attention_mask": {"linear_atention": None}}, "did you mean 'linear_attention'"),
        ],
    )
    def test_ready_masks_that_do_not_fit(self, model, kwargs, message):
        with pytest.raises(ValueError, match=message):
            model(tokens(2, 6), **kwargs)

    def test_unknown_argument(self, model):
        with pytest.raises(TypeError, match="'cu_seqlen'; did you mean 'cu_seqlens'"):
            model(tokens(1, 6), cu_seqlen=torch.tensor([0, 6]))

    def test_lists_as_ready_masks(self, model):
        with pytest.raises(TypeError, match=r"attention_mask\['linear_attention'\] must be a tensor, got list"):
            model(tokens(1, 6), attention_mask=ready([1] * 6))

    def test_ids_without_rows(self, model):
        with pytest.raises(ValueError, match=r"input_ids must have shape \[B, T\], got \(9,\)"):
            model(tokens(9))
