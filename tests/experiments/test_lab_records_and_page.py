"""Result files that survive a killed run and refuse other code; gates; the page; the command line."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import resource
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.lab_page import _wall_clock
from experiments.lab_plots import draw_complexity, draw_numerics
from helpers import run_python

import deltazoo
from deltazoo.cli import main
from deltazoo.layers import bounded_step, l2_normalize
from deltazoo.ops import delta_rule
from deltazoo.ops.step_size import euler, exact
from experiments import Check, Experiment, Recipe, Scores, experiment
from experiments.claims import Claim, gap, too_easy, verdict_of
from experiments.complexity import flops, measure_complexity, parallel_scan
from experiments.configurations import parse_configuration
from experiments.experiment import Run
from experiments.fitting import Outcome, Score
from experiments.lab_records import Environment, Record, ResultFile, decisive_files, read_records
from experiments.numerics import ROUNDED_FORM, judge_numerics, measure_numerics
from experiments.repeated_keys import bound_of, judge_repeated_keys
from experiments.runner import Plan, _in_order, run_suite
from experiments.suite_selection import Selection, select
from experiments.suites.causes import lead
from experiments.task import get_task, list_tasks
from experiments.tasks.parity import PARITY

RECIPE = Recipe(hidden_size=16, num_heads=2, head_dim=8, train_lengths=(3, 9), test=(9, 20), test_sequences=8, steps=3)
EXPERIMENT = Experiment(
    name="tiny", task=PARITY, recipe=RECIPE, configurations=("delta_net", "neg_delta_net"), seeds=(0,), spare_seeds=(1,)
)
HERE = Environment(device="a machine", torch="1", triton=None, version="0", commit="abc", code="123")
INLINE = Plan(workers=0)


def claim(bound: float) -> Claim:
    return Claim(
        name="tiny",
        statement="It learns.",
        paper="none",
        differences="all",
        experiments=(EXPERIMENT,),
        judge=lambda scores: [scores.at_least("tiny", "neg_delta_net", 9, bound)],
    )


def finished(tmp_path: Path) -> ResultFile:
    results = ResultFile(tmp_path / "results.jsonl", "mini", HERE)
    assert run_suite([EXPERIMENT], [claim(0.0)], results, INLINE, report=lambda line: None) == 0
    return results


def record(configuration: str, accuracy: float, *, seed: int = 0, curve=()) -> Record:
    outcome = Outcome(parameters=1, scores={"9": Score(accuracy, 1.0, 8)}, curve=list(curve))
    run = next(run for run in replace(EXPERIMENT, seeds=(seed,)).with_configurations((configuration,)).runs())
    return Record.of("mini", run, outcome, HERE)


def test_a_finished_suite_is_not_run_again_and_a_cut_line_is(tmp_path: Path) -> None:
    path = finished(tmp_path).path
    whole = path.read_text()
    assert len(whole.splitlines()) == 2
    reported: list[str] = []
    run_suite([EXPERIMENT], [], ResultFile(path, "mini", HERE), INLINE, report=reported.append)
    assert reported == [] and path.read_text() == whole

    path.write_text(whole[:-40])  # killed in the middle of a line
    assert len(read_records(path)) == 1
    run_suite([EXPERIMENT], [], ResultFile(path, "mini", HERE), INLINE, report=reported.append)
    assert len(reported) == 1
    clocks = {"started": 0, "seconds": 0, "cpu_seconds": 0}
    timeless = [{**json.loads(line), **clocks} for line in path.read_text().splitlines()]
    assert timeless == [{**json.loads(line), **clocks} for line in whole.splitlines()]


def test_going_on_with_a_full_disk_loses_no_result(tmp_path: Path) -> None:
    path = finished(tmp_path).path
    whole = path.read_text()
    path.write_text(whole + '{"suite": "mi')  # killed in the middle of a line
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, unlimited[1]))
    try:
        ResultFile(path, "mini", HERE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert path.read_text() == whole


def test_a_fresh_start_removes_only_what_the_lab_wrote(tmp_path: Path) -> None:
    ours = [tmp_path / name for name in ("results.jsonl", "numerics.json", "complexity.json")]
    others = [tmp_path / name for name in ("package.json", "notes.txt")]
    for path in (*ours, *others):
        path.write_text("somebody's")
    options = ["--only", "parity", "--rules", "delta_net", "--steps", "1", "--no-measure", "--workers", "1"]
    with contextlib.suppress(SystemExit):
        main(["lab", *options, "--fresh", "--out", str(tmp_path)])
    assert all(path.read_text() == "somebody's" for path in others)
    assert len(read_records(ours[0])) > 0 and not ours[1].exists() and not ours[2].exists()


def test_worker_processes_give_the_same_numbers(tmp_path: Path) -> None:
    inline = finished(tmp_path / "a")
    spread = ResultFile(tmp_path / "b" / "results.jsonl", "mini", HERE)
    assert run_suite([EXPERIMENT], [], spread, Plan(workers=2), report=lambda line: None) == 0
    assert {key: r.scores for key, r in spread.records.items()} == {key: r.scores for key, r in inline.records.items()}


def test_workers_are_spread_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert Plan(device="cuda", workers=4).devices() == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert Plan(device="cuda", workers=0).devices() == ["cuda:0"]
    assert Plan(device="cuda:2", workers=2).devices() == ["cuda:2", "cuda:2"]
    assert Plan(device="cpu", workers=2).devices() == ["cpu", "cpu"]


def test_with_a_time_limit_experiments_are_finished_one_by_one() -> None:
    def runs_of(name: str, steps: int, configurations: tuple[str, ...]) -> list[Run]:
        return replace(EXPERIMENT, name=name, configurations=configurations, recipe=replace(RECIPE, steps=steps)).runs()

    runs = [
        *runs_of("long", 9, ("kda",)),
        *runs_of("many", 4, ("kda", "delta_net", "neg_delta_net")),
        *runs_of("short", 2, ("kda", "delta_net")),
    ]
    assert [run.experiment for run in _in_order(runs, by_experiment=False)] == ["long", *["many"] * 3, *["short"] * 2]
    assert [run.experiment for run in _in_order(runs, by_experiment=True)] == ["short", "short", "long", *["many"] * 3]


def test_a_failed_claim_runs_its_spare_seeds(tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "results.jsonl", "mini", HERE)
    run_suite([EXPERIMENT], [claim(2.0)], results, INLINE, report=lambda line: None)
    assert sorted(r.seed for r in results.records.values()) == [0, 0, 1, 1]


def test_out_of_time_is_counted_and_nothing_is_lost(tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "results.jsonl", "mini", HERE)
    plan = replace(INLINE, time_limit=0.0)
    assert run_suite([EXPERIMENT], [], results, plan, report=lambda line: None) == 2
    assert run_suite([EXPERIMENT], [], results, INLINE, report=lambda line: None) == 0


def test_a_failing_configuration_is_named_after_the_others_have_run(tmp_path: Path) -> None:
    wild = replace(EXPERIMENT, name="wild", recipe=replace(RECIPE, learning_rate=1e30, clip=1e30))
    results = ResultFile(tmp_path / "results.jsonl", "mini", HERE)
    with pytest.raises(RuntimeError, match="wild delta_net .*ArithmeticError"):
        run_suite([wild, EXPERIMENT], [], results, INLINE, report=lambda line: None)
    assert {r.experiment for r in results.records.values()} == {"tiny"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": "999"}, "other source files .*123, now 999; commit abc.*--fresh"),
        ({"torch": "2"}, r"other torch \(1, now 2"),
        ({"device": "another"}, "other device"),
        ({"version": "9"}, "other version"),
        ({"transformers": "4"}, r"other transformers \(None, now 4"),
    ],
)
def test_results_of_another_version_do_not_mix(tmp_path: Path, change, message: str) -> None:
    path = finished(tmp_path).path
    with pytest.raises(ValueError, match=message):
        ResultFile(path, "mini", replace(HERE, **change))
    with pytest.raises(ValueError, match="of the suite 'mini', not 'full'"):
        ResultFile(path, "full", HERE)


def test_results_of_another_recipe_do_not_mix(tmp_path: Path) -> None:
    path = finished(tmp_path).path
    with pytest.raises(ValueError, match="under another recipe"):
        run_suite([EXPERIMENT.with_steps(5)], [], ResultFile(path, "mini", HERE), INLINE)
    path.write_text('{"suite": "mini"}\n')
    with pytest.raises(ValueError, match="line 1 is not a result"):
        read_records(path)


def with_another(instance: Any, name: str) -> Any:
    """A copy of a frozen dataclass with one field changed, whatever the class would say to the value."""
    twin = copy.copy(instance)
    object.__setattr__(twin, name, ["another", repr(getattr(instance, name))])
    return twin


def test_whatever_decides_a_run_changes_its_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    run = EXPERIMENT.runs()[0]
    others = {"another seed": replace(run, seed=7), "another configuration": replace(run, configuration="kda")}
    others |= {f"recipe.{f.name}": replace(run, recipe=with_another(RECIPE, f.name)) for f in fields(Recipe)}
    for task in map(get_task, list_tasks()):
        known = replace(run, task=task).fingerprint
        others[task.name] = replace(run, task=task)
        changed = [replace(run, task=with_another(task, f.name)).fingerprint for f in fields(task)]
        assert known not in changed, f"a field of the task {task.name} is not in the fingerprint"
    others.pop(PARITY.name)
    fingerprints = {name: other.fingerprint for name, other in others.items()}
    configuration = parse_configuration(run.configuration)
    assert configuration.spec is not None
    configurations = {
        f"spec.{f.name}": replace(configuration, spec=with_another(configuration.spec, f.name))
        for f in fields(configuration.spec)
    }
    configurations["options"] = replace(configuration, options={"num_micro_steps": 2})
    configurations["a function"] = replace(configuration, spec=replace(configuration.spec, step_size=exact))
    configurations["another function"] = replace(configuration, spec=replace(configuration.spec, step_size=euler))
    for name, other in configurations.items():
        with monkeypatch.context() as patch:
            patch.setattr(experiment, "parse_configuration", lambda _, other=other: other)
            fingerprints[name] = run.fingerprint
    fingerprints["the run"] = run.fingerprint
    by_value: dict[str, list[str]] = {}
    for name, value in fingerprints.items():
        by_value.setdefault(value, []).append(name)
    assert all(len(names) == 1 for names in by_value.values()), by_value


MODULES_OF_A_RUN = """
import sys
from experiments.configurations import parse_configuration
from experiments.recipe import Recipe
from experiments.tasks.parity import PARITY
from experiments.fitting import run_configuration

