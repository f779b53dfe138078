"""Conversions of the text suite's softmax model in miniature: the same model as a Llama, resuming, limit, page."""

from __future__ import annotations

import json
import math
import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.text_conversions.conversion_page import write_conversion_page

from deltazoo.cli import main
from deltazoo.swap import swapped_layers
from deltazoo.training.conversion_config import AlignmentConfig, DistillationConfig, FineTuningConfig
from experiments.lab_records import Environment
from experiments.text.building import SourceFile, build_corpus
from experiments.text.results import TextResults
from experiments.text.text_configurations import build_model
from experiments.text.text_corpus import TextCorpus
from experiments.text.text_recipe import TextRecipe
from experiments.text_conversions import conversion_suite
from experiments.text_conversions.conversion_recipe import CONTROL, Conversion, ConversionRecipe
from experiments.text_conversions.conversion_results import ConversionResults
from experiments.text_conversions.conversion_suite import (
    DECODING,
    ConversionJob,
    missing_conversion_jobs,
    open_conversions,
    run_conversions,
)
from experiments.text_conversions.stages import convert_copy
from experiments.text_conversions.teacher import as_llama, load_teacher

HERE = Environment(device="a machine", torch="1", triton=None, version="0", commit="abc", code="123")
SMALL = {"row_length": 64, "schedule": "linear", "weight_decay": 0.0}
RECIPE = ConversionRecipe(
    text=TextRecipe(
        parameters=48_000,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        softmax_every=2,
        width_multiple=1,
        row_length=64,
        rows_per_step=2,
        steps=6,
        rates=(1e-3, 1e-2),
        rungs=(2,),
        judged_steps=2,
        scored_lengths=(64, 128),
        decode_context=16,
        decode_tokens=2,
    ),
    rules=("gated_deltanet",),
    layers=("1:1", "all"),
    align=AlignmentConfig(steps=6, rows_per_batch=1, learning_rate=1e-2, evaluate_every=4, **SMALL),
    distill=DistillationConfig(
        steps=2, rows_per_batch=2, learning_rate=1e-3, evaluate_every=2, text_weight=1.0, **SMALL
    ),
    finetune=FineTuningConfig(steps=2, rows_per_batch=2, learning_rate=1e-3, evaluate_every=9, **SMALL),
    decode_contexts=(16, 160),
)


