"""Modules that compute otherwise within a step give what they give alone, and the model stays what it was around it.

Weights that decoding has merged in memory are saved, loaded, cast, copied, trained and adapted as before. Norms and
MLPs of transformers in our kernels run on a GPU, and interpreted in the child process of test_fused_blocks.py.
"""

from __future__ import annotations

import copy
from typing import Any

import foreign_models
import pytest
import safetensors.torch
import torch
from decoding_loops import assert_decodes_like_forward, model_of, own
from tiny_families import OWN, tiny_original
from tiny_models import FEW, tiny_config, tiny_model, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.phi.modeling_phi import PhiMLP

import deltazoo
from deltazoo.generation import Decoder, step_modules
from deltazoo.generation.step_modules import library_modules, merged_products, replaced
from deltazoo.models import DeltaRuleForCausalLM

SOME = [*FEW, "kda", "grouped_values", "micro_steps", "tied", "hybrid_kda", "softmax_only"]
OF_EACH_FORM = ("llama", "olmo2", "gemma3_text")
"""Families with norms whose weight comes after rounding, before it, and as its difference from one."""
LAYER_NORMS = ("gpt2", "gpt_neox")


def with_merged_maps(model: nn.Module) -> Any:
    return replaced([x for product in merged_products(model) for x in product.replacements])


def generated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return deltazoo.generate(model, ids, max_new_tokens=6)


def expected(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=6, do_sample=False, capture_step=False)


def used(case: str) -> tuple[Any, torch.Tensor]:
    """A model that has just generated, and a prompt."""
    model, ids = tiny_model(case), tokens(2, 5)
    generated(model, ids)
    return model, ids


def joints(model: nn.Module) -> int:
    """Pairs of parameters of which one begins where the other ends."""
    ends = {p.data_ptr() + p.nbytes for p in model.parameters()}
    return sum(p.data_ptr() in ends for p in model.parameters())


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("case", "in_layers"),
    [
        ("gated_deltanet", [4, 4]),  # maps of the mixer's input, o, gate and up, down
        ("kda", [6, 6]),  # and the second halves of the low-rank f and g
        ("hybrid", [4, 6]),  # two batched products of the softmax itself
        ("hybrid_kda", [6, 6]),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_products_per_token(case, in_layers, batch_size):
    model = tiny_model(case)
    model.set_attn_implementation("eager")
    steps = Decoder(model, batch_size, max_length=20).stream(tokens(batch_size, 5), max_new_tokens=4)
    next(steps)
    with Products() as products:
        next(steps)
    assert products.count == sum(in_layers) + 1


@pytest.mark.parametrize("case", SOME)
def test_same_logits_up_to_rounding(case):
    model, ids = tiny_model(case).double(), tokens(2, 1)
    with torch.no_grad():
        plain = model(ids).logits
        with with_merged_maps(model):
            merged = model(ids).logits
    torch.testing.assert_close(merged, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["gated_deltanet", "tied", "hybrid_kda", "grouped_values"])
def test_state_dict_and_checkpoints(case, tmp_path):
    fresh, (model, ids) = tiny_model(case), used(case)
    assert joints(model) >= len(fresh.model.layers)
    assert list(model.state_dict()) == list(fresh.state_dict())
    model.save_pretrained(tmp_path)
    loaded = DeltaRuleForCausalLM.from_pretrained(tmp_path).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    safetensors.torch.save_model(model, tmp_path / "weights.safetensors")
    others = [loaded.state_dict(), torch.load(tmp_path / "weights.pt")]
    for weights in (model.state_dict(), *others):
        assert all(torch.equal(weights[name], x) for name, x in fresh.state_dict().items())
    read = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(x, fresh.state_dict()[name]) for name, x in read.items())
    size = sum(x.nbytes for x in {x.data_ptr(): x for x in fresh.state_dict().values()}.values())
    assert (tmp_path / "model.safetensors").stat().st_size < 1.2 * size + 10_000
    assert torch.equal(generated(loaded, ids), expected(fresh, ids))


def train(model, ids):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("case", ["hybrid", "kda_without_conv"])
def test_training_after_generation(case, inference_mode):
    fresh, ids = tiny_model(case), tokens(2, 5)
    model = tiny_model(case)
    decoder = Decoder(model, 2, max_length=20)
    with torch.inference_mode(inference_mode):
        before = generated(model, ids)
    list(decoder.stream(ids, max_new_tokens=6))
    train(fresh, ids), train(model, ids)
    for (name, x), y in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(x, y), name
    after = expected(fresh, ids)
    assert not torch.equal(after, before)
    assert torch.equal(generated(model, ids), after)
    assert torch.equal(torch.stack(list(decoder.stream(ids, max_new_tokens=6)), 1), after[:, 5:])


@pytest.mark.parametrize("case", ["hybrid", "kda_without_conv"])
def test_casts_and_copies_have_weights_of_their_own(case):
    model, ids = used(case)
    train(copy.deepcopy(model), ids)
    assert torch.equal(generated(model, ids), expected(tiny_model(case), ids))
    model.to(torch.float64)
    assert torch.equal(generated(model, ids), expected(tiny_model(case).to(torch.float64), ids))


