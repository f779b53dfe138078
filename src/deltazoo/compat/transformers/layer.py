"""A delta-rule layer of transformers that keeps its modules and weights and computes with `deltazoo.ops`.

Accelerating replaces the class of a layer by a subclass with another `forward`. Nothing is copied, and setting the
class back undoes it. The subclasses are attributes of this module, so that accelerated models can be pickled.

States are read from the model's cache and written to it in the original form, so a cache stays valid across
`accelerate` and `restore`. Beam search, static caches and offloading are transformers' own. A cache that records tokens
to take them back is refused, since transformers would take back the convolution's inputs alone.
"""

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin
from transformers.integrations.accelerate import force_accelerate_hooks

from deltazoo._report import RuleDescription
from deltazoo.compat.transformers.arrangements import (
    LAYER_ARRANGEMENTS,
    LayerArrangement,
    Projections,
    arrangement_of,
)
from deltazoo.compat.transformers.packing import POSITIONS, SHARED_BATCH, has_explicit_packing
from deltazoo.generation.batch import PACKING_ARGUMENTS
from deltazoo.generation.cache import (
    DeltaRuleCacheLayer,
    layer_of_cache,
    not_of_a_linear_layer,
    refuse_to_go_back,
    takes_cache,
)
from deltazoo.layers.norm import l2_normalize_both
from deltazoo.layers.rule import EffectiveStep, RuleInputs, run_rule
from deltazoo.layers.sequences import WHOLE_ROWS, Sequences, SharedSequences, describe_sequences
from deltazoo.layers.short_convolution import last_inputs
from deltazoo.layers.state import LayerState, is_decoding_step
from deltazoo.models.forward_arguments import refuse_dropped
from deltazoo.ops import DeltaRuleOutput, fused
from deltazoo.ops.context.exchange import tokens_before
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.fused import takes_kernel
from deltazoo.ops.linear_maps import is_hooked
from deltazoo.spec import get_rule

_PREFIX = "Accelerated"
_KNOWN = (POSITIONS, SHARED_BATCH, "position_ids", "position_embeddings", "use_cache", "output_router_logits")
"""Arguments that decoder layers pass down: those of the model's hook, and those that tell a linear layer nothing."""


