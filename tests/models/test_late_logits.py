"""By default training computes its loss without all logits, and the logits when they are read."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import convert_to_fp32
from tiny_models import tiny_model, tokens
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltazoo.models import loss as losses
from deltazoo.models.loss import LateLogits, OutputWithLateLogits

IDS = tokens(2, 9)


def trained(case: str = "gated_deltanet", **runtime: Any) -> Any:
    return tiny_model(case, **runtime).train()


def expected(case: str = "gated_deltanet", **kwargs: Any) -> CausalLMOutputWithPast:
    output = trained(case, fuse_linear_cross_entropy=False)(IDS, **{"labels": IDS, **kwargs})
    assert type(output) is CausalLMOutputWithPast
    return output


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with one entry per computation of late logits."""
    made: list[int] = []
    linear = F.linear

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        made.append(1)
        return linear(x, weight)

    monkeypatch.setattr(losses, "F", SimpleNamespace(linear=counted, pad=F.pad))
    return made


@pytest.mark.parametrize("case", ["gated_deltanet", "tied", "hybrid"])
def test_logits_are_those_of_the_ordinary_path_and_have_its_gradients(case: str) -> None:
    gradients = []
    for model in (trained(case, fuse_linear_cross_entropy=False), trained(case)):
        output = model.double()(IDS, labels=IDS)  # in float32 the two orders of sums differ by its rounding
        (output.loss + output.logits.square().mean()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(trained(case)(IDS, labels=IDS).logits, expected(case).logits, rtol=0, atol=0)


READERS = {
    "attribute": lambda output: output.logits,
    "getattr": lambda output: getattr(output, "logits"),  # noqa: B009
    "key": lambda output: output["logits"],
    "get": lambda output: output.get("logits"),
    "number": lambda output: output[1],
    "slice": lambda output: output[1:][0],
    "to_tuple": lambda output: output.to_tuple()[1],
    "dict": lambda output: dict(output)["logits"],
    "unpacked": lambda output: (lambda **given: given["logits"])(**output),
    "copy": lambda output: copy.copy(output).logits,
    "pickle": lambda output: pickle.loads(pickle.dumps(output)).logits,
    "torch.save": lambda output: saved_and_loaded(output),
}


def saved_and_loaded(output: Any) -> Tensor:
    torch.save(output, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False).logits


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_way_to_read_them(read: Any, products: list[int]) -> None:
    output = trained()(IDS, labels=IDS, use_cache=False)
    loss = output["loss"], output[0], output.loss
    assert list(output) == list(output.keys()) == ["loss", "logits"] and len(output) == 2 and "logits" in output
    assert "not read yet" in repr(output)
    assert not products, "nobody has read them"
    found = read(output)
    assert type(found) is Tensor
    torch.testing.assert_close(found, expected().logits, rtol=0, atol=0)
    assert output.logits is output["logits"] and len(products) == 1, "computed once"
    assert all(x is loss[0] for x in loss)


def test_return_dict_false_gives_the_tuple_of_the_ordinary_path() -> None:
    found = trained()(IDS, labels=IDS, use_cache=False, return_dict=False)
    torch.testing.assert_close(found, expected(use_cache=False).to_tuple())
    assert type(found) is tuple and found[1].requires_grad


def test_a_look_without_gradients_does_not_spoil_a_later_one_with() -> None:
    output = trained()(IDS, labels=IDS)
    with torch.no_grad():
        assert not output.logits.requires_grad
    assert output.logits.requires_grad


def test_logits_that_were_read_are_read_again_after_the_weight_has_changed() -> None:
    model = trained()
    output = model(IDS, labels=IDS)
    with torch.no_grad():
        seen = output.logits
        model.lm_head.weight.add_(1)
        assert output.logits is seen


@pytest.mark.parametrize("kwargs", [{"logits_to_keep": 3, "labels": IDS[:, -3:]}, {"num_items_in_batch": 5}])
def test_arguments_of_the_loss(kwargs: dict[str, Any]) -> None:
    found, wanted = trained()(IDS, **{"labels": IDS, **kwargs}), expected(**kwargs)
    assert isinstance(found, OutputWithLateLogits)
    torch.testing.assert_close((found.loss, found.logits), (wanted.loss, wanted.logits))


def test_those_who_pass_an_output_on_compute_nothing(products: list[int]) -> None:
    output = trained()(IDS, labels=IDS, use_cache=False)
    flat, structure = pytree.tree_flatten(output)  # FSDP2, DDP with a static graph
    again = pytree.tree_unflatten(flat, structure)
    converted = convert_to_fp32(output)  # every forward pass under accelerate's mixed precision
    assert [isinstance(x, Tensor) for x in output.values()] == [True, False]  # DDP that looks for unused parameters
    assert type(again) is type(converted) is OutputWithLateLogits and not products
    for one in (again, converted):
        torch.testing.assert_close(one.logits, expected().logits, rtol=0, atol=0)


def test_under_autocast_they_have_the_dtype_that_they_would_have_had(products: list[int]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        wanted, output = expected().logits, trained()(IDS, labels=IDS)
    assert output.logits.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(output.logits, wanted, rtol=0, atol=0)
    single = convert_to_fp32(output).logits
    assert single.dtype == torch.float32 and torch.equal(single, wanted.float())


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps the precision of the first `Accelerator` or `Trainer` for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_under_accelerate_with_mixed_precision(products: list[int], fresh_accelerate: None) -> None:
    model, accelerator = trained(), Accelerator(mixed_precision="bf16", cpu=True)
    output = accelerator.prepare(model)(input_ids=IDS, labels=IDS)
    assert isinstance(output, OutputWithLateLogits) and not products
    assert output.loss.dtype == output.logits.dtype == torch.float32
    assert output.logits.requires_grad and len(products) == 1


def test_values_and_items_give_something_that_computes_as_a_tensor() -> None:
    output, wanted = trained()(IDS, labels=IDS), expected().logits
    late = dict(output.items())["logits"] if not isinstance(output, dict) else list(output.values())[1]
    assert isinstance(late, LateLogits)
    torch.testing.assert_close(torch.softmax(late, -1), wanted.softmax(-1), rtol=0, atol=0)
    torch.testing.assert_close(F.cross_entropy(late.flatten(0, 1), IDS.flatten()), F.cross_entropy(
        wanted.flatten(0, 1), IDS.flatten()), rtol=0, atol=0)  # fmt: skip
    torch.testing.assert_close(late[:, :-1] / 2 + late[:, 1:], wanted[:, :-1] / 2 + wanted[:, 1:], rtol=0, atol=0)
    assert late.shape == wanted.shape and len(late) == 2 and late.argmax(-1).equal(wanted.argmax(-1))
    assert torch.equal(late.detach().cpu(), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(late.detach())), wanted)


def test_data_parallel_gathers_them() -> None:
    outputs = [trained()(IDS, labels=IDS, use_cache=False), trained()(IDS + 0, labels=IDS, use_cache=False)]
    gathered = type(outputs[0])((k, torch.stack([d[k] for d in outputs])) for k in outputs[0])  # as DataParallel does
    assert torch.equal(gathered.logits[1], expected().logits) and gathered.loss.shape == (2,)


def test_a_weight_that_has_changed_meanwhile_is_refused() -> None:
    for fused in (False, True):
        model = trained()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        read, unread = (model(IDS, labels=IDS) for _ in range(2))
        seen = read.logits
        unread.loss.backward()
        optimizer.step()
        assert read.logits is seen
        with pytest.raises(RuntimeError, match="Read output.logits right after the forward pass, or call model.set_r"):
            unread.logits  # noqa: B018


def test_a_weight_that_has_been_released_is_refused() -> None:
    """FSDP and DeepSpeed release weights after a forward pass."""
    model = trained()
    output = model(IDS, labels=IDS)
    model.lm_head.weight.data = torch.empty(0)
    with pytest.raises(RuntimeError, match="FSDP or DeepSpeed has released it"):
        output.logits  # noqa: B018


class Adapted(nn.Linear):
    """A replacement of the head by another library."""


def with_bias(model: Any) -> None:
    model.lm_head = nn.Linear(32, 61)


def with_another_head(model: Any) -> None:
    model.lm_head = Adapted(32, 61, bias=False)


def with_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)


