"""Every refusal and promise of our models, kept by every kind: pure and hybrid, swapped, accelerated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_kinds import KINDS, model_of_kind
from tiny_families import tiny_original
from tiny_models import tiny_model, tokens
from torch import Tensor
from transformers import DynamicCache, StaticCache

from deltazoo.generation.cache import CACHE
from deltazoo.models import DeltaRuleConfig

IDS = tokens(2, 9)
ROW = IDS[:1]
LENGTHS = (3, 1, 5)
BOUNDARIES = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
OTHER_BOUNDARIES = torch.tensor([0, 4, 9], dtype=torch.int32)
POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4]])
NUMBERS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2]])
ONES = torch.ones(2, 9, dtype=torch.long)
FLOAT32 = {"rtol": 1.3e-6, "atol": 1e-5}
"""Those of torch.testing: models compute in float64, but the norms of transformers in float32."""


@pytest.fixture(params=KINDS, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    """For all tests of the module: whoever changes it changes a copy."""
    return model_of_kind(request.param).double()


def logits(model: Any, input_ids: Tensor | None, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=input_ids, **arguments).logits


def filled(model: Any, ids: Tensor) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=True)[CACHE]


def fresh(model: Any) -> dict[str, Any]:
    return {CACHE: DynamicCache(config=model.config)}


def greedy(model: Any, ids: Tensor, **options: Any) -> Any:
    return model.generate(ids, **{"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options})


def assert_close(actual: Tensor, expected: Tensor, model: Any = None) -> None:
    """Within the rounding of the model's norms; of our own models, all in float64, if the model is given."""
    own = model is not None and isinstance(model.config, DeltaRuleConfig)
    torch.testing.assert_close(actual, expected, **({"rtol": 1e-9, "atol": 1e-9} if own else FLOAT32))


# What is refused: what is called, and the error. A forward pass of ROW, or of IDS with two rows, if a dict is given.

ForwardArguments = dict[str, Any]
NO_PADDING_MASK: dict[str, tuple[Any, type[Exception], str]] = {
    "documents numbered": (NUMBERS.expand(2, -1) + 1, ValueError, "only 0 and 1, got values from 1 to 3"),
    "below zero": (-ONES, ValueError, "only 0 and 1, got values from -1 to -1"),
    "pairs of tokens": (torch.ones(2, 1, 9, 9, dtype=torch.bool).tril(), ValueError, "a mask over pairs of tokens"),
    "additive pairs": (torch.zeros(2, 1, 9, 9), ValueError, "a mask over pairs of tokens"),
    "three dimensions": (ONES[:, None], ValueError, "a mask over pairs of tokens"),
    "one dimension": (ONES[0], ValueError, "a mask over pairs of tokens"),
    "wide": (torch.ones(2, 10), ValueError, r"shape \(2, 9\): 0 tokens in the cache and 9 new ones, got \(2, 10\)"),
    "narrow": (ONES[:, 1:], ValueError, r"shape \(2, 9\): 0 tokens in the cache and 9 new ones, got \(2, 8\)"),
    "rows": (ONES[:1], ValueError, r"must have shape \(2, 9\).*got \(1, 9\)"),
    "fractions": (ONES / 2, ValueError, "bool or integer with 1 = real token, got torch.float32"),
    "additive zeros": (0.0 * ONES, ValueError, "bool or integer with 1 = real token, got torch.float32"),
    "additive": ((ONES.cumsum(1) < 3) * -1e9, ValueError, "bool or integer with 1 = real token, got torch.float32"),
    "ready, misspelt": ({"linear_attn": None}, ValueError, "unknown layer type 'linear_attn'|got a dict"),
    "list": (ONES.tolist(), (TypeError, ValueError), "must be a tensor, got list|got a list"),
}