recipe = Recipe(steps=1, train_lengths=(3, 4), test=(4,), test_sequences=2, batch_size=2)
for name in ("softmax", "kda+neg"):
    run_configuration(PARITY, parse_configuration(name), recipe, seed=0, device="cpu", progress=lambda step: None)
print(*(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "deltazoo"), sep="\\n")
"""


def test_every_module_behind_a_result_is_in_its_key() -> None:
    package = Path(deltazoo.__file__).parent
    found = {Path(line).relative_to(package).as_posix() for line in run_python(MODULES_OF_A_RUN).splitlines()}
    # What is done with results.
    idle = {
        "workbench/__init__.py",
        "workbench/provenance.py",
        *(f"workbench/lab/{n}.py" for n in ("__init__", "claims", "experiment", "lab_records")),
    }
    decisive = {path.relative_to(package).as_posix() for path in decisive_files()}
    assert "models/softmax_attention.py" in found
    assert found - decisive <= idle


def test_a_users_file_is_in_the_key_of_its_results(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("x = 1")
    second.write_text("x = 2")
    keys = [Environment.here("cpu", "abc", load).code for load in ([], [first], [second], [first, second])]
    assert len(set(keys)) == 4
    assert Environment.here("cpu", "abc", [second, first]).code == keys[3]


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("lab_*.jsonl")), ids=lambda path: path.stem)
def test_committed_results_are_read(path: Path) -> None:
    records = read_records(path)
    assert len(records) > 20 and {f"lab_{record.suite}" for record in records} == {path.stem}


def test_results_from_before_transformers_was_kept_are_read() -> None:
    records = read_records(RESULTS / "lab_mini.jsonl")
    assert all(record.environment.transformers is None for record in records)


def test_gates() -> None:
    scores = Scores([record("delta_net", 0.6), record("delta_net", 0.8, seed=1), record("delta_net", 0.1, seed=2)])
    assert scores.best("tiny", "delta_net", 9) == 0.8 and scores.mean("tiny", "delta_net", 9) == 0.5
    check = scores.at_least("tiny", "delta_net", 9, 0.75)
    assert check == Check("pass", "DeltaNet at 9: 0.800 (best of 3 seeds, median 0.600), wanted at least 0.75")
    assert scores.at_least("tiny", "delta_net", 9, 0.9).verdict == "fail"
    assert scores.at_least("tiny", "delta_net", 9, 0.9, otherwise="warn").verdict == "warn"
    assert scores.at_most("tiny", "delta_net", 9, 0.75).verdict == "fail"
    assert scores.show("tiny", "delta_net", 9, named=True).text.startswith("tiny, DeltaNet at 9: 0.800")
    assert gap("a minus b", 0.2, 0.3).verdict == "fail" and gap("a minus b", 0.3, 0.3).verdict == "pass"
    assert too_easy("linear attention", 0.95, 0.9).verdict == "fail"
    assert verdict_of([Check("pass", ""), Check("warn", ""), Check("printed", "")]) == "warn"
    assert claim(0.5).checks(Scores([]))[0].verdict == "not run"
    curve = [(10, 1.0, 0.5), (20, 0.5, 0.96), (30, 0.1, 0.99)]
    assert Scores([record("kda", 1.0, curve=curve)]).steps_to("tiny", "kda", 0.95) == 20
    assert Scores([record("kda", 1.0, curve=curve[:1])]).steps_to("tiny", "kda", 0.95) is None
    assert Scores([record("kda", 1.0, curve=curve)]).training_bits("tiny", "kda") == pytest.approx(0.1 / math.log(2))


def test_a_lead_counts_beyond_twice_its_standard_error() -> None:
    """Two means of three seeds .5 apart; the standard error is sqrt(2/3) times the spread of the seeds."""
    for spread, verdict, word in ((0.1, "pass", "ahead"), (0.4, "warn", "no difference")):
        records = [
            record(name, mean + step * spread, seed=1 + step)
            for name, mean in (("efla", 0.5), ("delta_net", 0.0))
            for step in (-1, 0, 1)
        ]
        rate = records[0].learning_rate
        better, worse = (("tiny", name, rate) for name in ("efla", "delta_net"))
        found = lead(Scores(records), better, worse, 9)
        assert found.verdict == verdict
        assert found.text.endswith(f"at 9: +0.500 +- {spread * (2 / 3) ** 0.5:.3f}, {word}")
    assert lead(Scores(records), worse, better, 9).verdict == "warn"


def test_selection() -> None:
    chosen = select("mini", only=["parity", "s3"], configurations=["kda", "softmax"])
    assert [e.name for e in chosen.experiments] == ["parity", "s3"] and chosen.experiments[0].configurations == (
        "kda",
        "softmax",
    )
    assert [c.name for c in chosen.claims] == ["parity", "s3"]
    assert select("mini", further_configurations=["softmax"]).experiments[0].configurations[-1] == "softmax"
    digits = select("full", only=["digits_large"], configurations=["efla"]).experiments[0]
    assert {run.recipe.learning_rate for run in digits.runs()} == {1e-3, 3e-3}
    with pytest.raises(ValueError, match="did you mean 'parity'"):
        select("mini", only=["partiy"])
    with pytest.raises(ValueError, match="unknown suite 'mimi'; did you mean 'mini'"):
        select("mimi")
    with pytest.raises(ValueError, match="unknown rule 'gdn'"):
        select("mini", configurations=["gdn"])
    with pytest.raises(ValueError, match="'comba' takes no allow_neg_eigval=True"):
        select("mini", configurations=["comba+neg"])


def test_the_scan_is_the_delta_rule_and_costs_what_is_said() -> None:
    q, k, v = (torch.randn(2, 37, 3, 8, dtype=torch.float64) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    beta = 2 * torch.rand(2, 37, 3, dtype=torch.float64)
    expected = delta_rule(q, k, v, beta).output
    torch.testing.assert_close(parallel_scan(q, k, v, beta), expected, rtol=1e-9, atol=1e-11)
    assert flops("parallel scan", 1024, 64) == 1024 * 10 * 4 * 64**3
    assert flops("softmax", 2048, 64) == 4 * flops("softmax", 1024, 64)
    assert flops("chunkwise", 2048, 64) == 2 * flops("chunkwise", 1024, 64)


def test_measurements_are_judged_and_drawn(tmp_path: Path) -> None:
    measured = measure_numerics("cpu", tokens=1024)
    checks = judge_numerics(measured)
    assert [check.verdict for check in checks] == ["pass"] * len(checks)
    norms = measured["state_norm"]
    assert norms["unguarded"][-1] > 50 and max(norms["guarded"]) < 1.01
    shape = {"tokens": 1024, "dim": 128}
    far_off = {"dtype": "bfloat16", "pattern": "one key", "beta": 2.0, "who": "token loop", "error": 4e13}
    for row in (far_off, {**far_off, "error": None}):
        assert judge_repeated_keys({**shape, "rows": [row]})[0].verdict == "fail"
    assert judge_repeated_keys({**shape, "rows": [{**far_off, "who": "fla"}]})[0].verdict == "printed"
    forgotten = {**far_off, "dtype": "float32", "beta": 1.9, "error": 2e-4}  # below step size 2 nothing adds up
    at_two = {**forgotten, "beta": 2.0}
    for row, verdict in ((forgotten, "fail"), (at_two, "fail"), ({**at_two, "who": "chunkwise"}, "pass")):
        assert judge_repeated_keys({**shape, "rows": [row]})[0].verdict == verdict
    measured["repeated_keys"]["rows"].append({**far_off, "who": "fla", "error": None})
    complexity = measure_complexity("cpu", longest=256, seconds=0.0)
    assert {row["form"] for row in complexity["length"]} >= {"token loop", "parallel scan", "chunkwise", "softmax"}
    for path in (
        draw_numerics(tmp_path / "numerics.png", measured),
        draw_complexity(tmp_path / "complexity.png", {**complexity, "environment": asdict(HERE)}),
    ):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_page_counts_wall_clock_and_gpus() -> None:
    """Runs side by side count once, the hour between two calls not at all."""
    spans = (("cuda:0", 100.0, 60.0), ("cuda:1", 130.0, 60.0), ("cuda:0", 3700.0, 90.0))
    records = [
        replace(record("delta_net", 0.5, seed=seed), device=device, started=started, seconds=seconds)
        for seed, (device, started, seconds) in enumerate(spans)
    ]
    assert _wall_clock(records) == ", 3.0 of wall clock on 2 GPUs"
    assert _wall_clock([*records, record("kda", 0.5)]) == ""  # one from before the time was kept
    assert records[0].precision == "float32" and Record.from_json(records[0].to_json()) == records[0]


def test_the_page_says_what_the_results_say(tmp_path: Path) -> None:
    from experiments.lab_page import write_page

    results = finished(tmp_path)
    selection = Selection((EXPERIMENT,), (replace(claim(2.0), tried="three seeds"),))
    page = write_page(tmp_path / "lab.md", {"mini": (selection, list(results.records.values()), {})}).read_text()
    score = results.records["tiny neg_delta_net lr=0.001 seed=0"].scores["9"].accuracy
    assert "**FAIL**" in page and "chance 0.500" in page and "| DeltaNet [-1,1] | 0.001 | 1 |" in page
    assert f"{score:.3f}" in page and "a machine" in page
    assert (tmp_path / "images" / "lab_mini_tiny.png").exists()
    assert "- Tried: three seeds.\n" in page
    assert "\n2 runs, " in page and "Cut short" not in page
    backwards = {"mini": (selection, [*results.records.values()][::-1], {})}
    assert write_page(tmp_path / "lab.md", backwards).read_text() == page  # configurations in the experiment's order


def test_the_page_of_a_suite_cut_short_judges_only_what_ran(tmp_path: Path) -> None:
    from experiments.lab_page import write_page

    records = list(finished(tmp_path).records.values())
    other = replace(EXPERIMENT, name="other", seeds=(0, 1))
    unjudged = replace(
        claim(0.0),
        name="other",
        statement="It learns more.",
        experiments=(other,),
        judge=lambda scores: [scores.at_least("other", "kda", 9, 0.0)],
    )
    selection = Selection((EXPERIMENT, other), (claim(0.0), unjudged))
    page = write_page(tmp_path / "lab.md", {"mini": (selection, records, {})}).read_text()
    assert "\n2 runs, " in page and "Missing runs by experiment: other (4).\n" in page
    assert "| [It learns.](#mini-tiny) | none | **pass** |" in page
    assert "| [It learns more.](#mini-other) | none | not run |" in page
    assert "It learns more. not run." in page and "**FAIL**" not in page

    one_more = replace(records[0], experiment="other")
    page = write_page(tmp_path / "lab.md", {"mini": (selection, [*records, one_more], {})}).read_text()
    assert "\n3 runs, " in page and "Missing runs by experiment: other (3 of 4).\n" in page


USERS_FILE = """
from dataclasses import replace
from experiments import Experiment, Recipe, register_experiment, register_task
from experiments.tasks.parity import Parity
from deltazoo.spec import get_rule, register_rule

