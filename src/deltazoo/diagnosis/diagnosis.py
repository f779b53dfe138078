"""`deltazoo.diagnose`: what the delta-rule layers of a model do on a batch, per head, and what looks wrong."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.diagnosis.rule_calls import RuleCall, delta_rule_layers, recorded_calls
from deltazoo.diagnosis.rule_figures import CHUNK, Figures, Quantiles, measure
from deltazoo.generation.nan_origin import watch_for_nan
from deltazoo.layers.backend_report import describe_update
from deltazoo.models.delta_layers import evaluation_mode

__all__ = ["Diagnosis", "LayerDiagnosis", "diagnose"]

_EXPANDS = 1.01
"""An eigenvalue along the key beyond this expands the state by more than rounding explains."""
_CHUNK_EXPANDS = 1.05
_OFTEN = 0.01
_MOSTLY = 0.9
_GROWS = 2.5
_FORGETS = 0.25
"""Tokens. Fresh heads of the largest rate and step, 16 and 0.1, halve in 0.43."""


@dataclass(frozen=True)
class LayerDiagnosis:
    """One delta-rule layer."""

    name: str
    """Path inside the model."""
    rule: str
    update: str
    """What the operator does per token: decay, erase and steps, in words."""
    heads: tuple[Figures, ...]
    """Of every value head."""


@dataclass(frozen=True)
class Diagnosis:
    """The figures of all delta-rule layers on one batch; prints as a table with the warnings below it."""

    layers: tuple[LayerDiagnosis, ...]
    num_tokens: int
    """Without padding."""
    num_sequences: int
    not_finite: str | None = None
    """Where NaN or infinity comes first among the outputs of all modules, in words; None: nowhere."""

    @property
    def warnings(self) -> list[str]:
        """What looks wrong, one sentence for each kind of trouble in a layer, about its worst head.

        If the model, inside or outside these layers, computes NaN or infinity, the first sentence says where.
        """
        broken = [] if self.not_finite is None else [self.not_finite]
        return [*broken, *(sentence for layer in self.layers for sentence in _warnings(layer))]

    def records(self) -> list[dict[str, Any]]:
        """One flat dict per head, with the same keys for all: rows of a table, JSON lines.

        Figures that a rule or a gate does not have are None.
        """
        gates = list(dict.fromkeys(gate for layer in self.layers for head in layer.heads for gate in head.gates))
        return [
            {"layer": layer.name, "rule": layer.rule, "head": number, **_flat(head, gates)}
            for layer in self.layers
            for number, head in enumerate(layer.heads)
        ]

    def summary(self) -> dict[str, float]:
        """A few figures over all heads, for curves: what Trainer logs."""
        heads = [head for layer in self.layers for head in layer.heads]
        figures: dict[str, Iterable[float | None]] = {
            "gain_max": (head.gain.max if head.gain else None for head in heads),
            "gain_above_one_max": (head.gain_above_one for head in heads),
            "near_expansion_max": (head.near_expansion for head in heads),
            "chunk_norm_max": (head.chunk_norm for head in heads),
            "state_norm_max": (head.state_norm for head in heads),
            "state_growth_max": (head.state_growth for head in heads),
            "step_gate_saturated_max": (_saturated(head, "step") for head in heads),
            "output_gate_saturated_max": (_saturated(head, "output") for head in heads),
        }
        found = {name: _largest(values) for name, values in figures.items()}
        found["half_life_min"] = _smallest(head.half_life.median if head.half_life else None for head in heads)
        return {name: value for name, value in found.items() if value is not None}

    def save_picture(self, path: str | Path) -> Path:
        """Draw heat maps, layers by heads, and the states over the tokens into a PNG; needs matplotlib."""
        from deltazoo.diagnosis.pictures import draw_records

        return draw_records(self.records(), Path(path))

    def __str__(self) -> str:
        sequences = "1 sequence" if self.num_sequences == 1 else f"{self.num_sequences:,} sequences"
        size = f"{self.num_tokens:,} tokens in {sequences}; {_COLUMNS}"
        return "\n".join([size, _table(self.layers), *self.warnings])


_COLUMNS = f"""the worst head of each layer:
erase gain (median, largest, tokens above 1), smallest eigenvalue along the key, shortest half-life, norm of the state
and its growth over the second half, norm of {CHUNK} transitions, saturated gates"""


def diagnose(model: nn.Module, batch: Tensor | Mapping[str, Any]) -> Diagnosis:
    """Measure the delta-rule layers of a model in one forward pass over a batch.

    Per value head: erase gain, eigenvalue along the key, half-lives of the decay, norm and growth of the state, the
    largest singular value of 64 transitions in a row, saturation of the gates (`Figures`). A few thousand tokens are
    enough, in sequences as long as in training: each layer's states and products of transitions are computed once
    more, in float32 at least, and take `[tokens / 64, heads, K, K]` floats each.

    The pass runs in evaluation mode, without gradients and `torch.compile`; the model is left as it was. Layers of the
    model run as always, with the kernels of their device.

    Args:
        model: one of ours, a swapped one, an accelerated one of transformers, or a layer.
        batch: what the model is called with: `input_ids` `[B, T]` (for a layer hidden states), or a mapping of its
            arguments. Padding and packed sequences are kept apart. Labels are left out.

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

    def receive(name: str, call: RuleCall) -> None:
        with torch.autocast(call.inputs.q.device.type, enabled=False):
            heads, num_tokens, num_sequences = measure(call)
        update = describe_update(call.spec, call.num_micro_steps)
        found[name] = LayerDiagnosis(name, call.spec.name, update, tuple(heads))
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


