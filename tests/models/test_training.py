import copy

import pytest
import torch
from tiny_models import CASES, FEW, tiny_model, tokens
from transformers import Trainer, TrainingArguments

from deltazoo.layers import parameters_without_decay


def gradients(model, ids, **kwargs):
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False, **kwargs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(ours, expected, tolerance=1e-5):
    for name, gradient in expected.items():
        assert ours[name] is not None, name
        torch.testing.assert_close(
            ours[name], gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max()), msg=name
        )


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_gets_a_finite_gradient(case):
    model = tiny_model(case).train()
    loss, grads = gradients(model, tokens(2, 20))
    assert loss.isfinite()
    for name, gradient in grads.items():
        assert gradient is not None and gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("case", FEW)
def test_summed_losses_of_micro_batches_equal_the_batch(case):
    model, ids = tiny_model(case).train(), tokens(4, 9)
    loss, expected = gradients(model, ids)
    expected = {name: g.clone() for name, g in expected.items()}
    model.zero_grad()
    parts = [model(part, labels=part, num_items_in_batch=4 * 8).loss for part in ids.split(1)]
    sum(parts).backward()
    torch.testing.assert_close(sum(parts).detach(), loss)
    assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, expected)


def test_ignored_labels_do_not_count():
    model, ids = tiny_model("gated_deltanet"), tokens(1, 9)
    labels = ids.clone()
    labels[:, :5] = -100
    logits = model(ids).logits
    expected = torch.nn.functional.cross_entropy(logits[0, 4:-1], ids[0, 5:])
    torch.testing.assert_close(model(ids, labels=labels).loss, expected)


@pytest.mark.slow
def test_compiled_in_one_graph():
    """Packed documents through both kinds of layers, the backward pass included; the rest is in test_compile."""
    model, ids, boundaries = tiny_model("hybrid").train(), tokens(1, 20), torch.tensor([0, 3, 8, 20])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss, expected = gradients(model, ids, cu_seqlens=boundaries)
    expected = {name: g.clone() for name, g in expected.items()}
    compiled_loss, ours = gradients(compiled, ids, cu_seqlens=boundaries)
    torch.testing.assert_close(compiled_loss, loss)
    assert_same_gradients({name.removeprefix("_orig_mod."): g for name, g in ours.items()}, expected)
    torch._dynamo.reset()


def test_output_hidden_states_and_attentions():
    model, ids = tiny_model("hybrid"), tokens(2, 6)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(ids, output_hidden_states=True, output_attentions=True)
    assert [h.shape for h in output.hidden_states] == [(2, 6, 32)] * 3
    torch.testing.assert_close(output.hidden_states[0], model.get_input_embeddings()(ids))
    torch.testing.assert_close(model.lm_head(output.hidden_states[-1]), output.logits)
    (weights,) = output.attentions
    assert weights.shape == (2, 4, 6, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))


def test_attention_implementations_agree():
    model, ids = tiny_model("hybrid").double(), tokens(1, 12)
    for kwargs in ({}, {"cu_seqlens": torch.tensor([0, 5, 12])}):
        with torch.no_grad():
            model.set_attn_implementation("sdpa")
            expected = model(ids, **kwargs).logits
            model.set_attn_implementation("eager")
            torch.testing.assert_close(model(ids, **kwargs).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_implementations_agree_on_padded_rows(dtype):
    """A padding token on the left sees no token; the mask of float64 is -inf in float32."""
    model, ids = tiny_model("softmax_only").to(dtype), tokens(1, 12)
    mask = torch.tensor([[0] * 4 + [1] * 8])
    with torch.no_grad():
        expected = model(ids[:, 4:]).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, 4:], expected, rtol=1e-4, atol=1e-4)


def test_unknown_attention_implementation_is_refused():
    with pytest.raises((ValueError, ImportError), match="attn_implementation|attention"):
        tiny_model("hybrid").set_attn_implementation("flashy")


def test_context_parallelism_is_refused():
    assert not getattr(tiny_model("softmax_only"), "supports_context_parallel", False)


class TestTrainer:
    def arguments(self, path, **overrides):
        options = {
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        return TrainingArguments(output_dir=str(path), **{**options, **overrides})

    def losses(self, model, arguments):
        data = [{"input_ids": row, "labels": row} for row in tokens(16, 12)]
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def undecayed(self, model, path):
        """Names of the parameters that transformers' own Trainer does not decay."""
        trainer = Trainer(model=model, args=self.arguments(path, weight_decay=0.1))
        _, group = trainer.create_optimizer().param_groups
        assert group["weight_decay"] == 0
        spared = {id(parameter) for parameter in group["params"]}
        return {name for name, parameter in model.named_parameters() if id(parameter) in spared}

    @pytest.mark.parametrize("case", CASES)
    def test_weight_decay_spares_gates_norms_and_biases(self, case, tmp_path):
        model = tiny_model(case)
        spared = parameters_without_decay(model)
        assert self.undecayed(model, tmp_path) == spared
        gates = {name for name, _ in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
        assert gates <= spared and not any("proj.weight" in name for name in spared)

    def test_weight_decay_spares_the_gates_of_copied_cast_and_loaded_models(self, tmp_path):
        model = tiny_model("hybrid_kda")
        spared = parameters_without_decay(model)
        model.save_pretrained(tmp_path)
        for other in (
            copy.deepcopy(model),
            model.to(torch.bfloat16),
            type(model).from_pretrained(tmp_path),
            type(model).from_pretrained(tmp_path, dtype=torch.bfloat16),
        ):
            assert self.undecayed(other, tmp_path) == spared

    def test_weight_decay_moves_no_gate(self, tmp_path):
        after = []
        for decay in (0.0, 0.5):
            model = tiny_model("gated_deltanet")
            self.losses(model, self.arguments(tmp_path, max_steps=1, weight_decay=decay))
            after.append(model.state_dict())
        plain, decayed = after
        for name, matrix in plain.items():
            assert torch.equal(matrix, decayed[name]) == (matrix.ndim == 1), name

    @pytest.mark.parametrize("case", ["hybrid"])
    def test_accumulation_equals_the_larger_batch(self, case, tmp_path):
        whole = self.losses(tiny_model(case), self.arguments(tmp_path, per_device_train_batch_size=4))
        parts = self.losses(
            tiny_model(case),
            self.arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2),
        )
        assert parts == pytest.approx(whole, rel=1e-3)

    @pytest.mark.parametrize("case", ["gated_deltanet"])
    def test_gradient_checkpointing_changes_no_loss(self, case, tmp_path):
        plain = self.losses(tiny_model(case), self.arguments(tmp_path))
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        assert self.losses(tiny_model(case), self.arguments(tmp_path, **options)) == plain

    @pytest.mark.parametrize("case", ["gated_deltanet"])
    def test_bfloat16_starts_from_the_same_loss(self, case, tmp_path):
        plain = self.losses(tiny_model(case), self.arguments(tmp_path))
        mixed = self.losses(tiny_model(case), self.arguments(tmp_path, bf16=True))
        assert mixed[0] == pytest.approx(plain[0], rel=torch.finfo(torch.bfloat16).eps)
        assert all(torch.tensor(mixed).isfinite())

    def test_gate_parameters_stay_float32_in_bfloat16(self, tmp_path):
        model = tiny_model("gated_deltanet").to(torch.bfloat16)
        self.losses(model, self.arguments(tmp_path))
        for layer in model.model.layers:
            assert layer.attn.A_log.dtype == layer.attn.dt_bias.dtype == torch.float32
