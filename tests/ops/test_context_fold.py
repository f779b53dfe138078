"""The fold of cells over ranks: the states of a plain loop, and the same bits however ranks divide the cells."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deltazoo.ops.context import fold
from deltazoo.ops.context.fold import Fold, ReverseFold, depth

K, V = 8, 6


def folded(
    first: tuple[int, ...], M: Tensor, X: Tensor, dX: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """States that enter all cells, and gradients of those that leave them; all ranks in this process, in turn."""
    ranks = range(len(first) - 1)
    monkeypatch.setattr(fold, "started_gather", lambda x, context: x)
    monkeypatch.setattr(fold, "finished", lambda x, context: x)
    contexts = [SimpleNamespace(rank=rank, size=len(ranks)) for rank in ranks]
    cells = [slice(*first[rank : rank + 2]) for rank in ranks]
    folds = [Fold(context, first, M[mine], X[mine]) for context, mine in zip(contexts, cells, strict=True)]
    gathered = torch.cat([one.start() for one in folds])
    transitions = [one.transitions(gathered) for one in folds]
    for mine, kept in zip(cells, transitions, strict=True):
        assert len(kept) == 1 + depth(mine.start, mine.stop)
    back = [ReverseFold(contexts[rank], first, transitions[rank], dX[cells[rank]]) for rank in ranks]
    sent_back = torch.cat([one.start() for one in back])
    states = torch.cat([one.boundaries(gathered) for one in folds])
    return states, torch.cat([one.boundaries(sent_back) for one in back])


@pytest.mark.parametrize("count", [1, 2, 5, 8, 13])
def test_ranks_fold_as_one(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    M, X, dX = torch.randn(count, 1, 2, K, K) / 3, torch.randn(count, 1, 2, K, V), torch.randn(count, 1, 2, K, V)
    states, gradients = folded((0, count), M, X, dX, monkeypatch)
    S, dS = torch.zeros_like(X[0]), torch.zeros_like(X[0])
    for cell in range(count):
        torch.testing.assert_close(states[cell], S, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradients[count - 1 - cell], dS, rtol=1e-4, atol=1e-4)
        S, dS = M[cell] @ S + X[cell], M[count - 1 - cell].mT @ dS + dX[count - 1 - cell]
    for ranks in (2, 3, 4):
        for cuts in combinations(range(1, count), ranks - 1):
            shared = folded((0, *cuts, count), M, X, dX, monkeypatch)
            assert torch.equal(shared[0], states) and torch.equal(shared[1], gradients), cuts
