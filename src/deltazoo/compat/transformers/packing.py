"""Padding and packed documents for accelerated layers, from the arguments of the base model's forward pass.

transformers shows its softmax layers where documents begin by `position_ids` that start again, and its delta-rule
layers by other arguments, or not at all. A hook describes documents to both, from the caller's arguments. The layers
get each token's position in its document. A document's first token makes the layer forget the state before it, so
packed rows run as unpacked ones do, in any batch size.

transformers gives delta-rule layers a padding mask, but not for single tokens, and in older versions only for the first
tokens of a sequence. The hook reads the mask of the caller.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from deltazoo.generation.batch import (
    PACKING_ARGUMENTS,
    BatchDescription,
    agreeing_starts,
    checked_position_ids,
    current_padding,
    describe_shared_batch,
    document_starts,
    positions_in_documents,
    refuse_empty,
    row_positions,
    whole_numbers,
)
from deltazoo.generation.cache import CACHE, cache_in, check_cache
from deltazoo.layers.sequences import describe_sequences
from deltazoo.models.forward_arguments import ROW_HEAD, refuse_several_documents
from deltazoo.ops import ContextParallel
from deltazoo.ops.validation import check_tensor

FORWARD_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", CACHE, "inputs_embeds", "use_cache")
"""The first arguments of every base model's forward, in order."""
POSITIONS = "deltazoo_positions"
"""The argument by which layers get each token's position in its document, `[B, T]` from 0."""
SHARED_BATCH = "delta_batch"
"""The argument by which layers get the description of padding, or of rows that several ranks share."""
_SPARSE_LAYER_TYPES = {"indexed_attention", "qwen_sparse_attention", "deepseek_sparse_attention"}
"""Softmax layers that choose among pooled tokens: one name since transformers 5.18, one per family before."""


def describe_documents(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward pre-hook of a base model, which describes padding and packed documents to all layers.

    Padding is given by `attention_mask`, `[B, past + T]`. Documents are given by `cu_seqlens` or `cu_seq_lens_q` (one
    row), by `seq_idx`, or by `position_ids` that do not rise by one, which is how transformers' softmax layers find
    them. A packed batch fills no cache.

    Raises:
        ValueError: no rows or no tokens; a mask that is not about padding; two descriptions
            contradict each other, or packing meets padding or a cache.
        NotImplementedError: other layers of this model would mix the documents.
    """
    row_head = kwargs.pop(ROW_HEAD, None)
    call = {**dict(zip(FORWARD_ARGUMENTS, args, strict=False)), **kwargs}
    tokens = call.get("input_ids") if call.get("inputs_embeds") is None else call["inputs_embeds"]
    if tokens is None:
        return None  # the model itself raises
    if call.get(SHARED_BATCH) is not None:
        return None  # the batch is described already
    check_tensor("input_ids", tokens)
    shape = (tokens.shape[0], tokens.shape[1])
    check_tensor("position_ids", call.get("position_ids"))
    context = getattr(model, "deltazoo_context", None)
    if context is not None:
        refuse_several_documents(row_head)
        return (), _with_shared_batch(model, call, context, shape, tokens.device)
    refuse_empty(shape)
    mask = _read_mask(model, call, shape)
    if shape[1] == 1 and not has_explicit_packing(call):
        return (), _with_padding(call, mask, shape, tokens.device)  # a decoding step
    positions = _text_positions(call.get("position_ids"), shape)
    found = document_starts(shape, {name: call.get(name) for name in PACKING_ARGUMENTS})
    if found:
        starts: Tensor | None = _starts_by_all(found, positions, call.get("position_ids"))
    else:
        starts = _starts_by_positions(model, call, positions, mask)
    if starts is None:
        return (), _with_padding(call, mask, shape, tokens.device)
    if row_head is not None and (torch.compiler.is_compiling() or bool(starts[:, 1:].any())):
        refuse_several_documents(row_head)
    _check_layers(model)
    if mask is not None:
        raise ValueError("packed documents and padding in one batch: pass no attention_mask, and no padding")
    if isinstance(call["attention_mask"], Tensor):
        call["attention_mask"] = None  # a mask of ones would keep softmax layers from looking for documents
    if cache_in(call) is not None or call.get("use_cache"):
        raise ValueError(
            "a packed batch cannot fill or continue a cache: pass use_cache=False and no cache, "
            "or run the documents as rows of a batch"
        )
    call["use_cache"] = False
    call[POSITIONS] = positions_in_documents(starts)
    if call.get("position_ids") is None:
        call["position_ids"] = call[POSITIONS]
    call.pop("cu_seqlens", None)  # softmax layers do not know this name
    return (), call


def _with_shared_batch(
    model: nn.Module, call: dict[str, Any], context: ContextParallel, shape: tuple[int, int], device: torch.device
) -> dict[str, Any]:
    """The arguments with a description of this rank's piece of rows that several ranks share."""
    given = {name: call.pop(name, None) for name in ("attention_mask", *PACKING_ARGUMENTS)}
    positions = _text_positions(call.get("position_ids"), shape)
    wrong = None if cache_in(call) is None else "accelerated models fill no cache on several ranks"
    batch = describe_shared_batch(context, *shape, device, position_ids=positions, wrong_cache=wrong, **given)
    if batch.sequences.positions is not None:
        _check_layers(model)
    return call | {"attention_mask": None, "position_ids": batch.position_ids, "use_cache": False, SHARED_BATCH: batch}


def has_explicit_packing(arguments: Mapping[str, Any]) -> bool:
    """Whether one of `PACKING_ARGUMENTS` is given."""
    return any(arguments.get(name) is not None for name in PACKING_ARGUMENTS)


def _read_mask(model: nn.Module, call: dict[str, Any], shape: tuple[int, int]) -> Tensor | None:
    """The mask `[B, T]` bool, True = real, or None without padding; the mask in `call` is changed to whole numbers."""
    config: Any = model.config
    layer_types = {"linear_attention", *config.layer_types}
    call["attention_mask"] = attention_mask = whole_numbers(call.get("attention_mask"), layer_types)
    if isinstance(attention_mask, Mapping) and shape[1] == 1:
        return None  # `generate` has prepared the mask, and its single tokens are real
    if cache_in(call) is not None:
        check_cache(cache_in(call), len(config.layer_types))
    mask = current_padding(attention_mask, shape, _num_tokens(cache_in(call)))
    if mask is None or (isinstance(attention_mask, Mapping) and not torch.compiler.is_compiling() and bool(mask.all())):
        return None
    return mask


def _num_tokens(cache: Any) -> int | Tensor | None:
    """Number of tokens in a cache; None if no layer counts them."""
    if cache is None or not cache.layers:
        return 0
    return cache.get_seq_length() if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) else None