def test_a_second_decoder_finds_the_weights_where_they_are():
    model = tiny_model("gated_deltanet")
    products = merged_products(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    assert merged_products(model) == products
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_memory_is_let_go_with_the_last_parameter_in_it():
    model = tiny_model("gated_deltanet")
    layer = model.model.layers[0].mlp
    (product,) = (p for p in merged_products(model) if p.linears[0] is layer.gate_proj)
    storage = product.weight.untyped_storage()
    up = layer.up_proj.weight.clone()
    del product
    layer.gate_proj.double()
    assert torch.equal(layer.up_proj.weight, up)
    assert torch._C._storage_Use_Count(storage._cdata) > 1
    layer.up_proj.double()
    assert torch._C._storage_Use_Count(storage._cdata) == 1  # the one counted from here


class Wrapped(nn.Linear):
    """A subclass of the linear map, which is not merged."""


def in_a_flat_buffer(weight: torch.Tensor) -> None:
    weight.data = torch.zeros(5000)[: weight.numel()].view_as(weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda attention: setattr(attention.q_proj, "__class__", Wrapped),
        lambda attention: attention.q_proj.register_forward_pre_hook(lambda module, args: None),
        lambda attention: attention.q_proj.double(),
        lambda attention: setattr(attention.q_proj, "forward", lambda x: x),
        lambda attention: nn.utils.parametrizations.weight_norm(attention.q_proj),
        lambda attention: in_a_flat_buffer(attention.q_proj.weight),
        lambda attention: setattr(attention.k_proj, "weight", attention.q_proj.weight),
        lambda attention: attention.q_proj.weight.data.share_memory_(),
        lambda attention: attention.q_proj.to("meta"),
    ],
    ids=["subclass", "hook", "dtype", "forward", "parametrization", "flat", "shared parameter", "shared", "meta"],
)
def test_what_is_left_alone(change):
    model = tiny_model("gated_deltanet")
    attention = model.model.layers[0].attn
    change(attention)
    addresses = [p.data_ptr() for p in attention.q_proj.parameters()]
    modules = with_merged_maps(model)
    assert [p.data_ptr() for p in attention.q_proj.parameters()] == addresses
    before = vars(attention.q_proj).get("forward")
    with modules:
        assert vars(attention.q_proj).get("forward") is before
        assert "forward" in vars(model.model.layers[1].attn.q_proj)
    assert "forward" not in vars(model.model.layers[1].attn.q_proj)


def test_a_forward_pass_replaced_after_the_merging_stays():
    model = tiny_model("gated_deltanet")
    modules, attention, x = with_merged_maps(model), model.model.layers[0].attn, torch.randn(1, 1, 32)
    attention.q_proj.forward = lambda x: x
    own = attention.q_proj.forward
    with torch.no_grad(), modules:
        assert attention.q_proj.forward is own and attention.q_proj(x) is x
        assert torch.equal(attention.k_proj(x), nn.functional.linear(x, attention.k_proj.weight))
    assert attention.q_proj.forward is own and "forward" not in vars(attention.k_proj)


class TestPieces:
    """A merged map gives the same result as alone, whatever its input."""

    @pytest.fixture
    def attention(self):
        torch.manual_seed(0)
        model = DeltaRuleForCausalLM(tiny_config("gated_deltanet")).double()
        with with_merged_maps(model):
            yield model.model.layers[0].attn

    def check(self, linear, x):
        torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight), rtol=0, atol=1e-12)

    @torch.no_grad()
    def test_in_any_order_and_number(self, attention):
        x, other = torch.randn(2, 1, 1, 32, dtype=torch.float64)
        for name, given in (
            ("k_proj", x), ("q_proj", x), ("b_proj", x), ("k_proj", other), ("b_proj", x), ("k_proj", x), ("k_proj", x),
            ("q_proj", other), ("v_proj", x), ("v_proj", other), ("a_proj", other), ("g_proj", other),
        ):  # fmt: skip
            self.check(getattr(attention, name), given)

    @torch.no_grad()
    def test_the_same_tensor_with_other_values(self, attention):
        x = torch.randn(1, 1, 32, dtype=torch.float64)
        for names in (("q_proj", "k_proj", "v_proj"), ("k_proj", "q_proj", "v_proj")):
            for name in names:
                self.check(getattr(attention, name), x)
            x.normal_()

    def test_gradients_are_recorded(self, attention):
        x = torch.randn(1, 1, 32, dtype=torch.float64)
        for linear in (attention.q_proj, attention.k_proj):
            (gradient,) = torch.autograd.grad(linear(x).sum(), linear.weight)
            assert torch.equal(gradient, x[0].expand_as(gradient))


def test_forward_passes_are_given_back_after_an_error():
    model = tiny_model("gated_deltanet")
    with pytest.raises(KeyError), with_merged_maps(model):
        raise KeyError("the caller's own")
    assert not any("forward" in vars(module) for module in model.modules())