@pytest.mark.parametrize("case", NO_PADDING_MASK)
def test_a_mask_that_says_something_else_than_padding_is_refused(model: Any, case: str) -> None:
    mask, error, message = NO_PADDING_MASK[case]
    for use_cache in (True, False):
        with pytest.raises(error, match=message):
            logits(model, IDS, attention_mask=mask, use_cache=use_cache)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda total: 1 + torch.arange(total).expand(2, -1) // 4, "only 0 and 1, got values from 1 to 3"),
        (lambda total: torch.ones(2, 1, total, total, dtype=torch.bool), "a mask over pairs of tokens"),
        (lambda total: torch.ones(2, total - 1), r"must have shape \(2, 1\d\): 9 tokens in the cache and \d new ones"),
        (lambda total: torch.ones(1, total), r"must have shape \(2, 1\d\): 9 tokens in the cache and \d new ones"),
        (lambda total: torch.ones(2, total) / 2, "bool or integer with 1 = real token, got torch.float32"),
    ],
    ids=["documents numbered", "pairs of tokens", "narrow", "rows", "fractions"],
)
def test_a_wrong_mask_beside_a_cache_is_refused(model: Any, make: Callable[[int], Tensor], message: str) -> None:
    for num_new in (1, 3):
        with pytest.raises(ValueError, match=message):
            logits(model, IDS[:, :num_new], attention_mask=make(9 + num_new), **{CACHE: filled(model, IDS)})


