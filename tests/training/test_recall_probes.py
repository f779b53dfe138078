"""The recall probes: best scores for a model that recalls, chance for one that guesses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltazoo.training.recall_probes import cut_passages, probe_copying, probe_recall

VOCAB = 40


class Scripted(nn.Module):
    """A language model from a function: ``answer`` returns the logits of the next token after a prefix."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.device = torch.device("cpu")
        self.seen: list[Tensor] = []

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        self.seen.append(input_ids)
        logits = [[self.answer(row[: i + 1].tolist()) for i in range(len(row))] for row in input_ids]
        return SimpleNamespace(logits=torch.stack([torch.stack(row) for row in logits]))


def look_up(prefix: list[int]) -> Tensor:
    """The token that followed the previous occurrence of the last token; equal logits if there is none."""
    *before, last = prefix
    logits = torch.zeros(VOCAB)
    if last in before:
        position = len(before) - 1 - before[::-1].index(last)
        logits[prefix[position + 1]] = 20.0
    return logits


def test_looking_up_gets_full_marks() -> None:
    found = probe_recall(Scripted(look_up), num_pairs=5, sequences=6)
    assert (found.accuracy, found.among_shown) == (1.0, 1.0)
    assert found.questions == 30
    # A guess costs log(40) nats, an answer with a margin of 20 nearly none.
    assert found.gain == pytest.approx(torch.tensor(VOCAB).log().item(), abs=1e-3)


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_nan_is_no_answer(fault: float) -> None:
    """Of another token than the right one; -inf rules a token out."""

    def answer(prefix: list[int]) -> Tensor:
        logits = look_up(prefix)
        logits[0] = -math.inf
        logits[1] = fault if len(prefix) == 5 else 0.0
        return logits

    with pytest.raises(FloatingPointError, match="computed NaN or infinite logits for sequence 0"):
        probe_recall(Scripted(answer), num_pairs=5, sequences=2)
    with pytest.raises(FloatingPointError, match="computed NaN or infinite logits for sequence 0"):
        probe_copying(Scripted(answer), torch.arange(2, 14)[None])


def test_guessing_gets_none() -> None:
    found = probe_recall(Scripted(lambda prefix: torch.eye(VOCAB)[0] * 0), num_pairs=5, sequences=6)
    assert found.accuracy == 0.0, "the likeliest of equals is token 0, which no pair holds"
    assert found.gain == 0.0
    assert found.among_shown == 0.0, "a tie is no preference"


def test_a_preference_among_the_shown_counts_where_another_token_is_likelier() -> None:
    def hesitant(prefix: list[int]) -> Tensor:
        return look_up(prefix) + 50 * torch.eye(VOCAB)[0]

    found = probe_recall(Scripted(hesitant), num_pairs=5, sequences=6)
    assert (found.accuracy, found.among_shown) == (0.0, 1.0)


def test_preferring_the_last_answer_shown_is_right_by_chance() -> None:
    """One of four pairs ended the first showing: a model that always names its second token is right once in four."""

    def stubborn(prefix: list[int]) -> Tensor:
        return 20 * torch.eye(VOCAB)[prefix[8]] if len(prefix) > 8 else torch.zeros(VOCAB)

    assert probe_recall(Scripted(stubborn), num_pairs=4, sequences=6).among_shown == 0.25


def test_the_second_showing_of_a_passage_costs_one_that_looks_up_nothing() -> None:
    passages = torch.stack([torch.arange(2, 14), torch.arange(20, 32)])
    model = Scripted(look_up)
    found = probe_copying(model, passages, begin=1)
    assert model.seen[0].tolist() == [[1, *row, *row] for row in passages.tolist()]
    assert found.first == pytest.approx(math.log2(VOCAB), abs=1e-4)
    assert found.second == pytest.approx(0, abs=1e-4)
    assert (found.copied, found.length, found.passages) == (1.0, 12, 2)


def test_the_second_showing_costs_one_that_guesses_the_same() -> None:
    found = probe_copying(Scripted(lambda prefix: torch.zeros(VOCAB)), torch.arange(2, 14)[None])
    assert found.first == found.second == pytest.approx(math.log2(VOCAB))
    assert found.copied == 0.0


@pytest.mark.parametrize("shape", [(0, 5), (3, 1)])
def test_a_passage_must_have_something_to_predict(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"got \\[{shape[0]}, {shape[1]}\\]"):
        probe_copying(Scripted(look_up), torch.ones(shape, dtype=torch.long))


def test_passages_lie_within_documents_and_leave_out_their_ends() -> None:
    documents = [np.array([0, *range(10, 20), 1]), np.array([0, 7, 1]), np.array([0, *range(30, 37), 1])]
    assert cut_passages(documents, 4, 9).tolist() == [[10, 11, 12, 13], [14, 15, 16, 17], [30, 31, 32, 33]]
    assert cut_passages(documents, 4, 2).tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert cut_passages(documents, 10, 5).tolist() == [list(range(10, 20))]
    with pytest.raises(ValueError, match="none of the 3 documents holds a passage of 11 tokens"):
        cut_passages(documents, 11, 1)


def test_the_sequences_are_pairs_shown_twice() -> None:
    model = Scripted(look_up)
    probe_recall(model, num_pairs=4, sequences=3, reserved=2, seed=1)
    probe_recall(model, num_pairs=4, sequences=3, reserved=2, seed=1)
    first, again = model.seen
    assert torch.equal(first, again)
    assert first.shape == (3, 17)
    for row in first.tolist():
        pairs = [tuple(row[i : i + 2]) for i in range(1, 17, 2)]
        assert sorted(pairs[:4]) == sorted(pairs[4:])
        assert len({token for pair in pairs for token in pair}) == 8
        assert row[0] == 0
        assert min(row[1:]) >= 2


@pytest.mark.parametrize("num_pairs", [0, 20])
def test_there_must_be_enough_tokens(num_pairs: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and 19 for a vocabulary of 40, got {num_pairs}"):
        probe_recall(Scripted(look_up), num_pairs)
