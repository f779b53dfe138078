"""A decoding step as one CUDA graph, behind a model's own forward pass.

A one-token step is thousands of launches of microseconds each; a graph of them is one launch. A graph reads and writes
fixed addresses, as a `StaticCache` has them; the state of a delta-rule layer keeps its size at every length.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltazoo.models.cache import DeltaRuleCacheLayer
from deltazoo.models.merged_projections import MergedProjections

__all__ = ["CapturedGeneration", "FixedTensors", "capture", "captured_steps"]

_WARM_UP_CALLS = 2
"""Before a capture: kernels compile, libraries allocate their workspaces."""


def capture(
    step: Callable[[], None], changed: Sequence[Tensor], generators: Sequence[torch.Generator] = ()
) -> Callable[[], object]:
    """A function that does what `step` does: on a GPU one CUDA graph of it, elsewhere `step` itself.

    Args:
        step: reads and writes tensors that stay where they are, and never waits for the device.
        changed: the tensors whose values it changes and reads again. They, and the generators, come out of this call as
            they went in.
        generators: random number generators that the step draws from.
    """
    if changed[0].device.type != "cuda":
        return step
    with torch.cuda.device_of(changed[0]):
        return _capture_graph(step, changed, generators).replay


def _capture_graph(
    step: Callable[[], None], changed: Sequence[Tensor], generators: Sequence[torch.Generator]
) -> torch.cuda.CUDAGraph:
    before = [x.clone() for x in changed]
    random_states = [generator.get_state() for generator in generators]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_CALLS):
            step()
            for x, kept in zip(changed, before, strict=True):
                x.copy_(kept)
    torch.cuda.current_stream().wait_stream(stream)
    for generator, state in zip(generators, random_states, strict=True):
        generator.set_state(state)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=stream):
        step()
    # torch zeroes the generators' offsets on the capture's stream and sets them at a replay on the current one.
    torch.cuda.current_stream().wait_stream(stream)
    return graph


class FixedTensors:
    """The tensors of a filled static cache at the addresses that a captured step knows.

    Args:
        cache: a `StaticCache` after its first tokens.
    """

    def __init__(self, cache: Cache) -> None:
        self._places: list[tuple[dict[Any, Any], Any, Tensor]] = []
        for layer in cache.layers:
            slots: list[tuple[dict[Any, Any], Any]]
            if isinstance(layer, DeltaRuleCacheLayer):
                slots = [(layer.conv_states, 0), (layer.recurrent_states, 0), (vars(layer), "num_tokens")]
            else:
                slots = [(vars(layer), name) for name in ("keys", "values", "cumulative_length")]
            self._places += [(owner, name, owner[name]) for owner, name in slots if owner[name] is not None]

    @property
    def changed(self) -> list[Tensor]:
        """What a step changes and reads again; it writes its keys and values to the same place when it is repeated."""
        return [tensor for _, name, tensor in self._places if name not in ("keys", "values")]

    def put_back(self) -> None:
        """Undo moves: transformers' key/value layers put new tensors in place of theirs when beams change rows."""
        for owner, name, tensor in self._places:
            if owner[name] is not tensor:
                tensor.copy_(owner[name])
                owner[name] = tensor