@pytest.fixture(scope="module")
def corpus() -> TextCorpus:
    library = Path(sysconfig.get_paths()["stdlib"])
    names = {"kept": "bisect contextlib copy fnmatch functools heapq operator textwrap", "held": "sched string"}
    files = [
        SourceFile(package, "1", f"{name}.py", (library / f"{name}.py").read_text(encoding="utf-8"))
        for package, listed in names.items()
        for name in listed.split()
    ]
    return build_corpus(files, ["held"], 400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conversions")


@pytest.fixture(scope="module")
def finished(corpus: TextCorpus, folder: Path) -> ConversionResults:
    results = open_conversions(folder / "all.jsonl", RECIPE, corpus)
    assert run(results, corpus, folder) == []
    return results


def run(results: ConversionResults, corpus: TextCorpus, folder: Path, **options) -> list[ConversionJob]:
    given = {"report": lambda line: None, "teacher_path": folder / "teacher.pt", "environment": HERE}
    return run_conversions(results, RECIPE, corpus, device="cpu", **given | options)


def test_the_recipe_reads_a_tenth_and_survives_a_file() -> None:
    recipe = ConversionRecipe()
    assert 0.099 * recipe.text.tokens < recipe.tokens <= 0.1 * recipe.text.tokens
    assert ConversionRecipe.from_json(json.loads(json.dumps(recipe.as_json()))) == recipe
    names = [conversion.name for conversion in recipe.conversions()]
    assert len(names) == 16 and names[0] == "gated_deltanet@3:1" and names.count("gated_deltanet@all") == 2
    configurations = [Conversion("kda", layers).configuration(recipe.text.softmax_every) for layers in recipe.layers]
    assert configurations == ["hybrid:kda", None, "kda"]
    with pytest.raises(ValueError, match=r"align\.precision must be 'auto' here, got 'fp32'"):
        replace(recipe, align=replace(recipe.align, precision="fp32"))


def test_a_llama_is_the_same_model(corpus: TextCorpus) -> None:
    model = build_model("softmax", RECIPE.text, corpus.vocab_size, seed=0).eval()
    tokens = torch.from_numpy(corpus.held_out[None, :200].astype(np.int64))
    with torch.no_grad():
        ours, llama = model(input_ids=tokens).logits, as_llama(model)(input_ids=tokens).logits
    torch.testing.assert_close(ours, llama, rtol=1e-5, atol=1e-5)
    half = as_llama(model.bfloat16())
    assert half.dtype == torch.bfloat16 and half.model.rotary_emb.inv_freq.dtype == torch.float32
    with pytest.raises(ValueError, match="only softmax attention becomes a Llama"):
        as_llama(build_model("gated_deltanet", RECIPE.text, corpus.vocab_size))


@pytest.mark.parametrize("rule", ConversionRecipe().rules)
def test_stages_train_what_they_say_and_leave_the_original(corpus: TextCorpus, rule: str) -> None:
    original = as_llama(build_model("softmax", RECIPE.text, corpus.vocab_size, seed=0))
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    seen: list[dict[str, torch.Tensor]] = []

    def keep(model) -> float:
        assert not model.training
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return float(len(seen))

    found = convert_copy(original, Conversion(rule, "1:1"), RECIPE, corpus, score=keep)
    assert found.swapped == [0] == sorted(swapped_layers(found.model))
    assert found.points == [
        ("transfer", 0, 1.0),
        ("align", 4 * 64, 2.0),
        ("align", 6 * 64, 3.0),
        ("distill", 6 * 64 + 2 * 128, 4.0),
        ("finetune", 6 * 64 + 4 * 128, 5.0),
    ]
    assert found.points[-1][1] == RECIPE.tokens and set(found.stage_seconds) == {"align", "distill", "finetune"}
    changed = {name for name in seen[0] if not torch.equal(seen[0][name], seen[2][name])}
    assert changed and all(".0.self_attn.delta." in name for name in changed)  # alignment: the new layer alone
    assert all(
        not torch.equal(tensor, seen[3][name]) for name, tensor in seen[2].items() if name.endswith("up_proj.weight")
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in original.state_dict().items())


def test_what_a_file_lacks_is_converted_and_nothing_else(
    finished: ConversionResults, corpus: TextCorpus, folder: Path, tmp_path: Path
) -> None:
    lines = finished.path.read_text().splitlines(keepends=True)
    kinds = [json.loads(line).get("kind") for line in lines[1:]]
    assert kinds == ["teacher", *["conversion"] * 5, *["decoding"] * 3]
    assert list(finished.conversions) == RECIPE.conversions() and list(finished.decodings) == RECIPE.decodings()
    path = tmp_path / "some.jsonl"
    path.write_text("".join(lines[:3]) + lines[3][:200])  # killed while a line was written
    results = open_conversions(path, RECIPE, corpus)
    again = Conversion("gated_deltanet", "all")
    both = [ConversionJob(again), ConversionJob(replace(again, seed=1))]
    assert missing_conversion_jobs(results, RECIPE, [again.name]) == both
    reported: list[str] = []
    assert run(results, corpus, folder, only=[again.name], report=reported.append) == []
    assert len(reported) == 3 and "softmax model loaded" in reported[0]
    results = ConversionResults.read(path)
    assert len(results.teachers) == 1 and len(results.conversions) == 3 and results.recipe == RECIPE
    for seed in (0, 1):
        one, other = (x.conversions[replace(again, seed=seed)] for x in (results, finished))
        assert one.points == other.points and one.scores == other.scores  # the same seed, the same numbers
    assert results.conversions[again].points[0] == results.conversions[replace(again, seed=1)].points[0]
    assert results.conversions[again].points[1] != results.conversions[replace(again, seed=1)].points[1]
    with pytest.raises(ValueError, match="results of another recipe"):
        open_conversions(path, replace(RECIPE, rules=("kda",)), corpus)
    with pytest.raises(ValueError, match="unknown conversion 'kda@2:1'"):
        missing_conversion_jobs(results, RECIPE, ["kda@2:1"])
    path.write_text("".join([lines[0], lines[2]]))
    with pytest.raises(ValueError, match="line 2 is not a result of this suite: its softmax model .* has no line"):
        ConversionResults.read(path)


def test_decoding_is_measured_apart_and_on_one_machine(
    finished: ConversionResults, corpus: TextCorpus, tmp_path: Path
) -> None:
    lines = finished.path.read_text().splitlines(keepends=True)
    path = tmp_path / "some.jsonl"
    path.write_text(lines[0] + lines[-1])
    results = open_conversions(path, RECIPE, corpus)
    assert run(results, corpus, tmp_path, only=[DECODING]) == []
    assert not (tmp_path / "teacher.pt").exists()
    assert set(ConversionResults.read(path).decodings) == set(RECIPE.decodings())
    path.write_text(lines[0] + lines[-1])
    there = replace(HERE, device="another")
    results = open_conversions(path, RECIPE, corpus)
    with pytest.raises(ValueError, match="speeds of a machine, this is another"):
        run(results, corpus, tmp_path, only=[DECODING], environment=there)


def test_what_another_process_has_done_is_not_done_again(
    finished: ConversionResults, corpus: TextCorpus, tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "some.jsonl"
    lines = finished.path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-3]))
    results = open_conversions(path, RECIPE, corpus)
    measured: list[Conversion] = []

    def decode(conversion: Conversion, *others: object):
        measured.append(conversion)
        path.write_text("".join(lines[:-1]))  # meanwhile
        return finished.decodings[conversion]

    monkeypatch.setattr(conversion_suite, "_decode", decode)
    assert run(results, corpus, tmp_path) == []
    assert measured == [CONTROL, RECIPE.decodings()[-1]]


