"""A decoding step of a model: its own forward pass, in which some modules compute otherwise, as one CUDA graph.

Blocks run fused where they can (`fused_blocks`); other linear maps of one input are merged, and our kernels compute
norms and MLPs of transformers (`step_modules`). The step works on a static cache (`static_cache`) and on input tensors
at fixed addresses. A `Fingerprint` tells whether a step that was captured earlier (`capture`) still computes what the
model would.

Threads share a model's modules. So one thread at a time makes or runs a step of a model (`ModelSteps`), and calls from
others meanwhile run the modules' own forward passes.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
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

_UNCOMPARED = {*vars(nn.Module()), "forward"} - {"training"}
"""Attributes that every module may have. Those that matter to a captured step are compared separately, or keep steps
from being captured (`deltazoo.generation.conditions`)."""


class ModelSteps:
    """The locks of a model's steps, and the captured step that its `generate` keeps for the next call.

    Attributes:
        alone: lock that is held while forward passes of its modules are replaced, or read to make a step.
        in_use: lock that a call of `generate` holds while it captures and replays.
        last: the way in which the last call of `generate` ran its steps, in words.
        kept: `deltazoo.generation.hf_generate.StaticDecoding` for the next call, without a reference to the model.
        failed: the reason why a step could not be captured, and the model's fingerprint at that time.
    """

    def __init__(self) -> None:
        self.alone, self.in_use = threading.RLock(), threading.Lock()
        self.last: str | None = None
        self.kept: Any = None
        self.failed: tuple[Fingerprint, str] | None = None


_steps: weakref.WeakKeyDictionary[nn.Module, ModelSteps] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def steps_of(model: Any) -> ModelSteps:
    """The record of a model's captured steps; a copy of the model starts with an empty one."""
    with _making:
        return _steps.setdefault(model, ModelSteps())


def prepared_inputs(
    model: Any, tokens: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor | None, **options: Any
) -> dict[str, Any]:
    """Arguments of a forward pass that gives the last token's logits, prepared as `model.generate` does.

    Args:
        tokens: `[B, T]`.
        mask: the argument `attention_mask`.
        positions: `[B, T]`, the argument `position_ids`.
        options: further arguments of `prepare_inputs_for_generation`.
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
        tokens: `[N, 1]` int64. `NO_TOKEN` counts as token 0: the step after it may begin before the host reads it.
        visible: `[N, columns]`, 1 for columns of softmax layers that the token of a row may attend to; None: as many as
            the cache has counted.
        positions: `[N, 1]` int64, positions of the tokens in their rows; None: the model counts them.
    """
    inputs = prepared_inputs(model, tokens.clamp(min=0), cache, visible, positions)
    mask = inputs.get("attention_mask")
    if isinstance(mask, dict) and "linear_attention" in mask:  # older versions make this mask; this token is real
        inputs["attention_mask"] = mask | {"linear_attention": None}
    return model(**inputs).logits[:, -1]


class CapturedStep:
    """A decoding step, captured once and replayed for every token.

    On a GPU it is a CUDA graph, without a reference to the model; elsewhere it is the function itself.

    Args:
        model: the model whose layers the step runs; in evaluation mode.
        step: a function that runs the model over tensors at fixed addresses, and never waits for the device.
        cache: the static cache on which the step works, after its first tokens.
        changed: the other tensors whose values the step changes and reads again.

    Attributes:
        cache_tensors: the tensors of the cache, at their addresses.
        output: the result of the step; the next replay overwrites its tensors.

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
        self._device_index = changed[0].get_device()  # -1 for the CPU, which `torch.cuda.device` ignores
        alone = steps_of(model).alone
        with alone:
            self._products = products = merged_products(model)  # kept alive, since a graph reads the merged weights
            replacements = [x for product in products for x in product.replacements]
            replacements += [block.replacement for block in fused_blocks(model, products)]
            replacements += library_modules(model)

            def run() -> None:
                with alone, replaced(replacements):
                    self.output = step()

            self._replay = capture(run, changed)
            self._fingerprint = Fingerprint(model)

    def is_valid_for(self, model: Any) -> bool:
        """Whether a replay still computes what the model would compute now."""
        return self._fingerprint == Fingerprint(model)

    def replay(self) -> None:
        """Run the step once more."""
        with torch.cuda.device(self._device_index):  # a graph replays on the current device
            self._replay()


class Fingerprint:
    """The properties on which a captured step relies: modules of a model, their settings and hooks, weight addresses.

    `==` compares. Changes of weights in place (training, `load_state_dict`, merged adapters) do not change the
    fingerprint, since a graph reads the weights anew.
    """

    def __init__(self, model: Any) -> None:
        modules = list(model.modules())
        self._modules = [weakref.ref(module) for module in modules]
        # On a GPU steps compute experts by another implementation than prompts.
        with steps_of(model).alone, model._optimize_model_for_decode():
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
