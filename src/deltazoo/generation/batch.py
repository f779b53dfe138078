"""The description of a batch for the layers of a model, made from the arguments of the model's forward pass.

transformers users say where documents begin in five ways: an `attention_mask`, `cu_seqlens`, FlashAttention's
`cu_seq_lens_q`, `seq_idx`, or `position_ids` that start again. All of them become one description, made once per
forward pass for own, swapped and accelerated models alike. Two that disagree are refused, since a layer that follows
the wrong one leaks state from one document into the next.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deltazoo.generation.capture import graphs_run_on
from deltazoo.layers.sequences import (
    PackedSequences,
    Sequences,
    SharedSequences,
    check_cu_seqlens,
    check_zeros_and_ones,
    describe_sequences,
    describe_shared,
    readable,
    zeros_and_ones,
)
from deltazoo.names import unknown
from deltazoo.ops import ContextParallel
from deltazoo.ops.context.exchange import all_tokens
from deltazoo.ops.validation import check_tensor

PACKING_ARGUMENTS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""The arguments of `describe_batch`, and of a model's forward pass, that only say where documents begin."""

LAYER_TYPES = ("linear_attention", "full_attention")
"""The layer types of our models, by which ready masks are named."""

_NO_CACHE = "packed documents cannot fill or continue a cache: run them without past_key_values"
_DIVIDED = "packed documents may have padding before and behind them, not inside"


@dataclass(frozen=True)
class BatchDescription:
    """The description of a batch that the layers of a model need besides its tokens."""

    sequences: Sequences
    """The description that linear layers take."""
    position_ids: Tensor
    """`[B or 1, T]` int64: position of each token in its sequence, for rotary embeddings."""
    attention_mask: Tensor | Mapping[str, Tensor | None] | None
    """The source of the mask of softmax layers: `[B, past + T]`, ready masks by layer type, or None."""

    @property
    def packed(self) -> bool:
        """Whether rows hold several documents."""
        return isinstance(self.sequences, PackedSequences)

    @property
    def shared(self) -> bool:
        """Whether other ranks have further tokens of the rows."""
        return isinstance(self.sequences, SharedSequences)

    @property
    def beyond_one_row(self) -> bool:
        """Whether a row is not one whole document: it holds several, or other ranks have more of it."""
        several = isinstance(self.sequences, PackedSequences) and self.sequences.beyond_one_row
        return several or self.shared

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "BatchDescription":
        """The description on another device; accelerate asks for it if a model's layers are on several."""

        given = (self.position_ids, self.attention_mask)
        moved = tree_map_only(Tensor, lambda x: x.to(device, non_blocking=non_blocking), given)
        return BatchDescription(self.sequences.to(device, non_blocking), *moved)


def describe_batch(
    batch_size: int,
    num_tokens: int,
    past_length: int | Tensor,
    device: torch.device,
    *,
    attention_mask: Tensor | Mapping[str, Tensor | None] | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
    fills_cache: bool = False,
) -> BatchDescription:
    """The description of a batch from all arguments of a model's caller.

    Args:
        batch_size, num_tokens: B and T of the current tokens.
        past_length: number of tokens in the cache; a tensor if the cache counts on the device.
        device: device of the current tokens.
        attention_mask: `[B, past + T]` with 1 = real token, or the masks by layer type that `generate` prepares.
        position_ids: `[B, T]` or `[1, T]`; a value not above the one before it begins a new document.
        cu_seqlens: `[N + 1]` boundaries of packed documents, with B = 1.
        cu_seq_lens_q, cu_seq_lens_k: boundaries under FlashAttention's names.
        seq_idx: `[B, T]`, a number per document.
        fills_cache: whether the tokens go into a cache, which packed documents cannot.

    Raises:
        ValueError: no rows or no tokens; a description has the wrong shape, or two contradict each other; packed
            documents and a cache, or with padding inside one. Compiled code reads no values: there such padding, and
            packed documents that only `position_ids` show with a cache, raise RuntimeError.
    """
    shape = (batch_size, num_tokens)
    refuse_empty(shape)
    attention_mask = whole_numbers(attention_mask)
    mask = current_padding(attention_mask, shape, past_length)
    cu_seqlens = _one_cu_seqlens(cu_seqlens, cu_seq_lens_q, cu_seq_lens_k)
    position_ids = checked_position_ids(position_ids, shape)

    # Ready masks of a model without linear layers do not show the padding, whose positions may look like restarts.
    padding_known = not isinstance(attention_mask, Mapping) or "linear_attention" in attention_mask
    telling = position_ids if padding_known else None
    explicit = document_starts(shape, {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx})
    starts = _all_starts(shape, mask, telling, explicit, fills_cache)
    if starts is not None and fills_cache:
        raise ValueError(_NO_CACHE)
    if starts is None:
        if position_ids is None:
            position_ids = row_positions(attention_mask, num_tokens, past_length, device)
        sequences = describe_sequences(batch_size, num_tokens, attention_mask=mask)
        return BatchDescription(sequences, position_ids, attention_mask)

    if cu_seqlens is None or mask is not None:
        packed = PackedSequences.from_starts(starts)
    else:
        packed = PackedSequences.from_cu_seqlens(cu_seqlens, num_tokens)
    if torch.is_grad_enabled() and graphs_run_on(device) and not torch.compiler.is_compiling():
        packed = packed.padded()  # also without capture: tiles depend on the number of sequences
    return BatchDescription(packed, packed.positions if position_ids is None else position_ids, None)


