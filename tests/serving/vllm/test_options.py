import json

import pytest
import torch

pytest.importorskip("vllm", reason="make vllm-test makes vLLM's environment, 3.4 GiB in minutes: not in CI")

import vllm
from safetensors.torch import load_file, save_file
from serving.vllm.vllm_runs import adapted, generated, greedy, log_probs, prompts_of, served, small_model
from transformers import AutoConfig, AutoModelForSequenceClassification
from vllm.lora.request import LoRARequest

from deltazoo.serving.vllm import register

PROMPTS = prompts_of(37, 100, 5)


def test_an_adapter(tmp_path):
    """One request with it, beside what the model gives without; maps of low rank take none."""
    model = small_model("kda")
    plain = greedy(model, PROMPTS)
    model.save_pretrained(tmp_path / "model")
    targets = ["q_proj", "k_proj", "v_proj", "b_proj", "o_proj", "gate_proj", "down_proj"]
    expected = greedy(adapted(model, tmp_path / "adapter", targets), PROMPTS)
    assert expected != plain
    adapted(small_model("kda"), tmp_path / "of_gates", ["g_proj.1"])
    adapter, of_gates = (LoRARequest(x, i, str(tmp_path / x)) for i, x in enumerate(("adapter", "of_gates"), 1))
    with served(None, tmp_path / "model", enable_lora=True, max_lora_rank=8) as engine:
        assert generated(engine, PROMPTS) == plain
        assert generated(engine, PROMPTS, lora_request=adapter) == expected
        with pytest.raises(ValueError, match=r"but received .*g_proj\.1"):
            generated(engine, PROMPTS, lora_request=of_gates)


@pytest.mark.parametrize("rule", ["kda", "gated_deltanet"])
def test_weights_of_four_bits(rule, tmp_path):
    """Of the large maps, by compressed-tensors: near the model of the rounded weights, which is far from the original.

    vLLM's products of four bits are for bfloat16 alone on a CPU, and round differently from transformers' in float32.
    """
    from compressed_tensors.compressors import pack_to_int32

    model = small_model(rule).bfloat16()
    model.save_pretrained(tmp_path)
    tensors, group = load_file(tmp_path / "model.safetensors"), 32
    rounded = dict(tensors)
    large = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for name in [x for x in tensors if x.split(".")[-2] in large]:
        weight = tensors.pop(name).float().unflatten(1, (-1, group))
        scale = (weight.abs().amax(2, keepdim=True) / 7).bfloat16()
        integers = (weight / scale).round().clamp(-8, 7)
        rounded[name] = (integers * scale).flatten(1)
        tensors |= {
            f"{name}_packed": pack_to_int32(integers.flatten(1).to(torch.int8), 4),
            f"{name}_scale": scale[..., 0].contiguous(),
            f"{name}_shape": torch.tensor(rounded[name].shape),
        }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group, dynamic=False)
    scheme = dict(quant_method="compressed-tensors", format="pack-quantized", ignore=["lm_head"])
    scheme["config_groups"] = {"group_0": dict(targets=["Linear"], weights=weights)}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    with served(None, tmp_path, dtype="bfloat16") as engine:
        found = log_probs(engine, PROMPTS[1])
    original = model.float()
    expected = []
    for state in ({}, rounded):
        original.load_state_dict({name: x.float() for name, x in state.items()}, strict=False)
        with torch.no_grad():
            logits = original(torch.tensor([PROMPTS[1]])).logits[0, :-1].log_softmax(-1)
        expected.append(logits.gather(1, torch.tensor(PROMPTS[1][1:])[:, None])[:, 0])
    assert (found - expected[1]).abs().mean() < 0.2 * (expected[0] - expected[1]).abs().mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pipeline_parallel_size=2), "without pipeline parallelism"),
        (dict(speculative_config={"method": "ngram", "num_speculative_tokens": 2}), "without speculative decoding"),
        (dict(compilation_config={"mode": 3}, enforce_eager=False), "are not compiled"),
    ],
)
def test_refusals(options, message, tmp_path):
    model = small_model("delta_net", num_layers=1)
    with pytest.raises(ValueError, match=message), served(model, tmp_path, **options):
        pass


def test_models_that_are_refused(tmp_path):
    kinds = {"dynamic": "those of 'dynamic' depend on how long", "proportional": "no factor of 'proportional', got 4.0"}
    for kind, message in kinds.items():
        rope = dict(rope_type=kind, rope_theta=10000.0, factor=4.0)
        model = small_model("delta_net", hybrid=True, rope_parameters=rope)
        with pytest.raises(ValueError, match=message), served(model, tmp_path / kind):
            pass
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_heads=2, vocab_size=64)
    classifier = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("delta_rule", **sizes))
    with pytest.raises(ValueError, match="serves causal language models"), served(classifier, tmp_path / "head"):
        pass


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.40.1")
    with pytest.raises(RuntimeError, match="works with vLLM 0.26 to 0.33, got 0.40.1: install one of these"):
        register()


@pytest.mark.parametrize(("rule", "hybrid"), [("kda", False), ("lightning_attention", False), ("pgdn", True)])
def test_two_ranks_share_the_heads(rule, hybrid, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model = small_model(rule, hybrid=hybrid)
    with served(model, tmp_path, tensor_parallel_size=2) as engine:
        assert generated(engine, PROMPTS) == greedy(model, PROMPTS)


def test_heads_that_cannot_be_divided_are_refused():
    from deltazoo.layers import make_layer
    from deltazoo.serving.vllm.paged_layer import meta_layer

    with pytest.raises(ValueError, match="num_heads=3 of layer 0 is no multiple of the 2 ranks"):
        meta_layer(lambda ranks: make_layer("kda", 48, 3, 16, layer_idx=0), 2)
    with pytest.raises(ValueError, match="tensor parallelism needs num_micro_steps=1, got 2"):
        meta_layer(lambda ranks: make_layer("gated_deltaproduct", 64, 4, 16, layer_idx=0), 2)


@pytest.mark.parametrize(
    "name", ["layers.3.mlp.up_proj.weight", "layers.3.attn.v_proj.bias", "layers.0.attn.k_conv1d.weight", "norm.weight"]
)
def test_a_checkpoint_that_lacks_a_parameter_is_refused(name, tmp_path):
    """vLLM itself does not miss a part of a product that it has joined."""
    small_model("kda", hybrid=True, qkv_bias=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.{name}"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks weights of its model: model.{name}"), served(None, tmp_path):
        pass


def test_a_parameter_of_another_size_is_refused(tmp_path):
    small_model("kda", num_layers=1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.attn.A_log"] = tensors["model.layers.0.attn.A_log"].repeat(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = r"layers.0.attn.A_log must have shape \(4,\), got \(8,\)"
    with pytest.raises(ValueError, match=message), served(None, tmp_path):
        pass
