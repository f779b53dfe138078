"""The lab: what the papers claim, tried on small models of every rule side by side.

A task (`task`) draws sequences with known answers. A configuration (`configurations`) is a rule with options. An
experiment trains several configurations on one task with one recipe; a claim puts a gate on experiments. The runner
writes one JSON line per run, and the page is made from those lines alone.

A file that registers a task, an experiment or a rule and is named with `deltazoo lab --load FILE` takes part in
everything.
"""

from experiments import tasks as tasks  # importing it registers the tasks
from experiments.claims import Check, Claim, Scores
from experiments.configurations import parse_configuration
from experiments.experiment import Experiment, register_experiment
from experiments.fitting import run_configuration
from experiments.recipe import Recipe
from experiments.task import IGNORED, Batch, Task, get_task, list_tasks, register_task

__all__ = [
    "IGNORED",
    "Batch",
    "Check",
    "Claim",
    "Experiment",
    "Recipe",
    "Scores",
    "Task",
    "get_task",
    "list_tasks",
    "parse_configuration",
    "register_experiment",
    "register_task",
    "run_configuration",
]
