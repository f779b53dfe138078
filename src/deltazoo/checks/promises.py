"""What a rule promises, checked on a layer and on models of a few thousand parameters, all in float64.

Two ways to compute one quantity differ by rounding alone there. Each check takes the name of a rule and returns its
fault in a sentence or two, or None; `check_rule` runs them one after another.
"""

import tempfile
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from deltazoo.generation.cache import CACHE
from deltazoo.layers import DeltaRuleAttention, LayerInput, LayerStates, RuleInputs, make_layer
from deltazoo.layers import rule as rule_functions
from deltazoo.models import DeltaRuleConfig, DeltaRuleForCausalLM
from deltazoo.spec import get_rule, registering_module
from deltazoo.swap import swap_attention
from deltazoo.training.console import no_transformers_bars

HIDDEN, HEADS, HEAD_DIM, VALUE_HEADS = 24, 2, 8, 4
TOKENS = 70  # a chunk of 64 and the beginning of another
TOLERANCE = 1e-9
_MIXES = "a token's inputs depend on other tokens, and only a further state may hand on what those have left"


def make(rule: str, dtype: torch.dtype = torch.float64, **options: Any) -> DeltaRuleAttention:
    """A small layer of the rule, perturbed."""
    sizes: dict[str, Any] = {"num_v_heads": VALUE_HEADS, "initializer_range": 0.5, "layer_idx": 0}
    return perturbed(make_layer(rule, HIDDEN, HEADS, HEAD_DIM, **sizes, **options), 0.1).to(dtype)


@torch.no_grad()
def perturbed(module: Any, size: float) -> Any:
    """The module with noise added to its parameters, so that parameters initialised to zero also act."""
    for parameter in module.parameters():
        parameter.add_(size * torch.randn_like(parameter))
    return module


