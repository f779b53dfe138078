import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm-test makes an environment with it")

from serving.vllm.vllm_runs import generated, greedy, prompts_of, served, small_model

import deltazoo

PROMPTS = prompts_of(37, 100, 5, 1)  # longer than a step takes, so cut, beside others that decode already


@pytest.mark.parametrize("rule", deltazoo.list_rules())
def test_every_rule_gives_the_tokens_of_transformers(rule, tmp_path):
    model = small_model(rule)
    with served(model, tmp_path) as engine:
        assert generated(engine, PROMPTS) == greedy(model, PROMPTS)
