"""Blocks that decode in a few launches give what their own forward passes give: interpreted on a CPU, and on a GPU.

A step in pages of states does, to the bit, what one does on gathered states, for every rule in kernels. The interpreter
has to be chosen before Triton is imported, so a child process runs it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_loops import Loop, assert_decodes_like_forward, captured, own, uncaptured
from fresh_process import run_interpreted
from outside_rule import forget_rules
from tiny_families import tiny_original, tokens
from tiny_models import tiny_model
from torch import Tensor
from transformers import DynamicCache, StaticCache

import deltazoo
from deltazoo.generation import fused_blocks
from deltazoo.generation.cache import DeltaRuleCacheLayer
from deltazoo.generation.fused_blocks import FusedRule, first_maps, why_not_this_rule
from deltazoo.generation.static_cache import fixed_cache
from deltazoo.generation.step_modules import merged_products, replaced
from deltazoo.layers import LayerInput, layer_class, make_layer
from deltazoo.layers.norm import GATE_ACTIVATIONS
from deltazoo.layers.state import LayerState, LayerStates
from deltazoo.ops.step_size import STEP_SIZES
from deltazoo.spec import get_rule, register_rule, registered_promises
from deltazoo.swap import swapped_layers

SPEC_ALONE = ("delta_net", "gated_deltanet", "kda", "neg_delta_net", "neg_gated_deltanet", "linear_attention",
              "mamba2_style", "efla", "gated_efla", "longhorn", "gated_longhorn", "kaczmarz")  # fmt: skip
"""Rules that the shared layer computes from their spec, one step per token."""
OWN_FORM = ("gla", "lightning_attention", "gated_deltaproduct", "eda", "gated_deltanet2", "qed", "fg2_gdn", "comba",
            "comba_unit_erase", "q_delta", "pgdn", "pkda")  # fmt: skip
"""Rules with a decay, keys or steps of their own."""
RAW_KEYS = "raw_keys"
"""A rule of the test's own: the plain step with keys that are not normalised, which must be bounded."""
FUSED = (*SPEC_ALONE, *OWN_FORM, RAW_KEYS, "micro_steps", "grouped_values", "tied", "hybrid")
INTERPRETED = (*SPEC_ALONE[:3], RAW_KEYS, "linear_attention", "efla", "grouped_values", "hybrid", "gated_deltaproduct",
               "eda", "pkda")  # fmt: skip
"""With a kernel each of every form; all rules' forms in all kernels are in test_decoding_kernels.py."""
DOUBLED = ("eda", "gated_deltanet2", "fg2_gdn", "pgdn")
"""Rules whose own keys act otherwise with negative eigenvalues."""
ORDINARY = ("erase_only", "without_conv")
WITHOUT_KERNELS = {"falcon", "isotropic_kdn", "diagonal_kdn", "momentum"}
"""Rules with a state of a scan, or with more key channels than their heads: a decoding step runs their layers."""
IN_KERNELS = [rule for rule in deltazoo.list_rules() if rule not in WITHOUT_KERNELS]
ROWS, PAGES = 3, 7
CHILD = """
import sys; sys.path.insert(0, sys.argv[1])
import test_fused_blocks as tests, test_step_modules as steps
from unittest import mock
# The ordinary step runs in plain torch, which is faster than the interpreter.
no_kernels = mock.patch("deltazoo.ops.backends.triton_obstacle", lambda *args: "interpreted")
with mock.patch.object(tests.fused_blocks, "takes_kernel", lambda *_, **__: True), no_kernels:
    for case in sys.argv[2:]:
        loops = (tests.own, tests.captured) if case in ("gated_deltanet", "hybrid") else (tests.own,)
        tests.check_tokens(case, "cpu", fused=True, count=3, batch_sizes=(3,), loops=loops)
    for case in tests.OWN_FORM:
        tests.check_logits(tests.own_model(case, **tests.SMALL), tests.tokens(1, 20))
    for case in tests.DOUBLED[1::2]:
        tests.check_logits(tests.own_model(case, allow_neg_eigval=True, **tests.SMALL), tests.tokens(2, 20))
    tests.check_swapped_tokens(*tests.SWAPPED[1], "cpu", count=3, batch_sizes=(3,))
    for swap in tests.SWAPPED:
        tests.check_logits(tests.swapped_model(*swap), tests.tokens(1, 30))
with mock.patch.object(steps.step_modules, "takes_kernel", lambda *_, **__: True):
    for family in steps.OF_EACH_FORM:
        for dtype in (tests.torch.float32, tests.torch.bfloat16):
            steps.check_modules(family, "cpu", dtype)
for rule in tests.IN_KERNELS:
    tests.check_pages(rule, "cpu")
"""
SWAPPED = [
    ("llama", "gated_deltanet", {}),
    ("mistral", "kda", {}),
    ("qwen2", "delta_net", {}),  # biases on queries, keys and values
    ("smollm3", "mamba2_style", {}),
    ("llama", "comba", {"rope": False}),
    ("qwen2", "gated_deltaproduct", {"init": "random"}),
]
"""Families of transformers with the block of Llama, rules, and options of the swap."""