class _CapturedForward:
    """A model's forward pass; one token after a static cache's state is replayed, all else passes through.

    A call replays the last capture if it hands over the same cache and inputs of the same shapes; else it captures.
    """

    def __init__(self, model: nn.Module) -> None:
        update_wrapper(self, model.forward)
        self.forward = model.forward
        self._projections = MergedProjections(model)
        self._cache: Cache | None = None
        self._shapes: object = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get("past_key_values")
        ids = kwargs.get("input_ids")
        if args or ids is None or ids.shape[1] != 1 or not _is_filled(cache) or torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        _refuse_extras(kwargs)
        inputs = _tensors_in(kwargs)
        shapes = {name: (x.shape, x.dtype, x.device) for name, x in inputs.items()}
        if cache is self._cache and shapes == self._shapes:
            self._fixed.put_back()
            for name, x in inputs.items():
                self._inputs[name].copy_(x)
        else:
            self._capture(cache, kwargs, inputs)
            self._cache, self._shapes = cache, shapes
        with torch.cuda.device_of(ids):  # a graph is replayed on the current device, which need not be the model's
            self._replay()
        return CausalLMOutputWithPast(logits=self._logits, past_key_values=cache)

    def _capture(self, cache: Cache, kwargs: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> None:
        self._inputs = {name: x.clone() for name, x in inputs.items()}
        self._fixed = FixedTensors(cache)
        fixed_kwargs = _with_tensors(kwargs, self._inputs)

        def step() -> None:
            with self._projections.active():
                self._logits = self.forward(**fixed_kwargs).logits

        self._replay = capture(step, self._fixed.changed)


def _is_filled(cache: Any) -> bool:
    return isinstance(cache, StaticCache) and all(
        layer.state is not None if isinstance(layer, DeltaRuleCacheLayer) else getattr(layer, "is_initialized", False)
        for layer in cache.layers
    )


def _refuse_extras(kwargs: Mapping[str, Any]) -> None:
    for name in ("output_attentions", "output_hidden_states", "labels"):
        if kwargs.get(name):
            raise ValueError(f"a captured step gives logits alone, got {name}={kwargs[name]!r}; leave capture_step off")


def _tensors_in(kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors among the arguments of a forward pass, those of a dict of masks included, by name."""
    found = {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}
    masks = kwargs.get("attention_mask")
    if isinstance(masks, Mapping):
        found |= {f"attention_mask.{name}": x for name, x in masks.items() if isinstance(x, Tensor)}
    return found


def _with_tensors(kwargs: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same arguments with the tensors of `_tensors_in` exchanged."""
    exchanged = {name: tensors.get(name, x) for name, x in kwargs.items()}
    masks = kwargs.get("attention_mask")
    if isinstance(masks, Mapping):
        exchanged["attention_mask"] = {name: tensors.get(f"attention_mask.{name}", x) for name, x in masks.items()}
    return exchanged


def _static_generation(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` with a static cache, and without transformers' own compilation of the step.

    Raises:
        ValueError: they ask for another cache, for none, or for that compilation.
    """
    cache = kwargs.get("past_key_values")
    if cache is not None and not isinstance(cache, StaticCache):
        raise ValueError(f"capture_step=True needs past_key_values to be a StaticCache, got {type(cache).__name__}")
    wanted = {"use_cache": True, "cache_implementation": "static" if cache is None else None, "disable_compile": True}
    for name, value in wanted.items():
        if kwargs.get(name) not in (None, value):
            raise ValueError(f"capture_step=True needs {name}={value!r}, got {kwargs[name]!r}")
    if kwargs.get("compile_config") is not None:
        raise ValueError("capture_step=True and compile_config are two ways to run the step: pass one of them")
    return {**kwargs, **wanted}


@contextmanager
def captured_steps(model: nn.Module) -> Iterator[None]:
    """Within this context `model` replays one-token forward passes over a filled `StaticCache` from a CUDA graph.

    On a CPU the same steps run over the same fixed tensors without a graph. The logits that a call returns are
    overwritten by the next call.
    """
    replaced = vars(model).get("forward")  # a hook of accelerate, or compiled code
    model.forward = _CapturedForward(model)
    try:
        yield
    finally:
        del model.forward
        if replaced is not None:
            model.forward = replaced


class CapturedGeneration:
    """What a causal language model adds to transformers' `generate`; stands before `GenerationMixin` in its bases."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: `generate_batch` and its kin share pages of keys and values among requests; a state has no pages."""
        raise NotImplementedError(
            f"{type(self).__name__} has delta-rule layers, whose state transformers' continuous batching "
            '(generate_batch, cache_implementation="paged") cannot hold: pass generate a padded batch'
        )

    def generate(self, *args: Any, capture_step: bool = False, **kwargs: Any) -> Any:
        """As in transformers, and:

        Args:
            args, kwargs: as in transformers.
            capture_step: run the steps over a static cache, on a GPU from one CUDA graph. Outputs are the same. Not for
                assisted decoding, which takes tokens back.

        Raises:
            ValueError: with `capture_step`, arguments that ask for another cache or for compilation.
        """
        if not capture_step:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        with captured_steps(self):  # type: ignore[arg-type]
            return super().generate(*args, **_static_generation(kwargs))  # type: ignore[misc]
