"""Train a small Gated DeltaNet on this Python's standard library, reload it in a new process, sample, compare.

``make quickstart`` runs this. A finished run is not trained again; ``--fresh`` trains anew.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax

from deltazoo.training.folder import has_saved

ROOT = Path(__file__).resolve().parents[1]
console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="train anew even if there is a finished run")
    parser.add_argument("--output", default="runs/quickstart", help="folder of the run")
    parser.add_argument("--set", action="append", default=[], help="section.key=value, as for deltazoo train")
    arguments = parser.parse_args()
    run = Path(arguments.output)
    if arguments.fresh and (run / "config.yaml").is_file():
        shutil.rmtree(run)

    overrides = [part for override in arguments.set for part in ("--set", override)]
    resume = ["--resume"] if has_saved(run) else []
    deltazoo("train", "--text", "python_stdlib", "--output", str(run), *resume, *overrides)
    sampling = sample_in_new_process(run / "model")  # beside the evaluation: both wait for imports on one core
    deltazoo("eval", str(run), "--json", str(run / "score.json"))
    show_sample(sampling)
    return report(run, json.loads((run / "score.json").read_text(encoding="utf-8")))


def deltazoo(*arguments: str) -> None:
    """Run a deltazoo command as a user would; its output goes to this terminal."""
    console.print(f"\n[bold]$ deltazoo {' '.join(arguments)}[/]", highlight=False)
    ended = subprocess.run([sys.executable, "-m", "deltazoo", *arguments], env=environment())
    if ended.returncode:
        sys.exit(ended.returncode)


def environment() -> dict[str, str]:
    """Environment of the commands.

    Waiting threads soon sleep in it; by default they spin, and slow each other down on busy cores. And Python keeps the
    modules that it compiles, which takes eight seconds in each of three processes otherwise.
    """
    return {"GOMP_SPINCOUNT": "1000", **os.environ, "PYTHONDONTWRITEBYTECODE": ""}


def sample_in_new_process(model: Path) -> subprocess.Popen[str]:
    """A new process that loads the model from its folder with AutoModelForCausalLM.from_pretrained, and samples."""
    command = [sys.executable, str(ROOT / "scripts" / "sample.py"), str(model)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=environment()
    )


def show_sample(process: subprocess.Popen[str]) -> None:
    """Wait for the process, and show its text."""
    text, error = process.communicate()
    if process.returncode:
        sys.exit(f"loading and sampling in a new process failed:\n{error}")
    console.print(f"\n[bold]$ {' '.join(['python', 'scripts/sample.py', *process.args[2:]])}[/]", highlight=False)
    console.print(
        Panel(Syntax(text.rstrip("\n"), "python", background_color="default"), title="sample from a new process")
    )


def report(run: Path, figures: dict) -> int:
    """Print whether it worked and what to do next; returns the exit status."""
    training = json.loads((run / "result.json").read_text(encoding="utf-8"))
    baselines = {baseline["name"]: baseline["bits_per_byte"] for baseline in figures["baselines"]}
    goal = "xz -9"
    margin = baselines[goal] - figures["bits_per_byte"]
    curve = run / "loss.png"  # drawn where matplotlib is installed
    console.print(
        f"trained {training['seconds']:,.0f} s at {training['tokens_per_second']:,.0f} tokens/s in "
        f"{training['precision']} on {training['device']}" + (f"\nloss curve: {curve}" if curve.is_file() else ""),
        highlight=False,
    )
    if margin <= 0:
        console.print(f"[bold red]It did not work:[/] the model needs {-margin:.3f} bits per byte more than {goal}.")
        return 1
    console.print(f"[bold green]It worked:[/] the model needs {margin:.3f} bits per byte less than {goal}.\n")
    console.print("What next?", style="bold")
    size = "cpu" if training["device"].startswith("CPU") else "gpu"
    for command in (
        f'deltazoo generate {run} --prompt "def main("',
        f"deltazoo eval {run} --primed   [dim]# lets xz read the training text first, as the model did[/]",
        "deltazoo list",
        f"deltazoo train quickstart_{size} --rule kda --output runs/kda",
        "deltazoo train --text FOLDER",
    ):
        console.print(f"  .venv/bin/{command}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
