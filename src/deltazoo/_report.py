"""The report on a model: the backend of each layer, the way it decodes and trains, and the reasons."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from deltazoo.layers.delta_attention import DeltaRuleAttention
from deltazoo.ops import resolve_backend
from deltazoo.ops.backends import describe_kernels
from deltazoo.spec import RuleSpec


class RuleDescription(NamedTuple):
    """A layer's call of the operator, described."""

    spec: RuleSpec
    num_micro_steps: int
    packs: bool
    """Whether packed documents reach the operator as such; other layers make their first tokens forget the state."""
    backend: str | None
    """The backend asked for; None leaves the choice to the operator."""
    device: torch.device
    dtype: torch.dtype
    head_k_dim: int
    head_v_dim: int


@runtime_checkable
class RunsDeltaRule(Protocol):
    """A layer of another library that runs the operator."""

    def describe_rule(self) -> RuleDescription:
        """The call of the operator on the layer's present device, described."""


class LayerReport(NamedTuple):
    """A row of the report: one delta-rule layer."""

    name: str
    """Path inside the model."""
    rule: str
    update: str
    """The operator's update per token in words: decay, erase and steps."""
    backend: str
    """"triton", "chunkwise" or "reference"."""
    reason: str
    """Reason for the backend."""


@dataclass(frozen=True)
class ModelReport:
    """All delta-rule layers of a model; prints as a table."""

    layers: tuple[LayerReport, ...]
    decoding: str | None = None
    """The way `generate` runs decoding steps, with the reason; None without deltazoo's `generate`."""
    training: str | None = None
    """The way a training step computes norms, MLP and loss, and what it recomputes; None unless the model is ours."""

    captured: str | None = None
    """The number of training steps that ran from CUDA graphs so far, and why others did not; None without any."""

    def __str__(self) -> str:
        parts = (self._table(), self.decoding, self.training, self.captured)
        return "\n".join(part for part in parts if part is not None)

    def _table(self) -> str:
        if not self.layers:
            return "no delta-rule layers"
        rows = [("layer", *LayerReport._fields[1:]), *self.layers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def report(model: nn.Module) -> ModelReport:
    """A report on the backend of every delta-rule layer on its present device, and on how the model decodes and trains.

    Args:
        model: a layer, or a module that holds layers. Device and dtype of its parameters decide.
    """
    layers = []
    for name, module in model.named_modules():
        rule = _description(module)
        if rule is not None:
            update = describe_update(rule.spec, rule.num_micro_steps)
            backend, reason = backend_of(rule)
            if methods := replaced_methods(module):
                names = ", ".join(methods)
                reason += f"; but {names} of this layer did not come with deltazoo and may call no operator"
            layers.append(LayerReport(name or type(module).__name__, rule.spec.name, update, backend, reason))
    decoding, training = _told(model, "describe_decoding"), _told(model, "describe_training")
    kept = (vars(module).get("_captured_training") for module in model.modules())
    captured = next((steps.describe() for steps in kept if steps is not None), None)
    return ModelReport(tuple(layers), decoding, training, captured)


def _told(model: nn.Module, method: str) -> str | None:
    """The answer of the first module that has the method; None without one."""
    return next((getattr(module, method)() for module in model.modules() if hasattr(module, method)), None)


def backend_of(rule: RuleDescription) -> tuple[str, str]:
    """The backend that a rule's calls run, and the reason."""
    device, dtype, K, V = rule.device, rule.dtype, rule.head_k_dim, rule.head_v_dim
    undecayed = rule.spec.erase_reads == "undecayed"
    per_channel = undecayed and rule.spec.decay == "channel"
    backend, reason = resolve_backend(
        rule.backend, device=device, dtype=dtype, head_k_dim=K, head_v_dim=V, undecayed_channels=per_channel
    )
    if backend != "triton":
        return backend, reason
    kernels = describe_kernels(
        device,
        dtype,
        K,
        V,
        decay=rule.spec.decay,
        has_beta=rule.spec.corrects,
        has_erase_key=rule.spec.erase_key == "separate",
        undecayed=undecayed,
        num_micro_steps=rule.num_micro_steps,
        packs=rule.packs,
    )
    return backend, reason if kernels is None else f"{reason}: {kernels}"


def _description(module: nn.Module) -> RuleDescription | None:
    if isinstance(module, RunsDeltaRule):
        return module.describe_rule()
    if not isinstance(module, DeltaRuleAttention):
        return None
    weight, steps = module.v_proj.weight, module.num_micro_steps
    sizes = module.key_expansion * module.head_k_dim, module.head_v_dim
    spec = module.spec if module.key_expansion == 1 else replace(module.spec, decay="channel")
    return RuleDescription(spec, steps, True, module.backend, weight.device, weight.dtype, *sizes)


def replaced_methods(layer: nn.Module) -> list[str]:
    """Names of methods before the operator that another library has replaced, so the description may not hold."""
    replaced = {"apply_rule"} & {*vars(layer)}
    if isinstance(layer, DeltaRuleAttention):  # layers of other libraries describe themselves
        methods = {name: getattr(type(layer), name) for name in ("forward", "apply_rule")}
        replaced |= {name for name, method in methods.items() if method.__module__.partition(".")[0] != "deltazoo"}
    return sorted(replaced)


def describe_update(spec: RuleSpec, num_micro_steps: int) -> str:
    """Decay, erase and number of steps of a rule, in a few words."""
    decay = {"none": "no decay", "scalar": "decay per head", "channel": "decay per channel"}[spec.decay]
    if not spec.corrects:
        return f"{decay}, no erase"
    erase = "erases under its key" if spec.erase_key == "tied" else "erases under another key"
    reads = ", reads before the decay" if spec.erase_reads == "undecayed" else ""
    steps = f", {num_micro_steps} micro-steps" if num_micro_steps > 1 else ""
    return f"{decay}, {erase}{reads}{steps}"