class Odd(Parity):
    title = "the opposite of parity"

    def sample(self, batch_size, length, generator):
        batch = super().sample(batch_size, length, generator)
        return batch._replace(targets=1 - batch.targets)

odd = register_task(Odd(name="odd"))
register_rule(replace(get_rule("delta_net"), name="mine", hub_model_type=None))
recipe = Recipe(hidden_size=16, num_heads=2, head_dim=8, train_lengths=(3, 9), test=(9, 20), test_sequences=8, steps=3)
register_experiment(Experiment(name="odd", task=odd, recipe=recipe, configurations=("delta_net",), suites=("mini",)))
"""


@pytest.fixture
def users_file(tmp_path: Path):
    from deltazoo import spec
    from experiments import experiment, task

    path = tmp_path / "users_task.py"
    path.write_text(USERS_FILE)
    yield path
    task._TASKS.pop("odd", None)
    spec._REGISTRY.pop("mine", None)
    experiment._EXPERIMENTS.pop("odd", None)


def test_a_users_task_and_rule_from_one_file(users_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        main(["lab", "--load", str(users_file), "--only", "odd", "--out", str(out), "--no-measure", "--workers", "1"])
    assert stop.value.code == 0
    assert {r.configuration for r in read_records(out / "results.jsonl")} == {"delta_net", "mine"}
    page = (out / "lab.md").read_text()
    assert "the opposite of parity" in page and "| mine |" in page


FAULTY_FILE = """
from experiments import runner, register_task
from experiments.tasks.parity import Parity