def _with_padding(
    call: dict[str, Any], mask: Tensor | None, shape: tuple[int, int], device: torch.device
) -> dict[str, Any]:
    """The arguments of an unpacked batch with a description of the padding.

    Positions count on from a row's first real token, so that padding inside a row turns no keys further.
    """
    attention_mask = call["attention_mask"]
    if attention_mask is None or (mask is None and isinstance(attention_mask, Mapping)):
        return call
    if call.get("position_ids") is None:
        positions = row_positions(attention_mask, shape[1], _num_tokens(cache_in(call)) or 0, device)
        if isinstance(attention_mask, Tensor):
            positions = positions + attention_mask.int().argmax(1, keepdim=True)
        call["position_ids"] = positions
    sequences = describe_sequences(*shape, attention_mask=mask)
    return call | {SHARED_BATCH: BatchDescription(sequences, call["position_ids"], attention_mask)}


def _text_positions(position_ids: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Positions `[B, T]` of text; None if there are none, or those of pictures alone (rows of time, height, width)."""
    if position_ids is None or (position_ids.ndim == 3 and position_ids.shape[0] == 3):
        return None
    positions = checked_position_ids(position_ids[0] if position_ids.ndim == 3 else position_ids, shape)
    return None if positions is None else positions.expand(shape)


def _starts_by_all(found: Mapping[str, Tensor], positions: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """Mask `[B, T]` bool of first tokens by the explicit arguments, checked against positions if there are any."""
    if position_ids is not None and positions is None:
        raise ValueError(
            "packed documents need the text positions as the first of four rows of position_ids, got three rows "
            f"{tuple(position_ids.shape)}: softmax layers would not separate the documents"
        )
    if positions is not None:
        found = {**found, "position_ids": _begins_where_positions_jump(positions)}
    return agreeing_starts(found, check=not torch.compiler.is_compiling())


def _begins_where_positions_jump(positions: Tensor) -> Tensor:
    """Mask `[B, T]` bool of tokens whose position does not rise by one, with which documents begin in transformers."""
    return torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True)


def _starts_by_positions(
    model: nn.Module, call: Mapping[str, Any], positions: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """Mask `[B, T]` bool of first tokens by positions alone; None if the batch is not packed."""
    if positions is None:
        return None
    starts = _begins_where_positions_jump(positions)
    if torch.compiler.is_compiling():
        # Values cannot be read. transformers' softmax layers, too, look for documents only if the other arguments mean
        # packing, and then do so whatever the values.
        asked: Any = call.get("use_cache")
        fills_cache = model.config.use_cache if asked is None else asked  # type: ignore[union-attr]
        return None if mask is not None or fills_cache or cache_in(call) is not None else starts
    if mask is not None or cache_in(call) is not None:
        restarts = positions.diff(dim=1) <= 0
        if mask is not None:
            restarts = restarts & mask[:, 1:] & mask[:, :-1]
        if bool(restarts.any()):
            other = "a cache" if mask is None else "padding"
            raise ValueError(
                f"position_ids start again inside a row, which packs documents, and there is {other}: transformers' "
                "softmax layers do not separate documents then. Pass neither attention_mask nor a cache"
            )
        return None
    return starts if bool(starts[:, 1:].any()) else None


def layers_over_neighbours(config: Any) -> str | None:
    """Name of the layers, besides the linear ones, that compute from neighbouring tokens; None if there are none."""
    if _SPARSE_LAYER_TYPES.intersection(config.layer_types):
        return "sparse softmax layers, which pool neighbouring tokens,"
    return "n-gram layers" if getattr(config, "ple_layer_ids", None) else None


def _check_layers(model: nn.Module) -> None:
    layers = layers_over_neighbours(model.config)
    if layers is None:
        return
    raise NotImplementedError(
        f"{type(model).__name__} cannot take packed documents: its {layers} would mix them; pass them as padded rows"
    )