class AcceleratedLayer:
    """The methods that every accelerated subclass adds to a layer class of transformers."""

    original: ClassVar[type[nn.Module]]
    """The class of transformers."""
    arrangement: ClassVar[LayerArrangement]
    input_projections: ClassVar[tuple[str, ...]]
    """The linear maps of the layer's input, which captured steps merge."""
    steps: ClassVar[Sequence[EffectiveStep]]
    """The step sizes without and with doubling."""
    deltazoo_backend: str | None = None
    """Backend of the operator: None, "triton", "chunkwise" or "reference"."""
    deltazoo_fused_kernels: bool | None = None
    """Whether Triton kernels compute the convolution, the decay gate and the gated norm."""

    @force_accelerate_hooks("conv1d")
    @takes_cache("cache_params")
    def forward(
        self: Any,
        hidden_states: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Mix the tokens, with the arguments and the cache of the original layer.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            cache: the model's cache, in which the layer keeps its state in the original form.
            attention_mask: `[B, T]` bool or integer for these tokens, 1 = real. Padding may be anywhere: it does not
                influence other positions, and its outputs are zeros.
            kwargs: further arguments of the decoder layer; the layer reads those that the hook of the model has made.

        Returns:
            `[B, T, hidden_size]`.

        Raises:
            ValueError: packed documents that the model around the layer did not describe; another kind of mask.
            TypeError: an argument that the layer does not know.
        """
        refuse_dropped(self, kwargs, _KNOWN)
        positions = kwargs.get(POSITIONS)
        if positions is None and has_explicit_packing(kwargs):
            raise ValueError(
                f"{type(self).__name__} was given packed documents ({', '.join(PACKING_ARGUMENTS)}) that no "
                "accelerated model around it has described: call the whole model"
            )
        if kwargs.get(SHARED_BATCH) is not None:
            sequences = kwargs[SHARED_BATCH].sequences
            positions = sequences.positions
        else:
            sequences = describe_sequences(*hidden_states.shape[:2], attention_mask=attention_mask)
        hidden_states = sequences.arrange(hidden_states)

        projections = self.arrangement.project(self, hidden_states)
        before = stored_state(cache, self.layer_idx, self.conv_kernel_size, projections.qkv)
        if positions is None and sequences.whole_rows and self._may_overwrite(before, projections.qkv):
            output = self._step(projections, before)
        else:
            output = self._mix(projections, before, sequences, positions, cache)
        output = self._norm_and_gate(output, projections.output_gate)
        output = self.get_submodule(self.arrangement.output)(output.flatten(2))
        return sequences.restore(output)

    def _mix(
        self: Any,
        projections: Projections,
        before: LayerState | None,
        sequences: Sequences,
        positions: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """The rule's output `[B, T, HV, V]`, after writing the state to the cache."""
        qkv, window = self._convolve(projections.qkv, before, sequences, positions)
        q, k, v = self._heads(qkv.split(_widths(projections), dim=-1))
        inputs = self._rule_inputs(*l2_normalize_both(q, k), v, projections).mask_padding(sequences)
        if positions is not None and not isinstance(sequences, SharedSequences):
            # A log-decay of -inf, which has no gradient, begins every document with an empty state.
            log_decay: Any = inputs.log_decay
            starts = (positions == 0).reshape(*positions.shape, *[1] * (log_decay.ndim - 2))
            inputs = inputs._replace(log_decay=log_decay.masked_fill(starts, -torch.inf))
        output, new_state = self.apply_rule(inputs, before, sequences)
        if cache is not None:
            cache.update_conv_state(window, self.layer_idx, conv_kernel_size=window.shape[-1])
            cache.update_recurrent_state(new_state, self.layer_idx)
        return output

    def _may_overwrite(self: Any, before: LayerState | None, qkv: Tensor) -> bool:
        """Whether a call has one token per row, whose kernels may overwrite the states in the cache."""
        if before is None or not is_decoding_step(qkv):
            return False
        conv: Any = before.conv
        if conv.dtype != qkv.dtype or before.recurrent.dtype != torch.float32:
            return False
        return conv.is_contiguous() and before.recurrent.is_contiguous() and self.fuses(qkv, conv)

    def _step(self: Any, projections: Projections, state: LayerState) -> Tensor:
        """The rule's output for one token per row, in fewer launches than `_mix`; overwrites the state."""
        widths, heads, window = _widths(projections), _head_dims(self)[:1] * 2, state.conv
        parts, weights = projections.qkv.split(widths, dim=-1), self.conv1d.weight.split(widths)
        assert window is not None
        parts, _ = fused.short_convolution_step(parts, weights, window, head_dims=heads, inplace=True, fused=True)
        inputs = self._rule_inputs(*self._heads(parts), projections)
        return self.apply_rule(inputs, state, in_place=True).output

    def apply_rule(
        self: Any,
        inputs: RuleInputs,
        before: LayerState | None,
        sequences: Sequences = WHOLE_ROWS,
        *,
        in_place: bool = False,
    ) -> DeltaRuleOutput:
        """The operator's output `[B, T, HV, V]`, and the state after the last token."""
        described = sequences if isinstance(sequences, SharedSequences) else WHOLE_ROWS
        state = None if before is None else before.recurrent
        backend, precision = self.deltazoo_backend, self.effective_step.precision
        return run_rule(inputs, state, described, in_place=in_place, backend=backend, precision=precision)

    def _convolve(
        self: Any, qkv: Tensor, before: LayerState | None, sequences: Sequences, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Convolved inputs `[B, T, C]`, and the last `conv_kernel_size` real inputs of each row, `[B, C, taps]`."""
        state, past = None if before is None else before.conv, self._inputs_before(qkv, before, sequences)
        shared = isinstance(sequences, SharedSequences)
        window = last_inputs([qkv], past, WHOLE_ROWS if shared else sequences)  # a shared piece has no padding
        if not shared and self.fuses(qkv, state) and (positions is None or state is None):
            older = None if state is None else past[:, 1:].transpose(1, 2)
            return _fused_convolution(qkv, self.conv1d.weight, older, positions), window
        history = torch.cat([past[:, 1:], qkv], dim=1)
        return F.silu(fused.depthwise_sum(history, self.conv1d.weight, positions)).to(qkv.dtype), window

    def _inputs_before(self: Any, qkv: Tensor, before: LayerState | None, sequences: Sequences) -> Tensor:
        """The `conv_kernel_size` inputs before each row, `[B, taps, C]`, zeros where there are none."""
        taps = self.conv_kernel_size
        if isinstance(sequences, SharedSequences):
            return tokens_before((qkv,), taps, sequences.context)[0]
        if before is None or before.conv is None:
            return qkv.new_zeros(qkv.shape[0], taps, qkv.shape[2])
        return before.conv.transpose(1, 2).to(qkv.dtype)

    def _heads(self: Any, parts: Sequence[Tensor]) -> list[Tensor]:
        """q, k and v, each `[B, T, heads, head dimension]`, from convolved parts `[B, T, C_i]`."""
        key_dim, value_dim = _head_dims(self)
        return [x.unflatten(-1, (-1, dim)) for x, dim in zip(parts, (key_dim, key_dim, value_dim), strict=True)]

    def _rule_inputs(self: Any, q: Tensor, k: Tensor, v: Tensor, projections: Projections) -> RuleInputs:
        return RuleInputs(q, k, v, self.effective_step(self.step_gate(projections), k), projections.log_decay)

    @property
    def effective_step(self: Any) -> EffectiveStep:
        """The step size from the gate; not every layer class may double it."""
        return self.steps[getattr(self, "allow_neg_eigval", False)]

    def step_gate(self: Any, projections: Projections) -> Tensor:
        """The gate `[B, T, HV]` float32 from which the rule computes the step size."""
        return torch.sigmoid(at_least_float32(projections.step_gate))

    def _norm_and_gate(self: Any, output: Tensor, gate: Tensor) -> Tensor:
        norm = self.get_submodule(self.arrangement.norm)
        activation = getattr(norm, "activation", "silu")  # older versions know no other
        # Neither an adapter nor a hook, and not FLA's norm.
        is_plain = not is_hooked(norm) and type(norm).__module__ == self.original.__module__
        if not (self.fuses(output) and activation in ("silu", "sigmoid") and is_plain):
            return norm(output, gate)
        return fused.gated_rms_norm(output, gate, norm.weight, norm.variance_epsilon, activation, fused=True)

    def fuses(self: Any, x: Tensor, state: Tensor | None = None) -> bool:
        """Whether fused kernels compute a convolution of x, after a state if there is one."""
        wanted = self.deltazoo_fused_kernels
        return takes_kernel(None, x, trained=(state,)) if wanted is None else wanted

    def describe_rule(self: Any) -> RuleDescription:
        """Description of the layer's call of the operator, for `deltazoo.report`."""
        return rule_of(self, self.arrangement, self.deltazoo_backend)


def rule_of(layer: Any, arrangement: LayerArrangement, backend: str | None) -> RuleDescription:
    """Description of the operator's call by a layer of an arrangement, accelerated or not."""
    norm = layer.get_submodule(arrangement.norm)  # never quantised
    # If weights are offloaded, a hook of accelerate has the device on which the layer runs.
    device = getattr(getattr(norm, "_hf_hook", None), "execution_device", None)
    device = norm.weight.device if device is None else torch.device(device)
    key_dim, value_dim = _head_dims(layer)
    spec, dtype = get_rule(arrangement.rule), norm.weight.dtype
    return RuleDescription(spec, 1, False, backend, device, dtype, key_dim, value_dim)


def _head_dims(layer: Any) -> tuple[int, int]:
    """K and V; transformers has separate names only where they may differ."""
    if hasattr(layer, "head_k_dim"):
        return layer.head_k_dim, layer.head_v_dim
    return layer.head_dim, layer.head_dim


def _widths(projections: Projections) -> list[int]:
    """Channels of q, k and v."""
    values = projections.output_gate.shape[2:].numel()
    keys = (projections.qkv.shape[-1] - values) // 2
    return [keys, keys, values]


def _fused_convolution(x: Tensor, weight: Tensor, older: Tensor | None, positions: Tensor | None) -> Tensor:
    """Convolution and SiLU of one kernel; with `positions` `[B, T]`, no tap reaches past a document's first token."""
    if positions is None:
        return fused.short_convolution(x, weight, older, fused=True)
    # The number of a document is that of its first token, so that nothing has to be counted on the device.
    tokens = torch.arange(x.shape[0] * x.shape[1] + 1, device=x.device)
    first_tokens = tokens[:-1] - positions.expand(x.shape[:2]).flatten()
    joined = x.flatten(0, 1)[None]
    packing = {"sequence": first_tokens, "cu_seqlens": tokens.int()}
    return fused.short_convolution(joined, weight, **packing, fused=True).view_as(x)


def stored_state(cache: Cache | None, layer_idx: int, taps: int, qkv: Tensor) -> LayerState | None:
    """The convolution's last inputs `[B, C, taps]` and the recurrent state `[B, HV, K, V]`; None before any token.

    Where gradients are recorded these are copies, since autograd saves them and the layer overwrites the cache.

    Args:
        qkv: `[B, T, C]`, the present inputs of the convolution.

    Raises:
            ValueError: the cache belongs to another model, or has another number of rows.
            RuntimeError: the cache records tokens, to take them back.
    """
    if cache is None:
        return None
    layer = layer_of_cache(cache, layer_idx)
    if not isinstance(layer, LinearAttentionCacheLayerMixin) or isinstance(layer, DeltaRuleCacheLayer):
        raise not_of_a_linear_layer(layer, layer_idx)
    if layer.record_past:
        refuse_to_go_back()
    if not layer.has_previous_state[0]:
        return None
    conv: Any = layer.conv_states[0]
    conv = conv[..., -taps:]
    if conv.shape[:2] != (qkv.shape[0], qkv.shape[2]):
        raise ValueError(
            f"the convolution state must have shape {(qkv.shape[0], qkv.shape[2], taps)}, got {tuple(conv.shape)}: the "
            "cache belongs to another model, or has other rows"
        )
    recurrent: Any = layer.recurrent_states[0]
    return LayerState(conv.clone(), recurrent.clone()) if torch.is_grad_enabled() else LayerState(conv, recurrent)


def accelerated_class(original: type[nn.Module]) -> type[nn.Module]:
    """The accelerated subclass of a layer class in `LAYER_ARRANGEMENTS`, made once."""
    name = _PREFIX + original.__name__
    if name not in globals():
        arrangement: Any = arrangement_of(original)
        spec = get_rule(arrangement.rule)
        members = {
            "__module__": __name__,
            "original": original,
            "arrangement": arrangement,
            "input_projections": arrangement.inputs,
            "steps": [EffectiveStep(spec, allow_neg_eigval=doubles) for doubles in (False, True)],
        }
        globals()[name] = type(name, (AcceleratedLayer, original), members)
    return globals()[name]


def __getattr__(name: str) -> Any:
    arrangement = LAYER_ARRANGEMENTS.get(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    if arrangement is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family, original = arrangement.family, name.removeprefix(_PREFIX)
    return accelerated_class(resolve_name(f"transformers.models.{family}.modeling_{family}:{original}"))
