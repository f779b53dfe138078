import pytest
import torch
from model_kinds import KINDS, model_of_kind
from tiny_families import tiny_original
from tiny_models import TYPES, VOCAB, tiny_model, tiny_named, tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

import deltazoo

HEADS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForQuestionAnswering": AutoModelForQuestionAnswering,
}


@pytest.fixture(scope="module")
def tokenizer():
    words = {f"w{i}": i for i in range(VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w1", eos_token="w2", padding_side="left")


@pytest.mark.parametrize(
    ("model_type", "suffix"), [(model_type, list(HEADS)[i % len(HEADS)]) for i, model_type in enumerate(TYPES)]
)
def test_saves_and_loads(model_type, suffix, tmp_path):
    model, ids = tiny_named(model_type, suffix, pad_token_id=1, num_labels=3), tokens(2, 6)
    model.save_pretrained(tmp_path)
    loaded = HEADS[suffix].from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    with torch.no_grad():
        for ours, expected in zip(loaded(ids).to_tuple(), model(ids).to_tuple(), strict=True):
            if isinstance(expected, torch.Tensor):
                assert torch.equal(ours, expected)


@pytest.mark.parametrize("suffix", HEADS)
def test_starts_from_a_language_model(suffix, tmp_path):
    language_model = tiny_model("hybrid")
    language_model.save_pretrained(tmp_path)
    model, info = HEADS[suffix].from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert all("score" in key or "qa_outputs" in key for key in info["missing_keys"])
    assert torch.equal(model.get_input_embeddings().weight, language_model.get_input_embeddings().weight)


def test_sequence_head_reads_the_last_real_token():
    model = tiny_named("gated_deltanet", "ForSequenceClassification", pad_token_id=1, num_labels=3)
    ids = tokens(1, 6).clamp(min=2)
    padded, mask = torch.cat([ids, torch.ones(1, 3, dtype=torch.long)], 1), torch.tensor([[1] * 6 + [0] * 3])
    with torch.no_grad():
        torch.testing.assert_close(model(padded, attention_mask=mask).logits, model(ids).logits)


def test_heads_train():
    ids = tokens(2, 6)
    labels = {
        "ForSequenceClassification": {"labels": torch.tensor([0, 2])},
        "ForTokenClassification": {"labels": ids % 3},
        "ForQuestionAnswering": {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 3])},
    }
    for suffix, targets in labels.items():
        model = tiny_named("kda", suffix, pad_token_id=1, num_labels=3).train()
        model(ids, **targets).loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_classifier_dropout_acts():
    ids = tokens(2, 6)
    for dropout, varies in ((0.0, False), (0.5, True)):
        model = tiny_named("efla", "ForTokenClassification", classifier_dropout=dropout).train()
        with torch.no_grad():
            assert torch.equal(model(ids).logits, model(ids).logits) != varies


@pytest.mark.parametrize("case", ["hybrid"])
def test_text_generation_pipeline(case, tokenizer):
    model = tiny_model(case, pad_token_id=1, eos_token_id=2)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["w5 w6 w7", "w8", "w9 w10 w11 w12 w13"]
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    alone = [generate(prompt, **options)[0]["generated_text"] for prompt in prompts]
    batched = [result[0]["generated_text"] for result in generate(prompts, batch_size=3, **options)]
    assert batched == alone


def test_feature_extraction_pipeline(tokenizer, tmp_path):
    tiny_model("gated_deltanet").save_pretrained(tmp_path)
    extract = pipeline("feature-extraction", model=AutoModel.from_pretrained(tmp_path), tokenizer=tokenizer)
    assert torch.tensor(extract("w5 w6 w7")).shape == (1, 3, 32)


def test_text_classification_pipeline(tokenizer):
    model = tiny_named("delta_net", "ForSequenceClassification", pad_token_id=1, num_labels=3)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
    scores = classify(["w5 w6", "w7 w8 w9"], top_k=None, batch_size=2)
    assert [sum(label["score"] for label in row) for row in scores] == pytest.approx([1.0, 1.0])


PACKED = {
    "cu_seqlens": {"cu_seqlens": torch.tensor([0, 4, 9])},
    "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 4, 9]), "cu_seq_lens_k": torch.tensor([0, 4, 9])},
    "seq_idx": {"seq_idx": torch.tensor([[0] * 4 + [1] * 5])},
    "position_ids": {"position_ids": torch.tensor([[*range(4), *range(5)]])},
}


@pytest.mark.parametrize("said_by", PACKED)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_answer_per_row_takes_one_document_per_row(kind, said_by):
    """The head for sequences scored the last document alone."""
    ids, packed = tokens(1, 9).clamp(min=3), {**PACKED[said_by], "use_cache": False}
    model = model_of_kind(kind, AutoModelForSequenceClassification, num_labels=3)
    with pytest.raises(ValueError, match="ForSequenceClassification has one answer per row, so it takes no rows"):
        model(ids, **packed)
    assert model(ids, use_cache=False).logits.shape == (1, 3)
    if said_by == "cu_seqlens":  # one document may be said to be one
        alone = model(ids, cu_seqlens=torch.tensor([0, 9]), use_cache=False).logits
        torch.testing.assert_close(alone, model(ids, use_cache=False).logits)

    model = model_of_kind(kind, AutoModelForQuestionAnswering)
    answers = model(ids, **{name: x for name, x in packed.items() if name != "use_cache"})
    alone = torch.cat([model(part).start_logits for part in ids.split([4, 5], dim=1)], dim=1)
    torch.testing.assert_close(answers.start_logits, alone)
    place = torch.tensor([1])
    with pytest.raises(ValueError, match="ForQuestionAnswering has one answer per row"):
        model(ids, start_positions=place, end_positions=place, **packed)


def test_the_original_models_take_what_they_took():
    ids, packed = tokens(1, 9).clamp(min=3), PACKED["position_ids"]
    original = tiny_original("llama", HEADS["ForSequenceClassification"], num_labels=3)
    expected = original(ids, **packed).logits
    deltazoo.swap_attention(original, "gated_deltanet", "1:1", keep_teacher=True)
    deltazoo.unswap_attention(original)
    assert torch.equal(original(ids, **packed).logits, expected) and not original._forward_pre_hooks
    model = model_of_kind("accelerated", AutoModelForSequenceClassification)
    deltazoo.restore(model)
    assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs
