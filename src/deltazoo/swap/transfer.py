"""The first weights of a delta-rule layer that replaces softmax attention: copied weights, and initial values.

Softmax attention answers a query with an average of past values, weighted by how well their keys fit. A delta rule with
the same queries, keys and values answers `q^T S`, also a sum of past values weighted by `q . k`, so the projections can
be copied. Everything else in a delta-rule layer starts so that it hardly changes that answer:

* **Convolutions** are the identity (last tap 1), without SiLU after them, which softmax attention does not have. So at
  the first forward pass the queries, keys and values are the original ones.
* **Rotary embedding** stays, unless the user drops it. It multiplies the score by a function of the distance alone, as
  in the original. Keys keep their length under it, so unit keys stay unit keys.
* **Norms of queries and keys** stay too. The rule's L2 norm comes after them and removes the length alone, so the
  original norms' factors per channel still count.
* **Step size** is equal for all tokens (`b_proj` is nearly zero, its bias decides): `beta |k|^2 = 1/2`, where the
  sigmoid is steepest and an old value under the same key is half replaced. For rules that keep the length of their
  keys the bias is set from the length that the copied projection gives to random inputs; with the plain `b = 1/2` a
  key of length 8 would overwrite everything under it.
* **Decay** is slow and the same for all tokens (its projection is nearly zero): softmax attention has none. The time
  constants of the heads, or of the channels of each head, are spaced evenly in the logarithm from 8 to 4,096 tokens,
  since attention is local in some heads and not in others. (On a small Llama, starting at 8 instead of 64 was a little
  better before and after alignment with the original.)
* **Output gate** is a constant: its weight is nearly zero, and its bias makes it one (SiLU) or 1/2 (sigmoid, where it
  is steepest). The factor of the output norm compensates.
* **Output norm** divides `q^T S` by its length, which grows with the number of tokens, and multiplies it by a factor:
  half the length of the original values, measured on random inputs to the model's own norm and value projection. An
  average of values is shorter than a value; that of four independent ones is half as long.

* **Parameters that a rule adds** start where the rule equals the one that it extends, or close to that
  (`DeltaRuleAttention.neutral_initializers`).

"Nearly zero" means rows of length 1e-4: DoRA divides by the length of a row, and rows of zeros would give NaN.

Copies are exact. With `init="random"` every parameter starts as in the rule's paper instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from deltazoo.layers import LayerInput
from deltazoo.layers.initialization import nearly_zero_rows_, spaced_decay_rates
from deltazoo.layers.norm import GATE_ACTIVATIONS
from deltazoo.names import function_of
from deltazoo.ops.dtypes import at_least_float32
from deltazoo.ops.step_size import STEP_SIZES
from deltazoo.swap.families import ModelFamily
from deltazoo.swap.layer import DropInDeltaAttention

_AVERAGE_LENGTH = 0.5
"""Assumed length of the average of values that softmax attention returns, over the length of a value."""
_OPEN = 1.278464542761074
"""Input at which SiLU is one: the bias of every output gate whose activation is zero at zero."""
_PROBES = 256


@dataclass(frozen=True)
class HeadShape:
    """Sizes and parts of an attention layer, from which its replacement is built."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    qk_norm: str | None
    """Norms of queries and keys: "head", "width" (over all heads at once) or None."""
    qk_norm_eps: float
    has_rope: bool


def read_shape(family: ModelFamily, attention: Any, config: PreTrainedConfig, index: int) -> HeadShape:
    """Sizes of one attention layer, which must fit the family's entry.

    Raises:
        ValueError: projections that are not plain matrices (quantised, adapted, offloaded), or of unexpected sizes.
    """
    for name in (*family.projections, family.output):
        _check_projection(getattr(attention, name, None), name, index)
    projection, output = getattr(attention, family.projections[0]), getattr(attention, family.output)
    num_heads: int = config.num_attention_heads
    num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
    width = output.weight.shape[0 if family.transposed else 1]
    head_dim, rest = divmod(width, num_heads)
    if rest or num_heads % num_kv_heads:
        raise ValueError(
            f"layer {index}: {width} channels do not fit {num_heads} heads of queries and {num_kv_heads} of keys"
        )
    qk_norm, eps = None, 0.0
    if family.norms is not None:
        norm = getattr(attention, family.norms[0])
        qk_norm = "head" if norm.weight.numel() == head_dim else "width"
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
    return HeadShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=projection.bias is not None,
        o_bias=output.bias is not None,
        qk_norm=qk_norm,
        qk_norm_eps=eps,
        has_rope=family.rope and (family.rope_switch is None or bool(getattr(attention, family.rope_switch))),
    )


