"""The whole-model benchmark on a model of a few thousand parameters: rows, files, the page, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.model_page import write_model_page
from command_line import invoke
from liger_kernels import needs_liger

from benchmarks import model_candidates, model_page, model_suite
from benchmarks.model_candidates import Size, candidates
from benchmarks.model_results import ModelResults, ModelRow
from benchmarks.model_training import OUR_WAYS, kind_of_work
from benchmarks.provenance import describe_run

ROOT = Path(__file__).resolve().parents[2]
TINY = Size(32, 2, 2, 16, 48, 61)
QUICK = ["model", "--device", "cpu", "--models", "gated_deltanet", "--steps", "1", "--new-tokens", "3"]
QUICK += ["--shapes", "2x16,1x32", "--batches", "1,2", "--contexts", "8,40"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of everything at a tiny size."""
    path = tmp_path_factory.mktemp("bench") / "model_tiny.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model_candidates.SIZES, "quickstart", TINY)
        outcome = invoke("bench", *QUICK, "--out", str(path))
    assert outcome.exit_code == 0, outcome.output
    assert "without fla: its kernels need a GPU" in outcome.output
    return path


def test_every_setting_has_a_number(result: Path) -> None:
    results = ModelResults.load([result])
    assert all(row.value is not None and row.value > 0 for row in results.rows.values())
    settings = {(row.library, row.measure, row.way, row.batch, row.tokens) for row in results.rows.values()}
    for library, loop in (("deltazoo", "loop"), ("transformers", "generate")):
        for batch, tokens in ((2, 16), (1, 32)):
            assert (library, "train_tok_s", "eager", batch, tokens) in settings
        for batch in (1, 2):
            assert (library, "decode_tok_s", loop, batch, 16) in settings
        for tokens in (8, 40):
            assert (library, "token_ms", loop, 1, tokens) in settings
        assert (library, "profile_ms", "eager", 2, 16) in settings
    assert ("deltazoo", "decode_tok_s", "generate-plain", 1, 16) in settings


def test_decoding_of_swapped_and_accelerated_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_candidates.SIZES, "quickstart", TINY)
    path = tmp_path / "model_others.json"
    options = ["--models", "none", "--peers", "swapped,qwen3-next", "--measure", "decode", "--batches", "1"]
    outcome = invoke("bench", *QUICK, *options, "--out", str(path))
    assert outcome.exit_code == 0, outcome.output
    rows = ModelResults.load([path]).rows.values()
    assert all(row.value is not None and row.value > 0 for row in rows)
    assert {(row.model, row.library, row.way) for row in rows} == {
        ("llama-swapped", "deltazoo", "generate"),
        ("llama-swapped", "deltazoo", "generate-plain"),
        ("llama-swapped", "deltazoo", "loop"),
        ("qwen3-next", "transformers", "generate"),
        ("qwen3-next", "accelerated", "generate"),
        ("qwen3-next", "accelerated", "loop"),
    }


def test_the_run_names_machine_versions_and_commit(result: Path) -> None:
    (run,) = ModelResults.load([result]).runs.values()
    assert run.torch == torch.__version__ and run.transformers and run.cpu and run.commit
    assert run.threads == torch.get_num_threads()
    assert run.missing_peers == {"fla": "its kernels need a GPU"}


def test_the_page_shows_every_number_and_draws_the_plots(result: Path, tmp_path: Path) -> None:
    written = write_model_page(ModelResults.load([result]), tmp_path / "docs" / "page.md", tmp_path / "docs" / "plots")
    page = written[0].read_text()
    for heading in (
        "### Training",
        "### Decoding against the batch",
        "### One more token",
        "### Where a training step",
    ):
        assert heading in page
    assert "| 1 x 40 | gated_deltanet (deltazoo) | loop | float32 |" in page
    assert {path.stem for path in written[1:]} == {"train_tok_s", "decode_tok_s", "token_ms", "profile"}
    for path in written[1:]:
        assert path.stat().st_size > 1000 and path.relative_to(tmp_path / "docs").as_posix() in page