class Faulty(Parity):
    def sample(self, batch_size, length, generator):
        runner.device_is_lost = lambda device: True  # as after a fault in a kernel
        raise RuntimeError("illegal address")

faulty = register_task(Faulty(name="faulty"))
"""


def test_a_worker_without_its_gpu_costs_one_run(tmp_path: Path) -> None:
    from deltazoo.cli.rule_files import load_rule_file
    from experiments import task

    path = tmp_path / "faulty_task.py"
    path.write_text(FAULTY_FILE)
    load_rule_file(path)
    try:
        longer = replace(RECIPE, steps=RECIPE.steps + 1)  # longest first
        bad = Experiment(name="bad", task=get_task("faulty"), recipe=longer, configurations=("delta_net",))
        results = ResultFile(tmp_path / "results.jsonl", "mini", HERE)
        with pytest.raises(RuntimeError, match="^bad delta_net .* illegal address$"):
            run_suite([bad, EXPERIMENT], [], results, Plan(workers=1, load=(path,)), report=lambda line: None)
        assert {r.experiment for r in results.records.values()} == {"tiny"} and len(results.records) == 2
    finally:
        task._TASKS.pop("faulty", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "partiy"], "did you mean 'parity'"),
        (["--rules", "gdn"], "unknown rule 'gdn'"),
        (["--suite", "huge"], "unknown suite 'huge'"),
        (["--load", "nowhere.py"], "to load"),
        (["--device", "cuda"], "sees no NVIDIA GPU"),
    ],
)
def test_bad_input_on_the_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit) as stop:
        main(["lab", *arguments])
    assert stop.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_rounding_gate_is_what_rounded_operands_give() -> None:
    """The chunk form without decay in float64, with the operands of its products and the output rounded, or exact."""
    torch.manual_seed(0)
    q, k = (l2_normalize(torch.randn(1024, 64)).bfloat16().double() for _ in range(2))
    v, beta = torch.randn(1024, 64).bfloat16().double(), torch.rand(1024).double()

    def half(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().double()

    def outputs(rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        state, found = torch.zeros(64, 64, dtype=torch.float64), []
        for Q, K, V, b in zip(*(x.split(64) for x in (q, k, v, beta)), strict=True):
            A = torch.tril(b[:, None] * (K @ K.T), -1)
            T = rounded(torch.linalg.inv(torch.eye(64, dtype=torch.float64) + A) * b)
            S = rounded(state)
            U = rounded(T @ rounded(V - K @ S))
            found.append(Q @ S + rounded(torch.tril(Q @ K.T)) @ U)
            state = state + K.T @ U
        return torch.cat(found)

    exact = outputs(lambda x: x)
    once, everywhere = ((x - exact).norm() for x in (half(exact), half(outputs(half))))
    assert 2.5 < everywhere / once < ROUNDED_FORM


def test_the_gate_of_repeated_keys_is_the_rounding_of_a_keys_squared_length() -> None:
    """One key, step size 2, float32: the product k k^T in float32 and all else in float64 gives its error."""
    torch.manual_seed(0)
    heads, dim, chunk = 4, 128, 64
    key = l2_normalize(torch.randn(heads, 1, dim))
    steps = bounded_step(torch.full((1, 1, heads), 2.0), key.transpose(0, 1)[None])
    beta = steps[0, 0, :, None, None].double()

    def outputs(product: torch.Tensor) -> torch.Tensor:
        """Of the chunk form in float64, `product` standing for k k^T."""
        K = key.double().expand(-1, chunk, -1)
        A = torch.linalg.inv(torch.eye(chunk, dtype=torch.float64) + (beta * product.double()).tril(-1)) * beta
        state, found = torch.zeros(heads, dim, dim, dtype=torch.float64), []
        for Q, V in zip(q.double().split(chunk, 1), v.double().split(chunk, 1), strict=True):
            U = A @ (V - K @ state)
            found.append(Q @ state + (Q @ K.mT).tril() @ U)
            state = state + K.mT @ U
        return torch.cat(found, 1)

    repeated = key.expand(-1, chunk, -1).contiguous()
    errors = {}
    for tokens in (1024, 2048):
        q, v = l2_normalize(torch.randn(heads, tokens, dim)), torch.randn(heads, tokens, dim)
        exact = outputs(repeated.double() @ repeated.double().mT)
        Q, K, V = (x.transpose(0, 1)[None] for x in (q, key.expand(-1, tokens, -1), v))
        whole = delta_rule(Q, K, V, steps.expand(-1, tokens, -1), scale=1.0, backend="chunkwise").output
        whole = whole[0].transpose(0, 1).double()
        alone, of_all = (float((x - exact).norm() / exact.norm()) for x in (outputs(repeated @ repeated.mT), whole))
        assert alone == pytest.approx(of_all, rel=0.1)
        errors[tokens] = of_all
        assert errors[tokens] < bound_of({"dtype": "float32", "beta": 2.0, "who": "chunkwise"}, tokens, dim)
        # The gate's arithmetic: the rounding of 2 k k^T, times T / sqrt(6).
        off = 2 * ((repeated @ repeated.mT).double() - repeated.double() @ repeated.double().mT).mean((1, 2))
        assert alone == pytest.approx(float(off.square().mean().sqrt()) * tokens / 6**0.5, rel=0.3)
    assert errors[2048] == pytest.approx(2 * errors[1024], rel=0.3)