SIZES = {"hidden_size": 192, "num_heads": 3, "head_dim": 64, "intermediate_size": 344, "initializer_range": 0.02}
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "num_v_heads": 4,
    "head_dim": 12,
    "expand_v": 1.5,
    "initializer_range": 0.1,
}


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry per fused step of a block from here on."""
    steps: list[object] = []
    step = fused_blocks.FusedBlock._step

    def counted(self, *arguments):
        steps.append(self)
        return step(self, *arguments)

    monkeypatch.setattr(fused_blocks.FusedBlock, "_step", counted)
    return steps


def check_loops(model: Any, blocks: int, count: int, batch_sizes: Sequence[int], loops: Sequence[Loop]) -> None:
    """Loops make the tokens of the forward pass, and run as many blocks fused."""
    with pytest.MonkeyPatch.context() as patch:
        steps = count_steps(patch)
        for batch_size, loop in product(batch_sizes, loops):
            assert_decodes_like_forward(model, loop, tokens(batch_size, 7), count=count)
            assert len(set(map(id, steps))) == (0 if loop is uncaptured else blocks)
            steps.clear()


def check_tokens(
    case: str, device: str, *, fused: bool, count: int = 9, batch_sizes: Sequence[int] = (1, 3),
    loops: Sequence[Loop] = (own, captured, uncaptured),
) -> None:  # fmt: skip
    with forget_rules():
        options = {}
        if case == RAW_KEYS:
            raw = replace(get_rule("delta_net"), name=case, normalize_k=False, hub_model_type=None)
            case, options = "delta_net", {"mixer": register_rule(raw).name}
        elif case in OWN_FORM:
            options = {"num_v_heads": 4, "expand_v": 1.5}
        model = tiny_model(case, **options).to(device)
        blocks = model.config.layer_types.count("linear_attention") if fused else 0
        check_loops(model, blocks, count, batch_sizes, loops)


def own_model(case: str, **options: Any) -> Any:
    """With heads and gates that differ, and gates that saturate."""
    model = tiny_model(case, **SIZES | options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith("norm.weight"):
                parameter += 0.5 * torch.randn(parameter.shape)
            elif "b_proj" in name:
                parameter *= 10
    return model


def check_logits(model: Any, ids: torch.Tensor, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """A fused step errs at most about twice as much as the ordinary one."""
    model, ids = model.to(device, dtype), ids.to(device)
    exact = copy.deepcopy(model).to(torch.float64)
    expected = last_results(exact, ids)
    fused, ordinary = (last_results(model, ids, fused=x) for x in (True, False))
    assert fused.keys() == expected.keys()
    for name, value in expected.items():
        error, plain = ((x[name] - value).norm().item() for x in (fused, ordinary))
        allowed = 4 * torch.finfo(dtype if name == "logits" else torch.float32).eps * value.norm()
        assert error <= 2 * plain + allowed, name


def in_pages(shapes: list[torch.Size], device: str) -> LayerState:
    """States of all pages as an engine lays them out: all tensors of a page side by side, then some room."""
    sizes = [shape.numel() for shape in shapes]
    block = torch.rand(PAGES, sum(sizes) + 8, device=device)  # a moment is not negative
    starts = accumulate(sizes, initial=0)
    pages = (block[:, a : a + n].unflatten(1, shape) for a, n, shape in zip(starts, sizes, shapes, strict=False))
    return LayerState(*pages)


def step_of(rule: FusedRule, parts: Tensor, state: LayerState, indices: Tensor | None) -> tuple[Tensor, Tensor]:
    z, norm = rule.of_parts(parts, state, state_indices=indices)
    return z, norm.squares


def check_pages(name: str, device: str) -> None:
    torch.manual_seed(0)
    layer = make_layer(name, 24, 2, 12, layer_idx=0, num_layers=2, initializer_range=0.3).to(device)
    assert why_not_this_rule(layer) is None
    states, x = LayerStates(), torch.randn(1, 1, 24, device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
        layer(x, past_key_values=states)
        maps = first_maps(layer)
        columns = dict(zip(maps, accumulate((len(m.weight) for m in maps.values()), initial=0), strict=False))
        product = torch.cat([torch.randn(ROWS, 24, device=device) @ m.weight.T for m in maps.values()], dim=1)[None]
        shapes = [x.shape[1:] for x in states.states[0] if x is not None]
        pages, indices = in_pages(shapes, device), torch.tensor([5, 0, 3], dtype=torch.int32, device=device)
        before = LayerState(*(None if x is None else x.clone() for x in pages))
        rule = FusedRule(layer, columns, lambda second: getattr(layer, second)[1])
        gathered = before.rows(indices.long())
        expected, squares = step_of(rule, product, gathered, None)
        found, found_squares = step_of(rule, product, pages, indices)
    assert torch.equal(found, expected) and torch.equal(found_squares, squares), name
    for page, old, new in zip(pages, before, gathered, strict=True):
        if page is not None:
            assert not torch.equal(old[indices.long()], new), name
            old[indices.long()] = new
            assert torch.equal(page, old), name


@pytest.mark.gpu
@pytest.mark.parametrize("rule", IN_KERNELS)
def test_pages_on_a_gpu(rule):
    check_pages(rule, "cuda")


def test_interpreted():
    run_interpreted(CHILD, Path(__file__).parent, *INTERPRETED)


def swapped_model(family: str, rule: str, options: dict[str, Any]) -> Any:
    """With all parameters of the new layers different from head to head and from channel to channel."""
    model = tiny_original(family, num_hidden_layers=2)
    torch.manual_seed(2)
    deltazoo.swap_attention(model, rule, "1:1", **options)
    with torch.no_grad():
        for layer in swapped_layers(model).values():
            for name, parameter in layer.delta.named_parameters():
                scale = 0.5 if parameter.ndim == 1 and "norm" not in name else 0.1
                parameter += scale * torch.randn(parameter.shape)
    return model


def check_swapped_tokens(
    family: str, rule: str, options: dict[str, Any], device: str, *, count: int = 9, batch_sizes: Sequence[int] = (1, 3)
) -> None:
    model = swapped_model(family, rule, options).to(device)
    check_loops(model, len(swapped_layers(model)), count, batch_sizes, (own,))


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "rule", "options"), SWAPPED)
def test_swapped_tokens_on_a_gpu(family, rule, options):
    check_swapped_tokens(family, rule, options, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_size", [1, 3, 65])
@pytest.mark.parametrize(("family", "rule", "options"), SWAPPED)
def test_swapped_logits_on_a_gpu(family, rule, options, batch_size, dtype):
    check_logits(swapped_model(family, rule, options), tokens(batch_size, 30), "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*FUSED, *ORDINARY])
def test_tokens_on_a_gpu(case):
    check_tokens(case, "cuda", fused=case in FUSED)


def last_results(model, ids, *, fused=None):
    """Logits and states after two decoding steps by merged projections, in blocks that run fused or as they are; with
    None by neither."""
    products = merged_products(model)
    blocks = fused_blocks.fused_blocks(model, products)
    assert fused is None or len(blocks) == (len(swapped_layers(model)) or len(model.model.layers))
    replacements = [] if fused is None else [x for product in products for x in product.replacements]
    replacements += [block.replacement for block in blocks if fused]
    cache = fixed_cache(model, 100)
    with torch.no_grad():
        model(ids[:, :-2], past_key_values=cache)
        with replaced(replacements):
            for token in ids[:, -2:].split(1, dim=1):
                logits = model(token, past_key_values=cache).logits[:, -1].double()
    states = {
        f"{name}_{number}": state.double()
        for number, layer in enumerate(cache.layers)
        if isinstance(layer, DeltaRuleCacheLayer)
        for name, state in layer.state._asdict().items()
        if state is not None
    }
    return {"logits": logits, **states}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("case", "batch_size"),
    [
        *product(("delta_net", "gated_deltanet", "kda"), (1, 2, 16, 50, 64, 65)),
        *product(("mamba2_style", "gated_efla", *OWN_FORM), (1, 50)),
    ],
)
def test_logits_on_a_gpu(case, dtype, batch_size):
    check_logits(own_model(case), tokens(batch_size, 70), "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", DOUBLED)
def test_logits_with_negative_eigenvalues_on_a_gpu(case):
    check_logits(own_model(case, allow_neg_eigval=True), tokens(3, 70), "cuda", torch.bfloat16)


@pytest.fixture
def on_any_device(monkeypatch):
    """Blocks on a CPU count as able to run fused; a step raises."""

    def refuse(self, *arguments):
        raise AssertionError("fused")

    monkeypatch.setattr(fused_blocks, "takes_kernel", lambda *_, **__: True)
    monkeypatch.setattr(fused_blocks.FusedBlock, "_step", refuse)


def blocks_of(model):
    return fused_blocks.fused_blocks(model, merged_products(model))


def in_fused_blocks(model):
    return replaced([block.replacement for block in blocks_of(model)])


def reason(model, index=0):
    products = {id(product.linears[0]): product for product in merged_products(model)}
    return fused_blocks.why_not_fused(model.model.layers[index], products)


def into_a_subclass(module):
    module.__class__ = type("Own", (type(module),), {})


CHANGES = [
    (lambda block: setattr(block.attn, "apply_rule", lambda *args: None), "apply_rule of its layer was replaced"),
    (lambda block: block.mlp.down_proj.register_forward_hook(lambda *args: None), "linear map is not a plain one"),
    (lambda block: into_a_subclass(block.mlp), "DeltaRuleAttention and Own"),
    (lambda block: setattr(block.attn.o_proj, "bias", torch.nn.Parameter(torch.zeros(32))), "map is not a plain one"),
    (lambda block: block.mlp.double(), "float32 on cpu, torch.float64 on cpu"),
    (lambda block: into_a_subclass(block.attn.f_proj[1]), "not two plain linear maps"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_what_keeps_a_block_from_running_fused(change, message, on_any_device):
    model = tiny_model("kda")
    assert reason(model) is None
    change(model.model.layers[0])
    assert message in reason(model) and reason(model, 1) is None


@pytest.mark.parametrize(
    ("runtime", "message"),
    [({"fused_kernels": False}, "other kernels were"), ({"backend": "reference"}, "backend='reference' was")],
)
def test_runtime_options_that_keep_blocks_from_running_fused(runtime, message, on_any_device):
    model = tiny_model("kda")
    model.set_runtime(**runtime)
    assert f"{message} asked for" in reason(model)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        *((rule, {}, f"the rule {rule!r} has a decay or keys of its own") for rule in sorted(WITHOUT_KERNELS)),
        ("erase_only", {}, "neg_eigval is 'erase'"),
        ("without_conv", {}, "do not pass a short convolution"),
        ("kda", {"decay_lower_bound": -5.0}, "a decay or keys of its own"),
    ],
)
def test_layers_with_a_step_of_their_own(case, options, message, on_any_device):
    assert message in reason(tiny_model(case, **options))


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        ("eda", {"erase_reads": "undecayed"}, "before the decay"),
        ("gla", {"decay": "none"}, "a decay or keys of its own"),
        ("lightning_attention", {"decay": "none"}, "a decay or keys of its own"),
        ("lightning_attention", {"decay": "channel"}, "its decay is per head"),
        ("q_delta", {"normalize_k": False}, "its keys are 'query_share'"),
        ("gated_deltanet", {"gate_activation": "tanh"}, "its output gate has an activation of its own"),
        ("gated_deltanet", {"step_size": "half"}, "its step size is a function of its own"),
        ("kda", {"decay_gate": lambda a, A_log, dt_bias: -torch.sigmoid(a)}, "a decay or keys of its own"),
    ],
)
def test_specs_that_no_kernel_knows(rule, changes, message, on_any_device, monkeypatch):
    """Those that do not fit the form of the class, and those with functions of their own."""
    monkeypatch.setitem(GATE_ACTIVATIONS, "tanh", torch.tanh)
    monkeypatch.setitem(STEP_SIZES, "half", lambda x, *others: x / 2)
    with forget_rules():
        own_class, form = layer_class(rule), registered_promises(rule).step_form
        promised = (
            {"layer": f"{own_class.__module__}.{own_class.__name__}", "step_form": form} if rule in OWN_FORM else {}
        )
        own = register_rule(replace(get_rule(rule), name="own", hub_model_type=None, **changes), **promised)
        assert message in reason(tiny_model(rule, mixer=own.name))


def test_keys_that_no_kernel_knows(on_any_device, monkeypatch):
    model = tiny_model("q_delta")
    mixer = model.model.layers[0].attn
    monkeypatch.setattr(type(mixer), "step_form", mixer.step_form._replace(keys="query_shares"))
    assert "a decay or keys of its own" in reason(model)


def test_a_class_does_not_inherit_its_form(on_any_device):
    model = tiny_model("gla")
    assert reason(model) is None

    class Own(type(model.model.layers[0].attn)):
        pass

    model.model.layers[0].attn.__class__ = Own
    assert "Own and SwiGLU" in reason(model)
    with forget_rules():
        mixer = register_rule(replace(get_rule("gla"), name="own", hub_model_type=None), layer=Own)
        for promised in ({}, {"step_form": registered_promises("gla").step_form}):
            register_rule(mixer, layer=Own, **promised)
            assert (reason(tiny_model("gla", mixer="own")) is None) == bool(promised)


def test_a_fixed_decay_is_that_of_the_layers_heads(on_any_device):
    model = tiny_model("lightning_attention")
    mixers = [block.attn for block in model.model.layers]
    of_all_heads = [mixer.log_decay(LayerInput(torch.zeros(1, 1, 1), mixer))[0, 0] for mixer in mixers]
    for mixer in mixers:
        mixer.num_heads = mixer.num_v_heads = 1
        mixer.head_share = (1, 2)
    for block, expected in zip(blocks_of(model), of_all_heads, strict=True):
        assert torch.equal(block._rule._fixed_decay, expected[1:])


def test_nothing_runs_fused_on_a_cpu():
    model = tiny_model("delta_net")
    assert not blocks_of(model)


@pytest.mark.parametrize("kind", ["two tokens", "gradients", "dynamic cache", "no cache", "padding"])
def test_calls_that_cannot_run_fused_run_as_they_are(kind, on_any_device):
    model = tiny_model("delta_net")
    rows = 2
    ids = tokens(rows, 8)
    expected = tiny_model("delta_net")(ids).logits[:, -1:]
    cache = DynamicCache(config=model.config) if kind == "dynamic cache" else StaticCache(model.config, max_cache_len=9)
    last = -2 if kind == "two tokens" else -1
    with torch.set_grad_enabled(kind == "gradients"), in_fused_blocks(model):
        assert all("forward" in vars(block) for block in model.model.layers)
        if kind == "no cache":
            found = model(ids, use_cache=False).logits[:, -1:]
        else:
            with torch.no_grad():
                model(ids[:, :last], past_key_values=cache)
            mask = {"attention_mask": torch.ones(rows, 8, dtype=torch.long)} if kind == "padding" else {}
            if mask:
                mask["attention_mask"][:, -1] = 0
            found = model(ids[:, last:], past_key_values=cache, **mask).logits[:, -1:]
    assert all("forward" not in vars(block) for block in model.model.layers)
    if kind != "padding":
        torch.testing.assert_close(found, expected)


def test_a_block_makes_the_norm_of_the_block_after_it_alone(on_any_device):
    layer_types = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    model = tiny_model("hybrid", num_hidden_layers=4, layer_types=layer_types)
    first, second, last = blocks_of(model)
    assert first.following is second and second.following is None and last.following is None


def test_a_call_that_can_run_fused_does(on_any_device):
    model = tiny_model("delta_net")
    cache = StaticCache(model.config, max_cache_len=9)
    with torch.no_grad(), in_fused_blocks(model), pytest.raises(AssertionError, match="fused"):
        for _ in range(2):
            model(tokens(2, 1), past_key_values=cache)
