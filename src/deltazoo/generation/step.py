"""A decoding step of a model: its own forward pass, in which some modules compute otherwise, as one CUDA graph.

Blocks run fused where they can (`fused_blocks`), other linear maps of one input merged, and norms and MLPs of
transformers in our kernels (`step_modules`). The step works on a static cache (`static_cache`) and on input tensors
that stay where they are. A `Fingerprint` tells whether a step that was captured earlier (`capture`) still does what the
model would do.

Threads share a model's modules. So one of them at a time makes or runs a step of a model, and calls from others get the
modules' own forward passes meanwhile.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from deltazoo.generation.cache import CACHE
from deltazoo.generation.capture import capture
from deltazoo.generation.fused_blocks import fused_blocks
from deltazoo.generation.static_cache import FixedTensors
from deltazoo.generation.step_modules import library_modules, merged_products, replaced

__all__ = ["CapturedStep", "Fingerprint", "next_logits", "prepared_inputs"]

_UNCOMPARED = {*vars(nn.Module()), "forward", "_captured_steps"} - {"training"}
"""Attributes that every module may have. What of them matters to a captured step is compared separately, or keeps steps
from being captured (`deltazoo.generation.conditions`)."""
_locks: weakref.WeakKeyDictionary[nn.Module, AbstractContextManager[Any]] = weakref.WeakKeyDictionary()
_making_locks = threading.Lock()


def prepared_inputs(
    model: Any, tokens: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor | None, **options: Any
) -> dict[str, Any]:
    """Arguments of a forward pass that gives the last token's logits, as `model.generate` prepares them.

    Args:
        model: whose forward pass it is.
        tokens: `[B, T]`.
        cache: that they continue.
        mask: the argument `attention_mask`.
        positions: `[B, T]`, the argument `position_ids`.
        options: further ones of `prepare_inputs_for_generation`.
    """
    if model._supports_logits_to_keep():
        options["logits_to_keep"] = 1
    return model.prepare_inputs_for_generation(
        tokens, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: cache}, **options
    )


def next_logits(
    model: Any,
    tokens: Tensor,
    cache: Cache,
    visible: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """Logits `[N, vocabulary]` after one further token of each row.

    Args:
        model: whose step it is.
        tokens: `[N, 1]` int64. `NO_TOKEN` counts as token 0: a step behind it has begun before the host reads it.
        cache: of these rows.
        visible: `[N, columns]`, 1 for columns of softmax layers that the token of a row may attend to; None: as many as
            the cache has counted.
        positions: `[N, 1]` int64, of the tokens in their rows; None: as the model counts them.
    """
    inputs = prepared_inputs(model, tokens.clamp(min=0), cache, visible, positions)
    mask = inputs.get("attention_mask")
    if isinstance(mask, dict) and "linear_attention" in mask:  # of older versions; this token is real
        inputs["attention_mask"] = mask | {"linear_attention": None}
    return model(**inputs).logits[:, -1]


class CapturedStep:
    """A decoding step, captured once and replayed for every token.

    On a GPU it is a CUDA graph, without a reference to the model; elsewhere it is the function itself.

    Args:
        model: whose layers the step runs; in evaluation mode.
        step: runs the model over tensors that stay where they are, and never waits for the device.
        cache: the static cache that the step works on, after its first tokens.
        changed: the other tensors whose values the step changes and reads again.

    Attributes:
        cache_tensors: those of the cache, at their addresses.
        output: what the step returned; the next replay overwrites its tensors.

    Raises:
        RuntimeError: the step waits for the device, or memory runs out.
    """

    def __init__(
        self,
        model: Any,
        step: Callable[[], Any],
        cache: Cache,
        changed: Sequence[Tensor] = (),
    ) -> None:
        self.output: Any = None
        self.cache_tensors = FixedTensors(cache)
        changed = [*self.cache_tensors.changed, *changed]
        self._device_index = changed[0].get_device()  # -1 for the CPU, which `torch.cuda.device` leaves alone
        alone = _alone_with(model)
        with alone:
            self._products = products = merged_products(model)  # kept, as a graph reads the merged weights
            replacements = [x for product in products for x in product.replacements]
            replacements += [block.replacement for block in fused_blocks(model, products)]
            replacements += library_modules(model)

            def run() -> None:
                with alone, replaced(replacements):
                    self.output = step()

            self._replay = capture(run, changed)
            self._fingerprint = Fingerprint(model)

    def is_valid_for(self, model: Any) -> bool:
        """Whether a replay still does what the model would do now."""
        return self._fingerprint == Fingerprint(model)

    def replay(self) -> None:
        """Do the step once more."""
        with torch.cuda.device(self._device_index):  # a graph is replayed on the current device
            self._replay()


def _alone_with(model: nn.Module) -> AbstractContextManager[Any]:
    """A lock, one per model: held while its modules' forward passes are replaced, or are read to make a step."""
    with _making_locks:
        return _locks.setdefault(model, threading.RLock())


class Fingerprint:
    """What a captured step relies on: a model's modules, their settings and hooks, and the addresses of weights.

    `==` compares. Weights changed in place (training, `load_state_dict`, merged adapters) leave the fingerprint as it
    is: a graph reads them anew.
    """

    def __init__(self, model: Any) -> None:
        modules = list(model.modules())
        self._modules = [weakref.ref(module) for module in modules]
        # On a GPU experts run in another implementation than for prompts.
        with _alone_with(model), model._optimize_model_for_decode():
            self._rest = (
                [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in (*model.parameters(), *model.buffers())],
                [_settings(vars(module)) for module in modules],
                [(*x._forward_hooks, *x._forward_pre_hooks, id(vars(x).get("forward"))) for x in modules],
                _settings(vars(model.config)),
                torch.is_inference_mode_enabled(),
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint) or len(self._modules) != len(other._modules):
            return False
        pairs = zip(self._modules, other._modules, strict=True)
        return all(a() is b() is not None for a, b in pairs) and self._rest == other._rest

    __hash__ = None  # type: ignore[assignment]


def _settings(values: Any) -> Any:
    """The plain values in nested lists, dicts and dataclasses; the type of everything else."""
    if is_dataclass(values) and not isinstance(values, type | PreTrainedConfig):
        values = vars(values)
    # Copies, since other threads may add attributes meanwhile.
    if isinstance(values, dict):
        return {key: _settings(value) for key, value in values.copy().items() if key not in _UNCOMPARED}
    if isinstance(values, list | tuple | set):
        return [_settings(value) for value in list(values)]
    plain = isinstance(values, bool | int | float | str | torch.dtype | torch.device | None)
    return values if plain else type(values)