def describe_shared_batch(
    context: ContextParallel,
    batch_size: int,
    num_tokens: int,
    device: torch.device,
    *,
    attention_mask: Tensor | Mapping[str, Tensor | None] | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
    fills_cache: bool = False,
    wrong_cache: str | None = None,
) -> BatchDescription:
    """The description of a piece of rows that several ranks share; see `describe_batch` for arguments and errors.

    B, T and `position_ids` are those of this rank's piece, boundaries those of the whole row. Errors are raised on
    every rank; `wrong_cache` is the reason why the cache cannot be filled.
    """

    def check() -> None:
        mask = whole_numbers(attention_mask)
        if isinstance(mask, Mapping) or (mask is not None and not _checked_tokens(mask)[1]):
            raise ValueError("rows that several ranks share take no padding: pack them with cu_seqlens")
        if seq_idx is not None:
            raise ValueError("rows that several ranks share take cu_seqlens in place of seq_idx")
        if wrong_cache is not None:
            raise ValueError(wrong_cache)
        checked_position_ids(position_ids, (batch_size, num_tokens))

    cu_seqlens = _one_cu_seqlens(cu_seqlens, cu_seq_lens_q, cu_seq_lens_k)
    sequences = describe_shared(context, batch_size, num_tokens, cu_seqlens, check, fills_cache=fills_cache)
    position_ids = checked_position_ids(position_ids, (batch_size, num_tokens))
    if position_ids is not None and cu_seqlens is None:
        starts = _starts_from_positions(all_tokens(position_ids, sequences.context), None)
        if bool(starts[:, 1:].any()):
            if fills_cache:
                raise ValueError(_NO_CACHE)
            if batch_size > 1:
                raise ValueError(
                    f"packed sequences that several ranks share need batch size 1, got position_ids that start again "
                    f"in a batch of {batch_size} rows"
                )
            sequences = replace(sequences, cu_seqlens=PackedSequences.from_starts(starts).cu_seqlens)
    if position_ids is None:
        position_ids = sequences.positions
    if position_ids is None:
        position_ids = torch.arange(sequences.begin, sequences.begin + num_tokens, device=device)[None]
    return BatchDescription(sequences, position_ids, None)


def refuse_empty(shape: tuple[int, int]) -> None:
    """Raise ValueError for a batch of no rows or no tokens, which the softmax layers of transformers cannot compute."""
    if shape[0] == 0 or shape[1] == 0:
        raise ValueError(f"expected at least one row and one token per row, got input of shape {shape}")


def refuse_padding_at_the_end(mask: Tensor) -> None:
    """Raise ValueError for a prompt's mask `[B, T]` that ends in padding, after which the next token would be drawn."""
    if not bool(mask[:, -1].all()):
        raise ValueError("attention_mask must end with real tokens: pad prompts on the left")