def test_results_are_whole(finished: ConversionResults, corpus: TextCorpus, folder: Path) -> None:
    (teacher,) = finished.teachers.values()
    assert teacher.training["rate"] == RECIPE.rate and teacher.training["curve"][-1][0] == RECIPE.text.steps
    kept = load_teacher(folder / "teacher.pt", corpus, RECIPE.text, RECIPE.rate, "cpu")
    assert kept is not None and kept.digest == teacher.teacher
    assert load_teacher(folder / "teacher.pt", corpus, replace(RECIPE.text, steps=7), RECIPE.rate, "cpu") is None
    assert load_teacher(folder / "teacher.pt", corpus, RECIPE.text, 2e-3, "cpu") is None
    size = sum(finished.header["file_bytes"])
    for conversion, result in finished.conversions.items():
        bits = {stage: found for stage, _, found in result.points}
        assert all(0 < found < 10 for found in bits.values())
        final = sum(result.scores["64"]["file_nats"]) / math.log(2) / size
        assert math.isclose(bits["finetune"], final, rel_tol=1e-4)
        assert math.isclose(bits["transfer"], sum(result.transfer_nats) / math.log(2) / size, rel_tol=1e-4)
        if conversion == CONTROL:
            assert result.swapped == [] and "align" not in bits
            np.testing.assert_allclose(result.transfer_nats, teacher.scores["64"]["file_nats"], rtol=1e-3, atol=0.2)
            continue
        assert result.swapped == ([0, 1] if conversion.layers == "all" else [0])
    for conversion, found in finished.decodings.items():
        assert all(found.decoding[context]["tokens_per_second"] > 0 for context in ("16", "160"))
        grows = found.state_bytes["160"] - found.state_bytes["16"]
        softmax_layers = {CONTROL.layers: 2, "1:1": 1, "all": 0}[conversion.layers]
        assert grows == 144 * 2 * 32 * 4 * softmax_layers  # keys and values


