"""A search for the module that first computes NaN, made only after a result has shown NaN."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["origin_of_nan", "watch_for_nan"]


@contextmanager
def watch_for_nan(model: nn.Module) -> Iterator[list[str]]:
    """A context whose list gets a clause about the first module whose output holds NaN or infinity.

    It waits for the device after each module. -inf alone is no fault, since it hides tokens.
    """
    found: list[str] = []

    def look(name: str, module: nn.Module, _: Any, output: Any) -> None:
        if not found and (kind := _kind_in(tree_leaves(output))) is not None:
            weights = [(own, _kind_in([x])) for own, x in module.named_parameters(recurse=False)]
            cause = next((f", whose {own} holds {kind}" for own, kind in weights if kind is not None), "")
            found.append(f"{kind} comes first in the output of {name or type(module).__name__}{cause}")

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(look, name)).remove)
        yield found


@torch.no_grad()
def origin_of_nan(model: Any, input_ids: Tensor) -> str:
    """A clause for the message that a model computed NaN: "; NaN comes first in the output of ...", or nothing.

    It runs one forward pass over the tokens; if that computes no NaN, or fails, there is no clause.

    Args:
        model: a causal language model.
        input_ids: `[1, T]`.
    """
    with watch_for_nan(model) as found, suppress(Exception), torch.compiler.set_stance("force_eager"):
        options = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        model(input_ids=input_ids, use_cache=False, **options)
    return f"; {found[0]}" if found else ""


def _kind_in(values: Iterable[Any]) -> str | None:
    for x in values:
        if isinstance(x, Tensor) and x.is_floating_point() and not bool((x < torch.inf).all()):
            return "NaN" if bool(x.isnan().any()) else "infinity"
    return None
