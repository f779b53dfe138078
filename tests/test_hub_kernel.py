"""The folder for the kernel hub stands alone, and transformers' models compute on its layers what they did before."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from foreign_models import INSTALLED, VOCAB, foreign_model
from packaging.version import Version
from torch import Tensor
from transformers.utils import is_kernels_available

from scripts.hub_kernel import BACKENDS, FIGURES, build


def modeling_of(family: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def takes_kernels(family: str) -> bool:
    """Older versions of transformers take the functions of flash-linear-attention alone, or call them otherwise."""
    return Version(transformers.__version__) >= Version("5.17") and hasattr(modeling_of(family), "causal_conv1d_fn")


COMMON = {"causal_conv1d_fn": "causal_conv1d_fn", "causal_conv1d_update": "causal_conv1d_update"}
ALL = {  # layers, and the functions of transformers that they replace
    "qwen3_5": {
        "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
        **COMMON,
    },
    "kimi_linear": {
        "chunk_kda": "chunk_kimi_delta_attention",
        "fused_recurrent_kda": "recurrent_kimi_delta_attention",
        **COMMON,
    },
}
FAMILIES = {name: functions for name, functions in ALL.items() if name in INSTALLED and takes_kernels(name)}
NORMS = {"qwen3_5": "Qwen3_5RMSNormGated", "kimi_linear": "KimiLinearRMSNormGated"}
RULES = [(family, *pair) for family, functions in FAMILIES.items() for pair in list(functions.items())[:2]]
ALONE = """
import sys
sys.modules["deltazoo"] = None  # an import of it raises
import importlib, importlib.util, pkgutil, torch
spec = importlib.util.spec_from_file_location("_kernels", sys.argv[1] + "/__init__.py")
kernels = sys.modules["_kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
found = [module.name for module in pkgutil.walk_packages(kernels.__path__, "_kernels.")]
for name in found:
    importlib.import_module(name)
x = torch.randn(1, 3, 2, 4)
y, state = kernels.layers.chunk_kda.forward(None, x, x, x, -x.square(), x[..., 0], output_final_state=True)
assert y.shape == x.shape and state.shape == (1, 2, 4, 4)
print(len(found), *sorted(name for name in vars(torch.ops) if "kernels" in name or "deltazoo" in name))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub") / "kernels"
    build(path)
    return path


@pytest.fixture(scope="module")
def layers(folder: Path) -> Any:
    """Loaded as the library `kernels` does."""
    variant = folder / "build/torch-cpu"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.layers


def model_and_text(family: str) -> tuple[Any, Tensor]:
    """With weights half as large: with larger ones transformers' own rounding exceeds the tolerance."""
    model = foreign_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.5)
    return model, torch.randint(3, VOCAB, (2, 70), generator=torch.Generator().manual_seed(0))


