"""The text suite and the conversions in miniature: corpus, trainings, scores against a plain loop, what is called."""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments.runner import read_lines, run_jobs
from experiments.text import conversions, suite
from experiments.text.comparison import bits_per_byte, interval, is_called, seed_spread
from experiments.text.corpus import SourceFile, TextCorpus, build_corpus
from experiments.text.models import HYBRID, TextRecipe, base_configurations, build_model
from experiments.text.scoring import file_bytes, score

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
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
    scored_lengths=(64, 128),
)
COPY = "import os\n\n\ndef twice(x):\n    return 2 * x\n\n\nprint(twice(os.getpid()))\n"


def sources() -> list[SourceFile]:
    library = Path(sysconfig.get_paths()["stdlib"])
    names = {"kept": "bisect contextlib copy fnmatch functools heapq operator textwrap", "held": "queue sched string"}
    files = [
        SourceFile(package, f"{name}.py", (library / f"{name}.py").read_text(encoding="utf-8"))
        for package, listed in names.items()
        for name in listed.split()
    ]
    files += [SourceFile("kept", f"copy{i}.py", COPY) for i in range(2)]
    files += [SourceFile("held", "copy.py", COPY), SourceFile("held", "short.py", "x = 1\n")]
    return [*files, SourceFile("held", "table.py", "TABLE = [\n" + "1, 2, 3, 4,\n" * 20 + "]\n")]


@pytest.fixture(scope="module")
def corpus() -> TextCorpus:
    return build_corpus(sources(), ["held"], 400)


def test_a_corpus_keeps_no_copies_and_survives_a_file(corpus: TextCorpus, tmp_path: Path) -> None:
    assert len(corpus.file_starts) == 3  # of the held-out files neither the copy nor the short one nor the table
    held = sum(len(source.text.encode()) for source in sources()[8:11])
    assert int(corpus.token_bytes[corpus.held_out].sum(dtype=np.int64)) == held
    corpus.save(tmp_path / "text.xz")
    assert TextCorpus.load(tmp_path / "text.xz").digest == corpus.digest
    assert replace(corpus, held_out=corpus.held_out[::-1]).digest != corpus.digest
    with pytest.raises(ValueError, match=r"python -m experiments\.text\.corpus"):
        TextCorpus.load(tmp_path / "other.xz")