def _call(model: nn.Module, batch: Tensor | Mapping[str, Any]) -> None:
    device = next(model.parameters()).device
    if isinstance(batch, Tensor):
        arguments, named = [batch.to(device)], dict[str, Any]()
    else:
        arguments = []
        named = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in batch.items()
            if "labels" not in name
        }
    accepted = inspect.signature(model.forward).parameters
    for name, value in {"use_cache": False, "logits_to_keep": 1}.items():
        if name in accepted:
            named.setdefault(name, value)
    model(*arguments, **named)


def _flat(head: Figures, gates: list[str]) -> dict[str, Any]:
    record: dict[str, Any] = {
        f"{name}_{level}": None if quantiles is None else getattr(quantiles, level)
        for name, quantiles in (("gain", head.gain), ("eigenvalue", head.eigenvalue), ("half_life", head.half_life))
        for level in Quantiles._fields
    }
    record |= {
        "gain_above_one": head.gain_above_one,
        "near_expansion": head.near_expansion,
        "near_expansion_decay": head.near_expansion_decay,
        "chunk_norm": head.chunk_norm,
        "state_norm": head.state_norm,
        "state_growth": head.state_growth,
        "state_norms": list(head.state_norms),
        "finite": head.finite,
    }
    for gate in gates:
        shares = head.gates.get(gate)
        record[f"{gate}_gate_shut"] = None if shares is None else shares.shut
        record[f"{gate}_gate_open"] = None if shares is None else shares.open
    return record


def _saturated(head: Figures, gate: str) -> float | None:
    shares = head.gates.get(gate)
    return None if shares is None else shares.shut + (shares.open or 0.0)


def _largest(values: Iterable[float | None]) -> float | None:
    """The largest value, None without one; NaN is larger than all."""
    known = [value for value in values if value is not None]
    return max(known, key=lambda value: math.inf if math.isnan(value) else value, default=None)


def _smallest(values: Iterable[float | None]) -> float | None:
    """The smallest value, None without one; NaN is smaller than all."""
    known = [value for value in values if value is not None]
    return min(known, key=lambda value: -math.inf if math.isnan(value) else value, default=None)


