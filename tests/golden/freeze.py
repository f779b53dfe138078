"""What must not change unseen: checkpoints with their logits and gradients, and operator results on hard inputs.

    PYTHONPATH=tests python -m golden.freeze

writes those files beside this one that are missing; tests/test_golden.py compares the package with them. They were
written by the package as of commit 9437e5e, those of `NEWER` as of commit 1ffb3901. Delete one and write it again only
for a change of results that is wanted, and say so in the commit:

* `checkpoints/<name>/`: a folder of `save_pretrained`; and in `expected.safetensors` tokens, the loss, logits and the
  gradient of every parameter, computed in float64.
  Those named `earlier_...` are of rules that were corrected since, as of commit 08a5b07: only that commit's package
  could write them.
* `operator.safetensors`: arguments of `delta_rule` and `linear_attention` (float32), and output, final state and all
  gradients that the reference gives in float64.
* `rounding.json`: the largest relative error that float32 made in any result of a case when these were written, and
  for checkpoints that of logits in bfloat16.

Weights and inputs are stored, not drawn from a seed, so that new initial values or another random generator change
nothing here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from delta_rule_cases import TENSORS, DeltaRuleCase, DeltaRuleInputs
from helpers import relative_errors, results_and_gradients
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import deltazoo
from deltazoo.models import (
    DeltaNetConfig,
    DeltaRuleConfig,
    EFLAConfig,
    GatedDeltaNetConfig,
    KDAConfig,
)
from deltazoo.models.hub import model_class_of
from deltazoo.ops import delta_rule, linear_attention

FOLDER = Path(__file__).parent
CHECKPOINTS = FOLDER / "checkpoints"
OPERATOR = FOLDER / "operator.safetensors"
ROUNDING = FOLDER / "rounding.json"
RULES = [
    "linear_attention",
    "mamba2_style",
    "delta_net",
    "neg_delta_net",
    "gated_deltanet",
    "neg_gated_deltanet",
    "efla",
    "longhorn",
    "kda",
]
NEWER = [
    *("falcon", "isotropic_kdn", "diagonal_kdn", "momentum"),
    *("lightning_attention", "gla", "fg2_gdn", "gated_efla", "gated_longhorn", "kaczmarz", "comba", "comba_unit_erase"),
    *("pgdn", "pkda", "q_delta", "gated_deltanet2", "qed", "gated_deltaproduct", "eda"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
    "initializer_range": 0.3,  # large, so that the outputs of the mixers show in the logits
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MODELS: dict[str, DeltaRuleConfig] = {
    **{f"delta_rule_{mixer}": DeltaRuleConfig(mixer=mixer, **SIZES) for mixer in RULES},
    "delta_net": DeltaNetConfig(**SIZES),
    "gated_deltanet": GatedDeltaNetConfig(**SIZES),
    "kda": KDAConfig(**SIZES),
    "efla": EFLAConfig(**SIZES),
    "hybrid": DeltaRuleConfig(**{**SIZES, **HYBRID}, qkv_bias=True),
    "grouped_values": DeltaRuleConfig(**SIZES, num_v_heads=4, expand_v=0.5, use_short_conv=False, beta_bias=True),
    "micro_steps": DeltaRuleConfig(**SIZES, mixer="neg_gated_deltanet", num_micro_steps=2),
    "erase_only": DeltaRuleConfig(**SIZES, mixer="neg_delta_net", neg_eigval="erase", tie_word_embeddings=True),
    "bounded_decay": DeltaRuleConfig(**SIZES, mixer="kda", decay_lower_bound=-5.0, use_gate=False),
    **{f"delta_rule_{mixer}": DeltaRuleConfig(mixer=mixer, **SIZES) for mixer in NEWER},
}
EARLIER = "earlier_"
RUNTIME_KEYS: dict[str, dict[str, Any]] = {
    "runtime_keys_cpu": {
        "backend": "chunkwise",
        "fused_kernels": False,
        "liger": False,
        "fuse_linear_cross_entropy": True,
        "recompute": "elementwise",
    },
    "runtime_keys_gpu": {
        "backend": "triton",
        "fused_kernels": True,
        "liger": True,
        "fuse_linear_cross_entropy": True,
        "recompute": "block",
    },
}
"""config.json held how a model runs when these were written: here every such key, none at its default."""


def _cases() -> list[DeltaRuleCase]:
    """Hard inputs of `delta_rule`: 66 tokens are one chunk and a short second one."""
    small: dict[str, Any] = {"B": 1, "T": 66, "H": 1, "groups": 2, "K": 4, "V": 3, "initial_state": True}
    channel: dict[str, Any] = {**small, "decay": "channel"}
    scalar: dict[str, Any] = {**small, "decay": "scalar"}
    return [
        DeltaRuleCase("same_keys_beta_1", keys="same", beta=1.0, **small),
        DeltaRuleCase("same_keys_beta_2", keys="same", beta=2.0, **small),
        DeltaRuleCase("alternating_keys_beta_1.999_scalar", keys="alternating", beta=1.999, log_decay=-1e-3, **scalar),
        DeltaRuleCase("correlated_keys_channel", keys="correlated", log_decay=-0.01, **channel),
        DeltaRuleCase("beta_0.001_scalar", beta=1e-3, **scalar),
        DeltaRuleCase("beta_0.999_no_decay", beta=0.999, log_decay=0.0, **scalar),
        DeltaRuleCase("strong_decay_scalar", log_decay=-50.0, **scalar),
        DeltaRuleCase("strong_decay_channel", log_decay=-20.0, **channel),
        DeltaRuleCase("mixed_decay_channel", log_decay="mixed", **channel),
        DeltaRuleCase("reset_scalar", log_decay="reset", **scalar),
        DeltaRuleCase("reset_channel", log_decay="reset", **channel),
        DeltaRuleCase("some_zero_keys", keys="some_zero", **{**small, "T": 17}),
        DeltaRuleCase("grouped_values", **{**channel, "B": 2, "T": 17, "H": 2, "K": 5, "V": 7}),
        DeltaRuleCase("packed", lengths=(0, 1, 64, 5), log_decay="reset", **channel),
    ]


LINEAR_ATTENTION = ("strong_decay_scalar", "reset_channel", "packed")
"""Cases that `linear_attention` computes too, with beta left out."""


def relative(error: Tensor, size: Tensor) -> float:
    """Norm of an error over that of what it is an error of; 0 where both are nothing."""
    return 0.0 if not error.any() else (error.norm() / size.norm()).item()


# Checkpoints


def model_results(model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
    """Loss, logits and the gradient of every parameter, as training computes them."""
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    model.train().zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    gradients = {f"d_{name}": x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"loss": loss.detach(), "logits": logits, **gradients}


def model_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of every result. A gradient much smaller than the others is a sum that cancels, and has their
    rounding: each counts as at least a thousandth of all."""
    assert actual.keys() == expected.keys(), f"results are {sorted(actual)}, expected {sorted(expected)}"
    everything = torch.stack([x.double().norm() for name, x in expected.items() if name.startswith("d_")]).norm()
    errors = {}
    for name, exact in expected.items():
        size = exact.double().norm()
        if name.startswith("d_"):
            size = size.maximum(1e-3 * everything)
        errors[name] = relative(actual[name].double() - exact.double(), size)
    return errors


