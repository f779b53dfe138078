"""The lab: what the papers claim, tried on small models of every variant side by side.

A task (`task`) draws sequences with known answers. An arm (`arms`) is a variant with options. An experiment trains
several arms on one task with one recipe; a claim puts a gate on experiments. The runner keeps one JSON line per arm,
and the page is made from those lines alone.

A file that registers a task, an experiment or a variant and is named with `deltazoo lab --load FILE` takes part in
everything.
"""

from deltazoo.workbench.lab import tasks as tasks  # importing it registers the tasks
from deltazoo.workbench.lab.arms import parse_arm
from deltazoo.workbench.lab.claims import Check, Claim, Scores
from deltazoo.workbench.lab.experiment import Experiment, register_experiment
from deltazoo.workbench.lab.recipe import Recipe
from deltazoo.workbench.lab.task import IGNORED, Batch, Task, get_task, list_tasks, register_task
from deltazoo.workbench.lab.train import run_arm

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
    "parse_arm",
    "register_experiment",
    "register_task",
    "run_arm",
]
