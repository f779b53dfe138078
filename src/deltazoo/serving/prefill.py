"""Prompts before they become rows of the table: they run piece by piece, and states after pieces are kept.

A state depends in its last bits on how the tokens before it were divided into forward passes. A prompt is divided at
multiples of the piece, and at its own end. So a prompt may start from a kept state

* at a multiple of the piece, which every prompt with these first tokens reaches by the same passes;
* at the end of a prompt, if its own end is there: the same prompt once more, for another sample.

Both give the bits of a run from the prompt's beginning. The state at the end of an answer is not kept: it was computed
token by token, and the next turn of the conversation must not depend on whether it is still kept. That turn finds the
state at the last multiple of the piece within the former prompt, and runs the former answer as a part of its own
prompt.
"""

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from deltazoo.generation import Sampling, Snapshot
from deltazoo.generation.row_table import PromptRows
from deltazoo.generation.sampling import Way
from deltazoo.serving.requests import Output, Request

Deliver = Callable[[Sequence[tuple[Any, Output]]], None]
"""A function that takes new outputs of requests, each with its key."""


@dataclass(eq=False)
class Task:
    """A request in the engine.

    Args:
        key: name of the request for `deliver`.
        request: the request, with a seed.
        deliver: function that takes its output.
        most: number of new tokens after which it ends.
        ends: tokens that end it.
        sampling: settings of its draws.
        keys: keys of the positions in its prompt at which the state can be kept or found (`prefix_keys`).

    Attributes:
        done: number of the prompt's tokens that passes have run; the first step takes the last token.
        cached: number of those that the prefix cache had.
        state: the state after them; None at the beginning, and once it is a row of the table.
        steps: number of steps that have been started with its row.
        made: number of tokens that have been handed out.
        ended: whether its last output has been handed out.
    """

    key: Any
    request: Request
    deliver: Deliver
    most: int
    ends: frozenset[int]
    sampling: Sampling
    keys: dict[int, bytes]
    done: int = 0
    cached: int = 0
    state: Snapshot | None = None
    steps: int = 0
    made: int = 0
    ended: bool = False
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.way = Way.of(self.sampling)

    @property
    def next_end(self) -> int:
        """Number of the prompt's tokens that will have been run after the next pass."""
        return next(end for end in self.keys if end > self.done)

    @property
    def left(self) -> int:
        """Number of the prompt's tokens that passes still have to run."""
        return len(self.request.prompt) - 1 - self.done


@lru_cache(maxsize=1)  # the choices of one prompt come one after the other
def prefix_keys(tokens: tuple[int, ...], piece: int) -> dict[int, bytes]:
    """Keys of the positions of a prompt at which its state can be kept or found, by the number of tokens before them.

    Args:
        piece: most tokens of a pass.

    Returns:
        Digests of all tokens before each multiple of the piece, and before the end.
    """
    numbers, digest, keys = np.asarray(tokens, dtype=np.int64), b"", {}
    for start, end in itertools.pairwise([*range(0, len(tokens), piece), len(tokens)]):
        digest = blake2b(digest + numbers[start:end].tobytes(), digest_size=16).digest()
        keys[end] = digest
    return keys


class PrefixCache:
    """States by key; when they take too much memory, the least recently used are removed.

    Args:
        memory: most bytes of all states; 0: keep none.

    Attributes:
        nbytes: bytes of all states.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.nbytes = 0
        self._states: OrderedDict[bytes, Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def find(self, keys: dict[int, bytes]) -> tuple[int, Snapshot | None]:
        """The longest known beginning of a prompt: its number of tokens and the state after them, or 0 and None."""
        for length in reversed(keys):
            state = self._states.get(keys[length])
            if state is not None:
                self._states.move_to_end(keys[length])
                return length, state
        return 0, None

    def put(self, key: bytes, state: Snapshot) -> None:
        """Keep a state, unless it alone exceeds the memory."""
        if key in self._states:
            return self._states.move_to_end(key)
        if state.nbytes > self.memory:
            return
        self._states[key] = state
        self.nbytes += state.nbytes
        while self.nbytes > self.memory:
            _, oldest = self._states.popitem(last=False)
            self.nbytes -= oldest.nbytes


class Prefill:
    """The prompts that are being run.

    Args:
        prompts: rows in which the prompts run.
        prefixes: cache of the states after pieces.

    Attributes:
        tasks: tasks of the prompts, oldest first.
    """

    def __init__(self, prompts: PromptRows, prefixes: PrefixCache) -> None:
        self.prompts = prompts
        self.prefixes = prefixes
        self.tasks: list[Task] = []
        self._loaded: dict[Task, int] = {}
        """The row that holds the state of a task."""
        self._turns = itertools.count()

    def add(self, task: Task) -> None:
        """Begin with a prompt, after the beginning that the prefix cache knows."""
        self._skip_known(task)
        self.tasks.append(task)

    def finished(self) -> Iterator[Task]:
        """The tasks whose prompts have been run; they are no longer here."""
        for task in [task for task in self.tasks if not task.left]:
            self.tasks.remove(task)
            yield task

    def next_tasks(self) -> list[Task]:
        """The tasks of the next pass: in turn, the oldest and those with the fewest tokens left come first.

        So a short prompt does not wait for a long one, and a long one is not overtaken for ever. If several have the
        same next piece, one runs it, and the others find the state.
        """
        tasks = [task for task in self.tasks if task.left]
        if tasks and next(self._turns) % 2:
            tasks.sort(key=lambda task: task.left)
        chosen: dict[bytes, Task] = {}
        for task in tasks:
            self._skip_known(task)
            if task.left:
                chosen.setdefault(task.keys[task.next_end], task)
            if len(chosen) == self.prompts.sizes[-1]:
                break
        return [*chosen.values()][: self.prompts.best_count(len(chosen))]

    def _skip_known(self, task: Task) -> None:
        """Continue from a state in the prefix cache, if it has one further on."""
        done, state = self.prefixes.find(task.keys)
        if done > task.done:
            task.cached += done - task.done
            task.done, task.state = done, state
            self._loaded.pop(task, None)

    def run(self, tasks: Sequence[Task]) -> Callable[[], None]:
        """A function that waits for a pass over the next piece of each of these prompts, which has been started."""
        loaded, self._loaded = self._loaded, {}  # nothing is loaded if the pass fails
        size = self.prompts.size_for(len(tasks))
        rows = {task: loaded[task] for task in tasks if loaded.get(task, size) < size}
        free = iter(sorted({*range(size)} - {*rows.values()}))
        for task in tasks:
            if task not in rows:
                rows[task] = next(free)
                self.prompts.load(rows[task], task.state)
        wait = self.prompts.run(
            {row: (task.done, task.request.prompt[task.done : task.next_end]) for task, row in rows.items()}
        )
        for task, row in rows.items():
            task.done = task.next_end
            task.state = self.prompts.take(row, task.done)
            self.prefixes.put(task.keys[task.done], task.state)
        self._loaded = rows
        return wait
