import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm-test makes an environment with it")

import vllm
from peft import LoraConfig, get_peft_model
from serving.vllm.vllm_runs import generated, greedy, prompts_of, served, small_model

from deltazoo.serving.vllm import register

PROMPTS = prompts_of(37, 100, 5)


def test_an_adapter(tmp_path):
    """One request with it, beside what the model gives without."""
    from vllm.lora.request import LoRARequest

    model = small_model("kda")
    plain = greedy(model, PROMPTS)
    model.save_pretrained(tmp_path / "model")
    torch.manual_seed(3)
    targets = ["q_proj", "k_proj", "v_proj", "b_proj", "o_proj", "gate_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=targets, lora_alpha=64)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = greedy(adapted, PROMPTS)
    assert expected != plain
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    with served(None, tmp_path / "model", enable_lora=True, max_lora_rank=8) as engine:
        assert generated(engine, PROMPTS) == plain
        assert generated(engine, PROMPTS, lora_request=adapter) == expected


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
