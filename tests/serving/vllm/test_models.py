import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm-test makes an environment with it")

from serving.vllm.vllm_runs import add_and_abort, generated, greedy, outputs, prompts_of, served, small_model, spread

import deltazoo

PROMPTS = prompts_of(37, 100, 5, 1)  # longer than a step takes, so cut, beside others that decode already


@pytest.mark.parametrize("rule", deltazoo.list_rules())
def test_every_rule_gives_the_tokens_of_transformers(rule, tmp_path):
    model = small_model(rule)
    with served(model, tmp_path) as engine:
        assert generated(engine, PROMPTS) == greedy(model, PROMPTS)


@pytest.mark.parametrize("rule", ["gated_deltanet", "kda", "eda", "pgdn", "lightning_attention"])
def test_hybrids_with_the_prefix_cache(rule, tmp_path):
    model = small_model(rule, hybrid=True)
    shared = prompts_of(300)[0]
    asked = [shared + end for end in prompts_of(33, 7, seed=2)] + prompts_of(5)
    expected = greedy(model, asked)
    with served(model, tmp_path, enable_prefix_caching=True, max_num_batched_tokens=256) as engine:
        assert generated(engine, asked) == expected
        again = outputs(engine, asked)
    assert [list(x.outputs[0].token_ids) for x in again] == expected
    assert again[0].num_cached_tokens > 0


def test_a_pure_model_with_the_prefix_cache(tmp_path):
    model = small_model("kda")
    asked = prompts_of(150, 37)
    with served(model, tmp_path, enable_prefix_caching=True, max_num_batched_tokens=256) as engine:
        first, again = outputs(engine, asked), outputs(engine, asked)
    for found in (first, again):
        assert [list(x.outputs[0].token_ids) for x in found] == greedy(model, asked)
    assert again[0].num_cached_tokens > 0


def test_few_pages_aborted_requests_and_tied_embeddings(tmp_path):
    """With pages for fewer requests than are asked, some wait or begin again; aborted ones leave nothing behind."""
    model = small_model("gated_deltanet", tie_word_embeddings=True)
    with served(model, tmp_path, num_gpu_blocks_override=4) as engine:
        add_and_abort(engine, prompts_of(40, 90, seed=3))
        assert generated(engine, PROMPTS * 2) == greedy(model, PROMPTS) * 2


def test_a_hybrid_is_preempted(tmp_path):
    model = small_model("kda", hybrid=True)
    asked = prompts_of(60, 61, 62, 63)
    with served(model, tmp_path, num_gpu_blocks_override=14, max_model_len=128) as engine:
        assert generated(engine, asked, 40) == greedy(model, asked, 40)


def test_a_checkpoint_of_fla_hub(tmp_path):
    """Under a model type and parameter names of its own."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, num_hidden_layers=2, num_heads=4, vocab_size=512)
    model = spread(AutoModelForCausalLM.from_config(AutoConfig.for_model("gla", **sizes)))
    with served(model, tmp_path) as engine:
        assert generated(engine, PROMPTS) == greedy(model, PROMPTS)
