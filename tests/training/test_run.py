"""Whole runs: they learn, resume with the losses of an uninterrupted run, and survive kills and full disks."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch
from several_processes import run_in_processes
from tiny_runs import run_config, write_text_folder
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from deltazoo.training import RunConfig, TrainingDiverged, TrainingResult, load_config, save_config, train
from deltazoo.training.folder import SaveError, best_checkpoint, checkpoints
from deltazoo.training.trainer import Monitor, PackedTrainer, TrainingInterrupted, training_arguments


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_folder(tmp_path_factory.mktemp("text") / "library")


@pytest.fixture(scope="module")
def records(text: Path) -> Path:
    path = text.parent / "records.jsonl"
    lines = (json.dumps({"text": file.read_text()[:4000]}) for file in sorted(text.iterdir()))
    path.write_text("\n".join(lines) + "\n")
    return path


def losses(history: list[dict[str, Any]]) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


@contextmanager
def doing_after(step: int, action: Callable[[], None]) -> Iterator[None]:
    """Inside, every new trainer calls this in the middle of its next step."""

    class Plug(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step - 1:
                action()

    original = PackedTrainer.__init__

    def with_plug(self: PackedTrainer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.add_callback(Plug())

    PackedTrainer.__init__ = with_plug  # type: ignore[method-assign]
    try:
        yield
    finally:
        PackedTrainer.__init__ = original  # type: ignore[method-assign]


def stopping_after(step: int) -> AbstractContextManager[None]:
    """Inside, the process of every new trainer is killed after that step."""

    def die() -> None:
        raise KeyboardInterrupt

    return doing_after(step + 1, die)


def train_until(step: int, config: RunConfig) -> None:
    with stopping_after(step), pytest.raises(KeyboardInterrupt):
        train(config)


def assert_same_weights(one: TrainingResult, other: TrainingResult) -> None:
    weights, others = (AutoModelForCausalLM.from_pretrained(run.model_path).state_dict() for run in (one, other))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """A run of eight steps."""
    return train(run_config(text, tmp_path_factory.mktemp("finished") / "run"))


@pytest.fixture(scope="module")
def killed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a run that ended after six steps, with a checkpoint after four."""
    config = run_config(text, tmp_path_factory.mktemp("killed") / "run")
    train_until(6, config)
    return Path(config.output)


def copied(text: Path, folder: Path, tmp_path: Path) -> RunConfig:
    """The configuration of the copy of such a run."""
    shutil.copytree(folder, tmp_path / "run")
    return run_config(text, tmp_path / "run")