def test_a_line_joins_steps_of_as_many_tokens_and_names_an_older_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(describe_run(device="cpu", commit="0123456789", command=[]), id="new", date="2099-01-02T00:00:00")
    old = replace(run, id="old", commit="abcdefghij", date="2099-01-01T00:00:00")
    results = ModelResults({"new": run, "old": old})
    row = ModelRow("tiny", "kda", "deltazoo", "eager", "float32", 8, 16, measure="train_tok_s", value=3.0, run="new")
    for settings in ({}, {"batch": 4, "tokens": 32}, {"tokens": 64}, {"way": "compile", "run": "old"}):
        results.add(replace(row, **settings))
    drawn: list[dict[tuple[str, str], list[tuple[int, float]]]] = []
    monkeypatch.setattr(model_page, "draw_lines", lambda path, lines, *labels, **options: drawn.append(lines))
    write_model_page(results, tmp_path / "page.md", tmp_path / "plots")
    assert drawn[0] == {
        ("kda (deltazoo)", "eager, steps of 128"): [(16, 3.0), (32, 3.0)],
        ("kda (deltazoo)", "eager, steps of 512"): [(64, 3.0)],
        ("kda (deltazoo)", "compile, steps of 128, run a"): [(16, 3.0)],
    }


def test_a_later_run_replaces_the_same_settings(result: Path, tmp_path: Path) -> None:
    content = json.loads(result.read_text())
    content["runs"][0] |= {"id": "later", "date": "2099-01-01T00:00:00"}
    content["rows"] = [content["rows"][0] | {"value": 123.0, "run": "later"}]
    later = tmp_path / "model_later.json"
    later.write_text(json.dumps(content))
    for order in ([result, later], [later, result]):
        merged = ModelResults.load(order)
        assert len(merged.rows) == len(ModelResults.load([result]).rows)
        assert [row.value for row in merged.rows.values() if row.run == "later"] == [123.0]


def test_a_failure_is_a_row_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA out of memory\nand much more")

    monkeypatch.setitem(model_candidates.SIZES, "quickstart", TINY)
    monkeypatch.setattr(model_suite, "training_rows", failing)
    path = tmp_path / "model_x.json"
    outcome = invoke("bench", *QUICK, "--measure", "train,decode", "--peers", "none", "--out", str(path))
    assert outcome.exit_code == 1 and "2 of them failures" in outcome.output
    results = ModelResults.load([path])
    assert [row.error for row in results.of("train_tok_s")] == ["RuntimeError: CUDA out of memory"] * 2
    assert all(row.value for row in results.of("decode_tok_s"))
    page = write_model_page(results, tmp_path / "page.md", tmp_path / "plots")[0].read_text()
    assert "fails: RuntimeError: CUDA out of memory" in page


def test_recompute_levels_and_a_fused_loss_keep_less_and_ligers_kernels_need_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model_candidates.SIZES, "quickstart", TINY)
    path = tmp_path / "model_x.json"
    ways = "eager,recompute-elementwise,recompute-block,fused-loss,no-options,plain,fast"
    shape = ["--shapes", "4x128"]  # with fewer tokens the gradients that the fused loss keeps outweigh logits
    arguments = ["--measure", "memory", *shape, "--training", ways, "--peers", "llama", "--out", str(path)]
    assert invoke("bench", *QUICK, *arguments).exit_code == 1, "of the way fast, which needs a GPU"
    ours = {row.way: row for row in ModelResults.load([path]).of("kept_kib") if row.library == "deltazoo"}
    kept = [ours[way].value for way in ways.split(",")[:3]]
    assert kept[0] > kept[1] > kept[2] > 0
    assert ours["fused-loss"].value == kept[0] < ours["no-options"].value
    assert ours["plain"].value == ours["no-options"].value  # there are no kernels on a CPU
    assert ours["fast"].error.startswith("NotImplementedError: Liger's kernels run on GPUs, not on cpu")
    assert [row.way for row in ModelResults.load([path]).of("kept_kib") if row.library == "transformers"] == ["eager"]


