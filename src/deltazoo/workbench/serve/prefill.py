"""Running prompts piece by piece, some in each pass, and keeping the states after the pieces."""

import itertools
from collections.abc import Iterator, Sequence

from deltazoo.generation.row_table import PromptRows
from deltazoo.workbench.serve.prefix_cache import PrefixCache
from deltazoo.workbench.serve.serving_task import ServingTask

__all__ = ["Prefill"]


class Prefill:
    """The prompts that are being run.

    Args:
        places: in which they run.
        prefixes: where states after pieces are kept.

    Attributes:
        tasks: theirs, oldest first.
    """

    def __init__(self, places: PromptRows, prefixes: PrefixCache) -> None:
        self.places = places
        self.prefixes = prefixes
        self.tasks: list[ServingTask] = []
        self._loaded: list[ServingTask | None] = [None] * places.rows
        """The task whose state is in each place."""
        self._turns = itertools.count()

    def add(self, task: ServingTask) -> None:
        """Begin with a prompt, behind what the prefix cache knows of it."""
        task.done, task.state = self.prefixes.find(task.keys)
        task.stream.cached_tokens = task.done
        self.tasks.append(task)

    def finished(self) -> Iterator[ServingTask]:
        """The tasks whose prompts have been run; they are no longer here."""
        for task in [task for task in self.tasks if task.done == len(task.to_run)]:
            self.tasks.remove(task)
            yield task

    def next_tasks(self) -> list[ServingTask]:
        """Those of the next pass: in turn, the oldest and those with the fewest tokens left come first.

        So a short prompt does not wait for a long one, and a long one is not overtaken for ever.
        """
        tasks = [task for task in self.tasks if task.done < len(task.to_run)]
        if tasks and next(self._turns) % 2:
            tasks.sort(key=lambda task: len(task.to_run) - task.done)
        return tasks[: self.places.rows]

    def run(self, tasks: Sequence[ServingTask]) -> None:
        """One pass over the next piece of each of these prompts."""
        loaded, self._loaded = self._loaded, [None] * self.places.rows  # nothing, if the pass fails
        loaded = [task if task in tasks else None for task in loaded]
        for task in tasks:
            if task not in loaded:
                row = loaded.index(None)
                self.places.load(row, task.state)
                loaded[row] = task
        rows = {task: loaded.index(task) for task in tasks}
        piece = self.places.piece
        self.places.run({row: (task.done, task.to_run[task.done : task.done + piece]) for task, row in rows.items()})
        for task, row in rows.items():
            task.done = min(task.done + piece, len(task.to_run))
            task.state = self.places.take(row, task.done)
            self.prefixes.put(task.keys[task.done], task.state)
        self._loaded = loaded
