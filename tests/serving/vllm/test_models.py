import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("vllm", reason="make vllm-test makes vLLM's environment, 3.4 GiB in minutes: not in CI")

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


def test_softmax_heads_with_norms_biases_and_a_scaled_rotary_embedding(tmp_path):
    rope = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
    model = small_model("gated_deltanet", hybrid=True, softmax_qk_norm=True, qkv_bias=True, rope_parameters=rope)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".3.attn." in name and parameter.ndim == 1:
            parameter.data.uniform_(0.5, 2)
    with served(model, tmp_path) as engine:
        assert generated(engine, PROMPTS) == greedy(model, PROMPTS)


def test_a_pure_model_with_the_prefix_cache(tmp_path):
    model = small_model("kda")
    asked = prompts_of(150, 37)
    with served(model, tmp_path, enable_prefix_caching=True, max_num_batched_tokens=256) as engine:
        first, again = outputs(engine, asked), outputs(engine, asked)
    for found in (first, again):
        assert [list(x.outputs[0].token_ids) for x in found] == greedy(model, asked)
    assert again[0].num_cached_tokens > 0


def test_few_pages_aborted_requests_tied_embeddings_and_prompts_of_any_length(tmp_path):
    """With pages for fewer requests than are asked, some wait or begin again; aborted ones leave nothing behind."""
    model = small_model("gated_deltanet", tie_word_embeddings=True, max_position_embeddings=64)
    with served(model, tmp_path, num_gpu_blocks_override=4) as engine:
        add_and_abort(engine, prompts_of(40, 90, seed=3))
        assert generated(engine, PROMPTS * 2) == greedy(model, PROMPTS) * 2


def test_a_hybrid_is_preempted(tmp_path):
    """Four requests have a page each in three linear layers, and in the softmax layer two from token 129 on."""
    model = small_model("kda", hybrid=True)
    asked = prompts_of(100, 101, 102, 103)
    options = dict(num_gpu_blocks_override=18, disable_log_stats=False)
    with served(model, tmp_path, **options) as engine:
        assert generated(engine, asked, 40) == greedy(model, asked, 40)
        (preempted,) = [x.value for x in engine.get_metrics() if x.name == "vllm:num_preemptions"]
    assert preempted > 0


def test_a_checkpoint_of_fla_hub(tmp_path):
    """Under a model type and parameter names of its own."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, num_hidden_layers=2, num_heads=4, vocab_size=512)
    model = spread(AutoModelForCausalLM.from_config(AutoConfig.for_model("gla", **sizes)))
    with served(model, tmp_path) as engine:
        assert generated(engine, PROMPTS) == greedy(model, PROMPTS)