def tokens(num_tokens: int = TOKENS, rows: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random hidden states."""
    return torch.randn(rows, num_tokens, HIDDEN, dtype=dtype)


def difference(found: Tensor, expected: Tensor) -> str | None:
    """The place and size of a difference between two tensors `[B, T, ...]` beyond rounding; None if there is none."""
    wrong = ~((found - expected).abs() <= TOLERANCE * (1 + expected.abs().max()))  # NaN is wrong
    if not wrong.any():
        return None
    row, token = (int(index) for index in wrong.flatten(2).any(-1).nonzero()[0])
    largest = (found - expected).abs().nan_to_num(nan=float("inf")).max()
    return f"first at token {token} of row {row}, by up to {largest:.1e}, where rounding explains {TOLERANCE:.0e}"


def parameters_are_filled_and_act(rule: str) -> str | None:
    """A parameter that is not filled or has no gradient, or a result that is not finite; None without a fault."""
    layer = make_layer(rule, HIDDEN, HEADS, HEAD_DIM, num_v_heads=VALUE_HEADS)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    layer.init_parameters()
    for name, parameter in layer.named_parameters():
        if not parameter.isfinite().all():
            return f"initializers() leaves values of {name!r} unfilled"
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        layer, x = make(rule, dtype), tokens(dtype=dtype).requires_grad_()
        y = layer(x)
        if y.shape != x.shape or y.dtype != dtype:
            return f"the layer makes {tuple(y.shape)} {y.dtype} out of {tuple(x.shape)} {x.dtype}"
        y.double().square().mean().backward()
        for name, tensor in {"output": y, **{n: p.grad for n, p in layer.named_parameters()}}.items():
            if tensor is None:
                return f"parameter {name!r} gets no gradient: the layer does not use it, or cuts it off"
            if not tensor.isfinite().all():
                return f"in {dtype} the {'output' if name == 'output' else f'gradient of {name!r}'} is not finite"
            if dtype == torch.float64 and not tensor.any():
                return f"the gradient of parameter {name!r} is zero: it has no effect"
    return None


@torch.no_grad()
def same_twice(rule: str) -> str | None:
    """The difference between two calls of a layer on the same input; None if there is none."""
    layer, x = make(rule), tokens()
    found = difference(layer(x).nan_to_num(), layer(x).nan_to_num())
    return found and (
        f"two equal calls give different outputs, {found}: the rule draws random numbers, or keeps something "
        "from one call to the next. The other checks compare calls, so they are left out"
    )


@torch.no_grad()
def sees_no_future(rule: str) -> str | None:
    """The change of earlier outputs with later tokens; None if there is none."""
    layer, x = make(rule), tokens()
    before = layer(x)
    for cut in (1, 33, 64, 69):
        changed = torch.cat([x[:, :cut], 3 * torch.randn_like(x[:, cut:])], dim=1)
        if found := difference(layer(changed)[:, :cut], before[:, :cut]):
            return (
                f"outputs before token {cut} change with the tokens from there on ({found}): the rule reads the "
                "future. What a token's gates and keys are made of must come from that token alone"
            )
    return None


def state_does_not_expand(rule: str) -> str | None:
    """A violation of `0 <= beta e.k <= 2` or `log_decay <= 0`, in float32 or bfloat16; None if there is none."""
    for options in ({}, {"allow_neg_eigval": True}):
        for dtype in (torch.float32, torch.bfloat16):
            try:
                layer = make(rule, dtype, **options)
            except ValueError:
                if not options:
                    raise
                continue  # the rule has no doubled step
            for scale in (0.01, 1.0, 10.0, 1000.0):
                inputs = _rule_inputs(layer, scale * tokens(256, dtype=dtype))
                if inputs is None:
                    return "the layer's forward pass calls no operator: it is no rule of the operator's form"
                if problem := _expansion(inputs):
                    return problem
    return None


def _rule_inputs(layer: DeltaRuleAttention, x: Tensor) -> RuleInputs | None:
    """The arguments that the layer passes to the operator; None if it calls none."""
    with torch.no_grad(), patch.object(layer, "apply_rule", wraps=layer.apply_rule) as operator:
        try:
            layer(x)
        except ValueError:  # the operator refuses some inputs that this check reports
            if not operator.called:
                raise
    return operator.call_args_list[0].args[0] if operator.called else None


def _expansion(inputs: RuleInputs) -> str | None:
    if inputs.log_decay is not None and not inputs.log_decay.max() <= 0:
        return (
            f"log_decay reaches {inputs.log_decay.max():.3g}, and must not be positive: the state would grow by "
            "exp(log_decay) with every token"
        )
    if inputs.beta is None:
        return None
    erase_key = inputs.k if inputs.erase_key is None else inputs.erase_key
    product = (inputs.k.float() * erase_key.float()).sum(-1)
    product = product.repeat_interleave(inputs.beta.shape[2] // product.shape[2], dim=2)
    gain, name = inputs.beta * product, "|k|^2" if inputs.erase_key is None else "(e . k)"
    for value in (gain.min(), gain.max()):
        if not -1e-5 <= value <= 2 + 1e-5:
            return (
                f"beta {name} reaches {value:.4g}, and must stay between 0 and 2: along the key the state is "
                f"multiplied by 1 - beta {name} = {1 - value:.4g}, so it grows without bound. "
                f"deltazoo.layers.bounded_step keeps a step size below 2 / {name}"
            )
    return None


def clipped_step_sizes(rule: str) -> str | None:
    """The share of tokens whose step size is clipped to 2 / (e . k); None if never by more than a rounding error."""
    ratios: list[Tensor] = []

    def record(beta: Tensor, bound: Tensor) -> Tensor:
        bounded = torch.minimum(beta, bound)
        ratios.append((beta / bounded).flatten())
        return bounded

    layer = make(rule, torch.float32)
    with torch.no_grad(), patch.object(rule_functions, "clip_step", record):
        layer(tokens(256, dtype=torch.float32))
    ratio = torch.cat(ratios) if ratios else torch.ones(1)
    clipped = ratio > 1.01
    if not clipped.any():
        return None
    return (
        f"the step size of {clipped.double().mean():.0%} of the tokens exceeds 2 / |k|^2, by a factor of up to "
        f"{ratio.max():.3g}, and is clipped to that: the state does not expand, and no gradient reaches the gate there"
    )


def same_in_chunks_as_by_definition(rule: str) -> str | None:
    """A difference of outputs or gradients between the chunk form and the loop over tokens; None if there is none."""
    chunked, looped = make(rule, backend="chunkwise"), make(rule, backend="reference")
    looped.load_state_dict(chunked.state_dict())
    results = []
    for layer in (chunked, looped):
        torch.manual_seed(1)
        x = tokens().requires_grad_()
        y = layer(x)
        results.append((y, torch.autograd.grad((y * torch.randn_like(y)).sum(), [x, *layer.parameters()])))
    (y, gradients), (expected, expected_gradients) = results
    if found := difference(y, expected):
        return f"the chunk form and the loop over tokens give different outputs, {found}"
    names = ["the input", *(repr(name) for name, _ in chunked.named_parameters())]
    for name, mine, theirs in zip(names, gradients, expected_gradients, strict=True):
        if not (mine - theirs).abs().max() <= 1e-8 * (1 + theirs.abs().max()):
            return f"the chunk form and the loop over tokens give different gradients of {name}"
    return None


def same_gradients_as_finite_differences(rule: str) -> str | None:
    """A derivative along a random direction that differs from finite differences; None if there is none."""
    layer, x = make(rule), tokens(9).requires_grad_()
    weight = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    tensors = {"the input": x, **{repr(name): p for name, p in layer.named_parameters()}}
    gradients = torch.autograd.grad((layer(x) * weight).sum(), list(tensors.values()))
    for (name, tensor), gradient in zip(tensors.items(), gradients, strict=True):
        direction, size = torch.randn_like(tensor), 1e-6
        slopes = []
        with torch.no_grad():
            for sign in (1, -1):
                tensor.add_(sign * size * direction)
                slopes.append((layer(x) * weight).sum())
                tensor.sub_(sign * size * direction)
        expected, found = (slopes[0] - slopes[1]) / (2 * size), (gradient * direction).sum()
        if not (found - expected).abs() <= 1e-5 * (1 + expected.abs()):
            return (
                f"the gradient of {name} is wrong: along a random direction it says {found:.6g}, and finite "
                f"differences say {expected:.6g} (a rule that casts float64 to float32 cannot agree with them)"
            )
    return None


@torch.no_grad()
def same_decoded(rule: str) -> str | None:
    """A difference between pieces, with the state carried between them, and all tokens at once; None without one."""
    layer, x = make(rule), tokens()
    whole = layer(x)
    for sizes in ([1] * TOKENS, [3, 66, 1], [64, 6]):
        states = LayerStates()
        pieces = torch.cat([layer(part, past_key_values=states) for part in x.split(sizes, dim=1)], dim=1)
        if found := difference(pieces, whole):
            how = "one token at a time" if len(sizes) == TOKENS else f"in pieces of {sizes} tokens"
            return (
                f"outputs {how} differ from those of all tokens at once, {found}: the decoding step computes "
                "another rule than training, or a token's inputs depend on the number of tokens"
            )
    return None


@torch.no_grad()
def same_padded(rule: str) -> str | None:
    """A difference between rows padded on the left, on the right or inside and the rows alone; None without one."""
    x, layer = tokens(20, rows=3), make(rule)
    mask = torch.ones(3, 20, dtype=torch.bool)
    mask[0, :7] = mask[1, 15:] = mask[2, 5:9] = False
    alone = torch.zeros_like(x)
    for row, real in enumerate(mask):
        alone[row, real] = layer(x[row : row + 1, real])[0]
    found = difference(layer(x, attention_mask=mask), alone)
    return found and f"a padded row differs from the same row without padding, {found}: {_MIXES}"


@torch.no_grad()
def same_packed(rule: str) -> str | None:
    """A difference between sequences packed into one row and the sequences alone; None if there is none."""
    x, layer = tokens(rows=1), make(rule)
    bounds = torch.tensor([0, 3, 4, 50, TOKENS])
    alone = torch.cat([layer(part) for part in x.split(bounds.diff().tolist(), dim=1)], dim=1)
    found = difference(layer(x, cu_seqlens=bounds), alone)
    return found and f"packed sequences differ from the same sequences alone, {found}: {_MIXES}"


_SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
_PURE: dict[str, Any] = {"num_hidden_layers": 2, "num_heads": 2, "head_dim": 16}
_HYBRID = {**_PURE, "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4}


def _model(rule: str, **keys: Any) -> DeltaRuleForCausalLM:
    model: Any = DeltaRuleForCausalLM(DeltaRuleConfig(mixer=rule, **_SIZES, **keys))
    return perturbed(model, 0.05).double().eval()


def _ids() -> Tensor:
    return torch.randint(1, 61, (2, 12))


@torch.no_grad()
def same_generated(rule: str) -> str | None:
    """A difference between logits of single tokens with a cache and of all at once, in a pure and a hybrid model."""
    for kind, keys in (("", _PURE), ("hybrid ", _HYBRID)):
        model, ids = _model(rule, **keys), _ids()
        if found := difference(_with_cache(model, ids), model(ids).logits):
            return f"a {kind}model's logits with a cache differ from those without, {found}"
        made = [model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=cache) for cache in (True, False)]
        if not torch.equal(*made):
            return f"a {kind}model generates other tokens with a cache than without"
    return None


def _with_cache(model: Any, ids: Tensor) -> Tensor:
    first = model(ids[:, :5], use_cache=True)
    logits, cache = [first.logits], getattr(first, CACHE)
    logits += [model(token, **{CACHE: cache}).logits for token in ids[:, 5:].split(1, dim=1)]
    return torch.cat(logits, dim=1)


def same_after_reload(rule: str) -> str | None:
    """A difference between logits before saving and after loading, in a pure and a hybrid model; None without one."""
    return _through_a_checkpoint(_model(rule, **_PURE)) or _through_a_checkpoint(_model(rule, **_HYBRID))


def _through_a_checkpoint(model: Any) -> str | None:
    ids = _ids()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), no_transformers_bars():
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
        found = difference(again.double()(ids).logits, model(ids).logits)
    return found and (
        f"a model that was saved and loaded gives other logits, {found}: something that decides the layer's results is "
        "neither a parameter nor in the configuration"
    )


@torch.no_grad()
def swaps(rule: str) -> str | None:
    """A fault of a Llama with swapped attention: logits not finite, or other ones with a cache or after loading."""
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **_SIZES)
    model: Any = LlamaForCausalLM(config)
    swap_attention(model, rule, [0])
    model, ids = perturbed(model, 0.05).double().eval(), _ids()
    logits = model(ids).logits
    if not logits.isfinite().all():
        return "the swapped model's logits are not finite"
    if found := difference(_with_cache(model, ids), logits):
        return f"the swapped model's logits with a cache differ from those without, {found}"
    return _through_a_checkpoint(model)


_REPEATABLE = "the same call twice = the same output"
_BOUNDED = "the state does not expand"

CHECKS: dict[str, Callable[[str], str | None]] = {
    _REPEATABLE: same_twice,
    "every parameter is filled and acts": parameters_are_filled_and_act,
    "no token reads the future": sees_no_future,
    _BOUNDED: state_does_not_expand,
    "chunk form = definition": same_in_chunks_as_by_definition,
    "gradients = finite differences": same_gradients_as_finite_differences,
    "decoding = training": same_decoded,
    "padded = alone": same_padded,
    "packed = alone": same_packed,
    "generation with a cache = without": same_generated,
    "reloaded = saved": same_after_reload,
    "swapped into a Llama": swaps,
}
"""The checks in order, by title: functions from a rule's name to its fault, None if there is none."""


class Finding(NamedTuple):
    """The result of one check."""

    title: str
    problem: str | None
    """The fault, in a sentence or two; None: the rule passes."""
    remark: str | None = None
    """A remark about a rule that passes."""
    error: Exception | None = None
    """The exception that the check raised, unless an earlier check raised it in the same place."""


def check_rule(rule: str) -> Iterator[Finding]:
    """The findings about a registered rule, one by one.

    There are none after a failure to make the rule's layer, or after results that differ from call to call.

    Raises:
        ValueError: no such rule.
    """
    get_rule(rule)
    seen: set[Any] = set()
    try:
        make(rule)
    except Exception as error:  # a rule under test may raise anything
        yield _raised("a layer can be made", rule, error, seen)
        return
    for title, check in CHECKS.items():
        torch.manual_seed(0)
        try:
            problem = check(rule)
            remark = clipped_step_sizes(rule) if title == _BOUNDED and problem is None else None
        except Exception as error:
            yield _raised(title, rule, error, seen)
            continue
        yield Finding(title, problem, remark)
        if title == _REPEATABLE and problem is not None:
            return


def _raised(title: str, rule: str, error: Exception, seen: set[Any]) -> Finding:
    """The finding about an exception: its place in the rule's file and the shapes there; shorter if it is in `seen`."""
    module = registering_module(rule) or "deltazoo.rules"
    calls = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if f"{frame.f_globals.get('__name__')}.".startswith(f"{module}.")
    ]
    place = (type(error), calls[-1][1] if calls else str(error))
    if place in seen:
        return Finding(title, "raised the same error")
    seen.add(place)
    where = _place(*calls[-1]) if calls else f"In no line of {module}: what the rule returned was refused."
    return Finding(title, f"raised {type(error).__name__}: {error}\n{where}", error=error)


def _place(frame: FrameType, line: int) -> str:
    """File, line and function, with the shapes of the tensors among its arguments."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = {name: frame.f_locals.get(name) for name in names}
    given |= {f"{name}.hidden_states": x.hidden_states for name, x in given.items() if isinstance(x, LayerInput)}
    shapes = [f"{name}: {[*x.shape]} {x.dtype}" for name, x in given.items() if isinstance(x, Tensor)]
    return f"{code.co_filename}, line {line}, in {code.co_name}({', '.join(shapes)})"