def _check_projection(projection: Any, name: str, index: int) -> None:
    kind = type(projection)
    if kind not in (nn.Linear, Conv1D):
        raise ValueError(
            f"layer {index}: expected {name} to be a plain linear map, got {kind.__module__}.{kind.__name__}; "
            "swap before quantising or adding adapters"
        )
    weight: Tensor = projection.weight
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise ValueError(f"layer {index}: {name} holds {weight.dtype}, a quantised weight; swap before quantising")


@torch.no_grad()
def read_attention(family: ModelFamily, attention: Any, shape: HeadShape, index: int) -> dict[str, Tensor]:
    """Tensors of an attention layer, as far as possible views, by the names of the parameters that copy them.

    Weights are `[out, in]` with rows by head; factors of norms `[head_dim]` or `[heads * head_dim]`, offset included.

    Raises:
        ValueError: the weights are not in memory.
    """
    tensors: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        *inputs, output = (getattr(getattr(attention, name), kind) for name in (*family.projections, family.output))
        if kind == "weight" and family.transposed:
            inputs, output = [x.T for x in inputs], output.T
        if family.fused is not None:
            inputs = [None] * 3 if inputs[0] is None else _split(inputs[0], family, shape)
        tensors |= {f"{x}_proj.{kind}": y for x, y in zip("qkvo", (*inputs, output), strict=True) if y is not None}
    if any(x.is_meta for x in tensors.values()):
        raise ValueError(f"layer {index}: the weights are not in memory (meta device), so they cannot be copied")
    for part, name in zip("qk", family.norms or (), strict=False):
        tensors[f"{part}_norm.weight"] = at_least_float32(getattr(attention, name).weight) + family.norm_offset
    return tensors


def _split(x: Tensor, family: ModelFamily, shape: HeadShape) -> list[Tensor]:
    """Queries, keys and values from one tensor whose rows hold all three."""
    if family.fused == "by_head":
        by_head = x.unflatten(0, (shape.num_heads, 3, shape.head_dim))
        return [part.flatten(0, 1) for part in by_head.unbind(1)]
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    return list(x.split([count * shape.head_dim for count in heads]))


def copied_parameters(delta: DropInDeltaAttention) -> list[str]:
    """Names of the layer's parameters that `transfer` copies from the original attention."""
    sources = ("q_proj.", "k_proj.", "v_proj.", "o_proj.", "q_norm.", "k_norm.")
    return [name for name, _ in delta.named_parameters() if name.startswith(sources)]


@torch.no_grad()
def transfer(delta: DropInDeltaAttention, original: dict[str, Tensor], input_norm: nn.Module | None) -> None:
    """Fill all parameters of a layer from the attention it replaces, in place.

    Args:
        delta: the layer, built with the heads of the original attention, on its device and in its dtype.
        original: the result of `read_attention`.
        input_norm: the norm just before attention; None if there is none.
    """
    _copy_projections(delta, original)
    probe = _probe(original["v_proj.weight"], input_norm)
    if delta.conv_size:
        for convolution in (delta.q_conv1d, delta.k_conv1d, delta.v_conv1d):
            nn.init.zeros_(convolution.weight)
            convolution.weight[..., -1] = 1
    for name, start in delta.neutral_initializers().items():
        start(delta.get_parameter(name))
    if delta.spec.corrects:
        nearly_zero_rows_(delta.b_proj.weight)
        nn.init.constant_(delta.b_proj.bias, _step_bias(delta, original, probe))
    if hasattr(delta, "A_log"):  # neutral_initializers start any other decay
        _start_decay(delta)
    gate = _start_gate(delta)
    length = _AVERAGE_LENGTH * _root_mean_square(_project(probe, original, "v_proj"))
    nn.init.constant_(delta.o_norm.weight, length / gate)


def _copy_projections(delta: DropInDeltaAttention, original: dict[str, Tensor]) -> None:
    for name, source in original.items():
        if "_norm." in name and delta.qk_norm is None:
            continue
        target = delta.get_parameter(name)
        copies = len(target) // len(source)
        if copies > 1:  # shared keys or values, for every head that uses them
            source = source.unflatten(0, (-1, delta.head_k_dim)).repeat_interleave(copies, dim=0).flatten(0, 1)
        target.copy_(source)


