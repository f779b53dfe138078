"""Records of the inputs that delta-rule layers pass to the operator, and of their gates, during a forward pass."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from deltazoo._report import replaced_methods
from deltazoo.compat.transformers.layer import AcceleratedLayer
from deltazoo.layers import DeltaRuleAttention, GatedRMSNorm, RuleInputs, Sequences
from deltazoo.layers.norm import GATE_ACTIVATIONS
from deltazoo.layers.sequences import WHOLE_ROWS, SharedSequences
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.rules.channel_gates import ChannelGates
from deltazoo.spec import RuleSpec, get_rule


class Gate(NamedTuple):
    """The values of one kind of gate."""

    values: Tensor
    """`[B, T, heads, c]` in [0, 1], after the sigmoid: c gates per head and token, by key or value heads; with
    micro-steps the heads of the first step come first."""
    has_upper_bound: bool = True
    """Whether the gate has an upper end; not SiLU, `x * sigmoid(x)`, which is shut where the sigmoid is."""


class RecordedCall(NamedTuple):
    """One call of the operator by a layer."""

    spec: RuleSpec
    num_micro_steps: int
    inputs: RuleInputs
    """The operator's inputs: real tokens of padded rows first, micro-steps side by side in the heads."""
    sequences: Sequences
    gates: dict[str, Gate]
    """The gates of "step", "erase", "write", "decay" and "output" that the rule has."""


def delta_rule_layers(model: nn.Module) -> dict[str, Any]:
    """The delta-rule layers of a model by path: ours, swapped ones, and accelerated ones of transformers."""
    return {
        name or type(module).__name__: module
        for name, module in model.named_modules()
        if isinstance(module, (DeltaRuleAttention, AcceleratedLayer))
    }


@contextmanager
def recorded_calls(layers: dict[str, Any], receive: Callable[[str, RecordedCall], None]) -> Iterator[None]:
    """A context in which every forward pass of one of the layers ends with `receive(name, call)`.

    Raises:
        NotImplementedError: from the layer, if several ranks share its rows.
        ValueError: a layer whose `apply_rule` was replaced; from the layer, if it continues from the state of earlier
            tokens, or calls no operator.
    """
    with ExitStack() as hooks:
        for name, layer in layers.items():
            _record(name, layer, receive, hooks)
        yield


def _record(name: str, layer: Any, receive: Callable[[str, RecordedCall], None], hooks: ExitStack) -> None:
    """Have `receive(name, call)` follow every forward pass of a layer until the hooks are undone."""
    calls: list[tuple[RuleInputs, Sequences]] = []
    gates: dict[str, Gate] = {}

    def keep_inputs(_: Any, inputs: RuleInputs, past: Any, sequences: Sequences = WHOLE_ROWS) -> None:
        if isinstance(sequences, SharedSequences):
            raise NotImplementedError("diagnose needs whole sequences: call it without context parallelism")
        if past is not None and past.recurrent is not None:
            raise ValueError("diagnose measures sequences from their first token: pass no past_key_values")
        calls.append((inputs, sequences))

    if "apply_rule" in replaced_methods(layer):
        raise ValueError(f"diagnose describes the operator, and apply_rule of {name} was replaced: it may not run")

    def keep_step_gate(gate: Tensor, *_: Any) -> None:
        gates["step"] = Gate(gate[..., None])

    def keep_output_gate(gate: Tensor, activation: Any) -> None:
        if activation in GATE_ACTIVATIONS:
            gates["output"] = Gate(torch.sigmoid(at_least_float32(gate)), has_upper_bound=activation == "sigmoid")

    def keep_map(name: str, heads: int, module: nn.Module, arguments: Any, logit: Tensor) -> None:
        gates[name] = Gate(torch.sigmoid(at_least_float32(logit)).unflatten(-1, (heads, -1)))

    def finish(*_: Any) -> None:
        if not calls:
            raise ValueError(f"diagnose describes the operator, which the forward pass of {name} did not call")
        inputs, sequences = calls.pop()
        lower_bound = getattr(layer, "decay_lower_bound", None)
        if inputs.log_decay is not None and lower_bound is not None:
            share = inputs.log_decay / lower_bound
            gates["decay"] = Gate(share if share.ndim == 4 else share[..., None])
        receive(name, RecordedCall(spec, getattr(layer, "num_micro_steps", 1), inputs, sequences, dict(gates)))
        gates.clear()

    hooks.enter_context(_observed(layer, "apply_rule", keep_inputs))
    if not isinstance(layer, ChannelGates):
        hooks.enter_context(_observed(layer, "step_gate", keep_step_gate))
    if isinstance(layer, DeltaRuleAttention):
        spec, norm = layer.spec, layer.o_norm
        if isinstance(norm, GatedRMSNorm):
            keep = norm.register_forward_pre_hook(lambda _, inputs: keep_output_gate(inputs[1], norm.activation))
            hooks.enter_context(keep)
        for gate_name, projection, heads in _gate_maps(layer):
            hooks.enter_context(projection.register_forward_hook(partial(keep_map, gate_name, heads)))
    else:
        spec = get_rule(layer.arrangement.rule)
        activation = getattr(layer.get_submodule(layer.arrangement.norm), "activation", "silu")

        hooks.enter_context(
            _observed(layer, "_norm_and_gate", lambda _, output, gate: keep_output_gate(gate, activation))
        )
    hooks.enter_context(layer.register_forward_hook(finish))


def _gate_maps(layer: DeltaRuleAttention) -> list[tuple[str, nn.Module, int]]:
    """Name, linear map and number of heads of the gates that no method of the layer returns."""
    if isinstance(layer, ChannelGates):
        return [("erase", layer.b_proj, layer.num_heads), ("write", layer.w_proj, layer.num_v_heads)]
    projection = getattr(layer, "erase_b_proj", None)  # the gate of a step that only erases (`eda`)
    return [] if projection is None else [("erase", projection, layer.num_v_heads)]


def _observed(layer: Any, method: str, observer: Callable[..., None]) -> AbstractContextManager[Any]:
    """A context in which `observer(result, *arguments)` follows each call of a method of one layer."""
    function = getattr(layer, method)

    def observed(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        observer(result, *arguments)
        return result

    return patch.object(layer, method, observed)