def _table(layers: Iterable[LayerDiagnosis]) -> str:
    heading = (
        *("layer", "rule", "gain", "max", "above 1", "eigenvalue", "half-life", "state", "growth", "64 tokens"),
        *("step gate", "output gate"),
    )
    rows = [heading, *(_row(layer) for layer in layers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _row(layer: LayerDiagnosis) -> tuple[str, ...]:
    heads = layer.heads
    return (
        layer.name,
        layer.rule,
        _number(_largest(head.gain.median if head.gain else None for head in heads)),
        _number(_largest(head.gain.max if head.gain else None for head in heads)),
        _share(_largest(head.gain_above_one for head in heads)),
        _number(_smallest(head.eigenvalue.min if head.eigenvalue else None for head in heads)),
        _number(_smallest(head.half_life.median if head.half_life else None for head in heads)),
        _number(_largest(head.state_norm for head in heads)),
        _number(_largest(head.state_growth for head in heads)),
        _number(_largest(head.chunk_norm for head in heads)),
        _share(_largest(_saturated(head, "step") for head in heads)),
        _share(_largest(_saturated(head, "output") for head in heads)),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _warnings(layer: LayerDiagnosis) -> Iterator[str]:
    if not all(head.finite for head in layer.heads):
        yield f"{layer.name}: the operator gets NaN or infinity"
        return
    for badness, sentence in _TROUBLES:
        degrees = [badness(head) for head in layer.heads]
        troubled = {number: degree for number, degree in enumerate(degrees) if degree is not None}
        if troubled:
            worst = max(troubled, key=troubled.__getitem__)
            others = f" and {len(troubled) - 1} more" if len(troubled) > 1 else ""
            yield f"{layer.name} head {worst}{others}: {sentence(layer.heads[worst])}"


def _outside(head: Figures) -> float | None:
    if head.eigenvalue is None:
        return None
    size = max(-head.eigenvalue.min, head.eigenvalue.max)
    return size if size > _EXPANDS else None


def _say_outside(head: Figures) -> str:
    assert head.eigenvalue is not None and head.gain is not None
    factor = max(head.eigenvalue.min, head.eigenvalue.max, key=abs)
    return (
        f"a token multiplies what is stored along its key by {factor:.3g} (erase gain {head.gain.min:.3g} to "
        f"{head.gain.max:.3g}): the state expands. Bound the gain to [0, 2], as deltazoo.layers.bounded_step "
        "does, or normalise keys"
    )


def _near(head: Figures) -> float | None:
    expands = _outside(head) is not None
    return None if expands or not head.near_expansion or head.near_expansion < _OFTEN else head.near_expansion


def _say_near(head: Figures) -> str:
    assert head.gain is not None and head.near_expansion is not None
    return (
        f"erase gain up to {head.gain.max:.3g}, with an eigenvalue below -0.9 on {head.near_expansion:.0%} "
        f"of tokens and a decay of {head.near_expansion_decay:.4f} there: near expansion"
    )


def _chunk(head: Figures) -> float | None:
    return head.chunk_norm if not head.chunk_norm <= _CHUNK_EXPANDS and _outside(head) is None else None


def _grows(head: Figures) -> float | None:
    return head.state_growth if head.state_growth is not None and not head.state_growth <= _GROWS else None


def _stuck(gate: str, *, opened: bool) -> Callable[[Figures], float | None]:
    def degree(head: Figures) -> float | None:
        shares = head.gates.get(gate)
        share = None if shares is None else shares.open if opened else shares.shut
        return share if share is not None and share >= _MOSTLY else None

    return degree


def _say_stuck(gate: str, what: str, *, opened: bool) -> Callable[[Figures], str]:
    def sentence(head: Figures) -> str:
        share = head.gates[gate].open if opened else head.gates[gate].shut
        return f"the {gate} gate is {'open' if opened else 'shut'} on {share:.0%} of tokens: {what}"

    return sentence


_Trouble = tuple[Callable[[Figures], float | None], Callable[[Figures], str]]
_TROUBLES: tuple[_Trouble, ...] = (
    (_outside, _say_outside),
    (_near, _say_near),
    (
        _chunk,
        lambda head: (
            f"{CHUNK} tokens in a row multiply a state by up to {head.chunk_norm:.3g}: it can grow without being "
            "written to, and decay alone bounds it"
        ),
    ),
    (
        _grows,
        lambda head: (
            f"the norm of the state grows {head.state_growth:.3g}-fold over the second half of a sequence, to "
            f"{head.state_norm:.3g}: more than writes of one size explain"
        ),
    ),
    (
        lambda head: -head.half_life.max if head.half_life and head.half_life.max < _FORGETS else None,
        lambda head: (
            f"the decay halves every channel within {head.half_life.max if head.half_life else 0:.2g} tokens: the head "
            "carries next to nothing from token to token"
        ),
    ),
    *(
        (_stuck(gate, opened=opened), _say_stuck(gate, what, opened=opened))
        for gate, opened, what in (
            ("step", False, "the head hardly writes"),
            ("step", True, "the step size no longer depends on the input, and hardly any gradient reaches its gate"),
            ("output", False, "the head hardly contributes"),
        )
    ),
)
"""Each kind of trouble: how bad it is in a head, None if it is not there; and the sentence about the worst head."""
