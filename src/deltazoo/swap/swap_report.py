"""The report of a swap, done or planned: per layer, in parameters, and in memory per sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from transformers import PreTrainedModel

from deltazoo.swap.cache_memory import CONTEXTS, MemoryAtLength, memory_of_swap, sliding_window
from deltazoo.swap.families import ModelFamily, decoder_layers_of
from deltazoo.swap.starting_point import copied_parameters
from deltazoo.swap.swap_plan import LayerPlan
from deltazoo.swap.swapped_attention import SwappedAttention

__all__ = ["LayerSwap", "SwapReport", "report_swap"]


@dataclass(frozen=True)
class LayerSwap:
    """One swapped layer, with names of parameters as they are within the layer."""

    index: int
    path: str
    """Of the attention slot in the model."""
    copied: tuple[str, ...]
    """Parameters of the new layer, copied from the original weights."""
    created: tuple[str, ...]
    """Parameters of the new layer, started by rule."""
    dropped: tuple[str, ...]
    """Parameters and properties of the original attention that have no counterpart."""
    state_bytes: int
    """Of one sequence, at any length."""


@dataclass(frozen=True)
class SwapReport:
    """Result of `swap_attention`; prints as tables."""

    model_type: str
    """Of the original model."""
    rule: str
    init: str
    dry_run: bool
    """True: nothing was changed."""
    layers: tuple[LayerSwap, ...]
    num_layers: int
    """Of the model, swapped or not."""
    parameters_before: int
    parameters_after: int
    memory: tuple[MemoryAtLength, ...]
    only_windows_left: bool
    """Softmax layers that saw all tokens were swapped, and all that remain have sliding windows."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(self._layer_table(), self._summary_table())

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def _layer_table(self) -> Table:
        done = "would be swapped" if self.dry_run else "swapped"
        title = f"{self.model_type}: {len(self.layers)} of {self.num_layers} attention layers {done} for {self.rule}"
        left = "All softmax layers that remain have sliding windows: those that saw all tokens are swapped."
        table = Table(title=title, caption=left if self.only_windows_left else None)
        for heading in ("layers", "copied", "created", "dropped"):
            table.add_column(heading, overflow="fold")
        for layers in self._equal_layers():
            first = layers[0]
            cells = [", ".join(names) or "-" for names in (first.copied, first.created, first.dropped)]
            table.add_row(_ranges([layer.index for layer in layers]), *cells)
        return table

    def _equal_layers(self) -> list[list[LayerSwap]]:
        """Layers grouped by what was copied, created and dropped."""
        groups: dict[tuple[tuple[str, ...], ...], list[LayerSwap]] = {}
        for layer in self.layers:
            groups.setdefault((layer.copied, layer.created, layer.dropped), []).append(layer)
        return list(groups.values())

    def _summary_table(self) -> Table:
        table = Table()
        for heading in ("", "before", "after", "ratio"):
            table.add_column(heading, justify="right" if heading else "left")
        ratio = self.parameters_after / self.parameters_before
        table.add_row("parameters", f"{self.parameters_before:,}", f"{self.parameters_after:,}", f"{ratio:.3f}")
        names = {length: name for name, length in CONTEXTS.items()}
        for memory in self.memory:
            label = f"cache of one sequence of {names[memory.num_tokens]} tokens"
            ratio = memory.after / memory.before
            table.add_row(label, _size(memory.before), _size(memory.after), f"{ratio:.3g}")
        return table


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
    slot = f"{family.layers}.{{}}.{family.attention}"
    layers = []
    for plan, replacement in zip(plans, replacements, strict=True):
        names = [name for name, _ in replacement.delta.named_parameters()]
        copied = copied_parameters(replacement.delta) if init == "transfer" else []
        layers.append(
            LayerSwap(
                index=plan.index,
                path=slot.format(plan.index),
                copied=tuple(copied),
                created=tuple(name for name in names if name not in copied),
                dropped=tuple(_dropped(model, family, plan, init)),
                state_bytes=replacement.delta.state_bytes(model.dtype),
            )
        )
    swapped = {layer.index for layer in layers}
    windows = {index: sliding_window(model.config, index) for index in range(num_layers)}
    remaining = [window for index, window in windows.items() if index not in swapped]
    before = sum(p.numel() for p in model.parameters())
    removed = sum(p.numel() for plan in plans for p in plan.attention.parameters())
    added = sum(p.numel() for replacement in replacements for p in replacement.parameters())
    return SwapReport(
        model_type=family.model_type,
        rule=rule,
        init=init,
        dry_run=dry_run,
        layers=tuple(layers),
        num_layers=num_layers,
        parameters_before=before,
        parameters_after=before - removed + added,
        memory=memory_of_swap(
            model.config, plans[0].shape, model.dtype, num_layers, {layer.index: layer.state_bytes for layer in layers}
        ),
        only_windows_left=bool(remaining) and None not in remaining and None in windows.values(),
    )


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
    if window := sliding_window(config, plan.index):
        lost.append(f"window of {window} tokens")
    if cap := getattr(config, "attn_logit_softcapping", None):
        lost.append(f"score cap of {cap:g}")
    if dropout := getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", None):
        lost.append(f"attention dropout of {dropout:g}")
    if dropout := getattr(getattr(plan.attention, "resid_dropout", None), "p", None):
        lost.append(f"output dropout of {dropout:g}")
    return lost


def _ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as "0-2, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
