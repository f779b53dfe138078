"""Train a small Llama on Python's standard library, swap its attention, convert it with a tenth of the tokens, compare.

    python scripts/convert_standard_library.py --preset cpu             # two CPU cores
    python scripts/convert_standard_library.py --preset gpu --jobs 4    # one large GPU, four conversions at a time
    python scripts/convert_standard_library.py --preset cpu --rules kda --shares all

Nothing is downloaded. For every rule and share of layers, the script measures:

* held-out bits per byte after transfer, after each stage of the conversion, and of the same hybrid trained from scratch
  on as many tokens;
* copying of passages and recall of pairs of tokens, before and after;
* the effect of the stages that train the whole model on the original, so that gains from more training on the text are
  not credited to the swap.

All results go into one JSON file. A finished conversion is not run again, and an interrupted one resumes from its
latest checkpoint.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

from benchmarks.provenance import describe_run
from benchmarks.result_files import write_results
from deltazoo.swap import swap_attention
from deltazoo.training.config import TokenizerConfig
from deltazoo.training.conversion import ConversionText, convert, read_stage, run_stage, stage_as_run
from deltazoo.training.conversion_config import STAGES, FineTuningConfig, load_conversion
from deltazoo.training.corpus import read_corpus
from deltazoo.training.layer_ranking import rank_layers
from deltazoo.training.packed_rows import spread
from deltazoo.training.recall_probes import cut_passages, probe_copying, probe_recall
from deltazoo.training.run_folder import has_saved
from deltazoo.training.text import open_text
from deltazoo.training.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHARE_OF_TOKENS = 0.1
console = Console(stderr=True)


@dataclass(frozen=True)
class Preset:
    """Sizes of one run of the experiment.

    Attributes:
        llama: keys of ``LlamaConfig``.
        vocab_size: of the tokenizer, trained on the text.
        teacher: how the Llama is trained; the hybrid from scratch has its settings.
        scratch_rows: rows per batch of the hybrid from scratch, fewer than the teacher's for more steps.
        rules: the rules, unless others are named.
        pairs: numbers of pairs of the recall probe.
        passages: lengths of the passages of the copying probe.
        threads: of torch on a CPU.
    """

    llama: dict[str, int]
    vocab_size: int
    teacher: FineTuningConfig
    scratch_rows: int
    rules: tuple[str, ...]
    pairs: tuple[int, ...]
    passages: tuple[int, ...]
    threads: int | None = None


PRESETS = {
    "cpu": Preset(
        llama={"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 256},
        vocab_size=512,
        teacher=FineTuningConfig(
            steps=1000, row_length=256, rows_per_batch=4, learning_rate=4e-3, schedule="linear", warmup=0.05,
            log_every=25, evaluate_every=250, evaluation_rows=32, save_every=500, keep_checkpoints=1,
        ),
        scratch_rows=2,
        rules=("gated_deltanet", "delta_net"),
        pairs=(2, 4, 8, 16),
        passages=(16, 32, 64),
        threads=1,
    ),
    # 13 million tokens, four times the text: more would overfit. 52 M parameters.
    "gpu": Preset(
        llama={"hidden_size": 640, "num_hidden_layers": 10, "num_attention_heads": 5, "intermediate_size": 1728},
        vocab_size=4096,
        teacher=FineTuningConfig(
            steps=400, row_length=1024, rows_per_batch=32, learning_rate=1.5e-3, schedule="linear", warmup=0.1,
            log_every=10, evaluate_every=100, evaluation_rows=64, save_every=200, keep_checkpoints=1,
        ),
        scratch_rows=8,
        rules=("delta_net", "gated_deltanet", "kda", "efla"),
        pairs=(4, 16, 64, 128),
        passages=(32, 128, 448),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True)
    parser.add_argument("--rules", nargs="+", help="instead of the preset's")
    parser.add_argument("--shares", nargs="+", choices=["half", "all"], default=["half", "all"])
    parser.add_argument("--set", action="append", default=[], help="section.key=value of the conversion, repeatable")
    parser.add_argument("--folder", type=Path, help="of the runs; default runs/swap_PRESET")
    parser.add_argument("--jobs", type=int, default=1, help="conversions at a time, each in a process of its own")
    parser.add_argument("--conversions-only", action="store_true", help="leave out the JSON file")
    parser.add_argument("--json", type=Path, help="the result; default benchmarks/results/swap_PRESET.json")
    parser.add_argument("--commit", help="commit to record; read from git unless given")
    arguments = parser.parse_args()
    preset = PRESETS[arguments.preset]
    if preset.threads and not torch.cuda.is_available():
        torch.set_num_threads(preset.threads)
    experiment = Experiment(preset, arguments.folder or Path("runs") / f"swap_{arguments.preset}", arguments)
    rules = arguments.rules or preset.rules
    result = arguments.json or ROOT / "benchmarks" / "results" / f"swap_{arguments.preset}.json"

    record: dict[str, Any] = {
        "teacher": experiment.teacher(),
        "conversion": experiment.config.to_dict() | {"output": None},
        "arms": [],
    }
    conversions = [(rule, share) for rule in rules for share in arguments.shares]
    if arguments.jobs > 1:
        run_in_processes(conversions, experiment.folder, arguments)
    for rule, share in conversions:
        console.rule(f"{rule}, {share}")
        record["arms"].append(experiment.conversion(rule, share))
    if arguments.conversions_only:
        return
    record["teacher"]["further"] = experiment.further_bits_per_byte()
    command = ["--preset", arguments.preset, "--rules", *rules, "--shares", *arguments.shares]
    command += [part for override in arguments.set for part in ("--set", override)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = describe_run(device=device, commit=arguments.commit, command=command)
    write_results(result, about, preset=arguments.preset, **record)
    console.print(f"wrote {result}; next: python scripts/render_swap.py")


def run_in_processes(conversions: Sequence[tuple[str, str]], folder: Path, arguments: argparse.Namespace) -> None:
    """Run every conversion in its own process, `jobs` at a time; each writes its output to a log file in `folder`."""
    common = [sys.executable, __file__, "--preset", arguments.preset, "--folder", str(folder), "--conversions-only"]
    common += [part for override in arguments.set for part in ("--set", override)]

    def run(conversion: tuple[str, str]) -> None:
        rule, share = conversion
        with open(folder / f"{rule}_{share}.log", "w", encoding="utf-8") as log:
            command = [*common, "--rules", rule, "--shares", share]
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode:
                raise SystemExit(f"the conversion to {rule}, {share}, failed: see {log.name}")
        console.print(f"converted: {rule}, {share}", highlight=False)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for _ in pool.map(run, conversions):
            pass


class Experiment:
    """A teacher and its conversions, each in a subfolder."""

    def __init__(self, preset: Preset, folder: Path, arguments: argparse.Namespace) -> None:
        self.preset, self.folder = preset, folder
        self.config = load_conversion(ROOT / "configs" / f"swap_{arguments.preset}.yaml", arguments.set)
        self.tokens = sum(stage_tokens(stage) for stage in self.config.stages)
        allowed = SHARE_OF_TOKENS * stage_tokens(preset.teacher)
        if self.tokens > allowed:
            raise SystemExit(
                f"the conversion reads {self.tokens:,} tokens, more than a tenth of the training: {allowed:,.0f}"
            )
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = folder / "tokenizer"
        if not tokenizer.is_dir():
            corpus = read_corpus(open_text(self.config.data), self.config.data)
            build_tokenizer(TokenizerConfig(vocab_size=preset.vocab_size), corpus.train).save_pretrained(tokenizer)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.text = ConversionText(self.config.data, self.tokenizer)

    def new_llama(self) -> LlamaForCausalLM:
        set_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(self.tokenizer),
                max_position_embeddings=self.preset.teacher.row_length,
                tie_word_embeddings=True,
                bos_token_id=self.tokenizer.bos_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
                **self.preset.llama,
            )
        )

    def load(self, path: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(path).to(self.device)

    @property
    def teacher_path(self) -> Path:
        return self.folder / "teacher" / "model"

    def teacher(self) -> dict[str, Any]:
        """Train the teacher unless that is done; its sizes and scores."""
        self.train_on_text(self.new_llama(), self.folder / "teacher", self.preset.teacher, "softmax")
        model = self.load(self.teacher_path)
        stage = read_stage(self.folder / "teacher")
        return {
            "parameters": model.num_parameters(),
            "llama": self.preset.llama,
            "text": self.text.corpus.description,
            "bytes_per_token": self.text.bytes_per_token,
            "tokens": stage.tokens,
            "seconds": stage.seconds,
            "tokens_per_second": stage.tokens_per_second,
            "device": stage.device,
            "bits_per_byte": self.text.bits_per_byte(model, self.preset.teacher),
            "recall": self.recall(model),
        }

    def further_bits_per_byte(self) -> float | None:
        """Bits per byte of the teacher after the stages that train a whole model; None if the recipe has none.

        Nothing is swapped: a conversion that ends up better than the teacher owes that to this training.
        """
        stages = [stage for stage in self.config.stages if stage.trains == "all"]
        model, original = self.load(self.teacher_path), self.load(self.teacher_path)
        for stage in stages:
            run = stage_as_run(stage, "softmax", self.config, self.folder / "teacher_further")
            if not (Path(run.output) / "result.json").is_file():
                run_stage(model, self.text, stage, run, original)
            model = self.load(Path(run.output) / "model")
        return self.text.bits_per_byte(model, self.preset.teacher) if stages else None

    def train_on_text(self, model: Any, folder: Path, stage: FineTuningConfig, mixer: str) -> None:
        """Train from scratch, or resume, unless that is done."""
        if not (folder / "result.json").is_file():
            run = stage.as_run(folder, mixer, folder / "model", self.config.data, seed=self.config.seed)
            run_stage(model, self.text, stage, run)

    def layers(self, rule: str, share: str) -> tuple[list[int], list[dict[str, Any]]]:
        """All layers, or the half whose swap adds least to the loss; and the ranking for the half."""
        num_layers = self.preset.llama["num_hidden_layers"]
        if share == "all":
            return list(range(num_layers)), []
        rows = spread(self.text.validation_rows(self.preset.teacher.row_length), self.preset.teacher.evaluation_rows)
        ranking = rank_layers(self.load(self.teacher_path), rule, rows, rows_at_once=self.preset.teacher.rows_per_batch)
        return ranking.best(num_layers // 2), [asdict(score) for score in ranking.layers]

    def conversion(self, rule: str, share: str) -> dict[str, Any]:
        """One conversion, and the same hybrid trained from scratch."""
        folder = self.folder / f"{rule}_{share}"
        done = folder / "arm.json"  # the name in the folders of earlier versions
        if done.is_file():
            return json.loads(done.read_text(encoding="utf-8"))
        began = time.perf_counter(), time.process_time()
        layers, ranking = self.layers(rule, share)
        model = self.load(self.teacher_path)
        report = swap_attention(model, rule, layers=layers, keep_teacher=True)
        recall = {"transfer": self.recall(model)}
        config = replace(self.config, output=str(folder / "conversion"))
        found = convert(model, self.tokenizer, config, resume=has_saved(Path(config.output), STAGES), text=self.text)
        recall["converted"] = self.recall(self.load(found.model_path))

        stage = self.preset.teacher
        scratch = replace(stage, rows_per_batch=self.preset.scratch_rows)
        scratch = replace(scratch, steps=self.tokens // tokens_per_step(scratch))
        model = self.new_llama()
        swap_attention(model, rule, layers=layers, init="random")
        self.train_on_text(model, folder / "scratch", scratch, rule)
        model = self.load(folder / "scratch" / "model")
        values = {
            "rule": rule,
            "share": share,
            "layers": layers,
            "ranking": ranking,
            "parameters": report.parameters_after,
            "tokens": self.tokens,
            "scores": {**found.scores, "scratch": self.text.bits_per_byte(model, stage)},
            "recall": {**recall, "scratch": self.recall(model)},
            "stages": {name: asdict(stage) for name, stage in found.stages.items()},
            "seconds": time.perf_counter() - began[0],
            "processor_seconds": time.process_time() - began[1],
        }
        done.write_text(json.dumps(values, indent=1), encoding="utf-8")
        for checkpoint in folder.rglob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        return values

    def recall(self, model: Any) -> dict[str, list[dict[str, Any]]]:
        model = model.to(self.device)
        passages = [cut_passages(self.text.validation, length, 32) for length in self.preset.passages]
        return {
            "copying": [asdict(probe_copying(model, shown)) for shown in passages],
            "pairs": [asdict(probe_recall(model, pairs, sequences=64)) for pairs in self.preset.pairs],
        }


def tokens_per_step(stage: Any) -> int:
    return stage.rows_of_a_step * stage.row_length


def stage_tokens(stage: Any) -> int:
    return stage.steps * tokens_per_step(stage)


if __name__ == "__main__":
    main()