def test_rows_visit_an_epoch_once_and_go_on_in_another_order() -> None:
    tokens = np.arange(64 * 9, dtype=np.uint16)
    rows = torch.cat([*islice(suite.training_rows(tokens, 64, 2, 0, "cpu"), 8)])
    first, second = rows[:8, 0].tolist(), rows[8:, 0].tolist()
    assert len({begin // 64 for begin in first}) == 8 and sorted(first) != first
    assert (rows[:, 1:] == rows[:, :-1] + 1).all() and first != second


def test_scores_are_those_of_a_loop_over_rows(corpus: TextCorpus) -> None:
    model = build_model("hybrid:gated_deltanet", RECIPE, corpus.vocab_size, seed=0).eval()
    found = score(model, corpus, RECIPE)["64"]
    size = file_bytes(corpus, RECIPE)
    nats = np.zeros(len(corpus.file_starts))
    count = (len(corpus.held_out) - 1) // 128 * 128
    with torch.no_grad():
        for first in range(0, count, 64):
            row = torch.from_numpy(corpus.held_out[first : first + 65].astype(np.int64))
            logits = model(input_ids=row[None, :-1]).logits[0].float()
            for place, cost in enumerate(F.cross_entropy(logits, row[1:], reduction="none").tolist(), start=first + 1):
                if corpus.token_bytes[corpus.held_out[place]]:
                    nats[np.searchsorted(corpus.file_starts, place, side="right") - 1] += cost
    assert found["file_nats"] == pytest.approx(nats.tolist(), abs=0.2)
    assert size.sum() == corpus.token_bytes[corpus.held_out[1 : count + 1]].sum(dtype=np.int64)
    assert sum(found["recall"]["first"]) > 0


def test_a_configuration_is_trained_at_its_best_rate(corpus: TextCorpus, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"

    def jobs(lines: list[dict]) -> list[dict]:
        return [job for job in suite.jobs(lines, RECIPE) if job["configuration"] in ("delta_net", "softmax")]

    assert run_jobs(jobs, partial(suite.train_and_score, corpus=corpus), path, report=lambda line: None) == []
    lines = read_lines(path)
    for line in lines:
        assert line["parameters"] == pytest.approx(48_000, rel=0.02)
        losses = {trial["rate"]: trial["loss"] for trial in line["trials"]}
        assert line["rate"] == min(losses, key=losses.__getitem__)
        assert [step for step, _ in line["curve"]] == [1, 2, 3, 4]
        assert bits_per_byte(line, 64) < 5
    assert len(suite.verdicts(lines)) == 2 and "beside softmax attention, not called" in "".join(suite.verdicts(lines))
    with pytest.raises(ValueError, match="with another recipe"):
        run_jobs(lambda lines: suite.jobs(lines, replace(RECIPE, steps=5)), suite.train_and_score, path)


def test_hybrids_and_second_seeds_follow_from_what_is_best() -> None:
    def line(job: dict, nats: float) -> dict:
        return {**job, "rate": 1e-3, "file_bytes": [10, 10], "scores": {"64": {"file_nats": [nats, nats]}}}

    lines = [line(job, number) for number, job in enumerate(suite.jobs([], RECIPE), start=1)]
    lines[0]["rate"] = None  # its loss is finite at no learning rate
    added = suite.jobs(lines, RECIPE)[len(lines) :]
    rules = [name for name in base_configurations()[1:] if name != "softmax"]
    assert [job["configuration"] for job in added] == [HYBRID + name for name in rules[:4]]
    lines += [line(job, 0.5) for job in added]
    second = suite.jobs(lines, RECIPE)[len(lines) :]
    assert len(second) == 5 and all(job["seed"] == 1 and job["rates"] == [1e-3] for job in second)


def test_a_difference_counts_beyond_files_and_seeds() -> None:
    """The committed results: KDA is called better than DeltaNet, and not than Gated DeltaNet."""
    header, *lines = read_lines(RESULTS / "text.jsonl")
    groups: dict[str, list[dict]] = {}
    for line in lines:
        if line["kind"] == "configuration":
            groups.setdefault(line["configuration"], []).append({**line, "file_bytes": header["file_bytes"]})
    spread = seed_spread(list(groups.values()), 4096)
    kda, delta, softmax = (groups[name] for name in ("kda", "delta_net", "softmax"))
    assert spread == pytest.approx(0.010538, abs=1e-6)
    assert is_called(interval(kda, 4096, minus=delta), spread)
    assert not is_called(interval(kda, 4096, minus=delta), None)
    assert interval(softmax, 4096).low < interval(softmax, 4096).value < interval(softmax, 4096).high


def test_a_softmax_model_is_converted(corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "_ALL", [("delta_net", "1:1", 0), (*conversions.CONTROL, 0)])
    stages = tuple(replace(stage, steps=3, rows=1, every=2) for stage in conversions.STAGES)
    path = tmp_path / "conversions.jsonl"
    work = partial(conversions.convert, corpus=corpus, teacher_path=tmp_path / "teacher.pt")
    assert run_jobs(lambda lines: conversions.jobs(lines, RECIPE, stages), work, path, report=lambda line: None) == []
    teacher, converted, control = read_lines(path)
    assert converted["swapped"] == [0] and control["swapped"] == []
    names = ["transfer", "align", "align", "distill", "distill", "finetune", "finetune"]
    assert [point[0] for point in converted["points"]] == names
    assert [point[1] for point in converted["points"]] == [0, 128, 192, 320, 384, 512, 576]
    assert control["points"][0][2] == pytest.approx(bits_per_byte(teacher, 64), abs=1e-4)
    assert len(conversions.verdicts([teacher, converted, control])) == 3
    job = conversions.jobs([{**teacher, "teacher": "another"}], RECIPE, stages)[1]
    with pytest.raises(ValueError, match="the file's is another"):
        work(job, "cpu", lambda: None)


def test_a_llama_is_the_same_model(corpus: TextCorpus) -> None:
    model = build_model("softmax", RECIPE, corpus.vocab_size, seed=0).eval()
    tokens = torch.from_numpy(corpus.held_out[None, :200].astype(np.int64))
    with torch.no_grad():
        ours, llama = model(input_ids=tokens).logits, conversions.as_llama(model)(input_ids=tokens).logits
    torch.testing.assert_close(ours, llama, rtol=1e-5, atol=1e-5)
