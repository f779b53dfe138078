"""What every registered rule promises: the same numbers however the tokens arrive, frozen names, the right sizes.

`deltazoo check` (tests/checks/test_check.py) tries one case of most of this on every rule, in float64. Here are the
other dtypes on every rule, and the other cases on the few rules between which all shared code is (few_rules.py).
"""

from collections.abc import Iterator

import pytest
import torch
from few_rules import FEW_RULES
from torch import Tensor

from deltazoo.layers import DeltaRuleAttention, LayerStates, make_layer
from deltazoo.spec import get_rule, list_rules

HIDDEN, HEADS, HEAD_DIM, VALUE_HEADS = 24, 2, 8, 4
every_rule = pytest.mark.parametrize("rule", list_rules())
few_rules = pytest.mark.parametrize("rule", FEW_RULES)

# Float64 computations of one quantity, by different routes, differ by rounding alone.
EXACT = {"rtol": 0, "atol": 1e-12}


def make(rule: str, dtype: torch.dtype = torch.float64, **options: object) -> DeltaRuleAttention:
    """With larger weights than a fresh model has, so that all paths carry weight."""
    layer = make_layer(
        rule,
        HIDDEN,
        HEADS,
        HEAD_DIM,
        num_v_heads=VALUE_HEADS,
        initializer_range=0.5,
        layer_idx=0,
        **options,  # type: ignore[arg-type]
    )
    torch.nn.init.uniform_(layer.o_norm.weight, 0.5, 2)
    return layer.to(dtype)


def tokens(num_tokens: int, batch_size: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch_size, num_tokens, HIDDEN, dtype=dtype)


def parts(
    layer: DeltaRuleAttention, x: Tensor, sizes: list[int], states: LayerStates, **options: object
) -> Iterator[Tensor]:
    for part in x.split(sizes, dim=1):
        yield layer(part, past_key_values=states, **options)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_and_backward_are_finite_in_every_dtype(rule: str, dtype: torch.dtype) -> None:
    layer = make(rule, dtype)
    x = tokens(70, dtype=dtype).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape and y.dtype == dtype
    y.float().square().mean().backward()
    for name, tensor in {"x": x, **dict(layer.named_parameters())}.items():
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all() and tensor.grad.abs().max() > 0, name


# The states after the tokens are kept by shared code; outputs are compared for every rule by `deltazoo check`.
@few_rules
def test_token_by_token_equals_the_whole(rule: str) -> None:
    layer, states = make(rule), LayerStates()
    x = tokens(70)
    with torch.no_grad():
        stepped = torch.cat(list(parts(layer, x, [1] * 70, states)), dim=1)
        whole_states = LayerStates()
        whole = layer(x, past_key_values=whole_states)
    torch.testing.assert_close(stepped, whole, **EXACT)
    for mine, theirs in zip(states.states[0], whole_states.states[0], strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


# What happens at a boundary is the convolutions' and the chunks' affair: per kind of decay, erase key and state.
@few_rules
@pytest.mark.parametrize("sizes", [[1, 69], [2, 68], [3, 67], [64, 6], [65, 5], [69, 1], [1, 1, 2, 30, 36]], ids=str)
def test_any_split_equals_the_whole_with_gradients(rule: str, sizes: list[int]) -> None:
    layer = make(rule)
    x = tokens(70).requires_grad_()
    whole, split = layer(x), torch.cat(list(parts(layer, x, sizes, LayerStates())), dim=1)
    torch.testing.assert_close(split, whole, **EXACT)
    seed = torch.randn_like(whole)
    inputs = [x, *layer.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(split, inputs, seed), torch.autograd.grad(whole, inputs, seed), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


# A token's inputs are rounded alike in both; the rest is the operator.
@few_rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_loses_no_more_accuracy_than_the_whole(rule: str, dtype: torch.dtype) -> None:
    layer = make(rule, dtype)
    x = tokens(70, dtype=dtype)
    with torch.no_grad():
        whole, stepped = layer(x), torch.cat(list(parts(layer, x, [1] * 70, LayerStates())), dim=1)
        exact = layer.double()(x.double())
    error, allowed = ((y.double() - exact).norm() / exact.norm() for y in (stepped, whole))
    assert error <= 2 * allowed + torch.finfo(dtype).eps


@every_rule
def test_the_state_has_a_fixed_size_and_stays_float32(rule: str) -> None:
    layer, states = make(rule, torch.bfloat16), LayerStates()
    convolved = layer.q_conv1d.channels + layer.k_conv1d.channels + layer.v_conv1d.channels
    for size in (1, 80, 2):
        layer(tokens(size, dtype=torch.bfloat16), past_key_values=states)
        conv, recurrent, _ = states.states[0]
        rows = layer.key_expansion * HEAD_DIM
        assert recurrent.shape == (2, VALUE_HEADS, rows, layer.head_v_dim) and recurrent.dtype == torch.float32
        assert conv is not None and conv.shape == (2, convolved, 3)
    assert states.num_tokens[0] == 83


# Boundaries are found by convolutions, chunks and further states alone. One case on every rule: `deltazoo check`.
@few_rules
def test_packed_documents_equal_documents_alone(rule: str) -> None:
    layer = make(rule)
    lengths = [1, 2, 3, 0, 64, 65, 5]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    x = tokens(sum(lengths), batch_size=1).requires_grad_()
    packed = layer(x, cu_seqlens=bounds)
    alone = torch.cat(
        [layer(x[:, start:stop]) for start, stop in zip(bounds[:-1], bounds[1:], strict=True) if stop > start], 1
    )
    torch.testing.assert_close(packed, alone, **EXACT)
    seed = torch.randn_like(packed)
    inputs = [x, *layer.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(packed, inputs, seed), torch.autograd.grad(alone, inputs, seed), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


# As above, to the bit.
@few_rules
def test_no_document_feels_another(rule: str) -> None:
    layer = make(rule, torch.float32)
    bounds = torch.tensor([0, 20, 23, 90], dtype=torch.int32)
    x = tokens(90, 1, torch.float32)
    changed = x.clone()
    changed[:, 20:23] = torch.randn(1, 3, HIDDEN)
    before, after = layer(x, cu_seqlens=bounds), layer(changed, cu_seqlens=bounds)
    assert torch.equal(before[:, :20], after[:, :20]) and torch.equal(before[:, 23:], after[:, 23:])
    assert not torch.equal(before[:, 20:23], after[:, 20:23])


PADDINGS = {
    "left": [[0] * 5 + [1] * 7, [0] * 1 + [1] * 11, [1] * 12],
    "right": [[1] * 7 + [0] * 5, [1] * 11 + [0] * 1, [1] * 2 + [0] * 10],
    "middle": [[1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 6 + [0] * 5 + [1]],
    "single row": [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
    "nothing": [[0] * 12, [1] * 12],
}


# Padding is moved aside before the rule sees it; `mask_padding` then goes by the kind of input. One case on every rule:
# `deltazoo check`.
@few_rules
@pytest.mark.parametrize("side", PADDINGS)
def test_a_padded_row_equals_the_row_alone(rule: str, side: str) -> None:
    layer, states = make(rule), LayerStates()
    mask = torch.tensor(PADDINGS[side])
    x = tokens(12, len(mask)).requires_grad_()
    padded = layer(x, attention_mask=mask, past_key_values=states)
    more = tokens(3, len(mask))
    continued = layer(more, past_key_values=states)
    seed = torch.randn_like(padded)
    (gradient,) = torch.autograd.grad((padded * seed).sum() + continued.sum(), x)
    for row, real in enumerate(mask.bool()):
        assert (padded[row, ~real] == 0).all()
        assert (gradient[row, ~real] == 0).all()
        if not real.any():
            continue
        own = LayerStates()
        lone = x[row : row + 1, real].detach().requires_grad_()
        alone = layer(lone, past_key_values=own)
        alone_continued = layer(more[row : row + 1], past_key_values=own)
        torch.testing.assert_close(padded[row, real], alone[0], **EXACT)
        torch.testing.assert_close(continued[row], alone_continued[0], **EXACT)
        (expected,) = torch.autograd.grad((alone * seed[row, real]).sum() + alone_continued.sum(), lone)
        torch.testing.assert_close(gradient[row, real], expected[0], rtol=1e-10, atol=1e-10)


# As above, with states in between.
@few_rules
def test_padding_may_come_in_any_call(rule: str) -> None:
    layer = make(rule)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 0, 1]])
    x = tokens(8)
    with torch.no_grad():
        whole = layer(x, attention_mask=mask)
        for sizes in ([1] * 8, [3, 2, 3], [4, 4], [7, 1]):
            states, results = LayerStates(), []
            for part, part_mask in zip(x.split(sizes, 1), mask.split(sizes, 1), strict=True):
                results.append(layer(part, attention_mask=part_mask, past_key_values=states))
            torch.testing.assert_close(torch.cat(results, dim=1), whole, **EXACT)


# The rule sees the same shapes with and without convolutions.
@few_rules
def test_without_short_convolution_too_splits_and_padding_change_nothing(rule: str) -> None:
    layer, states = make(rule, use_short_conv=False), LayerStates()
    x = tokens(10)
    whole = layer(x)
    torch.testing.assert_close(torch.cat(list(parts(layer, x, [4, 1, 5], states)), dim=1), whole, **EXACT)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[:, 3:5] = False
    real = [0, 1, 2, 5, 6, 7, 8, 9]
    torch.testing.assert_close(layer(x, attention_mask=mask)[:, real], layer(x[:, real]), **EXACT)


@every_rule
def test_runs_under_autocast(rule: str) -> None:
    layer = make(rule, torch.float32)
    x = tokens(20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    exact = layer.double()(x.double())
    assert y.dtype == torch.bfloat16
    # The same computation wholly in bfloat16 sets the scale.
    plain = make(rule, torch.float32)
    plain.load_state_dict(layer.state_dict())
    error, allowed = ((z.double() - exact).norm() for z in (y, plain.bfloat16()(x.bfloat16())))
    assert error <= 2 * allowed


@every_rule
def test_the_past_never_feels_the_future(rule: str) -> None:
    layer = make(rule, torch.float32)
    x = tokens(100, dtype=torch.float32)
    before = layer(x)
    for cut in (1, 50, 63, 64, 65, 99):
        changed = x.clone()
        changed[:, cut:] = 10 * torch.randn_like(changed[:, cut:])
        after = layer(changed)
        assert torch.equal(before[:, :cut], after[:, :cut])
        assert not torch.equal(before[:, cut], after[:, cut])


# Only kernels could add up in another order. In float64, for every rule: `deltazoo check`.
@few_rules
def test_same_input_same_bits(rule: str) -> None:
    layer = make(rule, torch.float32)
    x = tokens(70, dtype=torch.float32).requires_grad_()
    first, second = layer(x), layer(x)
    assert torch.equal(first, second)
    inputs = [x, *layer.parameters()]
    for a, b in zip(torch.autograd.grad(first.sum(), inputs), torch.autograd.grad(second.sum(), inputs), strict=True):
        assert torch.equal(a, b)


COMMON = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "o_norm.weight"]
CONVOLUTIONS = ["q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"]
KDA_KEYS = [
    "b_proj.weight",
    "f_proj.0.weight",
    "f_proj.1.weight",
    "A_log",
    "dt_bias",
    "g_proj.0.weight",
    "g_proj.1.weight",
    "g_proj.1.bias",
]
OWN_KEYS = {
    "linear_attention": [],
    "mamba2_style": ["a_proj.weight", "A_log", "dt_bias", "g_proj.weight"],
    "delta_net": ["b_proj.weight"],
    "neg_delta_net": ["b_proj.weight"],
    "gated_deltanet": ["b_proj.weight", "a_proj.weight", "A_log", "dt_bias", "g_proj.weight"],
    "neg_gated_deltanet": ["b_proj.weight", "a_proj.weight", "A_log", "dt_bias", "g_proj.weight"],
    **dict.fromkeys(
        ["kaczmarz", "gated_longhorn", "gated_efla", "gated_deltaproduct"],
        ["b_proj.weight", "a_proj.weight", "A_log", "dt_bias", "g_proj.weight"],
    ),
    "efla": ["b_proj.weight"],
    "longhorn": ["b_proj.weight"],
    "kda": KDA_KEYS,
    "fg2_gdn": [*KDA_KEYS, "w_proj.weight"],
    "gla": ["gk_proj.0.weight", "gk_proj.1.weight", "gk_proj.1.bias", "g_proj.weight"],
    "lightning_attention": ["g_proj.weight"],
    "eda": [*KDA_KEYS[:5], "g_proj.weight", "erase_proj.0.weight", "erase_proj.1.weight", "erase_b_proj.weight"],
}


@pytest.mark.parametrize("rule", OWN_KEYS)
def test_parameter_names_are_frozen(rule: str) -> None:
    """Changing one breaks every checkpoint."""
    keys = set(make(rule).state_dict())
    assert keys == {*COMMON, *CONVOLUTIONS, *OWN_KEYS[rule]}
    assert set(make(rule, use_short_conv=False).state_dict()) == {*COMMON, *OWN_KEYS[rule]}


def test_parameter_shapes_are_those_of_the_hub() -> None:
    shapes = {name: tuple(p.shape) for name, p in make("kda", expand_v=2).named_parameters()}
    assert shapes == {
        "q_proj.weight": (16, 24),
        "k_proj.weight": (16, 24),
        "v_proj.weight": (64, 24),
        "q_conv1d.weight": (16, 1, 4),
        "k_conv1d.weight": (16, 1, 4),
        "v_conv1d.weight": (64, 1, 4),
        "b_proj.weight": (4, 24),
        "f_proj.0.weight": (16, 24),
        "f_proj.1.weight": (32, 16),
        "A_log": (4,),
        "dt_bias": (32,),
        "g_proj.0.weight": (16, 24),
        "g_proj.1.weight": (64, 16),
        "g_proj.1.bias": (64,),
        "o_norm.weight": (16,),
        "o_proj.weight": (24, 64),
    }
    shapes = {name: tuple(p.shape) for name, p in make("gated_deltanet").named_parameters()}
    assert shapes["a_proj.weight"] == shapes["b_proj.weight"] == (4, 24)
    assert shapes["A_log"] == shapes["dt_bias"] == (4,)
    assert shapes["g_proj.weight"] == shapes["v_proj.weight"] == (64, 24)


# Layers of the 1.3B models: DeltaNet 16 x 128 and Gated DeltaNet 6 x 256 at width 2048 (fla-hub), KDA 16 x 128.
PUBLISHED_SIZES = {
    "delta_net": (2048, 16, 128, 4 * 2048 * 2048 + 2048 * 16 + 3 * 2048 * 4 + 128),
    "gated_deltanet": (
        2048,
        6,
        256,
        2048 * (2 * 1536 + 3 * 3072 + 2 * 6) + 4 * (2 * 1536 + 3072) + 2 * 6 + 512,
    ),
    "kda": (
        2048,
        16,
        128,
        4 * 2048 * 2048 + 2 * (2048 * 128 + 128 * 2048) + 2048 + 2048 * 16 + 3 * 2048 * 4 + 16 + 2048 + 128,
    ),
}


@pytest.mark.parametrize("rule", PUBLISHED_SIZES)
def test_published_sizes_have_the_published_number_of_parameters(rule: str) -> None:
    hidden_size, num_heads, head_dim, expected = PUBLISHED_SIZES[rule]
    with torch.device("meta"):
        layer = DeltaRuleAttention(rule, hidden_size, num_heads, head_dim)
    assert sum(p.numel() for p in layer.parameters()) == expected
    assert get_rule(rule).head_dim == head_dim