def _write_checkpoints() -> dict[str, dict[str, float]]:
    models: dict[str, PreTrainedModel] = {}
    for name, config in MODELS.items():
        torch.manual_seed(len(models))
        model_class = model_class_of(type(config), "ForCausalLM")
        models[name] = model_class(config)
    torch.manual_seed(len(models))
    llama_sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "initializer_range")}
    llama = LlamaConfig(**llama_sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    models["swapped_llama"] = LlamaForCausalLM(llama)
    deltazoo.swap_attention(models["swapped_llama"], "gated_deltanet", [1])
    rounding = {}
    for name, model in models.items():
        if (CHECKPOINTS / name).exists():
            continue
        with torch.no_grad():
            for parameter in model.parameters():  # norms of ones, biases of zeros would hide what is mixed up
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        rounding[f"checkpoints/{name}"] = _write_checkpoint(name, model)
    for name, keys in RUNTIME_KEYS.items():
        if (CHECKPOINTS / name).exists():
            continue
        shutil.copytree(CHECKPOINTS / "delta_rule_gated_deltanet", CHECKPOINTS / name)
        written = CHECKPOINTS / name / "config.json"
        values = json.loads(written.read_text(encoding="utf-8")) | keys
        written.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return rounding


def _write_checkpoint(name: str, model: PreTrainedModel) -> dict[str, float]:
    folder = CHECKPOINTS / name
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 66))
    single = model_results(AutoModelForCausalLM.from_pretrained(folder), tokens)
    half = model_results(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), tokens)
    exact = model_results(AutoModelForCausalLM.from_pretrained(folder).double(), tokens)
    save_file({"tokens": tokens.int(), **{key: x.float() for key, x in exact.items()}}, folder / "expected.safetensors")
    largest = max(model_errors(single, exact).values())
    return {"float32": largest, "bfloat16": model_errors(half, exact)["logits"]}


