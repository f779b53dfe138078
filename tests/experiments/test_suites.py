"""The suites of claims: what there is to run, a job, and the verdicts of results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.claims import Claim, Lab, Scores, at_least, at_most, lead
from experiments.configurations import parse_configuration
from experiments.experiment import Experiment, Recipe
from experiments.lab import train_and_test
from experiments.network import build_model
from experiments.runner import read_lines
from experiments.suites import LABS
from experiments.text import conversions
from experiments.text import suite as text

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TINY = Experiment(
    "overwrite",
    Recipe(train_lengths=(8, 8), test=(8,), hidden_size=32, num_heads=2, steps=40, learning_rate=1e-2),
    ("delta_net", "softmax"),
    spare_seeds=(1,),
)


def test_every_suite_lists_its_jobs() -> None:
    known = {name: [job["id"] for job in lab.jobs([])] for name, lab in LABS.items()}
    known["text"] = [job["id"] for job in text.jobs([])]
    teacher = {"id": "teacher", "teacher": "abc", "recipe": {}}
    known["conversions"] = [job["id"] for job in conversions.jobs([teacher])]
    assert all(len(ids) == len(set(ids)) for ids in known.values())
    counts = {name: len(ids) for name, ids in known.items() if name not in ("family", "text")}
    assert counts == {"mini": 25, "full": 183, "conversions": 17}
    assert "parity kda+neg lr=0.01 seed=0" in known["mini"] and "kda@3:1 seed=0" in known["conversions"]
    assert [job["id"] for job in conversions.jobs([])] == ["teacher"]


def test_configurations_of_mini_have_equal_parameters() -> None:
    for experiment in LABS["mini"].experiments:
        sizes = [
            sum(
                p.numel()
                for p in build_model(parse_configuration(name), experiment.recipe, experiment.task).parameters()
            )
            for name in experiment.configurations
        ]
        assert max(sizes) <= 1.04 * min(sizes)
    with pytest.raises(ValueError, match="raise mlp_ratio"):
        build_model(parse_configuration("kda+x4"), replace(TINY.recipe, mlp_ratio=0.1), TINY.task)


def test_a_job_learns_and_repeats() -> None:
    job = TINY.jobs()[0]
    found, again = (train_and_test(job, "cpu", lambda: None) for _ in range(2))
    assert found == again
    losses = [loss for _, loss, _ in found["curve"]]
    assert losses[-1] < losses[0] - 0.2
    assert found["scores"]["8"]["answers"] == 6 * TINY.recipe.test_sequences
    assert train_and_test(TINY.jobs()[1], "cpu", lambda: None)["parameters"] == pytest.approx(
        found["parameters"], rel=0.02
    )


def test_claims_pass_warn_and_fail_and_spare_seeds_follow() -> None:
    gates = (at_least("overwrite", "delta_net", 8, 0.9), lead("overwrite", "delta_net", "softmax", 8, 0.1, "warn"))
    claim = Claim(name="x", statement="", paper="", differences="", experiments=(TINY,), gates=gates)
    lab = Lab((claim,))

    def lines(delta: float, softmax: float) -> list[dict]:
        found = {"delta_net": delta, "softmax": softmax}
        return [{**job, "scores": {"8": {"accuracy": found[job["configuration"]]}}} for job in TINY.jobs()]

    assert claim.verdict(Scores([])) == "not run"
    assert claim.verdict(Scores(lines(0.95, 0.5))) == "pass"
    assert claim.verdict(Scores(lines(0.95, 0.9))) == "warn"
    assert claim.verdict(Scores(lines(0.80, 0.5))) == "fail"
    assert len(lab.jobs(lines(0.95, 0.9))) == 2 and len(lab.jobs(lines(0.80, 0.5))) == 4
    assert at_most("overwrite", ("delta_net", "softmax"), 8, 0.9)(Scores(lines(0.95, 0.5)))[0].verdict == "fail"


def test_verdicts_of_the_results() -> None:
    worst = {"mini": "warn", "full": "fail"}
    for name, lab in LABS.items():
        scores = Scores(read_lines(RESULTS / f"lab_{name}.jsonl"))
        found = {claim.name: claim.verdict(scores) for claim in lab.claims}
        if name in worst:
            assert "not run" not in found.values() and worst[name] in found.values()


def test_the_command_lists_runs_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "mini.jsonl")
    main(["mini", "--only", "reset delta_net,s3", "--list", "--out", out])
    assert "reset delta_net lr=0.01 seed=0\n" in capsys.readouterr().out
    main(["mini", "--only", "reset delta_net", "--out", out, "--seconds", "0"])
    printed = capsys.readouterr().out
    assert "1 jobs are missing: the same command goes on" in printed and "not run reset" in printed
    with pytest.raises(SystemExit):
        main(["maxi"])