def document_starts(shape: tuple[int, int], given: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Masks `[B, T]` bool of the first tokens of documents, one by each argument that only says where they begin.

    Args:
        shape: B and T.
        given: arguments by name: `seq_idx` `[B, T]`, a number per document, or boundaries `[N + 1]`, which need B = 1.
            None is skipped.
    """
    found = {}
    for name, argument in given.items():
        check_tensor(name, argument)
        if argument is None:
            continue
        if name != "seq_idx":
            check_cu_seqlens(argument, *shape)
            argument = PackedSequences.from_cu_seqlens(argument, shape[1]).index[None]
        elif argument.shape != shape:
            raise ValueError(f"seq_idx must have shape {shape}, got {tuple(argument.shape)}")
        found[name] = _after_first(argument[:, 1:] != argument[:, :-1])
    return found


def agreeing_starts(found: Mapping[str, Tensor], *, check: bool) -> Tensor:
    """The starts `[B, T]` that several arguments give, by name; with `check`, ValueError if two differ."""
    (name, starts), *others = found.items()
    for other_name, other in others:
        if check and not torch.equal(starts, other):
            row, token = (starts != other).nonzero()[0].tolist()
            advice = ": position_ids must start again with every document, or be left out"
            raise ValueError(
                f"{name} and {other_name} place the documents differently, first at row {row}, token {token}"
                f"{advice if other_name == 'position_ids' else ''}"
            )
    return starts


def positions_in_documents(starts: Tensor) -> Tensor:
    """Positions `[B, T]` int64, from 0 in every document, computed from a mask `[B, T]` bool of first tokens."""
    tokens = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    return tokens - torch.where(starts, tokens, 0).cummax(1).values


def whole_numbers(
    attention_mask: Tensor | Mapping[str, Tensor | None] | None, layer_types: Collection[str] = LAYER_TYPES
) -> Tensor | Mapping[str, Tensor | None] | None:
    """The mask as whole numbers, or ready masks with such a mask for linear layers."""
    if not isinstance(attention_mask, Mapping):
        check_tensor("attention_mask", attention_mask)
        return _without_fractions(attention_mask)
    for layer_type, mask in attention_mask.items():
        if layer_type not in layer_types:
            raise ValueError(f"attention_mask: {unknown('layer type', layer_type, layer_types)}")
        check_tensor(f"attention_mask[{layer_type!r}]", mask)
    if "linear_attention" not in attention_mask:
        return attention_mask
    return {**attention_mask, "linear_attention": _without_fractions(attention_mask["linear_attention"])}


def _without_fractions(attention_mask: Tensor | None) -> Tensor | None:
    """The mask as whole numbers. PEFT's prompt tuning writes ones as floats; other floats may be additive masks."""
    if attention_mask is None or not attention_mask.is_floating_point() or attention_mask.ndim != 2:
        return attention_mask
    real = attention_mask == 1
    if torch.compiler.is_compiling() or not bool((real | (attention_mask == 0)).all() & real.any()):
        raise ValueError(
            f"attention_mask must be bool or integer with 1 = real token, got {attention_mask.dtype}, which is taken "
            "only if it holds ones and zeros, and not in compiled code"
        )
    return real


def current_padding(
    attention_mask: Tensor | Mapping[str, Tensor | None] | None,
    shape: tuple[int, int],
    past_length: int | Tensor | None,
) -> Tensor | None:
    """The mask `[B, T]` bool of the current tokens, True = real, or None if all are known to be real.

    Args:
        attention_mask: result of `whole_numbers`.
        shape: B and T of the current tokens.
        past_length: number of tokens in the cache; None if it is unknown.

    Raises:
        ValueError: a mask of another shape, over pairs of tokens, or with other values than 0 and 1.
    """
    if isinstance(attention_mask, Mapping):
        mask = attention_mask.get("linear_attention")
        return None if mask is None else zeros_and_ones(mask[:, -shape[1] :])
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask must have 2 dimensions [batch, tokens] with 1 = real token, got shape "
            f"{tuple(attention_mask.shape)}; a linear layer cannot follow a mask over pairs of tokens"
        )
    if isinstance(past_length, Tensor):
        past_length = int(past_length) if readable(past_length) else None
    total = attention_mask.shape[1] if past_length is None else past_length + shape[1]
    if attention_mask.shape != (shape[0], total) or total < shape[1]:
        counted = "" if past_length is None else f": {past_length} tokens in the cache and {shape[1]} new ones"
        expected = (shape[0], max(total, shape[1]))
        raise ValueError(f"attention_mask must have shape {expected}{counted}, got {tuple(attention_mask.shape)}")
    if torch.compiler.is_compiling():
        return attention_mask[:, -shape[1] :].bool()
    mask, all_real = _checked_tokens(attention_mask, shape[1])
    return None if all_real else mask


def _checked_tokens(attention_mask: Tensor, num_tokens: int | None = None) -> tuple[Tensor, bool]:
    """The last columns of a mask `[B, past + T]` as bool, and whether all of them are real.

    Reading the mask waits for the device once per forward pass and saves every layer the work of padding.
    """
    current = attention_mask[:, -(num_tokens or attention_mask.shape[1]) :]
    if attention_mask.dtype == torch.bool or not attention_mask.numel():
        return current.bool(), bool(current.all())
    least, most, least_now = torch.stack([*attention_mask.aminmax(), current.amin()]).tolist()
    check_zeros_and_ones(least, most)
    return current.bool(), least_now == 1


