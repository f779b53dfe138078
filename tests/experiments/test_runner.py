"""The runner does what a file lacks, once; the loop learns and goes on as if it had not stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments.loop import Loop, rate_factor
from experiments.runner import read_lines, run_jobs

JOBS = [{"id": name, "size": 3} for name in ("a", "b", "c")]


def double(job: dict, device: str, tick) -> dict:
    if job["size"] < 0:
        raise ValueError("a negative size")
    return {"doubled": 2 * job["size"]}


def silent(line: str) -> None:
    pass


def test_what_has_a_line_is_not_done_again(tmp_path: Path) -> None:
    path, done = tmp_path / "results.jsonl", []

    def work(job: dict, device: str, tick) -> dict:
        done.append(job["id"])
        return double(job, device, tick)

    assert run_jobs(lambda lines: JOBS[:2], work, path, report=silent) == []
    with path.open("a") as file:
        file.write('{"id": "c", "doub')  # a run that was killed
    assert run_jobs(lambda lines: JOBS, work, path, report=silent) == []
    assert done == ["a", "b", "c"]
    lines = read_lines(path)
    assert [(line["id"], line["doubled"]) for line in lines] == [("a", 6), ("b", 6), ("c", 6)]
    assert {"commit", "command", "torch", "transformers", "gpu"} <= lines[0]["run"].keys()
    more = [{"id": "more", "size": line["doubled"]} for line in lines[:1]]  # jobs may follow from results
    run_jobs(lambda lines: [*JOBS, *(more if len(lines) > 2 else [])], work, path, report=silent)
    assert done == ["a", "b", "c", "more"]
    with pytest.raises(ValueError, match="result of 'a' with another size"):
        run_jobs(lambda lines: [{"id": "a", "size": 4}], work, path, report=silent)


def test_a_failure_or_the_limit_leaves_nothing_and_ends_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    jobs = [JOBS[0], {"id": "bad", "size": -1}, JOBS[1]]
    with pytest.raises(RuntimeError, match="bad: ValueError: a negative size"):
        run_jobs(lambda lines: jobs, double, path, report=silent)
    assert [line["id"] for line in read_lines(path)] == ["a", "b"]
    assert run_jobs(lambda lines: JOBS, double, path, seconds=-1, report=silent) == JOBS[2:]


@pytest.mark.slow
def test_processes_share_the_work(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    jobs = [*JOBS, {"id": "bad", "size": -1}]
    with pytest.raises(RuntimeError, match="a negative size"):
        run_jobs(lambda lines: jobs, double, path, devices=["cpu", "cpu"], report=silent)
    assert sorted(json.loads(line)["id"] for line in path.read_text().splitlines()) == ["a", "b", "c"]


def test_learning_rates_rise_and_fall() -> None:
    cosine = [rate_factor(step, 100, 10, final=0.1) for step in range(100)]
    assert cosine[0] == 0.1 and cosine[9] == 1.0 and cosine[-1] == pytest.approx(0.1)
    line = [rate_factor(step, 100, 10, shape="line") for step in range(100)]
    assert line[54] == pytest.approx(0.5) and line[-1] == 0.0
    assert rate_factor(10, 100, 10, first=0) == 1.0


def test_a_loop_learns_and_goes_on_as_if_it_had_not_stopped() -> None:
    def trained(*stops: int) -> Loop:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        wanted = torch.tensor([[1.0, -2.0, 3.0, 0.5]])

        def batches():
            generator = torch.Generator().manual_seed(1)
            while True:
                yield torch.randn(16, 4, generator=generator)

        def figures_of(model, x):
            loss = (model(x) - x @ wanted.T).square().mean()
            return loss, loss.sqrt()

        loop = Loop(
            model, batches(), figures_of, rate=0.1, factor=lambda step: rate_factor(step, 80, 5), weight_decay=0.0
        )
        assert all(loop.advance(stop) for stop in stops)
        return loop

    whole, parts = trained(80), trained(5, 41, 80)
    assert whole.losses == parts.losses and torch.equal(whole.model.weight, parts.model.weight)
    assert whole.losses[-1] < 0.01 * whole.losses[0]
    assert [point[0] for point in whole.curve(points=4)] == [20, 40, 60, 80]


def test_a_loop_ends_where_the_loss_is_not_finite() -> None:
    model = torch.nn.Linear(1, 1)
    loop = Loop(
        model,
        iter([torch.ones(1, 1) * (1 if i < 3 else torch.nan) for i in range(20)]),
        lambda model, x: (model(x).sum(),),
        rate=0.1,
        factor=lambda step: 1.0,
        weight_decay=0.0,
    )
    assert not loop.advance(20) and loop.steps == 8  # looked at every 8 steps
