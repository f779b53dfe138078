"""Running prompts piece by piece, some in each pass, and keeping the states after the pieces."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from deltazoo.generation.prompt_rows import PromptRows
from deltazoo.serving.prefix_cache import PrefixCache
from deltazoo.serving.serving_task import ServingTask

__all__ = ["Prefill"]


class Prefill:
    """The prompts that are being run.

    Args:
        prompts: rows in which they run.
        prefixes: where states after pieces are kept.

    Attributes:
        tasks: of the prompts, oldest first.
    """

    def __init__(self, prompts: PromptRows, prefixes: PrefixCache) -> None:
        self.prompts = prompts
        self.prefixes = prefixes
        self.tasks: list[ServingTask] = []
        self._loaded: dict[ServingTask, int] = {}
        """The row that has the state of a task."""
        self._turns = itertools.count()

    def add(self, task: ServingTask) -> None:
        """Begin with a prompt, behind what the prefix cache knows of it."""
        self._skip_known(task)
        self.tasks.append(task)

    def finished(self) -> Iterator[ServingTask]:
        """The tasks whose prompts have been run; they are no longer here."""
        for task in [task for task in self.tasks if task.done == len(task.to_run)]:
            self.tasks.remove(task)
            yield task

    def next_tasks(self) -> list[ServingTask]:
        """Those of the next pass: in turn, the oldest and those with the fewest tokens left come first.

        So a short prompt does not wait for a long one, and a long one is not overtaken for ever. Of several whose next
        piece is the same, one runs it, and the others find the state.
        """
        tasks = [task for task in self.tasks if task.done < len(task.to_run)]
        if tasks and next(self._turns) % 2:
            tasks.sort(key=lambda task: len(task.to_run) - task.done)
        chosen: dict[bytes, ServingTask] = {}
        for task in tasks:
            self._skip_known(task)
            if task.done < len(task.to_run):
                chosen.setdefault(task.keys[self._next_end(task)], task)
            if len(chosen) == self.prompts.sizes[-1]:
                break
        return [*chosen.values()][: self.prompts.best_count(len(chosen))]

    def _next_end(self, task: ServingTask) -> int:
        return min(task.done + self.prompts.piece, len(task.to_run))

    def _skip_known(self, task: ServingTask) -> None:
        """Go on from a state in the prefix cache, if there is one further on."""
        done, state = self.prefixes.find(task.keys)
        if done > task.done:
            task.cached += done - task.done
            task.done, task.state = done, state
            self._loaded.pop(task, None)

    def run(self, tasks: Sequence[ServingTask]) -> Callable[[], None]:
        """One pass over the next piece of each of these prompts; the result waits until the device has done it."""
        loaded, self._loaded = self._loaded, {}  # nothing, if the pass fails
        size = self.prompts.size_for(len(tasks))
        rows = {task: loaded[task] for task in tasks if loaded.get(task, size) < size}
        free = iter(sorted({*range(size)} - {*rows.values()}))
        for task in tasks:
            if task not in rows:
                rows[task] = next(free)
                self.prompts.load(rows[task], task.state)
        wait = self.prompts.run(
            {row: (task.done, task.to_run[task.done : self._next_end(task)]) for task, row in rows.items()}
        )
        for task, row in rows.items():
            task.done = self._next_end(task)
            task.state = self.prompts.take(row, task.done)
            self.prefixes.put(task.keys[task.done], task.state)
        self._loaded = rows
        return wait
