"""Tiny float32 models of flash-linear-attention with random weights, and their logits: what tests/compat loads.

    python scripts/make_fla_fixtures.py FOLDER

writes a folder per model: `config.json` and `model.safetensors` as that library saves them, and `expected.safetensors`
with `tokens` `[2, 40]` and `logits` `[2, 40, vocabulary]`. Needs a GPU and flash-linear-attention 0.6.0; deltazoo is
not used. tests/compat/fla_checkpoints holds what it wrote on a GPU.

Rows are short enough for that library's recurrent kernels, which compute in float32; its chunk kernels use TF32 or
refuse float32. Every parameter is random, those of the gates and norms included.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from triton.runtime.autotuner import Autotuner

_make_autotuner = Autotuner.__init__


def _with_one_choice(self: Autotuner, fn: Any, arg_names: Any, configs: list[Any], *args: Any, **kwargs: Any) -> None:
    _make_autotuner(self, fn, arg_names, configs[:1], *args, **kwargs)


Autotuner.__init__ = _with_one_choice  # tuning would take minutes, and the choice changes no result that matters here

# The decorators of that library's kernels run while it is imported, so it is imported after the line above.
import fla  # noqa: E402
from fla.layers import GatedDeltaNet2  # noqa: E402
from fla.models import (  # noqa: E402
    CombaConfig,
    GatedDeltaNetConfig,
    GatedDeltaProductConfig,
    GLAConfig,
    KDAConfig,
    PrecondGatedDeltaNetConfig,
    PrecondKDAConfig,
)
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

SIZES: dict[str, Any] = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
HEADS: dict[str, Any] = {"num_heads": 2, "head_dim": 8}
WIDE: dict[str, Any] = {**SIZES, **HEADS, "expand_v": 2.0}
GATED_DELTANET_2: dict[str, Any] = {**SIZES, **HEADS, "expand_v": 1.0}

MODELS: dict[str, Any] = {
    "gated_deltanet": GatedDeltaNetConfig(**WIDE, num_v_heads=4),
    "kda_negative_eigenvalues": KDAConfig(**SIZES, **HEADS, allow_neg_eigval=True),
    "comba": CombaConfig(**WIDE),
    "comba_grouped_values": CombaConfig(**SIZES, **HEADS, num_v_heads=4, expand_v=1.0, use_output_gate=False),
    "gated_deltaproduct": GatedDeltaProductConfig(
        **WIDE, num_householder=2, use_forget_gate=True, allow_neg_eigval=True
    ),
    "deltaproduct": GatedDeltaProductConfig(
        **WIDE, num_householder=3, use_forget_gate=False, allow_neg_eigval=True, use_output_gate=False
    ),
    "precond_kda": PrecondKDAConfig(**SIZES, **HEADS),
    "precond_kda_bounded_decay": PrecondKDAConfig(**SIZES, **HEADS, safe_gate=True, lower_bound=-5.0),
    "precond_gated_deltanet": PrecondGatedDeltaNetConfig(**WIDE),
    "precond_gated_deltanet_grouped_values": PrecondGatedDeltaNetConfig(
        **SIZES, **HEADS, num_v_heads=4, expand_v=1.0, use_gate=False
    ),
    "gla": GLAConfig(**SIZES, num_heads=2, expand_k=0.5, expand_v=1.0),
    "gla_convolutions": GLAConfig(**SIZES, num_heads=2, expand_k=1.0, expand_v=1.0, use_short_conv=True),
}


def main() -> None:
    """Write all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; folders of the same names are replaced")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    for name, config in MODELS.items():
        model = AutoModelForCausalLM.from_config(config)
        write(options.folder / name, model, generator, options.device)
    write(options.folder / "gated_deltanet2", gated_deltanet_2(), generator, options.device)
    # That library has the layer and no model of it, so no configuration: this one is deltazoo's.
    ours = {"model_type": "delta_rule", "mixer": "gated_deltanet2", "norm_eps": KDAConfig().norm_eps}
    path = options.folder / "gated_deltanet2" / "config.json"
    path.write_text(json.dumps({**ours, **GATED_DELTANET_2}, indent=2) + "\n")
    torch_and_device = f"torch {torch.__version__}, {options.device}"
    print(f"wrote {len(MODELS) + 1} models: flash-linear-attention {fla.__version__}, {torch_and_device}")


def gated_deltanet_2() -> PreTrainedModel:
    """A KDA model with Gated DeltaNet-2 layers in place of its own."""
    config = KDAConfig(**GATED_DELTANET_2)
    model = AutoModelForCausalLM.from_config(config)
    for index, block in enumerate(model.model.layers):
        sizes = {key: GATED_DELTANET_2[key] for key in ("hidden_size", "num_heads", "head_dim", "expand_v")}
        block.attn = GatedDeltaNet2(**sizes, norm_eps=config.norm_eps, layer_idx=index)
    return model


def write(folder: Path, model: PreTrainedModel, generator: torch.Generator, device: str) -> None:
    """Give a model random weights, run it, and save both."""
    for name, parameter in model.named_parameters():
        parameter.data = random_values(name, parameter, generator)
    tokens = torch.randint(model.config.vocab_size, (2, 40), generator=generator)
    model = model.to(device).eval()
    with torch.no_grad():
        logits = model(tokens.to(device), use_cache=False).logits
    if logits.dtype != torch.float32 or not logits.isfinite().all():
        raise RuntimeError(f"{folder.name}: logits are not finite float32 numbers")
    shutil.rmtree(folder, ignore_errors=True)
    model.cpu().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file({"tokens": tokens, "logits": logits.cpu().contiguous()}, folder / "expected.safetensors")
    print(f"{folder.name}: {type(model).__name__}, logits {tuple(logits.shape)}, deviation {logits.std().item():.3g}")


def random_values(name: str, parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
    """Values that let every parameter act on the logits: activations near one, decays that neither vanish nor rule."""
    noise = torch.randn(parameter.shape, generator=generator)
    last = name.rpartition(".")[2]
    if last in ("A_log", "A_log_atk"):
        return 0.5 * noise
    if last in ("dt_bias", "dt_bias_atk"):
        return noise - 2
    if last in ("decay", "D", "log_atk_scale"):
        return 0.5 * noise - (2 if last == "log_atk_scale" else 0)
    if parameter.ndim == 1:
        return 1 + 0.2 * noise if last == "weight" else 0.5 * noise
    return noise if "embeddings" in name else noise / parameter[0].numel() ** 0.5


if __name__ == "__main__":
    main()
