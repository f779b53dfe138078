"""`deltazoo.diagnose`: figures of the delta-rule layers of a model on a batch, per head, and warnings; its callback."""

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltazoo.diagnosis.rule_calls import RecordedCall, delta_rule_layers, recorded_calls
from deltazoo.diagnosis.rule_figures import CHUNK, Figures, Quantiles, measure
from deltazoo.generation.conditions import watch_for_nan
from deltazoo.models.delta_layers import evaluation_mode

if TYPE_CHECKING:
    from transformers import Trainer

_EXPANDS = 1.01
"""Eigenvalue along the key beyond which the state expands by more than rounding explains."""
_CHUNK_EXPANDS = 1.05
_OFTEN = 0.01
_MOSTLY = 0.9
_GROWS = 2.5
_FORGETS = 0.25
"""Half-life in tokens below which a head forgets. New heads of the largest rate and step, 16 and 0.1, have 0.43."""


@dataclass(frozen=True)
class LayerDiagnosis:
    """The figures of one delta-rule layer."""

    name: str
    """Path inside the model."""
    rule: str
    heads: tuple[Figures, ...]
    """The figures of every value head."""


@dataclass(frozen=True)
class Diagnosis:
    """The figures of all delta-rule layers on one batch; prints as a table with the warnings below it."""

    layers: tuple[LayerDiagnosis, ...]
    num_tokens: int
    """Number of tokens, without padding."""
    num_sequences: int
    not_finite: str | None = None
    """A clause about the module whose output holds NaN or infinity first; None: there is none."""

    @property
    def warnings(self) -> list[str]:
        """A sentence for each kind of trouble in a layer, about its worst head.

        If the model, inside or outside these layers, computes NaN or infinity, the first sentence says where.
        """
        broken = [] if self.not_finite is None else [self.not_finite]
        return [*broken, *(sentence for layer in self.layers for sentence in _warnings(layer))]

    def records(self) -> list[dict[str, Any]]:
        """A flat dict per head, all with the same keys, for tables or JSON lines.

        Figures that a rule or a gate does not have are None.
        """
        gates = list(dict.fromkeys(gate for layer in self.layers for head in layer.heads for gate in head.gates))
        return [
            {"layer": layer.name, "rule": layer.rule, "head": number, **_flat(head, gates)}
            for layer in self.layers
            for number, head in enumerate(layer.heads)
        ]

    def summary(self) -> dict[str, float]:
        """A few figures over all heads, which Trainer logs as curves."""
        records = self.records()
        found = {f"{name.removesuffix('_max')}_max": _worst(records, name) for name in _SUMMARY}
        found["half_life_min"] = _worst(records, "half_life_median", smallest=True)
        return {name: value for name, value in found.items() if value is not None}

    def save_picture(self, path: str | Path) -> Path:
        """Path of a PNG with heat maps, layers by heads, and the states over the tokens; needs matplotlib."""
        from deltazoo.diagnosis.pictures import draw_records

        return draw_records(self.records(), Path(path))

    def __str__(self) -> str:
        sequences = "1 sequence" if self.num_sequences == 1 else f"{self.num_sequences:,} sequences"
        records = self.records()
        rows = [("layer", "rule", *_COLUMNS)]
        for layer in self.layers:
            heads = [record for record in records if record["layer"] == layer.name]
            values = ((_worst(heads, name, smallest=name in _SMALLEST), form) for name, form in _COLUMNS.values())
            rows.append((layer.name, layer.rule, *("-" if x is None else f"{x:{form}}" for x, form in values)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        size = f"{self.num_tokens:,} tokens in {sequences}; {_LEGEND}"
        return "\n".join([size, *(line.rstrip() for line in lines), *self.warnings])


_LEGEND = f"""the worst head of each layer:
erase gain (median, largest, tokens above 1), smallest eigenvalue along the key, shortest half-life, norm of the state
and its growth over the second half, norm of {CHUNK} transitions, saturated gates"""
_COLUMNS = {
    "gain": ("gain_median", ".3g"),
    "max": ("gain_max", ".3g"),
    "above 1": ("gain_above_one", ".0%"),
    "eigenvalue": ("eigenvalue_min", ".3g"),
    "half-life": ("half_life_median", ".3g"),
    "state": ("state_norm", ".3g"),
    "growth": ("state_growth", ".3g"),
    "64 tokens": ("chunk_norm", ".3g"),
    "step gate": ("step_gate_saturated", ".0%"),
    "output gate": ("output_gate_saturated", ".0%"),
}
"""Columns of the printed table: heading, figure of the records, and format."""
_SMALLEST = ("eigenvalue_min", "half_life_median")
"""Figures whose smallest value is the worst."""
_SUMMARY = (
    *("gain_max", "gain_above_one", "near_expansion", "chunk_norm", "state_norm", "state_growth"),
    *("step_gate_saturated", "output_gate_saturated"),
)


def diagnose(model: nn.Module, batch: Tensor | Mapping[str, Any]) -> Diagnosis:
    """Figures of the delta-rule layers of a model, measured in one forward pass over a batch.

    Per value head: erase gain, eigenvalue along the key, half-lives of the decay, norm and growth of the state, the
    largest singular value of 64 transitions in a row, saturation of the gates (`Figures`). A few thousand tokens are
    enough, in sequences as long as in training: each layer's states and products of transitions are computed once
    more, in float32 at least, and take `[tokens / 64, heads, K, K]` floats each.

    The pass runs in evaluation mode, without gradients and `torch.compile`; the model is unchanged afterwards. Layers
    of the model run as always, with the kernels of their device.

    Args:
        model: one of ours, a swapped one, an accelerated one of transformers, or a layer.
        batch: the input of the model: `input_ids` `[B, T]` (for a layer hidden states), or a mapping of its arguments.
            Padding and packed sequences are kept apart. Labels are left out.

    Raises:
        ValueError: no delta-rule layer, no token, or a cache with earlier tokens in the batch.
        NotImplementedError: rows that several ranks share (context parallelism).
    """
    layers = delta_rule_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no delta-rule layer to diagnose; models of transformers need "
            "deltazoo.accelerate(model) first"
        )
    found: dict[str, LayerDiagnosis] = {}
    counts: list[tuple[int, int]] = []

    def receive(name: str, call: RecordedCall) -> None:
        with torch.autocast(call.inputs.q.device.type, enabled=False):
            heads, num_tokens, num_sequences = measure(call)
        found[name] = LayerDiagnosis(name, call.spec.name, tuple(heads))
        counts.append((num_tokens, num_sequences))

    with (
        evaluation_mode(model),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        recorded_calls(layers, receive),
        watch_for_nan(model) as not_finite,
    ):
        _call(model, batch)
    if not found:
        raise ValueError("the forward pass called no delta-rule layer")
    return Diagnosis(tuple(found[name] for name in layers if name in found), *counts[0], next(iter(not_finite), None))


class DiagnoseCallback(TrainerCallback):
    """A callback that logs figures of `diagnose`, such as `diagnose_gain_max` (`Diagnosis.summary`).

        trainer.add_callback(deltazoo.DiagnoseCallback(trainer, batch, every=100))

    Args:
        trainer: the Trainer whose `log` writes the figures, so that they reach its history and every tracker.
        batch: the argument of `diagnose`, always the same, so that the curves show the model and not the text.
        every: steps between two measurements; the first one is before training.

    Raises:
        ValueError: `every` below 1.
    """

    def __init__(self, trainer: "Trainer", batch: Tensor | Mapping[str, Any], every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self.trainer, self.batch, self.every = trainer, batch, every
        self.latest: Diagnosis | None = None
        """The last measurement, with its `warnings`."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the model before training; a resumed run has measured it before."""
        if state.global_step == 0:
            self.measure(kwargs["model"], control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure every `every` steps."""
        if state.global_step % self.every == 0:
            self.measure(kwargs["model"], control)

    def measure(self, model: nn.Module | None, control: TrainerControl) -> None:
        """Diagnose the model and log the summary."""
        assert model is not None
        self.latest = diagnose(model, self.batch)
        due = control.should_log  # `log` clears the request for the loss of this step
        self.trainer.log({f"diagnose_{name}": value for name, value in self.latest.summary().items()})
        control.should_log = due


def _call(model: nn.Module, batch: Tensor | Mapping[str, Any]) -> None:
    device = next(model.parameters()).device
    arguments = [batch.to(device)] if isinstance(batch, Tensor) else []
    named = {} if isinstance(batch, Tensor) else {name: x for name, x in batch.items() if "labels" not in name}
    named = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in named.items()}
    accepted = inspect.signature(model.forward).parameters
    for name, value in {"use_cache": False, "logits_to_keep": 1}.items():
        if name in accepted:
            named.setdefault(name, value)
    model(*arguments, **named)


def _flat(head: Figures, gates: list[str]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, value in vars(head).items():
        if name in ("gain", "eigenvalue", "half_life"):
            record |= {f"{name}_{level}": getattr(value, level, None) for level in Quantiles._fields}
        elif name != "gates":
            record[name] = list(value) if name == "state_norms" else value
    for gate in gates:
        record |= {
            f"{gate}_gate_{end}": getattr(head.gates.get(gate), end, None) for end in ("shut", "open", "saturated")
        }
    return record


def _worst(records: list[dict[str, Any]], name: str, *, smallest: bool = False) -> float | None:
    """The largest or smallest value of a figure, or NaN if there is one; None if no record has the figure."""
    known = [value for record in records if (value := record.get(name)) is not None]
    return max(known, key=lambda value: math.inf if math.isnan(value) else -value if smallest else value, default=None)


def _warnings(layer: LayerDiagnosis) -> Iterator[str]:
    if not all(head.finite for head in layer.heads):
        yield f"{layer.name}: the operator gets NaN or infinity"
        return
    heads = [_troubles(head) for head in layer.heads]
    for kind in sorted({kind for found in heads for kind in found}):
        troubled = {number: found[kind] for number, found in enumerate(heads) if kind in found}
        worst = max(troubled, key=lambda number: troubled[number][0])
        others = f" and {len(troubled) - 1} more" if len(troubled) > 1 else ""
        yield f"{layer.name} head {worst}{others}: {troubled[worst][1]}"


def _troubles(head: Figures) -> dict[int, tuple[float, str]]:
    """Size and sentence of each kind of trouble in a head; the keys give the order of the sentences."""
    found: dict[int, tuple[float, str]] = {}
    gain, factor, half_life = head.gain, head.eigenvalue, head.half_life
    expands = factor is not None and max(-factor.min, factor.max) > _EXPANDS
    if expands:
        assert factor is not None and gain is not None
        furthest = max(factor.min, factor.max, key=abs)
        found[0] = (
            abs(furthest),
            f"a token multiplies what is stored along its key by {furthest:.3g} (erase gain {gain.min:.3g} to "
            f"{gain.max:.3g}): the state expands. Bound the gain to [0, 2], as deltazoo.layers.bounded_step "
            "does, or normalise keys",
        )
    elif head.near_expansion and head.near_expansion >= _OFTEN:
        assert gain is not None
        found[1] = (
            head.near_expansion,
            f"erase gain up to {gain.max:.3g}, with an eigenvalue below -0.9 on {head.near_expansion:.0%} "
            f"of tokens and a decay of {head.near_expansion_decay:.4f} there: near expansion",
        )
    if not head.chunk_norm <= _CHUNK_EXPANDS and not expands:
        found[2] = (
            head.chunk_norm,
            f"{CHUNK} tokens in a row multiply a state by up to {head.chunk_norm:.3g}: it can grow without being "
            "written to, and decay alone bounds it",
        )
    if head.state_growth is not None and not head.state_growth <= _GROWS:
        found[3] = (
            head.state_growth,
            f"the norm of the state grows {head.state_growth:.3g}-fold over the second half of a sequence, to "
            f"{head.state_norm:.3g}: more than writes of one size explain",
        )
    if half_life is not None and half_life.max < _FORGETS:
        found[4] = (
            -half_life.max,
            f"the decay halves every channel within {half_life.max:.2g} tokens: the head carries next to nothing from "
            "token to token",
        )
    for kind, (gate, end, what) in enumerate(_STUCK, 5):
        share = getattr(head.gates.get(gate), end, None)
        if share is not None and share >= _MOSTLY:
            found[kind] = share, f"the {gate} gate is {end} on {share:.0%} of tokens: {what}"
    return found


_STUCK = (
    ("step", "shut", "the head hardly writes"),
    ("step", "open", "the step size no longer depends on the input, and hardly any gradient reaches its gate"),
    ("output", "shut", "the head hardly contributes"),
)
"""Gate, end of its range, and the effect of staying there."""
