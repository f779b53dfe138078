"""Which backend each layer of a model runs, and why."""

from dataclasses import dataclass

from torch import nn

from deltazoo.layers.delta_attention import DeltaRuleAttention
from deltazoo.ops import resolve_backend

__all__ = ["LayerReport", "ModelReport", "report"]


@dataclass(frozen=True)
class LayerReport:
    """One delta-rule layer."""

    name: str
    """Path inside the model."""
    variant: str
    backend: str
    """"triton", "chunkwise" or "reference"."""
    reason: str
    """Why that one."""


@dataclass(frozen=True)
class ModelReport:
    """All delta-rule layers of a model; prints as a table."""

    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        if not self.layers:
            return "no delta-rule layers"
        rows = [("layer", "variant", "backend", "reason")]
        rows += [(layer.name, layer.variant, layer.backend, layer.reason) for layer in self.layers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def report(model: nn.Module) -> ModelReport:
    """Say which backend every delta-rule layer of `model` runs where it is now, and why.

    Args:
        model: a layer or anything that holds layers. Its parameters' device and dtype decide.
    """
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, DeltaRuleAttention):
            weight = module.v_proj.weight
            backend, reason = resolve_backend(
                module.backend,
                device=weight.device,
                dtype=weight.dtype,
                head_k_dim=module.head_k_dim,
                head_v_dim=module.head_v_dim,
                channel_decay=module.spec.decay == "channel",
            )
            layers.append(LayerReport(name or type(module).__name__, module.spec.name, backend, reason))
    return ModelReport(tuple(layers))