def test_a_run_learns_and_leaves_a_model_for_transformers(text: Path, tmp_path: Path) -> None:
    config = run_config(text, tmp_path / "run", training={"steps": 40, "save_every": 20, "keep_checkpoints": 1})
    result = train(config)
    by_step = losses(result.log_history)
    assert len(by_step) == 40
    assert by_step[40] < by_step[1] - 0.4
    validation = [entry["eval_loss"] for entry in result.log_history if "eval_loss" in entry]
    assert len(validation) == 10
    assert validation[-1] < validation[0]
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-40"]
    assert result.tokens_per_step == 96
    model = AutoModelForCausalLM.from_pretrained(result.model_path)
    tokenizer = AutoTokenizer.from_pretrained(result.model_path)
    assert model.config.model_type == "gated_deltanet"
    assert len(tokenizer) == model.config.vocab_size == 320
    assert sum(parameter.numel() for parameter in model.parameters()) == result.num_parameters
    assert f"{result.corpus.description}; 40 steps of 96 tokens." in (result.model_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("text", {"training": {"rows_per_step": 2, "steps": 12}}),
        ("text", {"training": {"rows_per_step": 4, "steps": 12}}),
        ("records", {"data": {"streaming": True}, "training": {"steps": 10}}),
    ],
    ids=["one_pass", "two_passes", "stream"],
)
def test_a_resumed_run_has_the_losses_of_an_unbroken_one(
    source: str, changes: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(source)
    unbroken = train(run_config(path, tmp_path / "unbroken", **changes))
    config = run_config(path, tmp_path / "broken", **changes)
    train_until(6, config)
    assert [path.name for path in checkpoints(tmp_path / "broken")] == ["checkpoint-4"]
    resumed = train(config, resume=True)
    assert losses(resumed.log_history) == losses(unbroken.log_history)
    assert_same_weights(unbroken, resumed)


def test_a_run_of_an_earlier_revision_goes_on_as_it_began(text: Path, tmp_path: Path) -> None:
    """Of three heads: lightning attention's rates differ between its revisions, and its parameters do not."""
    sizes = {"mixer": "lightning_attention", "hidden_size": 48, "num_heads": 3, "expand_v": 1.0}
    unbroken = train(run_config(text, tmp_path / "unbroken", model={**sizes, "mixer_revision": 1}))
    train_until(6, run_config(text, tmp_path / "broken", model={**sizes, "mixer_revision": 1}))
    for path in (tmp_path / "broken").rglob("*"):  # as before there were revisions
        if path.name in ("config.json", "training.yaml", "config.yaml"):
            kept = [x for x in path.read_text("utf-8").splitlines() if "mixer_revision" not in x]
            path.write_text("\n".join(kept), "utf-8")
    resumed = train(run_config(text, tmp_path / "broken", model=sizes), resume=True)
    assert losses(resumed.log_history) == losses(unbroken.log_history)
    assert AutoModelForCausalLM.from_pretrained(resumed.model_path).config.mixer_revision == 1


def test_a_diagnosed_run_has_the_losses_of_another(text: Path, tmp_path: Path, finished: TrainingResult) -> None:
    """The figures are logged beside the losses, also by a run that goes on, and change nothing."""
    config = run_config(text, tmp_path / "diagnosed", training={"diagnose_every": 2})
    train_until(6, config)
    found = train(config, resume=True)
    assert losses(found.log_history) == losses(finished.log_history)
    growth = {x["step"]: x["diagnose_state_norm_max"] for x in found.log_history if "diagnose_state_norm_max" in x}
    assert [*growth] == [0, 2, 4, 6, 8] and len({*growth.values()}) == 5


def test_a_killed_process_goes_on_to_the_same_weights(records: Path, tmp_path: Path) -> None:
    """At whatever moment: some milliseconds after a checkpoint, also while the next one is written.

    Of a stream, whose checkpoints hold a file more.
    """
    changes: dict[str, Any] = {"data": {"streaming": True}, "training": {"steps": 40, "save_every": 2}}
    config = run_config(records, tmp_path / "run", **changes)
    save_config(config, tmp_path / "config.yaml")
    command = [sys.executable, "-m", "deltazoo", "train", str(tmp_path / "config.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while not checkpoints(tmp_path / "run") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    _, complaints = process.communicate()
    assert process.returncode == -signal.SIGKILL, complaints.decode()
    reached = int(checkpoints(tmp_path / "run")[-1].name.removeprefix("checkpoint-"))
    assert 0 < reached < 40
    resumed, unbroken = train(config, resume=True), train(run_config(records, tmp_path / "unbroken", **changes))
    assert losses(resumed.log_history) == losses(unbroken.log_history)
    assert_same_weights(unbroken, resumed)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["text", "records"])
def test_two_processes_have_the_losses_of_one(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(kind)
    changes: dict[str, Any] = {"data": {"streaming": kind == "records"}}
    alone = train(run_config(source, tmp_path / "one", **changes, training={"rows_per_step": 4}))
    config = run_config(source, tmp_path / "two", **changes, training={"rows_per_step": 4})
    together = run_in_processes(2, tiny_runs.losses, config)[0]
    assert together["loss"] == pytest.approx([*losses(alone.log_history).values()], rel=1e-6)
    assert [path.name for path in checkpoints(tmp_path / "two")] == ["checkpoint-4", "checkpoint-8"]


def test_the_model_with_the_lowest_held_out_loss_is_kept(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between two of the checkpoints that ``save_every`` asks for."""
    found = iter([(5.0, 1), (4.5, 1), (3.0, 1), (6.0, 1)])
    monkeypatch.setattr("deltazoo.training.trainer.score_rows", lambda *_, **__: next(found))
    training = {"steps": 8, "evaluate_every": 2, "save_every": 8, "keep_checkpoints": 1, "log_every": 2}
    result = train(run_config(text, tmp_path / "run", training=training))
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-6", "checkpoint-8"]
    assert best_checkpoint(tmp_path / "run", result.log_history) == tmp_path / "run" / "checkpoint-6"


def test_a_full_disk_while_saving_leaves_the_previous_checkpoint_whole(text: Path, tmp_path: Path) -> None:
    config = run_config(text, tmp_path / "run", training={"steps": 8})
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))

    try:
        with doing_after(7, fill_disk), pytest.raises(SaveError) as caught:
            train(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "could not save" in str(caught.value)
    assert "checkpoint-4 is whole" in str(caught.value)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    assert not list((tmp_path / "run").glob(".unfinished*"))
    assert losses(train(config, resume=True).log_history).keys() == set(range(1, 9))


def test_a_finished_run_is_reported_again_without_training(text: Path, finished: TrainingResult) -> None:
    written = (finished.model_path / "model.safetensors").stat().st_mtime_ns
    assert train(run_config(text, finished.model_path.parent), resume=True) == finished
    assert (finished.model_path / "model.safetensors").stat().st_mtime_ns == written


def test_the_model_of_a_finished_run_is_made_again_from_its_last_checkpoint(
    text: Path, tmp_path: Path, finished: TrainingResult
) -> None:
    config = copied(text, finished.model_path.parent, tmp_path)
    model = tmp_path / "run" / "model"
    weights = (model / "model.safetensors").read_bytes()
    shutil.rmtree(model)
    assert train(config, resume=True) == replace(finished, model_path=model)
    assert (model / "model.safetensors").read_bytes() == weights
    for left in (model, *checkpoints(tmp_path / "run")):
        shutil.rmtree(left)
    with pytest.raises(ValueError, match="no checkpoint to go on from is left"):
        train(config, resume=True)


@pytest.mark.parametrize("content", ['{"log_hist', "[1]", '{"seconds": 1}'])
def test_a_damaged_result_is_named_and_made_again(
    text: Path, tmp_path: Path, finished: TrainingResult, content: str
) -> None:
    config = copied(text, finished.model_path.parent, tmp_path)
    (tmp_path / "run" / "result.json").write_text(content)
    with pytest.raises(ValueError, match=r"run/result.json is damaged: .*Remove it"):
        train(config, resume=True)
    (tmp_path / "run" / "result.json").unlink()
    assert losses(train(config, resume=True).log_history) == losses(finished.log_history)


def test_a_stream_killed_before_its_result_was_written_ends_where_it_was(records: Path, tmp_path: Path) -> None:
    config = run_config(records, tmp_path / "run", data={"streaming": True})
    first = train(config)
    (tmp_path / "run" / "result.json").unlink()
    assert losses(train(config, resume=True).log_history) == losses(first.log_history)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-4", "checkpoint-8"]


@pytest.mark.parametrize("source", ["text", "records"])
def test_more_steps_go_on_beyond_the_end(source: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With a constant learning rate, an extended run equals one with as many steps from the beginning."""
    changes: dict[str, Any] = {"data": {"streaming": source == "records"}}

    def config(folder: str, steps: int, evaluate_every: int = 4) -> RunConfig:
        training = {"steps": steps, "schedule": "constant", "warmup": 0.0, "evaluate_every": evaluate_every}
        return run_config(request.getfixturevalue(source), tmp_path / folder, **changes, training=training)

    at_once = train(config("at_once", 12))
    train(config("extended", 8))
    extended = train(config("extended", 12, evaluate_every=2), resume=True)
    assert losses(extended.log_history) == losses(at_once.log_history)
    validated = [entry["step"] for entry in extended.log_history if "eval_loss" in entry]
    assert validated == [4, 8, 10, 12], "the new interval acts from here on"
    assert_same_weights(at_once, extended)
    assert load_config(tmp_path / "extended" / "config.yaml").training.steps == 12
    assert train(config("extended", 12), resume=True) == extended
    with pytest.raises(ValueError, match="has reached step 12, and training.steps is 8"):
        train(config("extended", 8), resume=True)


def test_a_run_can_end_at_a_checkpoint_that_has_no_score(text: Path, tmp_path: Path) -> None:
    """The run was to be longer, and is scored as one of so many steps."""
    train_until(6, run_config(text, tmp_path / "run", training={"evaluate_every": 8}))
    ended = train(run_config(text, tmp_path / "run", training={"evaluate_every": 8, "steps": 4}), resume=True)
    assert [entry["step"] for entry in ended.log_history if "eval_loss" in entry] == [4]


def test_nothing_to_resume_is_said(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing to resume in .*run: no checkpoint was saved there"):
        train(run_config(text, tmp_path / "run"), resume=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ("data", {"text": "/nowhere"}, "no file or folder"),
        ("tokenizer", {"kind": "pretrained", "vocab_size": None, "path": "./nowhere"}, "nowhere"),
        ("model", {"mixer": "gated_deltanett"}, "did you mean 'gated_deltanet'"),
        ("model", {"hiden_size": 32}, "did you mean 'hidden_size'"),
        ("model", {"num_heads": 0}, "num_heads must be"),
        ("model", {"num_v_heads": 3}, "num_v_heads=3 must be a multiple"),
        ("model", {"hidden_size": "abc"}, "hidden_size"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing_behind(
    text: Path, tmp_path: Path, section: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(run_config(text, tmp_path / "run", **{section: keys}))
    assert not (tmp_path / "run").exists()


def test_rows_longer_than_the_text_are_refused(tmp_path: Path) -> None:
    text = write_text_folder(tmp_path / "text", bytes_per_file=100)
    with pytest.raises(ValueError, match=r"row_length is 20,000, and .*/text, has 1,\d\d\d tokens, of which no row"):
        train(run_config(text, tmp_path / "run", tokenizer={"vocab_size": 259}, training={"row_length": 20_000}))
    assert not checkpoints(tmp_path / "run")


def test_a_rule_that_ranks_cannot_share_leaves_nothing_behind(text: Path, tmp_path: Path) -> None:
    config = run_config(text, tmp_path / "run", model={"mixer": "falcon"}, training={"context_parallel": 2})
    with pytest.raises(NotImplementedError, match="ranks cannot share rows"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_run_that_saved_nothing_leaves_its_folder_free(text: Path, tmp_path: Path) -> None:
    train_until(2, run_config(text, tmp_path / "run"))
    other = run_config(text, tmp_path / "run", tokenizer={"vocab_size": 300}, training={"steps": 1})
    assert len(AutoTokenizer.from_pretrained(train(other).model_path)) == 300


def test_a_configuration_of_somebody_else_is_not_overwritten(text: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("my: own")
    with pytest.raises(ValueError, match="exists already"):
        train(run_config(text, tmp_path))
    assert (tmp_path / "config.yaml").read_text() == "my: own"


@pytest.mark.parametrize("name", ["tokenizer/vocab.txt", "loss.png", "text.json"])
def test_what_a_run_would_replace_is_not_replaced(text: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("my own")
    with pytest.raises(ValueError, match=f"{name.partition('/')[0]} exists already and belongs to no run"):
        train(run_config(text, tmp_path))
    assert file.read_text() == "my own" and not (tmp_path / "config.yaml").exists()


def test_a_run_without_its_configuration_is_not_resumed(text: Path, tmp_path: Path, finished: TrainingResult) -> None:
    config = copied(text, finished.model_path.parent, tmp_path)
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"cannot be resumed: .*config.yaml, the configuration .* is missing"):
        train(config, resume=True)


@pytest.fixture
def signals_heard() -> Iterator[None]:
    """Shells start background jobs with SIGINT ignored, which must stay ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("signals_heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_that_the_run_goes_on_from(
    text: Path, tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"training": {"steps": 9, "log_every": 2}}
    config = run_config(text, tmp_path / "run", **changes)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with doing_after(3, lambda: signal.raise_signal(number)), pytest.raises(TrainingInterrupted) as caught:
        train(config)
    assert caught.value.signal == number
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-3"]
    assert "stopping after this step" in capsys.readouterr().err
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    resumed, unbroken = train(config, resume=True), train(run_config(text, tmp_path / "unbroken", **changes))
    assert_same_weights(unbroken, resumed)
    assert list(losses(resumed.log_history)) == [2, 3, 4, 6, 8, 9], "every trained step is logged"


@pytest.mark.usefixtures("signals_heard")
def test_a_second_signal_ends_the_run_at_once(text: Path, tmp_path: Path) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)

    with doing_after(6, twice), pytest.raises(TrainingInterrupted) as caught:
        train(run_config(text, tmp_path / "run"))
    assert caught.value.signal == signal.SIGTERM
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-4"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_a_damaged_checkpoint_is_named_before_anything_is_trained(
    text: Path, tmp_path: Path, killed: Path, name: str
) -> None:
    config = copied(text, killed, tmp_path)
    file = tmp_path / "run" / "checkpoint-4" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(
        ValueError, match=rf"{name} is damaged or incomplete.*remove the folder .*checkpoint-4 to start"
    ):
        train(config, resume=True)
    file.unlink()
    with pytest.raises(ValueError, match=r"checkpoint-4 holds no "):
        train(config, resume=True)


def test_a_folder_with_a_run_is_not_overwritten(text: Path, finished: TrainingResult) -> None:
    with pytest.raises(ValueError, match=r"already holds a run: go on with --resume"):
        train(run_config(text, finished.model_path.parent))


def test_resuming_with_another_configuration_names_the_difference(text: Path, finished: TrainingResult) -> None:
    config = run_config(text, finished.model_path.parent)
    other = replace(config, training=replace(config.training, learning_rate=1e-4, keep_checkpoints=5))
    with pytest.raises(ValueError, match=r"another configuration: training.learning_rate was 0.003 and is 0.0001$"):
        train(other, resume=True)


def test_resuming_on_changed_text_is_refused(text: Path, tmp_path: Path) -> None:
    copied = write_text_folder(tmp_path / "text")
    config = run_config(copied, tmp_path / "run")
    train(config)
    (copied / "abc.py").write_text("changed")
    with pytest.raises(ValueError, match="no longer the text"):
        train(config, resume=True)


@pytest.mark.parametrize(
    ("step", "added", "message"),
    [
        (6, lambda weight: float("nan"), "the training loss is nan at step 6.*lower training.learning_rate"),
        # In the last step, whose loss is still a number and whose update leaves NaN in the weights.
        (8, lambda weight: (0 * weight).sqrt(), "the norm of the gradients is nan at step 8: lower"),
    ],
    ids=["loss", "gradients"],
)
def test_a_loss_or_gradients_that_are_no_numbers_stop_the_run(
    text: Path, tmp_path: Path, step: int, added: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PackedTrainer.compute_loss

    def broken(self: PackedTrainer, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        first = next(self._model.parameters()).flatten()[0]
        return loss + added(first) if self.state.global_step == step - 1 else loss

    monkeypatch.setattr(PackedTrainer, "compute_loss", broken)
    with pytest.raises(TrainingDiverged, match=message):
        train(run_config(text, tmp_path / "run"))
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    assert not (tmp_path / "run" / "model").exists()


def test_a_held_out_loss_that_is_no_number_stops_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltazoo.training.trainer.score_rows", lambda *_, **__: (float("inf"), 10))
    with pytest.raises(TrainingDiverged, match=r"the held-out loss is inf at step 4"):
        train(run_config(text, tmp_path / "run"))
    assert not checkpoints(tmp_path / "run")


def test_gradients_can_be_recomputed_and_give_the_same_losses(
    text: Path, tmp_path: Path, finished: TrainingResult
) -> None:
    saving = train(run_config(text, tmp_path / "saving", training={"gradient_checkpointing": True}))
    assert losses(saving.log_history) == pytest.approx(losses(finished.log_history), rel=1e-5)


def test_bf16_trains_and_keeps_the_parameters_in_fp32(text: Path, tmp_path: Path) -> None:
    exact = train(run_config(text, tmp_path / "fp32", training={"steps": 20}))
    rounded = train(run_config(text, tmp_path / "bf16", training={"steps": 20, "precision": "bf16"}))
    assert rounded.precision == "bf16"
    model = AutoModelForCausalLM.from_pretrained(rounded.model_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses(rounded.log_history) != losses(exact.log_history)
    # bf16 has 8 bits of mantissa; the losses of twenty steps may drift by a few roundings of a loss near 5.
    assert losses(rounded.log_history)[20] == pytest.approx(losses(exact.log_history)[20], rel=4 * 2**-8)


def test_one_process_never_splits_a_packed_batch_over_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config: RunConfig = run_config(tmp_path, tmp_path / "run")
    arguments = training_arguments(config)
    arguments._n_gpu = 8
    assert arguments.train_batch_size == 16, "eight GPUs would mean DataParallel"
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", property(lambda self: self._n_gpu))
    monkeypatch.setattr("transformers.TrainingArguments.device", property(lambda self: torch.device("cpu")))
    monkeypatch.setattr("transformers.TrainingArguments.__post_init__", lambda self: setattr(self, "_n_gpu", 8))
    assert training_arguments(config).n_gpu == 1


def test_the_clock_leaves_out_pauses() -> None:
    monitor = Monitor(tokens_per_step=10)
    monitor._began = time.perf_counter()
    with monitor.pause():
        time.sleep(0.2)
    assert monitor.seconds < 0.1