def read_checkpoint(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens, and what `model_results` made of them."""
    expected = load_file(CHECKPOINTS / name / "expected.safetensors")
    return expected.pop("tokens").long(), expected


# Operator results


def operator_results(name: str, inputs: DeltaRuleInputs, backend: str) -> dict[str, Tensor]:
    """Output, final state and all gradients of a case; `linear_attention` ones leave beta out."""
    if not name.startswith("linear_attention"):
        return results_and_gradients(delta_rule, inputs, backend=backend)

    def without_beta(beta: Tensor, **arguments: Any) -> Any:
        output, final_state = linear_attention(**arguments, backend=backend)
        return output + 0 * beta.sum(), final_state

    return results_and_gradients(without_beta, inputs)


def _write_operator_results() -> dict[str, dict[str, float]]:
    stored, rounding = {}, {}
    drawn = {case.name: case.make(dtype=torch.float32) for case in _cases()}
    drawn |= {f"linear_attention_{name}": drawn[name] for name in LINEAR_ATTENTION}
    for name, inputs in drawn.items():
        exact = operator_results(name, inputs.double(), "reference")
        single = operator_results(name, inputs, "chunkwise")
        rounding[f"operator/{name}"] = {"float32": max(relative_errors(single, exact, inputs).values())}
        for tensor_name in TENSORS:
            if (tensor := getattr(inputs, tensor_name)) is not None:
                stored[f"{name}/inputs/{tensor_name}"] = tensor.contiguous().clone()
        stored |= {f"{name}/expected/{key}": x.float() for key, x in exact.items()}
    save_file(stored, OPERATOR)
    return rounding


def read_operator_results() -> dict[str, tuple[DeltaRuleInputs, dict[str, Tensor]]]:
    """Inputs and the reference's results by name of the case."""
    cases: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, tensor in load_file(OPERATOR).items():
        name, kind, tensor_name = key.split("/")
        cases.setdefault(name, {"inputs": {}, "expected": {}})[kind][tensor_name] = tensor
    return {
        case: (DeltaRuleInputs(**{n: parts["inputs"].get(n) for n in TENSORS}), parts["expected"])
        for case, parts in cases.items()
    }


def main() -> None:
    torch.set_num_threads(1)
    rounding = _write_checkpoints() | ({} if OPERATOR.exists() else _write_operator_results())
    rounded = {case: {key: float(f"{x:.1e}") for key, x in errors.items()} for case, errors in rounding.items()}
    ROUNDING.write_text(json.dumps(json.loads(ROUNDING.read_text()) | rounded, indent=1) + "\n")


if __name__ == "__main__":
    main()
