"""The report of a swap, done or planned: layers, numbers of parameters, and memory per sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from transformers import PreTrainedConfig, PreTrainedModel

from deltazoo.layers.state import meta_state
from deltazoo.swap.families import ModelFamily, decoder_layers_of
from deltazoo.swap.layer import SwappedAttention, build_swapped_attention
from deltazoo.swap.plan import LayerPlan
from deltazoo.swap.transfer import copied_parameters

_CONTEXTS = (1024, 32 * 1024, 1024 * 1024)
"""Context lengths, in tokens, at which memory is compared."""


@dataclass(frozen=True)
class LayerSwap:
    """One swapped layer, with the names of parameters inside the layer."""

    index: int
    copied: tuple[str, ...]
    """Parameters of the new layer, copied from the original weights."""
    created: tuple[str, ...]
    """Parameters of the new layer, with new initial values."""
    dropped: tuple[str, ...]
    """Parameters and properties of the original attention that have no counterpart."""
    state_bytes: int
    """Bytes of the state of one sequence, at any length."""


@dataclass(frozen=True)
class SwapReport:
    """Result of `swap_attention`; prints as tables."""

    model_type: str
    """Model type of the original."""
    rule: str
    init: str
    dry_run: bool
    """Whether the swap was only planned."""
    layers: tuple[LayerSwap, ...]
    num_layers: int
    """Number of the model's layers, swapped or not."""
    parameters_before: int
    parameters_after: int
    memory: Mapping[int, tuple[int, int]]
    """Bytes that the cache of one sequence takes before and after the swap, by the sequence's length in tokens."""
    only_windows_left: bool
    """Whether all softmax layers that remain have sliding windows, and layers that saw all tokens were swapped."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        done = "would be swapped" if self.dry_run else "swapped"
        title = f"{self.model_type}: {len(self.layers)} of {self.num_layers} attention layers {done} for {self.rule}"
        left = "All softmax layers that remain have sliding windows: those that saw all tokens are swapped."
        layers = Table(title=title, caption=left if self.only_windows_left else None)
        for heading in ("layers", "copied", "created", "dropped"):
            layers.add_column(heading, overflow="fold")
        equal: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for layer in self.layers:
            equal.setdefault((layer.copied, layer.created, layer.dropped), []).append(layer.index)
        for parameters, indices in equal.items():
            layers.add_row(", ".join(map(str, indices)), *(", ".join(names) or "-" for names in parameters))
        sizes = Table()
        for heading in ("", "before", "after", "ratio"):
            sizes.add_column(heading, justify="right" if heading else "left")
        before, after = self.parameters_before, self.parameters_after
        sizes.add_row("parameters", f"{before:,}", f"{after:,}", f"{after / before:.3f}")
        for num_tokens, (before, after) in self.memory.items():
            taken = (f"{size / 2**20:,.2f} MiB" for size in (before, after))
            sizes.add_row(f"cache of one sequence of {num_tokens:,} tokens", *taken, f"{after / before:.3g}")
        yield layers
        yield sizes

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def report_swap(
    model: PreTrainedModel,
    family: ModelFamily,
    rule: str,
    init: str,
    dry_run: bool,
    plans: Sequence[LayerPlan],
    replacements: Sequence[SwappedAttention],
) -> SwapReport:
    """The report of a swap whose replacements are built and not yet in their slots."""
    num_layers = len(decoder_layers_of(model, family))
    layers = []
    for plan, replacement in zip(plans, replacements, strict=True):
        names = [name for name, _ in replacement.delta.named_parameters()]
        copied = copied_parameters(replacement.delta) if init == "transfer" else []
        with torch.device("meta"):
            state = meta_state(
                build_swapped_attention(family, model.config, plan.index, plan.options).delta.to(model.dtype)
            )
        layers.append(
            LayerSwap(
                index=plan.index,
                copied=tuple(copied),
                created=tuple(name for name in names if name not in copied),
                dropped=tuple(_dropped(model, family, plan, init)),
                state_bytes=sum(x.nbytes for x in state if x is not None),
            )
        )
    states = {layer.index: layer.state_bytes for layer in layers}
    windows = [_window(model.config, index) for index in range(num_layers)]
    remaining = [window for index, window in enumerate(windows) if index not in states]
    before = sum(p.numel() for p in model.parameters())
    removed = sum(p.numel() for plan in plans for p in plan.attention.parameters())
    added = sum(p.numel() for replacement in replacements for p in replacement.parameters())
    shape = plans[0].shape
    per_token = 2 * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize
    return SwapReport(
        model_type=family.model_type,
        rule=rule,
        init=init,
        dry_run=dry_run,
        layers=tuple(layers),
        num_layers=num_layers,
        parameters_before=before,
        parameters_after=before - removed + added,
        memory={length: _memory(length, per_token, windows, states) for length in _CONTEXTS},
        only_windows_left=bool(remaining) and None not in remaining and None in windows,
    )


def _memory(
    num_tokens: int, per_token: int, windows: Sequence[int | None], states: Mapping[int, int]
) -> tuple[int, int]:
    """Bytes of the cache before and after; softmax layers with these windows get states of a fixed size in part."""
    kept = [per_token * min(num_tokens, window or num_tokens) for window in windows]
    after = [states.get(index, size) for index, size in enumerate(kept)]
    return sum(kept), sum(after)


def _window(config: PreTrainedConfig, index: int) -> int | None:
    """The most tokens that a softmax layer's cache holds; None: all."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[index] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def _dropped(model: PreTrainedModel, family: ModelFamily, plan: LayerPlan, init: str) -> list[str]:
    """Parts of the original attention without a counterpart: parameters first, then properties without parameters."""
    lost = []
    if init == "random":
        lost += [name for name, _ in plan.attention.named_parameters()]
    elif plan.shape.qk_norm is not None and "qk_norm" not in plan.options:
        lost += [f"{name}.weight" for name in family.norms or ()]
    if plan.shape.has_rope and not plan.options["rope"]:
        lost.append("rotary embedding")
    config = model.config
    if window := _window(config, plan.index):
        lost.append(f"window of {window} tokens")
    if cap := getattr(config, "attn_logit_softcapping", None):
        lost.append(f"score cap of {cap:g}")
    if dropout := getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", None):
        lost.append(f"attention dropout of {dropout:g}")
    if dropout := getattr(getattr(plan.attention, "resid_dropout", None), "p", None):
        lost.append(f"output dropout of {dropout:g}")
    return lost