def run(model: Any, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, greedy text, and gradients."""
    model.train().zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.eval()
    with torch.no_grad():
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        return model(ids).logits, model.generate(ids, **options), gradients


def assert_same(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-5)
    assert torch.equal(found[1], wanted[1])
    largest = max(x.abs().max() for x in wanted[2].values())
    assert found[2].keys() == wanted[2].keys()
    for name, gradient in wanted[2].items():
        torch.testing.assert_close(found[2][name], gradient, rtol=1e-4, atol=float(1e-5 * largest), msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_module_imports_without_the_library(folder: Path, backend: str) -> None:
    variant = folder / f"build/torch-{backend}"
    command = [sys.executable, "-I", "-c", ALONE, str(variant)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    count, *operators = done.stdout.split()
    assert int(count) == len(list(variant.rglob("*.py"))) - 1
    assert operators in ([], ["_kernels"])  # registered under the name by which it was loaded


def test_building_again_replaces_the_folder_and_no_other(folder: Path, tmp_path: Path) -> None:
    before = (folder / "build/torch-cuda/metadata.json").read_bytes()
    build(folder)
    assert (folder / "build/torch-cuda/metadata.json").read_bytes() == before
    (tmp_path / "mine.txt").touch()
    with pytest.raises(FileExistsError, match="holds other files"):
        build(tmp_path)
    assert (tmp_path / "mine.txt").exists()


def test_the_card_names_every_layer_and_every_figure(folder: Path, layers: Any) -> None:
    text = (folder / "README.md").read_text()
    assert [name for name in layers.__all__ if f"| `{name}` |" not in text] == []
    for row in json.loads(FIGURES.read_text())["rows"]:
        if "layers_ms" in row:
            assert f"{row['torch_ms']:.1f} ms | {row['layers_ms']:.1f} ms |" in text
        else:
            assert f"differ by at most {row['logits']:.1e}; the same greedy text" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_are_those_of_transformers(family: str, layers: Any) -> None:
    def arguments(function: Any) -> list[tuple[str, Any]]:
        found = inspect.signature(getattr(function, "forward", function)).parameters.values()
        return [(x.name, x.kind) for x in found if x.name != "self"]

    modeling = modeling_of(family)
    for layer, function in FAMILIES[family].items():
        assert arguments(getattr(layers, layer)) == arguments(getattr(modeling, function)), layer
    assert arguments(layers.RMSNormGated) == arguments(getattr(modeling, NORMS[family]))
    members = dir(torch.nn.Module)
    for name in layers.__all__:
        assert set(dir(getattr(layers, name))) - set(members) == {"has_backward", "can_torch_compile"}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_the_same_on_the_layers(family: str, layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_and_text(family)
    wanted = run(model, ids)
    put_in_place(family, layers, monkeypatch)
    assert_same(run(model, ids), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_keep_packed_sequences_apart(family: str, layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(family, layers, monkeypatch)
    model, ids = foreign_model(family), torch.randint(3, VOCAB, (1, 12))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    boundaries = torch.tensor([0, 5, 12], dtype=torch.int32)
    packing = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": 7, "max_length_k": 7}
    with torch.no_grad():
        wanted = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], dim=1)
        found = model(ids, position_ids=positions, use_cache=False, **packing).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def put_in_place(family: str, layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers in place of transformers' functions, without the library `kernels`."""
    modeling = modeling_of(family)
    for layer, function in FAMILIES[family].items():
        monkeypatch.setattr(modeling, function, getattr(layers, layer)())
    monkeypatch.setattr(getattr(modeling, NORMS[family]), "forward", layers.RMSNormGated.forward)


@pytest.mark.skipif(
    not is_kernels_available(), reason=f"no version of kernels that fits transformers {transformers.__version__}"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_the_same_on_the_folder(family: str, folder: Path) -> None:
    from kernels import LocalLayerRepository, Mode, use_kernel_mapping
    from kernels import kernelize as by_mapping
    from transformers import KernelConfig
    from transformers.integrations.hub_kernels import kernelize

    model, ids = model_and_text(family)
    wanted = run(model, ids)
    names = [*FAMILIES[family], "RMSNormGated"]
    local = {name: {"cpu": LocalLayerRepository(folder, layer_name=name)} for name in names}
    model.kernel_config = KernelConfig(local, use_local_kernel=True)
    kernelize(model)
    try:
        replaced = {name: fn.forward.__module__ for x in model.modules() for name, fn in functions_of(x).items()}
        assert len(replaced) == 4 and all("_deltazoo_kernels_cpu_" in module for module in replaced.values())
        assert_same(run(model, ids), wanted)
    finally:
        with use_kernel_mapping({}, inherit_mapping=False):  # other models have the same functions
            by_mapping(model, mode=Mode.INFERENCE, device="cpu")


def functions_of(module: Any) -> dict[str, Any]:
    return getattr(module, "_kernel_funcs", {})


@pytest.mark.parametrize(("family", "layer", "function"), RULES)
def test_gradients_are_those_of_transformers(family: str, layer: str, function: str, layers: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 70, 2, 8) for _ in range(3))
    g = -torch.rand(2, 70, 2, 8) if "kda" in layer else -torch.rand(2, 70, 2)
    inputs = (q, k, v, g, torch.rand(2, 70, 2), 0.1 * torch.randn(2, 2, 8, 8))
    weights = torch.randn(2, 70, 2, 8), torch.randn(2, 2, 8, 8)

    def gradients(rule: Any) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        found = rule(*leaves[:5], initial_state=leaves[5], **options)
        torch.autograd.backward(found, weights)
        return *found, *(x.grad for x in leaves)

    wanted = gradients(getattr(modeling_of(family), function))
    torch.testing.assert_close(gradients(getattr(layers, layer)()), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif("qwen3_5" not in FAMILIES, reason="this version of transformers takes no kernels here")
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_bias", [False, True])
def test_convolution_is_that_of_transformers(activation: str | None, with_bias: bool, layers: Any) -> None:
    modeling = modeling_of("qwen3_5")
    x, weight, bias = torch.randn(2, 6, 9), torch.randn(6, 4), torch.randn(6) if with_bias else None
    wanted = modeling.causal_conv1d_fn(x, weight, bias, activation)
    torch.testing.assert_close(layers.causal_conv1d_fn()(x, weight, bias, activation=activation), wanted)
    for width in (3, 4):
        state = torch.randn(2, 6, width)
        same = state.clone()
        wanted = modeling.causal_conv1d_update(x[..., :1], state, weight, bias, activation)
        token = x[..., :1].clone().requires_grad_()
        found = layers.causal_conv1d_update()(token, same, weight, bias, activation)
        torch.testing.assert_close((found, same), (wanted, state))
        found.sum().backward()  # though the state was overwritten
        assert token.grad is not None and token.grad.any()


def test_other_activations_are_refused(layers: Any) -> None:
    with pytest.raises(ValueError, match="'silu', 'swish' or None, got 'gelu'"):
        layers.causal_conv1d_fn()(torch.randn(1, 2, 3), torch.randn(2, 4), activation="gelu")


@pytest.mark.parametrize("boundaries", ["cu_seqlens", "cu_seq_lens_q", "seq_idx"])
def test_packed_sequences_stay_apart(boundaries: str, layers: Any) -> None:
    cu_seqlens = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    numbers = torch.tensor([[0] * 4 + [1] + [2] * 6], dtype=torch.int32)
    packing = {boundaries: numbers if boundaries == "seq_idx" else cu_seqlens}
    x, weight = torch.randn(1, 6, 11), torch.randn(6, 4)
    q, g, beta = torch.randn(1, 11, 2, 4), -torch.rand(1, 11, 2, 4), torch.rand(1, 11, 2)
    convolve, rule = layers.causal_conv1d_fn(), layers.chunk_kda()
    spans = [slice(*pair) for pair in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)]
    wanted = torch.cat([convolve(x[..., span], weight, activation="silu") for span in spans], dim=-1)
    torch.testing.assert_close(convolve(x, weight, activation="silu", **packing), wanted)
    wanted = torch.cat([rule(q[:, s], q[:, s], q[:, s], g[:, s], beta[:, s])[0] for s in spans], dim=1)
    torch.testing.assert_close(rule(q, q, q, g, beta, **packing)[0], wanted)
    with pytest.raises(ValueError, match=r"seq_idx of packed sequences must have shape \[1, T\]"):
        convolve(x.repeat(2, 1, 1), weight, seq_idx=numbers.repeat(2, 1))