def _probe(weight: Tensor, input_norm: nn.Module | None) -> Tensor:
    """Random hidden states `[tokens, hidden_size]` in the form that the projections receive, equal at every call."""
    noise = torch.randn(_PROBES, weight.shape[1], generator=torch.Generator().manual_seed(0), device="cpu")
    noise = noise.to(weight.device, weight.dtype)
    return noise if input_norm is None else input_norm(noise)


def _project(probe: Tensor, original: dict[str, Tensor], name: str) -> Tensor:
    projected, bias = probe.float() @ original[f"{name}.weight"].float().T, original.get(f"{name}.bias")
    return projected if bias is None else projected + bias.float()


def _root_mean_square(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()


def _step_bias(delta: DropInDeltaAttention, original: dict[str, Tensor], probe: Tensor) -> float:
    """The bias of `b_proj` for which `beta |k|^2` is 1/2, before a doubling; zero (b = 1/2) for shorter keys."""
    if delta.spec.normalize_k:
        squared_length = 1.0
    elif delta.qk_norm is None:
        squared_length = _root_mean_square(_project(probe, original, "k_proj")) ** 2 * delta.head_k_dim
    else:
        squared_length = _root_mean_square(original["k_norm.weight"]) ** 2 * delta.head_k_dim
    step_size = function_of("step_size", delta.spec.step_size, STEP_SIZES)
    heads = delta.projected_steps * delta.num_heads
    key = torch.full((1, 1, heads, delta.head_k_dim), (squared_length / delta.head_k_dim) ** 0.5, device=probe.device)
    x = LayerInput(delta.b_proj.weight.new_zeros(1, 1, delta.hidden_size), delta)

    def excess(bias: Tensor) -> Tensor:
        nn.init.constant_(delta.b_proj.bias, bias.item())
        return (step_size(delta.step_gate(x), key).mean().double() * squared_length - 0.5).cpu()

    zero = torch.zeros((), dtype=torch.float64)
    return 0.0 if excess(zero) <= 1e-6 else _root(excess, zero - 40, zero).item()


def _root(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The zeros of an increasing function, one per number, by bisection."""
    for _ in range(80):
        middle = (low + high) / 2
        above = function(middle) > 0
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return high


def _start_decay(delta: DropInDeltaAttention) -> None:
    per_head = delta.spec.decay == "scalar"
    steps = delta.num_v_heads if per_head else delta.head_k_dim
    rate = spaced_decay_rates(steps)
    if not per_head:
        rate = rate.repeat(delta.num_v_heads)
    nn.init.zeros_(delta.A_log)
    delta.dt_bias.copy_(_bias_of_rate(delta, rate.double().to(delta.dt_bias.device)))
    nearly_zero_rows_(delta.a_proj.weight if per_head else delta.f_proj[1].weight)  # type: ignore[arg-type]


def _bias_of_rate(delta: DropInDeltaAttention, rate: Tensor) -> Tensor:
    """The `dt_bias` for which the decay gate, without input, gives a log-decay of `-rate`, found by bisection."""
    shape = (1, 1, delta.num_v_heads) if delta.spec.decay == "scalar" else (1, 1, delta.num_v_heads, delta.head_k_dim)
    no_input, A_log = rate.new_zeros(shape), rate.new_zeros(delta.num_v_heads)

    def excess(bias: Tensor) -> Tensor:
        return -delta.decay_gate(no_input, A_log, bias).flatten() - rate

    found = _root(excess, torch.full_like(rate, -60.0), torch.full_like(rate, 60.0))
    # A gate that does not reach the rate, or decreases as the bias grows, keeps its own initial value.
    return torch.where(excess(found).abs() <= 1e-3 * rate, found, delta.dt_bias.double())


def _start_gate(delta: DropInDeltaAttention) -> float:
    """The value of the output gate, which is made constant."""
    if delta.spec.output_gate == "none":
        return 1.0
    last: nn.Linear = delta.g_proj if delta.spec.output_gate == "full" else delta.g_proj[1]  # type: ignore[index, assignment]
    nearly_zero_rows_(last.weight)
    activation = function_of("gate_activation", delta.spec.gate_activation, GATE_ACTIVATIONS)
    closed_at_zero = activation(torch.zeros(1)).item() == 0
    bias = _OPEN if closed_at_zero else 0.0
    nn.init.constant_(last.bias, bias)
    return activation(torch.tensor([bias], dtype=torch.float64)).item()
