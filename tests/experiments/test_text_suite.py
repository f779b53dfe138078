"""The suite on real text in miniature: corpus, equal parameters, resuming, limit, scores against a plain loop, page."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sysconfig
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from experiments.text.text_page import _judged_though_dropped, _mixer, _recalled, _tie, write_text_page

from deltazoo.cli import main
from experiments.lab_records import Environment
from experiments.text import decoding as text_decoding
from experiments.text import suite as text_suite
from experiments.text.building import SourceFile, build_corpus, installed_sources
from experiments.text.results import Job, TextResults, Trial
from experiments.text.rows import TrainingRows
from experiments.text.scoring import file_bytes, score
from experiments.text.suite import missing_jobs, open_results, run_text_suite
from experiments.text.text_comparison import bits_per_byte, compare, interval
from experiments.text.text_configurations import (
    base_configurations,
    build_model,
    configuration_label,
    hybrid_of,
    model_config,
)
from experiments.text.text_corpus import TextCorpus
from experiments.text.text_recipe import TextRecipe
from experiments.text.training import Training

HERE = Environment(device="a machine", torch="1", triton=None, version="0", commit="abc", code="123")
CONFIGURATIONS = ("delta_net", "softmax")
RECIPE = TextRecipe(
    parameters=48_000,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    softmax_every=2,
    width_multiple=1,
    row_length=64,
    rows_per_step=2,
    steps=4,
    rates=(1e-3, 1e-2),
    rungs=(2,),
    judged_steps=1,
    scored_lengths=(64, 128, 256),
    decode_batches=(1, 2),
    decode_context=16,
    decode_tokens=2,
)
COPY = "import os\n\n\ndef twice(x):\n    return 2 * x\n\n\nprint(twice(os.getpid()))\n"


def sources() -> list[SourceFile]:
    library = Path(sysconfig.get_paths()["stdlib"])
    names = {"kept": "bisect contextlib copy fnmatch functools heapq operator textwrap", "held": "queue sched string"}
    files = [
        SourceFile(package, "1", f"{name}.py", (library / f"{name}.py").read_text(encoding="utf-8"))
        for package, listed in names.items()
        for name in listed.split()
    ]
    files += [SourceFile("kept", "1", f"copy{i}.py", COPY) for i in range(2)]
    files += [SourceFile("held", "1", "copy.py", COPY), SourceFile("held", "1", "short.py", "x = 1\n")]
    return [*files, SourceFile("held", "1", "table.py", "TABLE = [\n" + "1, 2, 3, 4,\n" * 20 + "]\n")]


@pytest.fixture(scope="module")
def corpus() -> TextCorpus:
    return build_corpus(sources(), ["held"], 400)


@pytest.fixture(scope="module")
def finished(corpus: TextCorpus, tmp_path_factory: pytest.TempPathFactory) -> TextResults:
    results = open_results(tmp_path_factory.mktemp("text") / "text.jsonl", RECIPE, corpus)
    assert run(results, corpus) == []
    return results


def run(results: TextResults, corpus: TextCorpus, **options) -> list:
    options = {"only": CONFIGURATIONS, "devices": ["cpu"], "report": lambda line: None, **options}
    return run_text_suite(results, corpus, environment=HERE, **options)


def without(kind: str, results: TextResults) -> list[str]:
    """The lines of a file but for those of a kind."""
    lines = results.path.read_text().splitlines(keepends=True)
    return [line for line in lines if json.loads(line).get("kind") != kind]


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()[1:]]


def test_a_corpus_keeps_no_copies_and_survives_a_file(corpus: TextCorpus, tmp_path: Path) -> None:
    kept, held = corpus.manifest["packages"]
    assert (kept["package"], kept["part"], kept["kept_files"], kept["copies_files"]) == ("kept", "training", 9, 1)
    assert (held["part"], held["kept_files"], held["copies_files"]) == ("held out", 3, 1)
    assert (held["short_files"], held["tables_files"]) == (1, 1)
    assert len(corpus.train) == kept["tokens"] and len(corpus.held_out) == held["tokens"]
    assert int(corpus.token_bytes[corpus.held_out].sum(dtype=np.int64)) == held["kept_bytes"]
    corpus.save(tmp_path / "text.xz")
    assert TextCorpus.load(tmp_path / "text.xz").digest == corpus.digest
    assert build_corpus(sources(), ["held"], 400).digest == corpus.digest
    assert replace(corpus, held_out=corpus.held_out[::-1]).digest != corpus.digest
    (tmp_path / "text.xz").write_bytes((tmp_path / "text.xz").read_bytes()[:-9])
    with pytest.raises(ValueError, match="no corpus of this suite, or damaged"):
        TextCorpus.load(tmp_path / "text.xz")
    with pytest.raises(ValueError, match="not among the sources: nowhere"):
        build_corpus(sources(), ["nowhere"], 400)


def test_sources_are_those_of_the_installed_versions() -> None:
    version = metadata.version("tqdm")
    found = list(installed_sources({"tqdm": version}))
    assert "tqdm/std.py" in [source.path for source in found] and all(source.text is not None for source in found)
    assert [source.path for source in found] == sorted(source.path for source in found)
    with pytest.raises(ValueError, match=f"needs tqdm==0.1, installed is {version}"):
        list(installed_sources({"tqdm": "0.1"}))
    with pytest.raises(ValueError, match="no-such-package==1, which is not installed"):
        list(installed_sources({"no-such-package": "1"}))


def test_new_identifiers_are_spelled_by_their_tokens_and_unknown_to_the_training_part(corpus: TextCorpus) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(corpus.tokenizer)
    training = tokenizer.decode(corpus.train.tolist())
    spelled: dict[int, str] = {}
    for first, completing, number in corpus.new_identifiers.tolist():
        text = tokenizer.decode(corpus.held_out[first : first + completing + 1].tolist())
        text = re.search(r"\w+$", text)[0]  # its first token may begin with a space or a bracket
        name = spelled.setdefault(number, text)
        # A token may end an identifier together with what follows it; that token is left out.
        assert name.startswith(text) or text.startswith(name)
        assert completing >= 2 and text.isidentifier(), text
    assert len(spelled) > 20
    words = set(re.findall(r"\w+", training))
    assert sum(name in words for name in spelled.values()) < 0.1 * len(spelled)  # cut names may occur


def test_every_configuration_has_the_same_number_of_parameters() -> None:
    recipe, sizes = TextRecipe(), {}
    with torch.device("meta"):
        for configuration in [*base_configurations(), hybrid_of("kda"), hybrid_of("gated_deltanet2")]:
            sizes[configuration] = sum(p.numel() for p in build_model(configuration, recipe, 8192).parameters())
    assert all(abs(size - recipe.parameters) <= 0.02 * recipe.parameters for size in sizes.values()), sizes
    assert max(sizes.values()) <= 1.02 * min(sizes.values())
    assert model_config(hybrid_of("kda"), recipe, 8192, 64).layer_types.count("full_attention") == 2
    with pytest.raises(ValueError, match="not within 2%"):
        build_model("kda", replace(RECIPE, parameters=9_000), 400)
    with pytest.raises(ValueError, match="needs a rule beside"):
        build_model(hybrid_of("softmax"), recipe, 8192)


def test_softmax_attention_takes_the_fast_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit inputs and no mask: what torch's flash attention needs, and a fair comparison with it."""
    calls = []
    attend = F.scaled_dot_product_attention

    def watched(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append(([x.dtype for x in inputs], options["attn_mask"], options["is_causal"]))
        return attend(*inputs, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model, tokens = build_model("softmax", RECIPE, 400).train(), torch.randint(400, (2, 65))
    with torch.autocast("cpu", torch.bfloat16):  # as the suite trains on a GPU; on a CPU it does so in float32
        model(input_ids=tokens[:, :-1], labels=tokens[:, :-1], shift_labels=tokens[:, 1:], use_cache=False)
    assert calls == [([torch.bfloat16] * 3, None, True)] * RECIPE.num_layers


def test_rows_visit_an_epoch_once_and_go_on_in_another_order() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    batches = list(TrainingRows(tokens, 10, 9, 0, "cpu").batches(22))
    assert all(torch.equal(row + 1, after) for row, after in batches)
    firsts = [int(row[0]) for rows, _ in batches for row in rows]
    assert len(set(firsts[:99])) == 99 and len({first % 10 for first in firsts[:99]}) == 1
    assert set(firsts[99:198]) != set(firsts[:99])
    again = TrainingRows(tokens, 10, 9, 0, "cpu").batches(22)
    assert all(torch.equal(rows, same) for (rows, _), (same, _) in zip(batches, again, strict=True))
    assert not torch.equal(next(TrainingRows(tokens, 10, 9, 1, "cpu").batches(1))[0], batches[0][0])
    with pytest.raises(ValueError, match="no two rows"):
        TrainingRows(tokens, 600, 1, 0, "cpu")


@pytest.mark.parametrize("configuration", ["gated_deltanet", "softmax"])
def test_scores_are_those_of_a_loop_over_tokens(corpus: TextCorpus, configuration: str) -> None:
    torch.manual_seed(0)
    model = build_model(configuration, RECIPE, corpus.vocab_size).eval()
    with torch.no_grad():  # so that some tokens are certain
        model.lm_head.weight.mul_(8)
    found = score(model, corpus, RECIPE)[128]
    stream = torch.from_numpy(corpus.held_out.astype(np.int64))
    count = (len(stream) - 1) // 256 * 256
    nats, hits = np.zeros(len(stream)), np.zeros(len(stream), dtype=bool)  # of the token at that place
    with torch.no_grad():
        for begin in range(0, count, 128):
            logits = model(input_ids=stream[None, begin : begin + 128], use_cache=False).logits[0].double()
            after = stream[begin + 1 : begin + 129]
            nats[begin + 1 : begin + 129] = -logits.log_softmax(-1)[torch.arange(128), after].numpy()
            hits[begin + 1 : begin + 129] = (logits.argmax(-1) == after).numpy()
    nats[corpus.token_bytes[corpus.held_out] == 0] = 0
    ends = [*corpus.file_starts[1:], len(stream)]
    expected = [nats[a:b].sum() for a, b in zip(corpus.file_starts, ends, strict=True)]
    np.testing.assert_allclose(found.file_nats, expected, rtol=1e-4, atol=1e-3)
    assert math.isclose(sum(found.position_nats), sum(expected), rel_tol=1e-4)
    assert sum(found.position_bytes) == int(file_bytes(corpus, RECIPE).sum())
    assert len(found.position_bytes) == 2

    seen: dict[tuple[int, int], int] = {}
    first = second = completed = 0
    cost = 0.0
    for begin, completing, name in corpus.new_identifiers.tolist():
        if begin + completing > count or begin // 128 != (begin + completing - 1) // 128:
            continue
        times = seen[begin // 128, name] = seen.get((begin // 128, name), 0) + 1
        first, second = first + (times == 1), second + (times == 2)
        if times == 2:
            completed += bool(hits[begin + 1 : begin + completing + 1].all())
            cost += nats[begin + 1 : begin + completing + 1].sum()
    assert found.recall["first"][0] == first > 20
    later = [counts for key, counts in found.recall.items() if key != "first"]
    assert sum(counts[0] for counts in later) == second > 10
    assert sum(counts[1] for counts in later) == completed
    assert math.isclose(sum(x for key, x in found.recall_nats.items() if key != "first"), cost, rel_tol=1e-4)


def test_logits_are_float32_whatever_the_dtype_of_hidden_states(corpus: TextCorpus) -> None:
    model = build_model("linear_attention", RECIPE, corpus.vocab_size, seed=0).eval().bfloat16()
    with torch.no_grad():
        model.lm_head.weight.mul_(64)  # logits that bfloat16 rounds visibly
        found = sum(score(model, corpus, RECIPE, [64])[64].file_nats)
        stream = torch.from_numpy(corpus.held_out.astype(np.int64))
        count = (len(stream) - 1) // 256 * 256
        hidden = model.model(input_ids=stream[:count].view(-1, 64), use_cache=False).last_hidden_state.flatten(0, 1)
        logits = hidden.double() @ model.lm_head.weight.double().T
    targets = stream[1 : count + 1]
    nats = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    expected = float(nats[torch.from_numpy(corpus.token_bytes.astype(np.int64))[targets] > 0].sum())
    assert math.isclose(found, expected, rel_tol=1e-6)


def test_the_time_that_a_training_takes_is_not_guessed_from_the_steps_that_compile(
    corpus: TextCorpus, monkeypatch
) -> None:
    clock = iter([0.0, 800.0, 808.0, 816.0, 824.0])  # at the start, and after every eight steps
    monkeypatch.setattr("experiments.text.training.time.perf_counter", lambda: next(clock))
    left: list[float] = []
    training = Training("linear_attention", replace(RECIPE, steps=24), corpus, rate=1e-3, seed=0, device="cpu")
    training.advance(24, left.append)
    assert left == [0.0, 8.0, 0.0] and training.tokens_per_second == RECIPE.tokens_per_step
    assert (training.steps, training.seconds) == (24, 816.0)


def test_a_training_that_stopped_goes_on_as_if_it_had_not(corpus: TextCorpus) -> None:
    recipe = replace(RECIPE, steps=12)
    whole, parts, other = (
        Training("gated_deltanet", recipe, corpus, rate=rate, seed=0, device="cpu") for rate in (1e-2, 1e-2, 1e-3)
    )
    whole.advance(12)
    for training, steps in ((parts, 3), (other, 5), (parts, 3), (parts, 12), (other, 12)):
        training.advance(steps)
    assert parts.losses == whole.losses and parts.curve() == whole.curve() and len(parts.losses) == 12
    for name, tensor in parts.model.state_dict().items():
        assert torch.equal(tensor, whole.model.state_dict()[name]), name
    assert other.losses[1:] != whole.losses[1:] and other.losses[0] == whole.losses[0]
    assert parts.judged(4) == sum(whole.losses[-4:]) / 4


def test_each_rung_drops_the_rate_with_the_highest_loss() -> None:
    recipe = TextRecipe(rates=(1.0, 2.0, 4.0), rungs=(64, 128))
    losses: dict[tuple[float, int], float] = {(1.0, 64): 3.0, (2.0, 64): 1.0}
    assert recipe.standing(losses) == ([1.0, 2.0, 4.0], 64)
    losses[4.0, 64] = 2.0
    assert recipe.standing(losses) == ([2.0, 4.0], 128)
    losses |= {(2.0, 128): 0.9, (4.0, 128): 0.8}
    assert recipe.standing(losses) == ([4.0], None)
    losses[4.0, 128] = math.inf  # in the whole training
    assert recipe.standing(losses) == ([2.0], None)
    losses[2.0, 128] = math.inf
    assert recipe.standing(losses) == ([], None)
    losses = {(1.0, 64): math.inf, (2.0, 64): 1.0, (4.0, 64): math.inf}
    assert recipe.standing(losses) == ([2.0], None)  # none is left to compare it with
    assert recipe.standing({**losses, (2.0, 128): math.inf}) == ([], None)
    for wrong, said in (
        ({"rungs": (64,)}, "a rung for each but one"),
        ({"rates": (1.0,), "rungs": ()}, "two rates or more"),
        ({"rungs": (128, 64)}, "must rise"),
        ({"rungs": (32, 64)}, "from judged_steps=64"),
        ({"rungs": (64, 2000)}, "below steps=1536"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(recipe, **wrong)


def test_what_a_file_lacks_is_trained_and_nothing_else(
    finished: TextResults, corpus: TextCorpus, tmp_path: Path
) -> None:
    lines = finished.path.read_text().splitlines(keepends=True)
    assert kinds(finished.path) == ["trial", "trial", "configuration"] * 2 + ["costs"] * 2
    path = tmp_path / "text.jsonl"
    path.write_text("".join(lines[:-3]) + lines[-3][:100])  # killed while the last training's line was written
    results = open_results(path, RECIPE, corpus)
    assert missing_jobs(results, CONFIGURATIONS) == [Job("softmax"), Job("delta_net", costs=True)]
    reported: list[str] = []
    assert run(results, corpus, report=reported.append) == []
    done = ["softmax, seed 0", "delta_net, costs", "softmax, costs"]
    assert [line.split(":")[0] for line in reported] == done
    again = open_results(path, RECIPE, corpus)
    for key, configuration in finished.configurations.items():  # the same seed, the same numbers
        assert (
            again.configurations[key].curve == configuration.curve
            and again.configurations[key].scores == configuration.scores
        )
    assert again.configurations["softmax", 0].rate == min(
        RECIPE.rates, key=lambda rate: again.trials["softmax", rate, 2].loss
    )
    with pytest.raises(ValueError, match="results of another recipe"):
        open_results(path, replace(RECIPE, steps=5), corpus)
    with pytest.raises(ValueError, match="results of another corpus"):
        open_results(path, RECIPE, replace(corpus, train=corpus.train[:-1]))


def test_costs_are_measured_apart_from_training(
    finished: TextResults, corpus: TextCorpus, tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(without("costs", finished)))
    jobs = [Job(name, costs=True) for name in CONFIGURATIONS]
    results = open_results(path, RECIPE, corpus)
    assert missing_jobs(results, CONFIGURATIONS) == jobs and missing_jobs(results, ["softmax"]) == jobs[1:]
    assert missing_jobs(results)[0] == Job(base_configurations()[0]) and missing_jobs(results)[-2:] == jobs
    measured = {}

    class Watched(Training):
        def advance(self, steps: int, **options: object) -> None:
            super().advance(steps, **options)
            measured[self.model] = self.steps, self.rate

    def watched(model: torch.nn.Module, *inputs: object) -> dict:
        assert not model.training and model in measured
        return text_decoding.decoding(model, *inputs)

    monkeypatch.setattr(text_suite, "Training", Watched)
    monkeypatch.setattr(text_suite, "decoding", watched)
    assert run(results, corpus) == []
    assert kinds(path)[-3:] == ["configuration", "costs", "costs"] and len(kinds(path)) == len(kinds(finished.path))
    # The first steps at the rate that was found, not the whole training.
    assert list(measured.values()) == [(RECIPE.rungs[0], results.rate_of(name)) for name in CONFIGURATIONS]
    for again in (results, open_results(path, RECIPE, corpus)):
        for name in CONFIGURATIONS:
            costs = again.costs[name]
            assert list(costs.decoding) == ["1", "2"] and costs.tokens_per_second > 0 and costs.peak_bytes is None
            assert all(again.decoding_speeds(batch)[name] > 0 for batch in RECIPE.decode_batches)
            assert costs.training_steps == RECIPE.rungs[0] and costs.environment == HERE and costs.date
        bytes_per_token = 2 * 32 * RECIPE.num_layers * 4  # keys and values in float32
        assert again.costs["softmax"].state_bytes == {"64": 64 * bytes_per_token, "128": 128 * bytes_per_token}
        assert len(set(again.costs["delta_net"].state_bytes.values())) == 1

    before = path.read_bytes()
    assert run(results, corpus, report=pytest.fail) == [] and path.read_bytes() == before
    path.with_name("cut.jsonl").write_text(path.read_text()[:50])  # killed while the first line was written
    assert open_results(path.with_name("cut.jsonl"), RECIPE, corpus).costs == {}
    results.add(replace(results.costs["softmax"], state_bytes={"64": 1}))
    assert open_results(path, RECIPE, corpus).costs["softmax"].state_bytes == {"64": 1}


def test_costs_of_several_cards_stay_apart(finished: TextResults, corpus: TextCorpus, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(finished.path.read_text())
    results = open_results(path, RECIPE, corpus)
    other = replace(HERE, device="another")
    jobs = [Job(name, costs=True) for name in CONFIGURATIONS]
    assert missing_jobs(results, CONFIGURATIONS) == [] and missing_jobs(results, CONFIGURATIONS, "another") == jobs
    results.add(replace(finished.costs["softmax"], environment=other, tokens_per_second=1.0))
    for again in (results, open_results(path, RECIPE, corpus)):
        assert again.card == HERE.device and again.costs == finished.costs
        assert again.costs_on("another")["softmax"].tokens_per_second == 1.0 and again.costs_on("a third") == {}
    options = {"only": CONFIGURATIONS, "devices": ["cpu"], "report": lambda line: None}
    assert run_text_suite(results, corpus, environment=other, **options) == []
    assert kinds(path)[len(kinds(finished.path)) :] == ["costs"] * 2 and len(results.costs_on("another")) == 2
    results.add(replace(finished.costs["softmax"], configuration="kda", environment=other))
    assert results.card == "another" and len(results.costs) == 3


def test_what_does_not_decode_stops_nothing(
    finished: TextResults, corpus: TextCorpus, tmp_path: Path, monkeypatch
) -> None:
    class Failing(text_decoding.Decoder):
        def __init__(self, model: torch.nn.Module, batch: int, **options: object) -> None:
            if batch == 2:
                raise RuntimeError("no room")
            super().__init__(model, batch, **options)

    monkeypatch.setattr(text_decoding, "Decoder", Failing)
    path = tmp_path / "text.jsonl"
    path.write_text("".join(without("costs", finished)))
    results = open_results(path, RECIPE, corpus)
    assert run(results, corpus) == []
    assert all("no room" in result.decoding["2"]["error"] for result in results.costs.values())
    assert results.decoding_speeds(2) == {} and results.decoding_speeds(1).keys() == set(CONFIGURATIONS)
    manifest = {**corpus.manifest, "sha256": corpus.digest}
    page = write_text_page(tmp_path / "text.md", results, manifest, images=tmp_path / "images").read_text()
    assert page.split("## Costs")[1].split("##")[0].count("no room") == 2
    choices = page.split("## Which rule for what")[1].split("##")[0]
    assert "| decoding 1 row |" in choices and "| decoding 2 rows |" not in choices

    def state_bytes(model: torch.nn.Module, tokens: int) -> int:
        if model.config.layer_types[0] == "linear_attention":
            raise RuntimeError("no memory")
        return 1

    monkeypatch.setattr(text_suite, "state_bytes", state_bytes)
    path.write_text("".join(without("costs", finished)))
    results = open_results(path, RECIPE, corpus)
    with pytest.raises(RuntimeError, match="delta_net, costs: RuntimeError: no memory"):
        run(results, corpus)
    assert list(results.costs) == ["softmax"] and kinds(path).count("costs") == 1


def test_a_measurement_that_the_limit_leaves_no_time_for_is_left_out(
    finished: TextResults, corpus: TextCorpus, tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(without("costs", finished)[:-1]))  # softmax is not trained, nothing is measured
    results = open_results(path, RECIPE, corpus)
    monkeypatch.setattr(text_suite, "_DECODING_SECONDS", 1e6)
    reported: list[str] = []
    missing = run(results, corpus, limit=1e5, report=reported.append)
    assert missing == [Job(name, costs=True) for name in CONFIGURATIONS] and not results.costs
    assert [line for line in reported if "no time" in line] == [f"{job.name}: no time left for it" for job in missing]
    assert kinds(path)[-1] == "configuration" and results.configurations.keys() == finished.configurations.keys()


@pytest.mark.slow
def test_several_devices_share_the_work_and_the_file(
    finished: TextResults, corpus: TextCorpus, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    results = open_results(tmp_path / "text.jsonl", RECIPE, corpus)
    assert run(results, corpus, devices=["cpu", "cpu"]) == []
    for key, configuration in finished.configurations.items():
        assert results.configurations[key].curve == configuration.curve
    assert open_results(results.path, RECIPE, corpus).trainings.keys() == finished.trainings.keys()
    assert "softmax, seed 0: learning rate 0.01, loss" in capfd.readouterr().out
    assert kinds(results.path).count("costs") == 2 and results.costs.keys() == set(CONFIGURATIONS)

    results.path.write_text("".join(without("costs", results)))
    again = open_results(results.path, RECIPE, corpus)
    assert run(again, corpus, devices=["cpu", "cpu"]) == []
    assert sorted(kinds(again.path)) == sorted(kinds(finished.path)) and kinds(again.path)[-2:] == ["costs"] * 2
    assert again.costs.keys() == set(CONFIGURATIONS)
    before = again.path.read_bytes()
    assert run(again, corpus, devices=["cpu", "cpu"]) == [] and again.path.read_bytes() == before


@pytest.mark.slow
def test_what_fails_on_one_of_several_devices_is_raised_at_the_end(corpus: TextCorpus, tmp_path: Path) -> None:
    recipe = replace(RECIPE, rates=(1e30, 1e31), rungs=(8,), steps=12)
    results = open_results(tmp_path / "text.jsonl", recipe, corpus)
    options = {"environment": HERE, "report": lambda line: None}
    with pytest.raises(RuntimeError) as raised:
        run_text_suite(results, corpus, devices=["cpu", "cpu"], only=CONFIGURATIONS, **options)
    assert all(f"{name}, seed 0: ArithmeticError" in str(raised.value) for name in CONFIGURATIONS)
    assert not results.trainings and len(results.trials) == 4


def test_a_training_that_the_limit_cuts_leaves_its_rungs(corpus: TextCorpus, tmp_path: Path, monkeypatch) -> None:
    results = open_results(tmp_path / "text.jsonl", RECIPE, corpus)
    reported: list[str] = []
    clock = iter(range(10**6))
    monkeypatch.setattr(text_suite.time, "monotonic", lambda: next(clock))  # a second at every look
    missing = run(results, corpus, limit=14, report=reported.append)
    assert [job.configuration for job in missing] == list(CONFIGURATIONS)
    assert any("no time left" in line for line in reported)
    # The end of a training is expected to take a minute.
    assert 0 < len(results.trials) <= 4 and not results.trainings
    assert len(results.path.read_text().splitlines()) == len(results.trials) + 1
    again = open_results(results.path, RECIPE, corpus)
    assert run(again, corpus) == [] and len(again.trials) == 4 and len(again.configurations) == 2
    assert len(again.costs) == 2


def test_a_rate_at_which_the_loss_is_not_finite_is_not_taken(corpus: TextCorpus, tmp_path: Path) -> None:
    recipe = replace(RECIPE, rates=(1e30, 1e-3), rungs=(8,), steps=12)
    results = open_results(tmp_path / "text.jsonl", recipe, corpus)
    options = {"devices": ["cpu"], "environment": HERE, "only": ["linear_attention"], "report": lambda line: None}
    assert run_text_suite(results, corpus, **options) == []
    again = open_results(results.path, recipe, corpus)
    assert again.trials["linear_attention", 1e30, 8].loss == math.inf
    assert again.configurations["linear_attention", 0].rate == 1e-3
    recipe = replace(recipe, rates=(1e30, 1e31))
    results = open_results(tmp_path / "hopeless.jsonl", recipe, corpus)
    with pytest.raises(RuntimeError, match="finite at none of the learning rates"):
        run_text_suite(results, corpus, **options)
    assert run_text_suite(results, corpus, **options) == [] and not results.trainings


def test_a_rate_that_fails_after_the_last_rung_gives_way_to_the_next_best(
    corpus: TextCorpus, tmp_path: Path, monkeypatch
) -> None:
    class Failing(Training):
        @property
        def is_finite(self) -> bool:
            return super().is_finite and not (self.rate == 1e-2 and self.steps == RECIPE.steps)

    monkeypatch.setattr(text_suite, "Training", Failing)
    results = open_results(tmp_path / "text.jsonl", RECIPE, corpus)
    for rate, loss in ((1e-3, 3.0), (1e-2, 2.0)):
        results.add(trial("delta_net", rate, loss))
    assert run(results, corpus, only=["delta_net"]) == []
    again = open_results(results.path, RECIPE, corpus)
    assert again.configurations["delta_net", 0].rate == 1e-3 and again.trials["delta_net", 1e-2, 2].loss == math.inf


def test_a_rate_that_was_trained_to_the_end_before_it_was_found_is_not_trained_again(
    finished: TextResults, corpus: TextCorpus, tmp_path: Path
) -> None:
    results = open_results(tmp_path / "text.jsonl", RECIPE, corpus)
    for rate in RECIPE.rates:  # both: whichever is found, it is there
        results.add(replace(finished.configurations["delta_net", 0], rate=rate))
    assert not results.configurations and missing_jobs(results, ["delta_net"]) == [Job("delta_net")]
    assert run(results, corpus, only=["delta_net"]) == []
    assert len(results.trials) == 2 and len(results.trainings) == 2
    assert results.configurations["delta_net", 0].rate == finished.configurations["delta_net", 0].rate


def trial(configuration: str, rate: float, loss: float) -> Trial:
    return Trial(
        configuration=configuration,
        rate=rate,
        rung=RECIPE.rungs[0],
        loss=loss,
        seconds=1.0,
        tokens_per_second=1e9,
        environment=HERE,
        date="",
    )


def test_a_loss_that_is_not_finite_is_kept_as_json(corpus: TextCorpus, tmp_path: Path) -> None:
    results = open_results(tmp_path / "text.jsonl", RECIPE, corpus)
    results.add(trial("kda", 0.5, math.inf))
    for line in results.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    again = open_results(results.path, RECIPE, corpus)
    assert again.losses("kda") == {(0.5, RECIPE.rungs[0]): math.inf}


def test_a_model_of_nan_has_no_score(corpus: TextCorpus) -> None:
    model = build_model("gated_deltanet", RECIPE, corpus.vocab_size)
    model.lm_head.weight.data[7] = math.nan
    with pytest.raises(ArithmeticError, match="computes NaN or infinity on the held-out part, in rows of 64 tokens"):
        score(model, corpus, RECIPE, [64])


@pytest.mark.gpu
@pytest.mark.parametrize("configuration", ["gated_deltanet", "gated_deltanet2", "softmax", hybrid_of("kda")])
def test_a_gpu_trains_scores_and_decodes(corpus: TextCorpus, tmp_path: Path, configuration: str) -> None:
    recipe = replace(RECIPE, parameters=200_000, hidden_size=64, width_multiple=8)
    results = open_results(tmp_path / "text.jsonl", recipe, corpus)
    assert run_text_suite(results, corpus, devices=["cuda:0"], environment=HERE, only=[configuration]) == []
    found = results.configurations[configuration, 0]
    costs = results.costs[configuration]
    assert costs.peak_bytes is not None and costs.peak_bytes > 16 * found.parameters  # weights, gradients, two moments
    assert 0 < bits_per_byte(found, results) < 10
    assert all(results.decoding_speeds(batch)[configuration] > 0 for batch in recipe.decode_batches)
    assert costs.state_bytes["128"] > 0


def test_hybrids_and_second_seeds_follow_from_what_is_best(corpus: TextCorpus, finished: TextResults) -> None:
    results = open_results(Path("unwritten.jsonl"), RECIPE, corpus)
    example = finished.configurations["delta_net", 0]
    configurations = base_configurations()

    def add(configuration: str, scores: dict, seed: int = 0) -> None:
        for rate in RECIPE.rates:
            results.trials[configuration, rate, RECIPE.rungs[0]] = trial(configuration, rate, rate)
        added = replace(example, configuration=configuration, seed=seed, rate=RECIPE.rates[0], scores=scores)
        results.trainings[configuration, seed, RECIPE.rates[0]] = added
        results.measured[HERE.device, configuration] = finished.costs["delta_net"]

    def scaled(factor: float) -> dict:
        nats = [x * factor for x in example.scores["64"]["file_nats"]]
        return {**example.scores, "64": {**example.scores["64"], "file_nats": nats}}

    for place, configuration in enumerate(configurations):
        add(configuration, scaled(1 + place / 100))
    jobs = missing_jobs(results)
    assert [job.configuration for job in jobs] == [hybrid_of(x) for x in configurations[:5] if x != "softmax"]
    for job in jobs:
        add(job.configuration, scaled(1.2))
    assert missing_jobs(results) == [Job(configuration, 1) for configuration in configurations[:5]]
    del results.measured[HERE.device, hybrid_of("kda")]
    assert missing_jobs(results)[4:] == [Job(configurations[4], 1), Job(hybrid_of("kda"), costs=True)]

    best, next_best = (interval(configuration, results) for configuration in configurations[:2])
    assert best.low < best.value < best.high and best.value == bits_per_byte(
        results.configurations[configurations[0], 0], results
    )
    ahead = compare(configurations[1], configurations[0], results)
    assert ahead.interval.low > 0 and not ahead.called  # the seeds' spread is not known
    for seed_factor, called in ((1.001, True), (1.1, False)):
        add(configurations[0], scaled(seed_factor), seed=1)
        assert compare(configurations[10], configurations[0], results).called is called
    with pytest.raises(ValueError, match="unknown configuration 'kdaa'"):
        missing_jobs(results, ["kdaa"])


def test_the_page_shows_what_there_is_and_says_what_is_missing(
    finished: TextResults, corpus: TextCorpus, tmp_path: Path
) -> None:
    manifest = {**corpus.manifest, "sha256": corpus.digest}
    images = tmp_path / "images"
    empty = write_text_page(tmp_path / "empty.md", None, manifest, images=images).read_text()
    assert "No model is trained with a learning rate" in empty and "## Findings" not in empty and not images.exists()

    page = write_text_page(tmp_path / "text.md", TextResults.read(finished.path), manifest, images=images).read_text()
    for configuration in CONFIGURATIONS:
        assert str(interval(configuration, finished)) in page
    assert "no difference between models is called" in page
    choices = page.split("## Which rule for what")[1].split("##")[0]
    shares = {name: _recalled(finished.configurations[name, 0], 64) for name in CONFIGURATIONS}
    most = max(shares.values(), key=lambda found: found[0] / found[1])
    assert f"{most[0] / most[1]:.1%}" in choices.split("recall within the row")[1]
    fastest = max(finished.costs.values(), key=lambda result: result.tokens_per_second)
    name, speed = fastest.configuration, f"{fastest.tokens_per_second:,.0f}"
    assert re.search(rf"\| training \| {re.escape(configuration_label(name))} \| [^|]* \| {speed}", choices)
    asked = next(iter(shares.values()))[1]
    assert f"For recall {asked:,} second occurrences" in " ".join(choices.split())
    assert "| DeltaNet | `delta_net` |" in page
    assert f"{len(base_configurations()) - 2} are not trained" in page and "KDA" in page.split("## What is missing")[1]
    pictures = re.findall(r"!\[.*\]\((.*)\)", page)
    assert len(pictures) == 5 and all((tmp_path / name).stat().st_size > 5000 for name in pictures)
    assert page == write_text_page(tmp_path / "text.md", finished, manifest, images=images).read_text()
    costs = page.split("## Costs")[1].split("##")[0]
    for name in CONFIGURATIONS:
        result = finished.costs[name]
        speeds = f"{result.tokens_per_second:,.0f} | - | {result.decoding_figure(1)} | {result.decoding_figure(2)}"
        speeds += f" | {result.state_bytes['64'] / 2**20:.1f}"
        assert re.search(rf"\| {re.escape(configuration_label(name))} .*\| {re.escape(speeds)} \|", costs)
    assert "Not measured" not in page and "| decoding 2 rows |" in choices

    unmeasured = tmp_path / "unmeasured.jsonl"
    unmeasured.write_text("".join(without("costs", finished)))
    results = TextResults.read(unmeasured)
    page = write_text_page(tmp_path / "text.md", results, manifest, images=images).read_text()
    assert "## Costs" not in page and "text_cost.png" not in page
    choices = page.split("## Which rule for what")[1].split("##")[0]
    assert "| recall" in choices and "| training" not in choices and "| decoding" not in choices
    assert "Not measured: the costs of DeltaNet; softmax attention." in page
    results.add(replace(finished.costs["softmax"], training_steps=RECIPE.steps))
    page = write_text_page(tmp_path / "text.md", results, manifest, images=images).read_text()
    assert "Not measured: the costs of DeltaNet." in page
    speed = finished.costs["softmax"].decoding_figure(1)
    best = f"| {configuration_label('softmax')} | any; all layers `full_attention` | {speed} tokens/s | - |"
    assert f"| decoding 1 row {best}" in page
    costs = page.split("## Costs")[1].split("##")[0]
    assert costs.count("| - | - | - | - | - | - |") == 1 and "of all steps, not of the first 2." in costs
    assert f"| softmax attention | {finished.costs['softmax'].tokens_per_second:,.0f} \N{DAGGER} |" in costs
    with pytest.raises(ValueError, match="another text than the manifest"):
        write_text_page(tmp_path / "text.md", finished, {**manifest, "sha256": "0"}, images=images)
    assert "of commit" not in costs
    other = finished.costs["delta_net"]
    results.add(replace(other, environment=replace(other.environment, commit="0123456789")))
    page = write_text_page(tmp_path / "text.md", results, manifest, images=images).read_text()
    assert "DeltaNet (`0123456`): kernels may differ from commit to commit." in " ".join(page.split())
    assert page.count("| DeltaNet \N{DOUBLE DAGGER} |") == 1


def test_shares_within_two_standard_errors_tie() -> None:
    assert _tie((50, 100), (50, 100)) and _tie((50, 100), (60, 100)) and not _tie((500, 1000), (560, 1000))


def test_the_command_line_trains_within_a_limit(corpus: TextCorpus, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("experiments.text.text_recipe.TextRecipe", lambda: RECIPE)
    corpus.save(tmp_path / "text.xz")
    command = ["lab", "--suite", "text", "--corpus", str(tmp_path / "text.xz"), "--out", str(tmp_path / "text.jsonl")]
    without_corpus = [*command[:3], *command[5:], "--list"]

    def status(arguments: list[str]) -> object:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code

    assert status([*command, "--only", "delta_net", "--list"]) == 0
    assert "delta_net, seed 0" in capsys.readouterr().out
    assert status(without_corpus) == 0
    assert "kda, seed 0" in capsys.readouterr().out.splitlines()
    assert status([*command, "--only", "delta_net", "--limit", "600"]) == 0
    printed = capsys.readouterr().out
    assert "bits per byte" in printed and "delta_net, costs" in printed and "0 jobs are missing" in printed
    assert set(open_results(tmp_path / "text.jsonl", RECIPE, corpus).configurations) == {("delta_net", 0)}
    assert status(without_corpus) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "kda, seed 0" in listed and "delta_net, seed 0" not in listed
    assert (
        status([*command, "--steps", "3", "--no-measure"]) == 1
        and "has no --steps, --measure" in capsys.readouterr().err
    )
    assert status(["lab", "--corpus", "x"]) == 1 and "belongs to the suite" in capsys.readouterr().err
    assert status([*command[:-1], str(tmp_path)]) == 1
    assert "is a folder" in " ".join(capsys.readouterr().err.replace("│", " ").split())  # lines are as long as may be


def test_the_committed_pages_are_what_the_script_renders(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("render_text", root / "scripts" / "render_text.py")
    assert spec is not None and spec.loader is not None
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    pages = render.main(tmp_path)
    assert [page.name for page in pages] == ["text.md", "text_conversions.md"]
    assert all(page.read_text() == (render.DOCS / page.name).read_text() for page in pages)


def test_the_name_to_give_as_mixer() -> None:
    assert _mixer("hybrid:comba") == "`comba`, hybrid" and _mixer("kda+neg") == "`kda`, `allow_neg_eigval: true`"


def test_losses_that_successive_halving_would_not_have_are_found() -> None:
    results = TextResults.read(Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "text.jsonl")
    early = _judged_though_dropped(results, results.recipe)
    assert early.keys() == {"gated_deltanet", "kda", "delta_net"} and set(map(tuple, early.values())) == {(0.001,)}
    assert {results.trials[name, 0.001, 512].environment.commit for name in early} == {"5ee44a0"}