@pytest.mark.parametrize("case", ["documents numbered", "pairs of tokens", "fractions"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_wrong_mask_is_refused_by_generate(model: Any, case: str, cache: str) -> None:
    mask, error, message = NO_PADDING_MASK[case]
    with pytest.raises(error, match=f"{message}|must be 2D"):
        greedy(model, IDS, attention_mask=mask, cache_implementation=cache, disable_compile=True)


WRONG_ARGUMENTS: dict[str, tuple[Callable[[Any], ForwardArguments], Any, str]] = {
    "tokens and embeddings": (
        lambda model: {"input_ids": ROW, "inputs_embeds": model.get_input_embeddings()(ROW)},
        ValueError,
        "exactly one of input_ids (and|or) inputs_embeds",
    ),
    "neither": (lambda model: {"input_ids": None}, ValueError, "exactly one of input_ids (and|or) inputs_embeds"),
    "an argument that nobody knows": (lambda model: {"attn_mask": ONES[:1]}, TypeError, "attn_mask"),
    "boundaries and positions": (
        lambda model: {"cu_seqlens": BOUNDARIES, "position_ids": torch.arange(9)[None]},
        ValueError,
        "cu_seqlens and position_ids place the documents differently, first at row 0, token 3",
    ),
    "boundaries and numbers": (
        lambda model: {"cu_seqlens": OTHER_BOUNDARIES, "seq_idx": NUMBERS},
        ValueError,
        "cu_seqlens and seq_idx place the documents differently, first at row 0, token 3",
    ),
    "numbers and positions": (
        lambda model: {"seq_idx": NUMBERS, "position_ids": torch.arange(9)[None]},
        ValueError,
        "seq_idx and position_ids place the documents differently, first at row 0, token 3",
    ),
    "boundaries of two names": (
        lambda model: {"cu_seqlens": BOUNDARIES, "cu_seq_lens_q": OTHER_BOUNDARIES},
        ValueError,
        "cu_seq_lens_q.* must agree|cu_seqlens and cu_seq_lens_q place the documents differently",
    ),
    "boundaries of queries and keys": (
        lambda model: {"cu_seq_lens_q": BOUNDARIES, "cu_seq_lens_k": OTHER_BOUNDARIES},
        ValueError,
        "cu_seq_lens_k must agree|cu_seq_lens_q and cu_seq_lens_k place the documents differently",
    ),
    "boundaries that begin late": (lambda model: {"cu_seqlens": BOUNDARIES[1:]}, ValueError, "must start at 0, got 3"),
    "boundaries that end early": (lambda model: {"cu_seqlens": BOUNDARIES[:-1]}, ValueError, "must end at .* 9, got 4"),
    "boundaries that descend": (
        lambda model: {"cu_seqlens": BOUNDARIES[[0, 2, 1, 3]]},
        ValueError,
        "must not descend, got 4 then 3",
    ),
    "boundaries of keys that end early": (
        lambda model: {"cu_seq_lens_k": BOUNDARIES[:-1]},
        ValueError,
        "must end at .* 9, got 4",
    ),
    "fractional boundaries": (lambda model: {"cu_seqlens": BOUNDARIES.float()}, ValueError, "must be int32 or int64"),
    "boundaries in a row": (lambda model: {"cu_seqlens": BOUNDARIES[None]}, ValueError, r"must have shape \[N \+ 1\]"),
    "boundaries of two rows": (
        lambda model: {"input_ids": IDS, "cu_seqlens": BOUNDARIES},
        ValueError,
        "need batch size 1, got 2",
    ),
    "boundaries in a list": (lambda model: {"cu_seqlens": [0, 9]}, TypeError, "cu_seqlens must be a tensor, got list"),
    "numbers in a list": (
        lambda model: {"seq_idx": NUMBERS.tolist()},
        TypeError,
        "seq_idx must be a tensor, got list",
    ),
    "too few numbers": (lambda model: {"seq_idx": NUMBERS[:, 1:]}, ValueError, r"seq_idx must have shape \(1, 9\)"),
    "too few positions": (
        lambda model: {"position_ids": POSITIONS[:, 1:]},
        ValueError,
        r"position_ids must have shape \(1, 9\), got \(1, 8\)",
    ),
    "positions of other rows": (
        lambda model: {"position_ids": POSITIONS.expand(3, -1).clone()},
        ValueError,
        "position_ids must have shape",
    ),
    "positions in a list": (
        lambda model: {"position_ids": POSITIONS.tolist()},
        TypeError,
        "position_ids must be a tensor, got list",
    ),
    "boundaries and a cache": (
        lambda model: {"cu_seqlens": BOUNDARIES, **fresh(model)},
        ValueError,
        "cannot fill or continue a cache",
    ),
    "numbers and a cache": (
        lambda model: {"seq_idx": NUMBERS, **fresh(model)},
        ValueError,
        "cannot fill or continue a cache",
    ),
    "positions that start again and a cache": (
        lambda model: {"position_ids": POSITIONS, **fresh(model)},
        ValueError,
        "cannot fill or continue a cache|start again inside a row.* a cache",
    ),
    "boundaries and a used cache": (
        lambda model: {"cu_seqlens": BOUNDARIES, CACHE: filled(model, ROW)},
        ValueError,
        "cannot fill or continue a cache",
    ),
    "no cache but a list": (lambda model: {CACHE: [None]}, ValueError, "must be a transformers Cache, got list"),
    "a cache of other rows": (
        lambda model: {CACHE: filled(model, IDS)},
        ValueError,
        r"must have shape \(1, \d+, \d\), got \(2, \d+, \d\)",
    ),
    "a cache of softmax layers": (
        lambda model: {CACHE: filled(tiny_original("llama", num_hidden_layers=model.config.num_hidden_layers), ROW)},
        ValueError,
        "layer 0 of the model is linear, but the cache holds a used",
    ),
    "a cache of more layers": (
        lambda model: {CACHE: filled(tiny_original("llama", num_hidden_layers=6), ROW)},
        ValueError,
        r"the cache has 6 layers and the model \d: it belongs to another model",
    ),
    "labels of another length": (
        lambda model: {"labels": ROW[:, 1:]},
        ValueError,
        r"labels must have shape \(1, 9\)|to match target batch_size",
    ),
    "a list of tokens": (
        lambda model: {"input_ids": ROW.tolist()},
        TypeError,
        "input_ids must be a tensor, got list",
    ),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused(model: Any, case: str) -> None:
    make, error, message = WRONG_ARGUMENTS[case]
    with pytest.raises(error, match=message):
        logits(model, **{"input_ids": ROW, **make(model)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_a_wider_model_is_refused(kind: str) -> None:
    wider = {"accelerated": {"linear_value_head_dim": 32}, "swapped": {"hidden_size": 64}}.get(kind, {"head_dim": 16})
    cache = filled(model_of_kind(kind, **wider), ROW)
    with pytest.raises(ValueError, match="convolution state must have shape"):
        logits(model_of_kind(kind), ROW, **{CACHE: cache})


@pytest.mark.parametrize("way", ["assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"])
def test_assisted_decoding_is_refused(model: Any, way: str) -> None:
    """By transformers, before anything has changed."""
    layers, before = model.config.num_hidden_layers, logits(model, ROW, use_cache=False)
    with pytest.raises(ValueError, match=f"not supported with stateful models, such as {type(model).__name__}"):
        greedy(model, ROW, **{way: tiny_model("hybrid") if way == "assistant_model" else 1})
    assert model.config.num_hidden_layers == layers
    assert torch.equal(logits(model, ROW, use_cache=False), before)


def test_a_prompt_padded_on_the_right_is_refused(model: Any) -> None:
    """transformers would take the logits of the padding for those of the prompt's last token."""
    mask = torch.ones_like(IDS)
    mask[1, -1:] = 0
    for wrong in (mask, mask.bool()):
        with pytest.raises(ValueError, match="must end with real tokens: pad prompts on the left"):
            greedy(model, IDS, attention_mask=wrong)


def test_assisting_another_model_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(model).__name__} has delta-rule layers.*cannot be the assistant"):
        greedy(tiny_original("llama"), ROW, assistant_model=model)


def test_taking_tokens_back_is_refused(model: Any) -> None:
    cache = filled(model, ROW)
    with pytest.raises(RuntimeError, match="cannot take tokens back|does not track past states"):
        cache.crop(-1)
    with pytest.raises(RuntimeError, match="cannot take tokens back"):
        cache.activate_past_recording()
        logits(model, ROW[:, :1], **{CACHE: cache})


def test_a_cache_of_the_whole_prompt_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="holds 9 tokens, and the prompt has 9"):
        greedy(model, ROW, **{CACHE: filled(model, ROW)})


def test_continuous_batching_is_refused(model: Any) -> None:
    with pytest.raises(NotImplementedError, match="state transformers' continuous batching"):
        model.generate_batch([[1, 2, 3], [4, 5]])
    with pytest.raises(NotImplementedError, match="state transformers' continuous batching"):
        greedy(model, ROW, cache_implementation="paged")


# What is promised.

PADDING = {
    "left": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
    "inside": [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1],
    "everywhere": [0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
}


def mask_of(padding: str) -> Tensor:
    return torch.tensor(PADDING[padding]).view(2, 9)


def assert_rows_as_alone(model: Any, actual: Tensor, mask: Tensor) -> None:
    for row in range(len(mask)):
        real = mask[row].bool()
        assert_close(actual[row, real], logits(model, IDS[row : row + 1, real])[0], model)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32], ids=str)
def test_padded_rows_equal_rows_alone(model: Any, dtype: torch.dtype) -> None:
    mask = mask_of("inside").to(dtype)
    assert_rows_as_alone(model, logits(model, IDS, attention_mask=mask), mask)


@pytest.mark.parametrize(
    ("padding", "pieces"),
    [
        *(("everywhere", pieces) for pieces in ([9], [4, 5], [3, 1, 1, 4], [1] * 9)),
        *((padding, [3, 1, 1, 4]) for padding in ("left", "right", "inside")),
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padded_rows_in_pieces_equal_rows_alone(model: Any, padding: str, pieces: list[int], cache: str) -> None:
    mask, done, parts = mask_of(padding), 0, []
    state = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=16)
    for piece in IDS.split(pieces, dim=1):
        done += piece.shape[1]
        parts.append(logits(model, piece, attention_mask=mask[:, :done], **{CACHE: state}))
    assert_rows_as_alone(model, torch.cat(parts, 1), mask)


@pytest.mark.parametrize("pieces", [[3, 1, 1, 4], [1] * 9], ids=str)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens_in_pieces_equal_tokens_at_once(model: Any, pieces: list[int], cache: str) -> None:
    state = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=16)
    parts = [logits(model, piece, **{CACHE: state}) for piece in IDS.split(pieces, dim=1)]
    assert_close(torch.cat(parts, 1), logits(model, IDS), model)


PACKED = {
    "cu_seqlens": {"cu_seqlens": BOUNDARIES},
    "cu_seqlens_int64": {"cu_seqlens": BOUNDARIES.long()},
    "cu_seq_lens_q": {"cu_seq_lens_q": BOUNDARIES},
    "cu_seq_lens_k": {"cu_seq_lens_k": BOUNDARIES},
    "cu_seq_lens": {"cu_seq_lens_q": BOUNDARIES, "cu_seq_lens_k": BOUNDARIES.clone()},
    "seq_idx": {"seq_idx": NUMBERS},
    "position_ids": {"position_ids": POSITIONS},
    "everything": {"cu_seq_lens_q": BOUNDARIES, "seq_idx": NUMBERS, "position_ids": POSITIONS},
    "a full mask too": {"cu_seqlens": BOUNDARIES, "attention_mask": ONES[:1]},
    "a full mask and positions": {"position_ids": POSITIONS, "attention_mask": ONES[:1]},
}


@pytest.mark.parametrize("packed", PACKED)
def test_packed_documents_equal_documents_alone(model: Any, packed: str) -> None:
    alone = torch.cat([logits(model, document) for document in ROW.split(LENGTHS, dim=1)], 1)
    assert_close(logits(model, ROW, use_cache=False, **PACKED[packed]), alone, model)


def test_packed_and_padded_is_obeyed_or_refused(model: Any) -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 0]])
    try:
        actual = logits(model, ROW, use_cache=False, cu_seqlens=BOUNDARIES, attention_mask=mask)
    except ValueError as error:
        assert "packed documents and padding in one batch" in str(error)  # noqa: PT017
        return
    documents = zip(ROW.split(LENGTHS, dim=1), mask.bool().split(LENGTHS, dim=1), strict=True)
    alone = [logits(model, document[real][None]) for document, real in documents]
    assert_close(actual[mask.bool()], torch.cat(alone, 1)[0], model)


