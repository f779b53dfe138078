import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm-test makes an environment with it")

from serving.vllm.vllm_runs import VOCABULARY, generated, greedy, prompts_of, served, spread
from transformers import AutoConfig, AutoModelForCausalLM

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
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=4, vocab_size=VOCABULARY)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads))
    deltazoo.swap_attention(model, rule, options["ratio"])
    model = spread(model)
    with served(model, tmp_path) as engine:
        assert generated(engine, PROMPTS) == greedy(model, PROMPTS)