def _one_cu_seqlens(*candidates: Tensor | None) -> Tensor | None:
    """The boundaries that several arguments agree on; None without any."""
    for candidate in candidates:
        check_tensor("cu_seqlens", candidate)
    given = [candidate for candidate in candidates if candidate is not None]
    for other in given[1:]:
        if other is not given[0] and readable(other) and not torch.equal(other, given[0]):
            raise ValueError(
                f"cu_seqlens, cu_seq_lens_q and cu_seq_lens_k must agree, got {given[0].tolist()} and {other.tolist()}"
            )
    return given[0] if given else None


def checked_position_ids(position_ids: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Positions `[B, T]` or `[1, T]`, also from `[T]`; ValueError unless they fit B rows of T tokens."""
    check_tensor("position_ids", position_ids)
    if position_ids is None:
        return None
    if position_ids.ndim == 1:
        position_ids = position_ids[None]
    if position_ids.shape not in (shape, (1, shape[1])):
        rows = f"{shape}" if shape[0] == 1 else f"{shape} or {(1, shape[1])}"
        raise ValueError(f"position_ids must have shape {rows}, got {tuple(position_ids.shape)}")
    return position_ids


def _all_starts(
    shape: tuple[int, int],
    mask: Tensor | None,
    position_ids: Tensor | None,
    explicit: Mapping[str, Tensor],
    fills_cache: bool,
) -> Tensor | None:
    """Mask `[B, T]` bool of first tokens of documents, by explicit arguments and positions; None unless packed."""
    found = dict(explicit)
    if position_ids is not None and shape[1] > 1 and (not found or readable(position_ids)):
        restarts = _starts_from_positions(position_ids.expand(shape), mask)
        if not found and fills_cache and torch.compiler.is_compiling():
            # `generate` sends positions with every prompt; a branch on them would need a graph of its own.
            torch._assert_async(~restarts[:, 1:].any(), _NO_CACHE)
        elif found or bool(restarts[:, 1:].any()):
            found["position_ids"] = restarts
    if not found:
        return None
    if mask is not None:
        found = {name: _separate_padding(starts, mask) for name, starts in found.items()}
    return agreeing_starts(found, check=readable(next(iter(found.values()))))


def _after_first(starts: Tensor) -> Tensor:
    """Mask `[B, T]` bool of first tokens from `[B, T - 1]`: the first token of a row begins a document."""
    return F.pad(starts, (1, 0), value=True)


def _starts_from_positions(position_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Mask of first tokens: real tokens whose position is not above that of the real token before."""
    if mask is None:
        return _after_first(position_ids[:, 1:] <= position_ids[:, :-1])
    tokens = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    last = torch.where(mask, tokens, -1).cummax(1).values[:, :-1]  # the real token before each, or -1
    before = torch.where(last >= 0, position_ids.gather(1, last.clamp(min=0)), -1)
    return _after_first((position_ids[:, 1:] <= before) & mask[:, 1:])


def _separate_padding(starts: Tensor, mask: Tensor) -> Tensor:
    """Make every padded token a document of its own, and a document's first real token its start.

    Raises:
        ValueError: padding between two real tokens of a document (RuntimeError in compiled code).
    """
    document = starts.cumsum(1)
    real_before = torch.where(mask, document, 0).cummax(1).values[:, :-1]
    divided = mask[:, 1:] & ~mask[:, :-1] & (document[:, 1:] == real_before)
    if torch.compiler.is_compiling():
        torch._assert_async(~divided.any(), _DIVIDED)
    elif bool(divided.any()):
        row, token = divided.nonzero()[0].tolist()
        raise ValueError(f"{_DIVIDED}, got it before token {token + 1} of row {row}: leave the padded tokens out")
    return ~mask | _after_first(document[:, 1:] > real_before)


def row_positions(
    attention_mask: Tensor | Mapping[str, Tensor | None] | None,
    num_tokens: int,
    past_length: int | Tensor,
    device: torch.device,
) -> Tensor:
    """Positions that count real tokens if a mask tells them apart, otherwise all tokens."""
    if isinstance(attention_mask, Tensor):
        return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -num_tokens:]
    return (torch.arange(num_tokens, device=device) + past_length)[None]
