import pytest
import torch

pytest.importorskip("vllm", reason="make vllm-test makes vLLM's environment, 3.4 GiB in minutes: not in CI")

from serving.vllm.vllm_runs import VOCABULARY, adapted, generated, greedy, prompts_of, served, spread
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.lora.request import LoRARequest

import deltazoo

PROMPTS = prompts_of(37, 100, 5, 1)


@pytest.mark.parametrize(
    ("family", "rule", "options"),
    [
        ("llama", "gated_deltanet", {"ratio": "1:1"}),
        ("qwen3", "kda", {"ratio": "1:1"}),
        ("qwen2", "delta_net", {"ratio": "1:1"}),  # biases on queries, keys and values
        ("mistral", "kda", {"ratio": "1:0"}),  # no softmax layer is left
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_swapped_models_give_the_tokens_of_transformers(family, rule, options, tmp_path):
    model = _swapped(family, rule, options)
    with served(model, tmp_path) as engine:
        assert generated(engine, PROMPTS) == greedy(model, PROMPTS)


def _swapped(family, rule, options):
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=4, vocab_size=VOCABULARY)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads))
    deltazoo.swap_attention(model, rule, options["ratio"])
    return spread(model)


def test_an_adapter_of_swapped_layers(tmp_path):
    model = _swapped("llama", "gated_deltanet", {"ratio": "1:1"})
    plain = greedy(model, PROMPTS)
    model.save_pretrained(tmp_path / "model")
    expected = greedy(adapted(model, tmp_path / "adapter", ["delta.q_proj", "delta.v_proj", "delta.o_proj"]), PROMPTS)
    assert expected != plain
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    with served(None, tmp_path / "model", enable_lora=True, max_lora_rank=8) as engine:
        assert generated(engine, PROMPTS) == plain
        assert generated(engine, PROMPTS, lora_request=adapter) == expected
