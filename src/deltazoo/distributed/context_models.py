"""One sequence over several ranks: layers and models that compute on a piece of its tokens."""

import inspect
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import PreTrainedModel

from deltazoo.distributed.shared_attention import SHARED_ATTENTION, register_shared_attention
from deltazoo.generation.cache_argument import cache_in
from deltazoo.layers import DeltaRuleAttention
from deltazoo.ops import ContextParallel
from deltazoo.ops.context.context_group import agreed_lengths, sum_over_ranks
from deltazoo.ops.context.token_exchange import all_tokens, next_tokens
from deltazoo.ops.fused.linear_cross_entropy import IGNORED

__all__ = ["context_parallel"]

M = TypeVar("M", bound=nn.Module)


def context_parallel(model: M, ranks: DeviceMesh | ProcessGroup | ContextParallel | None) -> M:
    """Let several ranks share every sequence that a layer or model is called with; changed in place.

    Rank r is called with its piece of the tokens, those after rank r - 1's, and with whatever else the model takes:
    `cu_seqlens` are boundaries in the whole row, `position_ids` count the tokens of the whole row (by default they do),
    and a row whose `position_ids` start again is packed. Hidden states and logits are those of the piece. Exact: what
    the pieces need of each other travels as states (delta-rule layers), as the last tokens before the piece (short
    convolutions) and as keys and values (softmax layers).

    `labels` are those of the piece; the last token of a piece predicts the first label of the next one. `shift_labels`
    (token t predicts label t) take their place if they are given. The loss of a rank is its summed loss over the mean
    number of labels that a rank has. So the mean of the losses of all ranks is the loss of the whole rows, and the mean
    of their gradients is its gradient, which is what DDP and FSDP take over data-parallel ranks too. With
    `num_items_in_batch` the summed loss is divided by that.

    An empty `DynamicCache` that the model is given is filled on every rank with what the whole rows leave there. So the
    ranks run a long prompt but for its last token together, and after `context_parallel(model, None)` each of them, or
    one, generates from the cache. Not in accelerated models.

    Args:
        model: a delta-rule layer or a model with some: our own, swapped or accelerated.
        ranks: a device mesh of one dimension, such as `mesh["cp"]`; or `ContextParallel` with further options; None:
            a rank has whole sequences again.

    Returns:
        The model.

    Raises:
        ValueError: there is no delta-rule layer; a mesh of several dimensions.
    """
    context = ranks if ranks is None or isinstance(ranks, ContextParallel) else ContextParallel(ranks)
    parts = [part for part in model.modules() if isinstance(part, (DeltaRuleAttention, PreTrainedModel))]
    if not parts:
        raise ValueError(f"{type(model).__name__} has no delta-rule layer and is no model of transformers")
    for part in parts:
        if isinstance(part, DeltaRuleAttention):
            part.context = context
        else:
            _share(part, context)
    return model


def _share(model: Any, context: ContextParallel | None) -> None:
    """Tell a model of transformers, which reads `deltazoo_context` where it describes a batch."""
    model.deltazoo_context = context
    if context is not None and model.base_model is not model and _shift_labels not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_shift_labels, with_kwargs=True)
    if context is not None and model.base_model is model and _complete_cache not in model._forward_hooks.values():
        model.register_forward_hook(_complete_cache, with_kwargs=True)
    implementation = model.config._attn_implementation
    if context is not None and implementation != SHARED_ATTENTION:
        register_shared_attention()
        model.deltazoo_attention = implementation
        model.config._attn_implementation = SHARED_ATTENTION
    elif context is None and implementation == SHARED_ATTENTION:
        model.config._attn_implementation = model.deltazoo_attention


def _call_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass by name."""
    call = {**dict(zip(inspect.signature(type(model).forward).parameters, (model, *args), strict=False)), **kwargs}
    call.pop("self", None)
    return call


def _complete_cache(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of a base model: gather the keys and values of softmax layers; the other layers have all."""
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
    """Forward pre-hook of a model with a loss: shift labels across pieces, and count those of all ranks."""
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
    """`[B or 1, T]` bool: whether the next token begins a packed sequence, which is not predicted; None: unknown."""
    if cu_seqlens is not None:
        lengths = agreed_lengths(context, num_tokens, "labels").known_lengths
        begin = sum(lengths[: context.rank])
        following = torch.arange(begin + 1, begin + num_tokens + 1, device=cu_seqlens.device)
        return torch.isin(following, cu_seqlens)[None]
    if position_ids is not None:
        position_ids = position_ids[None] if position_ids.ndim == 1 else position_ids
        return next_tokens(position_ids, context, torch.iinfo(position_ids.dtype).max) <= position_ids
    return None
