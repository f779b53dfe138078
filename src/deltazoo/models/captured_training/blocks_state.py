"""The state of blocks on which a graph of them depends: addresses of tensors, modules, settings and hooks.

Every step compares it and waits for the result, so the comparisons are functions of Python that loop in C.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTRIES = ("_parameters", "_buffers", "_modules", *HOOKS)
_OF_ALL_MODULES = {*vars(nn.Module())}
_VALUES = {bool, int, float, str, torch.dtype, torch.device, type(None)}
_FORM = attrgetter("requires_grad", "dtype", "shape")


def modules_of(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks and the modules below them, each once."""
    return list({id(module): module for block in blocks for module in block.modules()}.values())


class BlocksState:
    """The state of blocks at the time when this was made.

    Args:
        blocks: the blocks, in any order.
        config: configuration of their model.

    Attributes:
        places: dictionary, name and tensor of each parameter, buffer and tensor among the attributes of a module.
        parameters: the parameters, each once.
    """

    def __init__(self, blocks: Sequence[nn.Module], config: Any) -> None:
        attributes = [vars(module) for module in modules_of(blocks)]
        holders = [by for held in attributes for by in (held["_parameters"], held["_buffers"], held)]
        self.places = [(by, name, x) for by in holders for name, x in by.items() if isinstance(x, Tensor)]
        self._tensors = list({id(x): x for *_, x in self.places}.values())
        self.parameters = [x for x in self._tensors if type(x) is nn.Parameter]
        self._addresses, self._forms = self._read(Tensor.data_ptr), self._read_forms()
        # Dictionaries compare values by identity first, and modules and most other objects have no other comparison.
        # Tensors of one element compare by value, others raise.
        self._scalars = [(by, name, x) for by, name, x in self.places if x.numel() < 2]
        registries = [held[name] for held in attributes for name in _REGISTRIES]
        self._empty = [registry for registry in registries if not registry]
        self._now = [*attributes, *filter(None, registries)]
        self._then = list(map(dict, self._now))
        values = chain.from_iterable(map(dict.items, attributes))
        containers = [x for name, x in values if name not in _OF_ALL_MODULES and isinstance(x, dict | list | set)]
        self._nested = [vars(config), *containers]
        self._nested_then = _copied(self._nested)

    def in_place(self) -> bool:
        """Whether all tensors are where they were, so that a graph may read them."""
        return self._read(Tensor.data_ptr) == self._addresses

    def same(self) -> bool:
        """Whether everything but the addresses is as it was."""
        try:
            alike = self._now == self._then or self._made_anew_alike()
        except RuntimeError:  # two tensors have been compared
            return False
        alike = alike and not any(self._empty) and all(by[name] is x for by, name, x in self._scalars)
        return alike and _copied(self._nested) == self._nested_then and self._read_forms() == self._forms

    def _made_anew_alike(self) -> bool:
        """Whether only functions have been made anew, with the same options, as TRL's DPO does for each reference."""
        for now, then in zip(self._now, self._then, strict=True):
            if now.keys() != then.keys():
                return False
            for name, x in now.items():
                if x is not (y := then[name]) and x != y and _parts(x) != _parts(y):
                    return False
        self._then = list(map(dict, self._now))
        return True

    def _read(self, property_of: Callable[[Any], Any]) -> list[Any]:
        return list(map(property_of, self._tensors))

    def _read_forms(self) -> tuple[list[Any], ...]:
        return self._read(_FORM), self._read(Tensor.stride)

    @contextmanager
    def with_parameters(self, others: Mapping[int, Any]) -> Iterator[None]:
        """A context in which other tensors, by the parameters' ids, stand in the places of parameters."""
        places = [(by, name, by[name], others[id(x)]) for by, name, x in self.places if id(x) in others]
        for by, name, _, other in places:
            by[name] = other
        try:
            yield
        finally:
            for by, name, before, _ in places:
                by[name] = before


def _parts(value: Any) -> Any:
    """Function and options of a `functools.partial`; the identity of anything else."""
    return (value.func, value.args, value.keywords) if isinstance(value, partial) else id(value)


def _copied(value: Any) -> Any:
    """A copy of a container that holds plain values themselves, and the identity of everything else."""
    kind = type(value)
    if kind in _VALUES:
        return value
    if isinstance(value, dict):
        return {key: _copied(x) for key, x in value.copy().items()}
    return [_copied(x) for x in list(value)] if isinstance(value, list | tuple | set) else id(value)
