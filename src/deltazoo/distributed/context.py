"""Context parallelism: layers and models that compute on a piece of every sequence, and the pieces of a batch."""

import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.varlen import varlen_attn
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from deltazoo.generation.cache import cache_in
from deltazoo.layers import DeltaRuleAttention
from deltazoo.layers.sequences import SharedSequences
from deltazoo.ops import ContextParallel
from deltazoo.ops.context.exchange import all_tokens, exchanged, next_tokens
from deltazoo.ops.context.group import agreed_lengths, sum_over_ranks
from deltazoo.ops.fused import IGNORED

M = TypeVar("M", bound=nn.Module)

_SHARED_ATTENTION = "deltazoo_shared"
"""Name of `_attend_to_all_ranks` in a configuration of transformers."""
_QUERIES = 1024
"""Number of queries at a time under a mask, so that it stays small and no key after the last query is read."""
_GRID = 64
"""Divisor of the beginnings of pieces, if the batch is long enough: the tokens of a chunk of the operator."""
_PER_TOKEN = ("input_ids", "position_ids", "labels", "shift_labels", "attention_mask")


def context_parallel(model: M, ranks: DeviceMesh | ProcessGroup | ContextParallel | None) -> M:
    """The layer or model, changed in place so that several ranks share every sequence of its calls.

    Rank r gets its piece of the tokens, which follows the piece of rank r - 1, and the other arguments of the model:
    `cu_seqlens` are boundaries in the whole row, `position_ids` count the tokens of the whole row (by default they do),
    and a row whose `position_ids` start again is packed. Hidden states and logits are those of the piece. The results
    are exact: ranks exchange states (delta-rule layers), the last tokens before a piece (short convolutions), and
    pieces of all heads for a share of the heads of whole rows (softmax layers).

    `labels` are those of the piece; the last token of a piece predicts the first label of the next. `shift_labels`
    (token t predicts label t) take their place if they are given. The loss of a rank is its summed loss over the mean
    number of labels per rank. So the mean of the losses of all ranks is the loss of the whole rows, and the mean of
    their gradients is its gradient; DDP and FSDP take that mean, over data-parallel ranks too. With
    `num_items_in_batch` the summed loss is divided by that number.

    Every rank fills an empty `DynamicCache` with the states, keys and values of the whole rows. So the ranks can run
    all but the last token of a long prompt together, and after `context_parallel(model, None)` each of them, or one,
    generates from the cache. Accelerated models fill no cache.

    Args:
        model: a delta-rule layer or a model with some: our own, swapped or accelerated.
        ranks: a device mesh of one dimension, such as `mesh["cp"]`; or `ContextParallel` with further options; None:
            a rank has whole sequences again.

    Returns:
        The model.

    Raises:
        ValueError: there is no delta-rule layer; a mesh of several dimensions.
        NotImplementedError: a rule carries a state from token to token that ranks do not hand on.
    """
    context = ranks if ranks is None or isinstance(ranks, ContextParallel) else ContextParallel(ranks)
    parts = [part for part in model.modules() if isinstance(part, (DeltaRuleAttention, PreTrainedModel))]
    if not parts:
        raise ValueError(f"{type(model).__name__} has no delta-rule layer and is no model of transformers")
    alone = {x.spec.name for x in parts if isinstance(x, DeltaRuleAttention) and not x.shares_rows}
    if context is not None and alone:
        raise NotImplementedError(
            f"ranks cannot share rows (context parallelism) under the rule {', '.join(map(repr, sorted(alone)))}, "
            "which carries a further state from token to token: give whole rows to each rank (DDP or FSDP2), or take "
            "another rule"
        )
    for part in parts:
        if isinstance(part, DeltaRuleAttention):
            part.context = context
        else:
            _share(part, context)
    return model


def _share(model: Any, context: ContextParallel | None) -> None:
    """Set the context of a model of transformers, which reads `deltazoo_context` when it describes a batch."""
    model.deltazoo_context = context
    if context is not None and model.base_model is not model and _shift_labels not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_shift_labels, with_kwargs=True)
    if context is not None and model.base_model is model and _complete_cache not in model._forward_hooks.values():
        model.register_forward_hook(_complete_cache, with_kwargs=True)
    implementation = model.config._attn_implementation
    if context is not None and implementation != _SHARED_ATTENTION:
        ALL_ATTENTION_FUNCTIONS.register(_SHARED_ATTENTION, _attend_to_all_ranks)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_SHARED_ATTENTION, _no_mask)
        model.deltazoo_attention = implementation
        model.config._attn_implementation = _SHARED_ATTENTION
    elif context is None and implementation == _SHARED_ATTENTION:
        model.config._attn_implementation = model.deltazoo_attention


