"""The recall probe: full marks for a model that looks up, none for one that guesses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltazoo.evaluation.recall import probe_recall

VOCAB = 40


class Scripted(nn.Module):
    """A language model by rule: ``answer`` gives the logits of the next token after a prefix."""

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
    """Whatever followed this token the last time; nothing in particular if it is new."""
    *before, last = prefix
    logits = torch.zeros(VOCAB)
    if last in before:
        place = len(before) - 1 - before[::-1].index(last)
        logits[prefix[place + 1]] = 20.0
    return logits


def test_looking_up_gets_full_marks() -> None:
    found = probe_recall(Scripted(look_up), num_pairs=5, sequences=6)
    assert found.accuracy == 1.0
    assert found.questions == 30
    # A guess costs log(40) nats, an answer with a margin of 20 nearly none.
    assert found.gain == pytest.approx(torch.tensor(VOCAB).log().item(), abs=1e-3)


def test_guessing_gets_none() -> None:
    found = probe_recall(Scripted(lambda prefix: torch.eye(VOCAB)[0] * 0), num_pairs=5, sequences=6)
    assert found.accuracy == 0.0, "the likeliest of equals is token 0, which no pair holds"
    assert found.gain == 0.0


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
