"""Small models of the lab whose short convolutions start uniform, and normal with a standard deviation of 0.02.

    python scripts/compare_conv_starts.py overwrite
    python scripts/compare_conv_starts.py byte_text --device cuda

trains each rule below with both starts on a task of the lab, with the recipe of its suite (mini, family), and adds the
runs to benchmarks/results/conv_starts.json. Runs that the file has are not repeated.
"""

import argparse
import json
import platform
from dataclasses import replace
from pathlib import Path

import torch

from experiments.configurations import parse_configuration
from experiments.experiment import Experiment
from experiments.fitting import run_configuration
from experiments.suites.family import BYTES_FAMILY
from experiments.suites.mini import OVERWRITE_MINI

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "conv_starts.json"
RULES = (
    *("efla", "longhorn", "gated_efla", "gated_longhorn"),  # the length of keys counts
    *("delta_net", "gated_deltanet", "kda"),
    *("linear_attention", "mamba2_style"),
)


def with_both_starts(experiment: Experiment, rules: tuple[str, ...], seeds: tuple[int, ...]) -> Experiment:
    """The experiment for each rule with both starts."""
    names = tuple(f"{rule}{start}" for rule in rules for start in ("", "+normal-conv"))
    return replace(experiment, configurations=names, rates={}, seeds=seeds, spare_seeds=())


EXPERIMENTS = {
    "overwrite": with_both_starts(OVERWRITE_MINI, (*RULES, "kaczmarz"), (0, 1, 2)),
    "byte_text": with_both_starts(BYTES_FAMILY, (*RULES, "comba"), (0,)),
}


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    known = {(run["experiment"], run["configuration"], run["seed"]) for run in runs}
    on_gpu = arguments.device != "cpu"
    device = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, one thread"
    for run in EXPERIMENTS[arguments.experiment].runs():
        if (arguments.experiment, run.configuration, run.seed) in known:
            continue
        configuration = parse_configuration(run.configuration)
        outcome = run_configuration(run.task, configuration, run.recipe, seed=run.seed, device=arguments.device)
        runs.append(
            {
                "experiment": arguments.experiment,
                "configuration": run.configuration,
                "seed": run.seed,
                "steps": run.recipe.steps,
                "metric": run.task.metric,
                "scores": {
                    condition: round(score.bits if run.task.metric == "bits" else score.accuracy, 4)
                    for condition, score in outcome.scores.items()
                },
                "device": device,
                "torch": torch.__version__,
            }
        )
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
        print(runs[-1], flush=True)


if __name__ == "__main__":
    main()