def with_own_loss(model: Any) -> None:
    model.loss_function = lambda logits, **kwargs: logits.square().mean()


@pytest.mark.parametrize("change", [with_bias, with_another_head, with_hook, with_own_loss])
def test_where_the_loss_needs_all_logits_they_are_computed_without_a_word(change: Any, recwarn: Any) -> None:
    results = []
    for fused in (False, None):
        model = trained(fuse_linear_cross_entropy=fused)
        torch.manual_seed(0)
        change(model)
        output = model(IDS, labels=IDS)
        assert type(output) is CausalLMOutputWithPast
        results.append((output.loss, output.logits))
    torch.testing.assert_close(*results)
    assert not recwarn.list


def test_no_gradients_no_labels_or_evaluation_give_ordinary_outputs() -> None:
    model = trained()
    assert type(model(IDS)) is CausalLMOutputWithPast
    with torch.no_grad():
        assert type(model(IDS, labels=IDS)) is CausalLMOutputWithPast
    assert type(model.eval()(IDS, labels=IDS)) is CausalLMOutputWithPast


def test_function_transforms_and_second_derivatives_work_as_with_all_logits() -> None:
    def loss(model: Any, weight: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"lm_head.weight": weight}, (IDS,), {"labels": IDS}).loss

    results = []
    for fused in (False, None):
        model = trained(fuse_linear_cross_entropy=fused)
        weight = model.lm_head.weight
        (first,) = torch.autograd.grad(model(IDS, labels=IDS).loss, weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight)
        results.append((first.detach(), second, torch.func.grad(lambda w: loss(model, w))(weight.detach())))  # noqa: B023
    torch.testing.assert_close(*results)


def test_lora_trains_without_all_logits_and_on_the_head_with_them() -> None:
    peft = pytest.importorskip("peft")
    for target, late in (("q_proj", True), ("lm_head", False)):
        adapted = peft.get_peft_model(trained(), peft.LoraConfig(target_modules=[target], r=2)).train()
        output = adapted(input_ids=IDS, labels=IDS)
        assert isinstance(output, OutputWithLateLogits) == late
        torch.testing.assert_close(output.logits, expected().logits)
        output.loss.backward()
        assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