def test_submodules_of_that_name_in_other_libraries_are_left_alone():
    other = nn.Module()
    other.input_projections = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
    model = nn.Sequential(other)
    merged_products(model)
    assert joints(model) == 0


@pytest.mark.parametrize("family", foreign_models.FUSED)
def test_maps_of_an_accelerated_layers_input_are_merged(family):
    model = model_of(family)
    mixer = foreign_models.mixer_of(model)
    merged = [list(product.linears) for product in merged_products(model)]
    mlps = [[x.gate_proj, x.up_proj] for x in model.modules() if step_modules._joint_maps(type(x))]
    assert [x for maps in merged if maps not in mlps for x in maps] == [
        getattr(mixer, name) for name in mixer.input_projections
    ]
    assert [maps for maps in merged if maps in mlps] == mlps
    assert bool(mlps) == (family != "glm5_next")


def modules_of(model: nn.Module) -> list[Any]:
    return [module for module, _ in library_modules(model)]


def fused(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), replaced(library_modules(module)):
        assert "forward" in vars(module)
        return module(x)


def check_modules(family: str, device: str, dtype: torch.dtype) -> None:
    """In our kernels a module errs at most about as much as by its own forward pass."""
    chosen = {type(module): module for module in modules_of(tiny_original(family))}
    assert len(chosen) == 2
    for module in chosen.values():
        module = module.to(device, dtype)
        width = module.hidden_size if hasattr(module, "down_proj") else len(module.weight)
        x = (3 * torch.randn(2, 1, width, generator=torch.Generator().manual_seed(0))).to(device, dtype)
        with torch.no_grad():
            own, found = module(x), fused(module, x)
            exact = module.double()(x.double())
        assert found.dtype == own.dtype == dtype
        allowed = torch.finfo(dtype).eps * exact.norm()
        assert (found - exact).norm() <= (own - exact).norm() + allowed, type(module).__name__


@pytest.mark.parametrize("family", OWN)
def test_norms_of_the_families_that_can_be_swapped(family: str) -> None:
    model = tiny_original(family)
    norms = {module for module in model.modules() if type(module).__name__.endswith("RMSNorm")}
    known = {module for module in modules_of(model) if not hasattr(module, "down_proj")}
    assert known == norms and bool(norms) == (family not in LAYER_NORMS)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "kimi_linear"])
def test_norms_of_accelerated_models(family: str) -> None:
    """The gated ones are `accelerate`'s."""
    if family not in foreign_models.FUSED:
        pytest.skip("the installed transformers lacks it")
    names = {type(module).__name__ for module in modules_of(foreign_models.foreign_model(family))}
    assert any(name.endswith("RMSNorm") for name in names) and not any("Gated" in name for name in names)


def test_other_code_is_no_known_module() -> None:
    norm = type(modules_of(tiny_original("llama"))[0])
    assert not modules_of(nn.ModuleList([nn.RMSNorm(4), deltazoo.layers.RMSNorm(4)]))
    assert step_modules._kernel_of(norm) is not None
    assert step_modules._kernel_of(type("Own", (norm,), {"__module__": __name__})) is None
    assert step_modules._kernel_of(PhiMLP) is None  # of transformers, and another forward pass


def test_library_modules_that_keep_their_own_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients are recorded, on a CPU, for a weight of another dtype, and with a hook or a replaced method."""
    model, x = tiny_original("llama"), torch.randn(2, 1, 64)
    norm = next(module for module in modules_of(model) if not hasattr(module, "down_proj"))
    x = x[..., : len(norm.weight)]
    expected = norm(x)
    assert torch.equal(fused(norm, x), expected)
    monkeypatch.setattr(step_modules, "takes_kernel", lambda *_, **__: True)
    monkeypatch.setattr(step_modules.fused, "rms_norm", lambda x, *_, fused: torch.zeros_like(x))
    assert not fused(norm, x).any()
    with replaced(library_modules(model)):
        assert torch.equal(norm(x), expected)
    half = x.bfloat16()
    assert torch.equal(fused(norm, half), norm(half))
    handle = norm.register_forward_hook(lambda module, args, output: 2 * output)
    with torch.no_grad(), replaced(library_modules(model)):
        assert torch.equal(norm(x), 2 * expected)
    handle.remove()
    norm.forward = lambda x: 3 * x
    with torch.no_grad(), replaced(library_modules(model)):
        assert torch.equal(norm(x), 3 * x)
    assert "forward" in vars(norm)


@pytest.mark.gpu
@pytest.mark.parametrize("family", OF_EACH_FORM)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_library_modules_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    check_modules(family, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("family", OF_EACH_FORM)
def test_tokens_of_a_swapped_model_on_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of(f"{family} 1:1").cuda(), []
    norm = step_modules.fused.rms_norm
    counted = lambda *args, **options: (calls.append(1), norm(*args, **options))[1]  # noqa: E731
    monkeypatch.setattr(step_modules.fused, "rms_norm", counted)
    assert_decodes_like_forward(model, own)
    assert calls
