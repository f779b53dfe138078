"""`run_scan`: a further state of a rule in whole, padded and packed rows, in pieces, and from a start of its own."""

import pytest
import torch
from tiny_families import tiny_original
from tiny_models import tiny_model
from torch import Tensor, nn

import deltazoo
from deltazoo import swap_attention
from deltazoo.layers import describe_sequences, make_layer, run_scan
from deltazoo.layers.sequences import SharedSequences
from deltazoo.ops import ContextParallel

EXACT = {"rtol": 0, "atol": 1e-14}


def inputs(rows: int, tokens: int) -> list[Tensor]:
    """Decay, what a token adds, and damping, for 2 heads of 3 channels."""
    return [torch.rand(rows, tokens, 2, 3, dtype=torch.float64) for _ in range(3)]


def test_the_formula_from_a_start() -> None:
    decay, added, damping = inputs(2, 5)
    start = torch.rand(2, 3, dtype=torch.float64)
    before, state = run_scan(decay, added, damping, start=start)
    p = start.expand(2, -1, -1)
    for t in range(5):
        torch.testing.assert_close(before[:, t], p, **EXACT)
        h = decay[:, t] * p + added[:, t]
        p = h / (1 + damping[:, t] * h)
    torch.testing.assert_close(state, p - start, **EXACT)
    nothing = run_scan(decay, added, damping, torch.zeros_like(state), start=start)
    torch.testing.assert_close(nothing, (before, state), **EXACT)  # zeros are the state of a sequence that begins


def test_pieces_padding_and_packing_change_nothing() -> None:
    given = inputs(2, 6)
    start = torch.rand(2, 3, dtype=torch.float64)
    before, state = run_scan(*given, start=start)
    first, middle = run_scan(*(x[:, :4] for x in given), start=start)
    second, last = run_scan(*(x[:, 4:] for x in given), middle, start=start)
    torch.testing.assert_close((torch.cat([first, second], 1), last), (before, state), **EXACT)

    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    padded = describe_sequences(2, 6, attention_mask=mask)
    arranged = [padded.arrange(x.flatten(2)).view_as(x).masked_fill(padded.padding[..., None, None], 1) for x in given]
    found, after = run_scan(*arranged, None, padded, start=start)
    alone, alone_after = run_scan(*(x[:1, 2:] for x in given), start=start)
    torch.testing.assert_close((found[:1, :4], after[:1]), (alone, alone_after), **EXACT)
    torch.testing.assert_close((found[1:], after[1:]), (before[1:], state[1:]), **EXACT)

    packed = describe_sequences(1, 12, cu_seqlens=torch.tensor([0, 6, 12]))
    found, after = run_scan(*(x.view(1, 12, 2, 3) for x in given), None, packed, start=start)
    torch.testing.assert_close((found.view_as(before), after), (before, state), **EXACT)


def test_a_decay_of_zero_gives_the_token_before() -> None:
    x = torch.randn(2, 5, 2, 3).bfloat16()
    before, state = run_scan(torch.zeros(2, 5), x)
    assert torch.equal(before[:, 1:], x[:, :-1]) and not before[:, 0].any() and before.dtype == torch.bfloat16
    assert torch.equal(state, x[:, -1].float())


def test_a_decay_per_token_has_the_gradient_of_all_its_channels() -> None:
    _, added, damping = inputs(2, 5)
    decay = torch.rand(2, 5, dtype=torch.float64, requires_grad=True)
    wide = decay.detach()[..., None, None].repeat(1, 1, 2, 3).requires_grad_()
    for given in (decay, wide):
        before, state = run_scan(given, added, damping)
        (before.square().sum() + state.sum()).backward()
    assert decay.grad is not None and wide.grad is not None
    torch.testing.assert_close(decay.grad, wide.grad.sum((2, 3)), **EXACT)


def refused(model: nn.Module, rule: str) -> None:
    message = rf"ranks cannot share rows \(context parallelism\) under the rule '{rule}', .*: give whole rows to each"
    with pytest.raises(NotImplementedError, match=message):
        deltazoo.context_parallel(model, ContextParallel())
    for part in model.modules():
        assert getattr(part, "context", None) is None and getattr(part, "deltazoo_context", None) is None
    deltazoo.context_parallel(model, None)


def test_ranks_share_no_rows_of_a_layer_or_model_with_a_scan() -> None:
    """Refused before anything has run: layers, models, hybrids, swapped models."""
    refused(make_layer("diagonal_kdn", 16, 2), "diagonal_kdn")
    refused(tiny_model("gated_deltanet", mixer="falcon"), "falcon")
    refused(tiny_model("hybrid", mixer="isotropic_kdn"), "isotropic_kdn")
    swapped = tiny_original("llama")
    swap_attention(swapped, "falcon", [1])
    refused(swapped, "falcon")


def test_a_scan_refuses_rows_that_ranks_share() -> None:
    with pytest.raises(NotImplementedError, match=r"do not hand on the state of `run_scan`: .* `shares_rows = False`"):
        run_scan(*inputs(1, 4), sequences=SharedSequences(ContextParallel()))