def _call_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass by name."""
    call = {**dict(zip(inspect.signature(type(model).forward).parameters, (model, *args), strict=False)), **kwargs}
    call.pop("self", None)
    return call


def _complete_cache(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Gather the keys and values of softmax layers into the cache; the forward hook of a base model."""
    context: ContextParallel | None = model.deltazoo_context
    cache = cache_in(_call_of(model, args, kwargs))
    if context is None or cache is None:
        return
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]
    if layers:
        context = agreed_lengths(context, layers[0].get_seq_length(), "cache")
    for layer in layers:
        for name in ("keys", "values"):
            piece = getattr(layer, name).detach().transpose(1, 2)
            setattr(layer, name, all_tokens(piece, context).transpose(1, 2))


def _shift_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments with labels shifted across pieces and counted on all ranks; the pre-hook of a model with a loss."""
    context: ContextParallel | None = model.deltazoo_context
    if context is None:
        return None
    call = _call_of(model, args, kwargs)
    shifted = call.get("shift_labels")
    given = call.get("labels") if shifted is None else shifted
    if given is None:
        return None
    if shifted is None:
        shifted = next_tokens(given, context, IGNORED)
    begins = None
    if getattr(model, "leaves_out_first_tokens", False):
        begins = _next_begins_document(context, given.shape[1], call.get("cu_seqlens"), call.get("position_ids"))
    if begins is not None:
        shifted = shifted.masked_fill(begins, IGNORED)
    call["labels"], call["shift_labels"] = given, shifted
    if call.get("num_items_in_batch") is None:
        counted = sum_over_ranks((shifted != IGNORED).sum(), context)
        call["num_items_in_batch"] = counted / context.size
    return (), call


def _next_begins_document(
    context: ContextParallel, num_tokens: int, cu_seqlens: Tensor | None, position_ids: Tensor | None
) -> Tensor | None:
    """Mask `[B or 1, T]` bool: the next token begins a packed sequence and is not predicted; None: unknown."""
    if cu_seqlens is not None:
        lengths = agreed_lengths(context, num_tokens, "labels").known_lengths
        begin = sum(lengths[: context.rank])
        following = torch.arange(begin + 1, begin + num_tokens + 1, device=cu_seqlens.device)
        return torch.isin(following, cu_seqlens)[None]
    if position_ids is not None:
        position_ids = position_ids[None] if position_ids.ndim == 1 else position_ids
        return next_tokens(position_ids, context, torch.iinfo(position_ids.dtype).max) <= position_ids
    return None


def local_batch(batch: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """This rank's contiguous piece of a batch that all ranks of a mesh hold.

    Labels are shifted before the cut, so that the last token of a piece predicts the first of the next.

    Args:
        batch: `input_ids`, `position_ids`, `labels`, `shift_labels` and `attention_mask` `[B, T]`, those that it has,
            are cut; everything else, such as global `cu_seqlens`, stays.
        mesh: a mesh of one dimension, such as `mesh["cp"]`.

    Raises:
        ValueError: fewer tokens than ranks.
    """
    return piece_of_batch(batch, mesh.get_local_rank(), mesh.size())


def piece_of_batch(batch: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """The result of `local_batch` on a given rank.

    Args:
        batch: see `local_batch`.
        rank: number of the piece.
        ranks: number of pieces.

    Raises:
        ValueError: fewer tokens than ranks.
    """
    local = dict(batch)
    if "labels" in local and "shift_labels" not in local:
        local["shift_labels"] = F.pad(local["labels"][:, 1:], (0, 1), value=IGNORED)
    begin, end = _piece_bounds(local["input_ids"].shape[1], rank, ranks)
    return {name: value[:, begin:end] if name in _PER_TOKEN else value for name, value in local.items()}


def _piece_bounds(tokens: int, rank: int, ranks: int) -> tuple[int, int]:
    """Begin and end of a rank's piece of `tokens` tokens, at least one; pieces differ by at most one grid cell."""
    if tokens < ranks:
        raise ValueError(f"{tokens} tokens cannot be divided among {ranks} ranks: every rank needs at least one")
    grid = _GRID if tokens >= _GRID * ranks else 1
    cells = -(-tokens // grid)
    return tuple(min(cells * r // ranks * grid, tokens) for r in (rank, rank + 1))  # type: ignore[return-value]


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """None, since the mask follows from the description of the batch."""


def _attend_to_all_ranks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    delta_batch: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of this rank's queries `[B, H, T, d]` to the keys of all ranks, an implementation for
    transformers: `[B, T, H, d]`, and None in place of the weights.

    The ranks exchange pieces of all heads for a share of the heads of whole rows, which each attends with as if alone
    (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509). With fewer heads than ranks some wait.

    Attention within a window, or with a mask or logits of its own kind, raises NotImplementedError.
    """
    sequences = None if delta_batch is None else delta_batch.sequences
    if not isinstance(sequences, SharedSequences):
        raise ValueError("the model around this layer was called without a description of the rows that ranks share")
    odd = [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]
    if odd or attention_mask is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError(
            "softmax layers of rows that several ranks share are causal and without a mask, got "
            f"{', '.join(odd) or 'a mask'}"
        )
    context, (kv_heads, ranks) = sequences.context, (key.shape[1], sequences.context.size)
    if kv_heads < ranks:
        key, value = (x.repeat_interleave(query.shape[1] // kv_heads, 1) for x in (key, value))
        kv_heads = key.shape[1]
    groups = query.shape[1] // kv_heads
    bounds = [kv_heads * rank // ranks for rank in range(ranks + 1)]
    query = _heads_of_whole_rows(query, [bound * groups for bound in bounds], context)
    key, value = (_heads_of_whole_rows(x, bounds, context) for x in (key, value))
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    output = _attend(query, key, value, sequences.cu_seqlens, dropout, scaling)
    pieces = output.split(context.known_lengths, 2)
    heads = [(end - begin) * groups for begin, end in pairwise(bounds)]
    shapes = [(output.shape[0], n, sequences.num_tokens, output.shape[3]) for n in heads]
    return torch.cat(exchanged(pieces, shapes, context), 1).transpose(1, 2).contiguous(), None


def _heads_of_whole_rows(x: Tensor, bounds: list[int], context: ContextParallel) -> Tensor:
    """This rank's heads `[B, H_r, T, d]` of whole rows, from all heads `[B, H, T_r, d]` of its piece.

    Rank r has the heads from `bounds[r]` to `bounds[r + 1]`.
    """
    heads = bounds[context.rank + 1] - bounds[context.rank]
    shapes = [(x.shape[0], heads, length, x.shape[3]) for length in context.known_lengths]
    return torch.cat(exchanged([x[:, begin:end] for begin, end in pairwise(bounds)], shapes, context), 2)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, dropout: float, scaling: float | None
) -> Tensor:
    """Causal attention `[B, H, T, d]` of whole rows, or within the sequences packed into one, of as many key heads."""
    if not query.shape[1]:  # fewer heads than ranks: gradients of nothing, so that their exchange begins here too
        return value + (query.sum() + key.sum())
    if cu_seqlens is None:
        return F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=True, scale=scaling)
    tokens = query.shape[2]
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.is_cuda and half and not dropout and query.shape[3] % 8 == 0 and query.shape[3] <= 256:
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
        bounds = cu_seqlens.int()
        output = varlen_attn(q, k, v, bounds, bounds, tokens, tokens, scale=scaling, window_size=(-1, 0))
        assert isinstance(output, Tensor)
        return output.transpose(0, 1)[None]
    outputs = []
    for begin in range(0, tokens, _QUERIES):
        end = min(begin + _QUERIES, tokens)
        mask = _visible(cu_seqlens, begin, end)
        keys, values = key[:, :, :end], value[:, :, :end]
        output = F.scaled_dot_product_attention(query[:, :, begin:end], keys, values, mask, dropout, scale=scaling)
        outputs.append(output)
    return torch.cat(outputs, 2)


def _visible(cu_seqlens: Tensor, begin: int, end: int) -> Tensor:
    """Mask `[end - begin, end]` bool of the tokens that each from `begin` attends to: of its sequence, up to itself."""
    tokens = torch.arange(end, device=cu_seqlens.device)
    queries = tokens[begin:, None]
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, queries, right=True) - 1]
    return (queries >= tokens) & (tokens >= starts)
