"""Captured training steps for models whose forward pass is transformers' own: swapped and accelerated ones.

Such a forward pass makes masks and rotary embeddings, then calls its blocks in a loop. During the call, recorders stand
in the places of the blocks. They note the arguments of each block; the last recorder runs all blocks. Everything that
the forward pass does before and after the loop stays as it is.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.generation.batch import PACKING_ARGUMENTS
from deltazoo.generation.cache import CACHE
from deltazoo.generation.capture import graphs_run_on
from deltazoo.models.captured_training.kept import forget_captured, note_eager, run_blocks
from deltazoo.models.forward_arguments import remove_pre_hook

_PUT = "_captures_blocks"
"""Attribute of a base model: whether its loop only passes hidden states on; None until a training step has shown it."""
_KNOWN_ARGUMENTS = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache", "past_key_values", CACHE),
    *PACKING_ARGUMENTS,
    *("max_length_q", "max_length_k", "num_items_in_batch", "is_causal", "return_dict", "labels", "logits_to_keep"),
    *("shift_labels", "ignore_index"),
    *("output_hidden_states", "output_attentions", "output_router_logits", "delta_batch", "deltazoo_positions"),
)
"""Arguments by which a base model does nothing between its blocks; with others, such as pictures, it may act there."""
_of_thread = threading.local()


def capture_library_blocks(base: nn.Module) -> None:
    """Let training steps of a base model run captured where they can. Calls after the first change nothing."""
    if _blocks_of(base) is not None and _begin not in base._forward_pre_hooks.values():
        base.register_forward_pre_hook(_begin, with_kwargs=True)
        base.register_forward_hook(_end, always_call=True)


def release_library_blocks(base: nn.Module) -> None:
    """Undo `capture_library_blocks`."""
    remove_pre_hook(base, _begin)
    for key, found in list(base._forward_hooks.items()):
        if found is _end:
            del base._forward_hooks[key]
            base._forward_hooks_always_called.pop(key, None)
    forget_captured(base)
    vars(base).pop(_PUT, None)


def _blocks_of(base: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Name and list of the blocks, the longest list of modules that the base model holds itself."""
    lists = [(name, child) for name, child in base.named_children() if isinstance(child, nn.ModuleList)]
    return max(lists, key=lambda named: len(named[1]), default=None)


class _Loop:
    """One forward pass of a base model, with recorders in the places of its blocks."""

    def __init__(self, base: nn.Module) -> None:
        name, self.blocks = _blocks_of(base)  # type: ignore[misc]
        self.base, self.name = base, name
        self.checked: bool | None = getattr(base, _PUT, None)
        self.calls: list[tuple[nn.Module, Mapping[str, Any]]] = []
        self.x: Tensor | None = None
        self.last = min(len(self.blocks), getattr(base.config, "num_hidden_layers", len(self.blocks)))
        self.is_plain = True
        recorders = nn.ModuleList()
        for number, block in enumerate(self.blocks):
            recorders._modules[str(number)] = _Recorder(block, self)
        base._modules[name] = recorders

    def end(self, failed: bool) -> None:
        """Put the blocks back."""
        self.base._modules[self.name] = self.blocks
        complete = len(self.calls) == self.last
        if self.checked is None:
            note_eager(self.base, "the first step shows what the forward pass does between its blocks")
        if self.checked is None and not failed:
            vars(self.base)[_PUT] = self.is_plain and complete
        elif self.checked and not failed and not complete:
            raise RuntimeError(self._otherwise("calls fewer blocks than"))

    def _otherwise(self, does: str) -> str:
        return (
            f"{type(self.base).__name__} {does} in its first training step: call "
            "set_runtime(captured_training=False), or accelerate(model, captured_training=False)"
        )

    def call(self, block: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        """The result of a recorder's call: its input, until the last recorder runs all blocks."""
        if self.checked is None:  # in the first training step blocks run one by one, and are watched
            self.is_plain &= len(args) == 1 and (self.x is None or args[0] is self.x)
            self.x = block(*args, **arguments)
            self.is_plain &= isinstance(self.x, Tensor)
            self.calls.append((block, arguments))
            return self.x
        self.x = args[0] if self.x is None else self.x
        if len(args) != 1 or args[0] is not self.x:
            raise RuntimeError(self._otherwise("changes hidden states between its blocks, unlike"))
        self.calls.append((block, arguments))
        return run_blocks(self.base, self.calls, self.x) if len(self.calls) == self.last else self.x


class _Recorder(nn.Module):
    """A stand-in for a block in the loop of one thread. In other threads it acts as the block, parameters included."""

    def __init__(self, block: nn.Module, loop: _Loop) -> None:
        vars(self).update({name: vars(block)[name] for name in ("_parameters", "_buffers", "_modules", "training")})
        vars(self).update(_block=block, _loop=loop)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block, loop = vars(self)["_block"], _loop()
        ours = loop is not None and loop is vars(self)["_loop"]
        return loop.call(block, args, kwargs) if ours else block(*args, **kwargs)  # type: ignore[union-attr]

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_block"], name)


def _loop() -> _Loop | None:
    """The loop of this thread that runs now."""
    return getattr(_of_thread, "loop", None)


def _begin(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The forward pre-hook of a base model."""
    loop = _loop()
    if loop is not None and loop.base is base:  # an interrupt left it, after which no hooks run
        _end(base, args, None)
    trains = base.training and torch.is_grad_enabled() and graphs_run_on(base.device)
    if torch.compiler.is_compiling() or not trains or _loop() is not None:
        return
    _, blocks = _blocks_of(base)  # type: ignore[misc]
    wanted = getattr(getattr(base, "runtime", None), "captured_training", None) is not False
    if not wanted or any(isinstance(block, _Recorder) for block in blocks):  # those of another thread
        return
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _KNOWN_ARGUMENTS]
    if unknown:
        note_eager(base, f"{', '.join(unknown)} may act between the blocks")
    elif getattr(base, _PUT, None) is False:
        note_eager(base, "the forward pass does more between its blocks than to pass hidden states on")
    else:
        _of_thread.loop = _Loop(base)


def _end(base: nn.Module, args: Any, output: Any) -> None:
    """The forward hook of a base model, which is called after errors, too."""
    loop = _loop()
    if loop is not None and loop.base is base:
        _of_thread.loop = None
        loop.end(failed=output is None)