def test_a_row_does_not_depend_on_other_rows(model: Any) -> None:
    other = torch.cat([ROW, tokens(1, 9, seed=1)])
    assert_close(logits(model, IDS)[0], logits(model, other)[0])
    assert_close(logits(model, IDS)[:1], logits(model, ROW))


def test_a_token_does_not_depend_on_later_ones(model: Any) -> None:
    later = torch.cat([IDS[:, :5], tokens(2, 4, seed=1)], 1)
    assert_close(logits(model, IDS)[:, :5], logits(model, later)[:, :5])


LABELS = tokens(2, 9, seed=1)


def test_labels_may_be_shifted_by_the_caller(model: Any) -> None:
    """Trainer does so where ranks share rows, and transformers' models hand these labels on to every layer."""
    expected = F.cross_entropy(logits(model, IDS).flatten(0, 1), LABELS.flatten())
    assert_close(model(IDS, labels=IDS, shift_labels=LABELS).loss.double(), expected)


@pytest.mark.parametrize("kind", ["swapped", "accelerated"])
def test_the_loss_of_transformers_keeps_its_arguments(kind: str) -> None:
    model, ignored = model_of_kind(kind), LABELS[0, 1].item()
    labels = LABELS.masked_fill(LABELS.eq(ignored), -100)
    assert_close(model(IDS, labels=LABELS, ignore_index=ignored).loss, model(IDS, labels=labels).loss)