def test_several_dtypes_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_candidates.SIZES, "quickstart", TINY)
    path, ways = tmp_path / "model_x.json", ["no-options", "eager"]
    options = ["--training", ",".join(ways), "--dtype", "float32,autocast", "--peers", "none", "--out", str(path)]
    outcome = invoke("bench", *QUICK, "--measure", "train", *options)
    assert outcome.exit_code == 0, outcome.output
    results = ModelResults.load([path])
    rows = {(row.way, row.dtype) for row in results.of("train_tok_s") if row.value}
    assert rows == {(way, dtype) for way in ways for dtype in ("float32", "autocast")} and len(results.runs) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "gated_deltanett"], "unknown mixer 'gated_deltanett'"),
        (["--peers", "gpt"], "unknown peer 'gpt'"),
        (["--size", "huge"], "unknown size 'huge'"),
        (["--shapes", "8"], "reads ROWSxTOKENS, such as 8x4096; got '8'"),
        (["--batches", "0"], "batches must be whole numbers above 0"),
        (["--measure", "speed"], "unknown measure 'speed'"),
        (["--training", "quick"], "unknown way to train 'quick'"),
        (["--decoding", "fast"], "unknown way to decode 'fast'"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--dtype", "autocast"], "autocast is for training: measure train, memory or profile with it"),
    ],
)
def test_bad_input_is_one_line_and_status_1(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    outcome = invoke("bench", *QUICK, "--out", str(tmp_path / "x.json"), *arguments)
    assert outcome.exit_code == 1
    assert complaint in outcome.output and "Traceback" not in outcome.output
    assert not (tmp_path / "x.json").exists()


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    outcome = invoke("bench", *QUICK, "--out", str(path))
    assert outcome.exit_code == 1 and "is not a result of `deltazoo bench model`" in outcome.output
    assert path.read_text() == "{}"


def test_unknown_measures_and_runs_are_refused() -> None:
    results = ModelResults({"one": replace(describe_run(device="cpu", commit="x", command=[]), id="one")})
    row = ModelRow("tiny", "kda", "deltazoo", "eager", "float32", 1, 2, measure="train_tok_s", value=3.0, run="one")
    with pytest.raises(ValueError, match="unknown measure 'speed'"):
        results.add(replace(row, measure="speed"))
    with pytest.raises(KeyError, match="run 'two'"):
        results.add(replace(row, run="two"))


def test_candidates_have_the_same_number_of_layers_and_widths() -> None:
    taking_part, _ = candidates(TINY, ["kda"], ["llama"], "cpu")
    ours, llama = (candidate.build() for candidate in taking_part)
    assert ours.config.intermediate_size == llama.config.intermediate_size == 48
    assert ours.config.num_hidden_layers == llama.config.num_hidden_layers == 2
    assert [c.library for c in taking_part] == ["deltazoo", "transformers"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("deltazoo::chunkwise", "delta rule"),
        ("multi_tensor_apply_kernel<FusedAdam>", "optimizer"),
        ("aten::_log_softmax", "loss"),
        ("liger_cross_entropy_kernel", "loss"),
        ("flash_fwd_kernel", "softmax attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>", "softmax attention"),
        ("aten::mul", "elementwise and other"),
        ("_fused_add_rms_norm_forward_kernel", "norms"),
        ("_swiglu_backward_kernel", "elementwise and other"),
    ],
)
def test_kinds_of_work(name: str, kind: str) -> None:
    assert kind_of_work(name) == kind


def test_the_committed_page_is_what_the_script_renders(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "render_model_speed.py")]
    page = tmp_path / "docs" / "model_speed.md"
    plots = tmp_path / "docs" / "images" / "model_speed"
    subprocess.run([*script, "--page", str(page), "--plots", str(plots)], check=True, capture_output=True)
    assert page.read_text() == (ROOT / "docs" / "model_speed.md").read_text()


@pytest.mark.gpu
def test_on_a_gpu_memory_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_candidates.SIZES, "quickstart", TINY)
    path = tmp_path / "model_gpu.json"
    arguments = [*QUICK, "--device", "cuda", "--size", "quickstart", "--peers", "llama", "--out", str(path)]
    outcome = invoke("bench", *arguments)
    assert outcome.exit_code == 0, outcome.output
    results = ModelResults.load([path])
    assert all(row.value for row in [*results.of("train_peak_gib"), *results.of("context_peak_gib")])
    assert not [row.error for row in results.rows.values() if row.error]


@pytest.mark.gpu
@needs_liger
def test_on_a_gpu_every_way_to_train_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_candidates.SIZES, "quickstart", TINY)
    path, ways = tmp_path / "model_gpu.json", ["eager", *OUR_WAYS]
    arguments = ["--device", "cuda", "--size", "quickstart", "--measure", "train", "--training", ",".join(ways)]
    outcome = invoke("bench", *QUICK, *arguments, "--peers", "none", "--out", str(path))
    assert outcome.exit_code == 0, outcome.output
    rows = ModelResults.load([path]).of("train_tok_s")
    assert {row.way for row in rows} == set(ways) and not [row.error for row in rows if row.error]