def test_a_limit_leaves_nothing_half_done(
    finished: ConversionResults, corpus: TextCorpus, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(conversion_suite.time, "monotonic", lambda: next(clock))  # a second at every look
    results = open_conversions(tmp_path / "none.jsonl", RECIPE, corpus)
    reported: list[str] = []
    missing = run(results, corpus, tmp_path, limit=1, report=reported.append)
    assert len(missing) == 8 and sum("no time left" in line for line in reported) == 4  # of them three of decoding
    assert not (tmp_path / "teacher.pt").exists() and not results.path.exists()
    reported.clear()
    missing = run(results, corpus, folder, limit=28, report=reported.append)  # all are expected to take longer
    assert len(missing) == 8 and sum("no time left" in line for line in reported) == 8
    assert len(results.path.read_text().splitlines()) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gated_deltanet@1:1", "gated_deltanet@all"])
def test_a_gpu_converts_scores_and_decodes(corpus: TextCorpus, tmp_path: Path, name: str) -> None:
    recipe = replace(
        RECIPE, text=replace(RECIPE.text, parameters=200_000, hidden_size=64, width_multiple=8), again=None
    )
    results = open_conversions(tmp_path / "found.jsonl", recipe, corpus)
    options = {"device": "cuda:0", "environment": HERE, "teacher_path": tmp_path / "teacher.pt"}
    assert run_conversions(results, recipe, corpus, only=[name, DECODING], **options) == []
    (found,) = results.conversions.values()
    assert found.peak_bytes is not None and found.peak_bytes > 16 * found.parameters
    for model in results.decodings.values():
        for context in ("16", "160"):
            assert model.decoding[context]["tokens_per_second"] > 0, model.decoding
            assert model.decoding[context]["peak_bytes"] > 0


def test_the_command_line_lists_and_converts(
    corpus: TextCorpus, folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    package = "experiments.text_conversions"
    monkeypatch.setattr(f"{package}.conversion_recipe.ConversionRecipe", lambda: RECIPE)
    monkeypatch.setattr(f"{package}.teacher.default_teacher_path", lambda: folder / "teacher.pt")
    corpus.save(tmp_path / "text.xz")
    command = ["lab", "--suite", "text-conversions", "--corpus", str(tmp_path / "text.xz")]
    command += ["--out", str(tmp_path / "found.jsonl"), "--only", "gated_deltanet@all"]

    def status(arguments: list[str]) -> object:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code

    for corpus_given in (command[3:5], []):
        assert status([*command[:3], *corpus_given, *command[5:], "--list"]) == 0
        assert capsys.readouterr().out == "gated_deltanet@all, seed 0\ngated_deltanet@all, seed 1\n"
    assert status([*command, "--limit", "600"]) == 0
    assert "gated_deltanet@all, seed 0: bits per byte transfer" in capsys.readouterr().out
    assert list(ConversionResults.read(tmp_path / "found.jsonl").conversions) == [
        Conversion("gated_deltanet", "all", 0),
        Conversion("gated_deltanet", "all", 1),
    ]
    assert status([*command, "--steps", "3"]) != 0
    assert "has no --steps" in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_the_page_shows_what_there_is_and_says_what_is_missing(finished: ConversionResults, tmp_path: Path) -> None:
    images = tmp_path / "images"
    empty = write_conversion_page(tmp_path / "empty.md", None, None, images=images).read_text()
    assert "Nothing has been converted yet" in empty and "Of 16 conversions, 16 are not done" in empty
    assert "## Bits per byte" not in empty and not images.exists()

    path = tmp_path / "text_conversions.md"
    page = write_conversion_page(path, ConversionResults.read(finished.path), None, images=images).read_text()
    assert "## What is missing\n\nNothing." in page
    findings = page.split("## Findings")[1].split("##")[0]
    assert findings.count("Gated DeltaNet has the fewest bits") == 2 and "with nothing swapped, changes by" in findings
    assert "converted so far" not in findings and "In rows 2 times as long as in training" in findings
    assert findings.count("* Decoding one row after") == 2 and "tokens/s for the softmax model; " in findings
    assert "Memory beside the weights" not in findings and "trained from the start" not in findings
    (teacher,) = finished.teachers.values()
    size = sum(finished.header["file_bytes"])
    original = sum(teacher.scores["64"]["file_nats"]) / math.log(2) / size
    for conversion, result in finished.conversions.items():
        points = {stage: bits for stage, _, bits in result.points}
        cells = page.split("## Beyond")[0].split(f"| {_label(conversion)} | ")[1].splitlines()[0].split(" | ")
        assert cells[0] == f"{result.parameters:,}" and cells[1] == f"{original:.4f}"
        assert cells[5] == f"{points['finetune']:.4f}"
        assert math.isclose(float(cells[6].split()[0]), points["finetune"] - original, abs_tol=1e-4)
        if conversion != CONTROL:
            recovered = (points["transfer"] - points["finetune"]) / (points["transfer"] - original)
            assert math.isclose(float(cells[7].split("%")[0]) / 100, recovered, rel_tol=0.02)
    spread = [abs(a.points[-1][2] - b.points[-1][2]) for a, b in _pairs(finished)]
    assert f"differ by up to {max(spread):.4f} bits per byte" in page
    some = tmp_path / "some.jsonl"
    some.write_text("".join(finished.path.read_text().splitlines(keepends=True)[:3]))
    partial = write_conversion_page(tmp_path / "some.md", ConversionResults.read(some), None, images=images).read_text()
    assert "Of 5 conversions, 4 are not done: Gated DeltaNet, all layers; nothing swapped" in partial
    assert "Decoding of 3 models is not measured." in re.sub(r"\s+", " ", partial) and "## Decoding" not in partial
    assert "Worse than it" not in partial and "No conversion has two seeds yet" in " ".join(partial.split())
    (picture,) = re.findall(r"!\[.*\]\((.*)\)", page)
    assert (tmp_path / picture).stat().st_size > 5000


def test_findings_beside_other_models_come_from_both_result_files(tmp_path: Path) -> None:
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    conversions = ConversionResults.read(results / "text_conversions.jsonl")
    configurations = TextResults.read(results / "text.jsonl")
    page = write_conversion_page(tmp_path / "page.md", conversions, configurations, images=tmp_path).read_text()
    findings = " ".join(page.split("## Findings")[1].split("##")[0].split())
    kda = Conversion("kda", "all")
    size = sum(conversions.header["file_bytes"])
    nats = [
        sum(found.scores["4096"]["file_nats"])
        for found in (conversions.conversions[kda], configurations.configurations["kda", 0])
    ]
    assert f"KDA, all layers: {(nats[0] - nats[1]) / math.log(2) / size:+.4f} [" in findings
    peak = conversions.decodings[CONTROL].decoding["131072"]["peak_bytes"] / 2**20
    assert f"after 131,072 tokens: {peak:,.0f} MiB for the softmax model" in findings
    rules = len({done.rule for done in conversions.conversions if done.layers == "1:1"})
    said = findings.split("* 1:1: ")[1].split(" * ")[0]
    assert (f"fewest bits per byte of {rules} rules converted so far" in said) == (rules < 4)


def _pairs(results: ConversionResults) -> list[tuple]:
    found = results.conversions
    return [(found[replace(c, seed=0)], found[c]) for c in found if c.seed]


def _label(conversion: Conversion) -> str:
    return conversion.label + (f", seed {conversion.seed}" if conversion.seed else "")
