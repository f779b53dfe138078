"""The input of one call of a layer, and the linear maps that read it."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.ops.linear_maps import calls_are_watched, is_plain, is_plain_sequence, linear_maps


class LayerInput:
    """The hidden states of one call of a layer, and the results of its linear maps that nobody has read yet.

    Where gradients are recorded, the first request computes all plain maps as one function (`linear_maps`).

    Args:
        hidden_states: `[B, T, hidden_size]`, a tensor.
        layer: the layer whose `input_projections` read them.
        apart: names of maps that are computed only when they are asked for.
    """

    def __init__(self, hidden_states: Tensor, layer: Any, apart: Iterable[str] = ()) -> None:
        self.hidden_states = hidden_states
        self._layer = layer
        self._apart = apart
        self._waiting: dict[str, tuple[Tensor, Sequence[nn.Module]]] | None = None
        """Results that nobody has asked for, each with the maps that follow it in a pair made by `low_rank`."""

    def project(self, name: str) -> Tensor:
        """The result of `layer.name(hidden_states)`, for a linear map or a pair made by `low_rank`."""
        if self._waiting is None:
            self._waiting = self._projected_together()
        y, following = self._waiting.pop(name, (None, []))
        if y is None:
            return getattr(self._layer, name)(self.hidden_states)
        for module in following:
            y = module(y)
        return y

    def project_ahead(self, *names: str) -> None:
        """Compute `project(name)` before it is asked for, for those maps that the layer has."""
        for name in names:
            if hasattr(self._layer, name):
                y = self.project(name)
                assert self._waiting is not None
                self._waiting[name] = y, []

    def _projected_together(self) -> dict[str, tuple[Tensor, Sequence[nn.Module]]]:
        if not (torch.is_grad_enabled() and self.hidden_states.requires_grad) or calls_are_watched():
            return {}
        maps: dict[str, list[nn.Module]] = {}
        for name in self._layer.input_projections:
            module: Any = getattr(self._layer, name, None)
            parts = list(module) if isinstance(module, nn.Sequential) and is_plain_sequence(module) else [module]
            if name not in self._apart and is_plain(parts[0]):
                maps[name] = parts
        results = linear_maps(self.hidden_states, [parts[0] for parts in maps.values()], plain=True)
        return {name: (y, parts[1:]) for y, (name, parts) in zip(results, maps.items(), strict=True)}