BATCHES: dict[str, Callable[[], ForwardArguments]] = {
    "whole": dict,
    "padded": lambda: {"attention_mask": mask_of("left")},
    "packed": lambda: {"position_ids": POSITIONS.expand(2, -1).clone()},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_gradient(model: Any, batch: str, use_reentrant: bool) -> None:
    def gradients(model: Any) -> Iterator[tuple[str, Tensor]]:
        output = model.train()(IDS, use_cache=False, **BATCHES[batch]())
        output.logits[:, -1].logsumexp(-1).sum().backward()
        return ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)

    model, other = copy.deepcopy(model), copy.deepcopy(model)
    other.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    expected, actual = dict(gradients(model)), dict(gradients(other))
    assert expected.keys() == actual.keys() and expected
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, **FLOAT32, msg=name)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}, {"prefill_chunk_size": 2}],
    ids=str,
)
def test_generation_with_a_cache_equals_generation_without(model: Any, options: dict[str, Any]) -> None:
    mask, beams = mask_of("left"), {key: value for key, value in options.items() if key == "num_beams"}
    expected = greedy(model, IDS, attention_mask=mask, use_cache=False, **beams)
    assert torch.equal(greedy(model, IDS, attention_mask=mask, **options), expected)
    alone = greedy(model, IDS[1:, 3:], use_cache=False, **beams)
    assert torch.equal(expected[1:, 3:], alone)
