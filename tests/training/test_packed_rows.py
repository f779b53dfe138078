"""Packed rows: no token is lost, no state crosses documents, and a row depends only on its index and the seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import deltazoo.models  # noqa: F401
from deltazoo.training.tokens import IGNORED, PackedRows, Row, collate, num_tokens, pack_in_order, spread

VOCAB = 50


def documents(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, VOCAB, size=length).astype(np.uint16) for length in lengths]


def joined(rows: list[Row]) -> np.ndarray:
    return np.concatenate([piece for row in rows for piece in row])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16, "intermediate_size": 48}
    config = AutoConfig.for_model("gated_deltanet", vocab_size=VOCAB, initializer_range=0.2, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("row_length", [1, 3, 17, 51])
def test_an_epoch_of_rows_holds_every_token_once(row_length: int) -> None:
    texts = documents([5, 1, 30, 12, 3])
    total = sum(map(len, texts))
    rows_per_epoch = total // row_length
    rows = PackedRows(texts, row_length, num_rows=3 * rows_per_epoch, seed=1)
    assert total % row_length == 0
    for epoch in range(3):
        seen = joined([rows[i] for i in range(epoch * rows_per_epoch, (epoch + 1) * rows_per_epoch)])
        assert sorted(seen) == sorted(np.concatenate(texts))


@pytest.mark.parametrize("row_length", [7, 16, 40, 60, 130])
def test_rows_that_do_not_divide_an_epoch_lose_nothing(row_length: int) -> None:
    texts = documents([5, 1, 30, 12, 3])
    total = sum(map(len, texts))
    # The number of rows is a multiple of both epochs and blocks.
    epochs = row_length * max(1, total // row_length)
    rows = PackedRows(texts, row_length, num_rows=epochs * total // row_length, seed=1)
    seen = joined([rows[i] for i in range(len(rows))])
    assert sorted(seen) == sorted(np.tile(np.concatenate(texts), epochs))


def test_documents_stay_whole_and_their_starts_are_marked() -> None:
    texts = documents([5, 1, 30, 12, 3])
    rows = PackedRows(texts, 51, num_rows=2, seed=3)
    for row in (rows[0], rows[1]):
        assert sorted(map(tuple, row)) == sorted(map(tuple, texts))


def test_each_epoch_has_an_order_of_its_own_and_seeds_differ() -> None:
    texts = documents([6] * 10)
    rows = PackedRows(texts, 60, num_rows=2, seed=0)
    other = PackedRows(texts, 60, num_rows=2, seed=1)
    assert joined([rows[0]]).tolist() != joined([rows[1]]).tolist()
    assert joined([rows[0]]).tolist() != joined([other[0]]).tolist()


def test_neighbouring_rows_come_from_different_places() -> None:
    counting = [np.arange(i * 1000, (i + 1) * 1000).astype(np.uint16) for i in range(10)]
    rows = PackedRows(counting, 10, num_rows=1000, seed=0)
    follows = [int(rows[i + 1][0][0]) == int(rows[i][-1][-1]) + 1 for i in range(999)]
    assert sum(follows) < 10


def test_a_row_depends_on_its_number_alone() -> None:
    texts = documents([9, 2, 40, 17])
    forwards = PackedRows(texts, 13, num_rows=30, seed=5)
    expected = [forwards[i] for i in range(30)]
    backwards = PackedRows(texts, 13, num_rows=30, seed=5)
    for i in reversed(range(30)):
        assert [piece.tolist() for piece in backwards[i]] == [piece.tolist() for piece in expected[i]]


@pytest.mark.parametrize("row_length", [1, 4, 10, 200])
def test_validation_rows_come_in_order_and_complete(row_length: int) -> None:
    texts = documents([5, 1, 30, 12, 3])
    rows = pack_in_order(texts, row_length)
    assert joined(rows).tolist() == np.concatenate(texts).tolist()
    assert all(num_tokens(row) == row_length for row in rows[:-1])


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (2, [0, 5]), (3, [0, 3, 6]), (10, [*range(10)]), (99, [*range(10)])]
)
def test_some_rows_are_spread_over_all(count: int, expected: list[int]) -> None:
    rows = pack_in_order([np.arange(40)], 4)
    assert [int(row[0][0]) // 4 for row in spread(rows, count)] == expected


def test_a_batch_is_one_sequence_with_boundaries() -> None:
    rows = [[np.array([1, 2, 3]), np.array([4])], [np.array([5, 6, 7])]]
    batch = collate(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 7]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3, IGNORED, IGNORED, 6, 7]]
    assert batch["cu_seqlens"].dtype == torch.int32


@torch.no_grad()
def test_a_packed_batch_gives_each_document_its_own_logits(model: PreTrainedModel) -> None:
    texts = documents([1, 2, 3, 64, 65, 20])
    rows = pack_in_order(texts, 200)
    batch = collate(rows)
    batch.pop("labels")
    packed = model(**batch).logits[0]
    alone = torch.cat([model(input_ids=torch.from_numpy(text.astype(np.int64))[None]).logits[0] for text in texts])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_the_packed_loss_is_that_of_the_documents(model: PreTrainedModel) -> None:
    texts = documents([9, 30, 2, 17])
    packed = model(**collate(pack_in_order(texts, 100)))
    nats, tokens = 0.0, 0
    for text in texts:
        ids = torch.from_numpy(text.astype(np.int64))[None]
        nats += model(input_ids=ids, labels=ids).loss.item() * (len(text) - 1)
        tokens += len(text) - 1
    assert packed.loss.item() == pytest.approx(nats / tokens, rel=1e-5)


def test_no_gradient_crosses_a_document_boundary(model: PreTrainedModel) -> None:
    batch = collate(pack_in_order(documents([20, 30, 14]), 64))
    embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    batch.pop("labels")
    logits = model(inputs_embeds=embedded, **batch).logits
    logits[0, 20:50].square().sum().backward()
    gradient = embedded.grad
    assert gradient is not None
    assert gradient[0, :20].abs().max() == 0
    assert gradient[0, 50:].abs().max() == 0
    assert gradient[0, 20:50].abs().sum(-1).min() > 0
