"""The serving engine: a thread that runs one model for many requests at once. It handles tokens, not text.

A request waits in a queue until a row is free. Then its prompt, except the last token, runs in pieces; the state after
them becomes a row of the table (`deltazoo.generation.row_table`), and every step adds a token to all rows. One turn of
the loop is

    admit requests | one pass over pieces of prompts | start a step | hand out the tokens of the step before

so a step never waits for more than one pass, and a GPU computes a step while the host handles the one before.

The engine keeps one promise: at one width the tokens of a request do not depend on the other requests, bit for bit, nor
on the contents of the prefix cache. Every shape is fixed for that: prompts are always divided into the same pieces,
steps have one of a few widths, and passes over prompts one of a few sizes, or a single one if there is a single width.
Between widths and between sizes logits differ by rounding. If tokens must be equal at any load, give the engine one
width.
"""

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from deltazoo.generation import Sampling
from deltazoo.generation.conditions import max_positions, origin_of_nan
from deltazoo.generation.row_table import PromptRows, RowTable, has_softmax_layers
from deltazoo.generation.sampling import NO_TOKEN
from deltazoo.models import DeltaRuleForCausalLM
from deltazoo.serving.prefill import Deliver, Prefill, PrefixCache, Task, prefix_keys
from deltazoo.serving.requests import (
    MOST_LOGPROBS,
    EngineError,
    EngineStopped,
    FinishReason,
    Output,
    Piece,
    QueueFull,
    Request,
    RequestError,
    Status,
    Stream,
    TokenLogprob,
)

_log = logging.getLogger(__name__)

_NOT_STARTED = "the engine has not been started"
_FAILURES = 3
"""Number of steps that fail one after another before the engine gives up."""


class _Step(NamedTuple):
    """A step that has been started, whose tokens have not been read."""

    tasks: dict[int, Task]
    """The tasks by row."""
    tokens: Callable[[], Any]
    reporting: list[int]
    """Rows whose log-probabilities were asked for."""
    logprobs: Callable[[], tuple[Any, ...]] | None
    began: float


class Engine:
    """An engine that continues prompts for many clients with one model.

    `with Engine(...) as engine` starts it, and at the end cancels the requests that still run.

    Args:
        model: a causal language model with delta-rule layers, in evaluation mode, on the device where it stays. It must
            not change while the engine runs.
        tokenizer: tokenizer of the model. Its end token ends an answer if the model's `generation_config` has none.
        widths: numbers of rows that a step can have; the largest is the most requests that run at once. With a single
            width tokens are equal at any load.
        prompt_piece: most tokens of a prompt in one pass, and the distance of the positions where prefixes are found.
        max_queue: most requests that wait for a row.
        context_limit: most tokens of prompt and answer; default: none for models that are `unlimited`, for others the
            configuration's `max_position_embeddings`. Softmax layers reserve keys and values of so many tokens for
            every row.
        prefix_memory: most bytes of states that the prefix cache keeps on the model's device; 0: no cache.

    Raises:
        ValueError: a model that the engine cannot run, or an option out of its range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        widths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
        prompt_piece: int = 512,
        max_queue: int = 256,
        context_limit: int | None = None,
        prefix_memory: int = 2**30,
    ) -> None:
        for name, value, least in (
            ("widths", min(widths, default=0), 1),
            ("prompt_piece", prompt_piece, 1),
            ("max_queue", max_queue, 1),
            ("context_limit", 1 if context_limit is None else context_limit, 1),
            ("prefix_memory", prefix_memory, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.model = model
        self.tokenizer = tokenizer
        self.max_queue = max_queue
        self.context_limit = context_limit = _context_limit(model, context_limit)
        self.table = RowTable(model, widths, context_limit)
        padded = model.device.type == "cuda"
        sizes = _sizes_of_passes(model, several=len(self.table.widths) > 1) if padded else (1,)
        self.prompts = PromptRows(self.table, sizes, prompt_piece, padded=padded)
        self.prefixes = PrefixCache(prefix_memory)
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        self._ends = frozenset([ends] if ends is None or isinstance(ends, int) else ends)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._thread: threading.Thread | None = None

        # Shared by clients and the engine's thread, under the mutex:
        self._mutex = threading.Condition()
        self._waiting: deque[Task] = deque()
        self._cancelled: set[tuple[Deliver | None, Hashable]] = set()
        """Cancelled requests by function and key; None: any."""
        self._refusal: str | None = _NOT_STARTED
        """The reason why no request is taken. An engine that runs and takes none ends when nothing is left."""

        # Written by the engine's thread alone:
        self._counters: defaultdict[str, float] = defaultdict(int)
        self._finished: Counter[str] = Counter()
        self._prefill = Prefill(self.prompts, self.prefixes)
        self._running: dict[int, Task] = {}
        self._passes: deque[Callable[[], None]] = deque()
        """Passes over prompts that may not have ended; a new one begins when the second-last has ended."""
        self._started: deque[_Step] = deque()
        self._outputs: defaultdict[Deliver, list[tuple[Any, Output]]] = defaultdict(list)
        """New outputs, by the function that delivers them."""
        self._ahead = 1 if model.device.type == "cuda" else 0  # a CPU computes nothing beside the host's work
        self._failures = 0

    # Methods that clients call.

    def start(self) -> None:
        """Start the thread, and return once it has captured its steps.

        Raises:
            Exception: the error that the model raised. RuntimeError: the engine has been started before.
        """
        if self._thread is not None:
            raise RuntimeError("the engine has been started before: make another one")
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="deltazoo engine", daemon=True)
        self._thread.start()
        ready.result()

    def __enter__(self) -> "Engine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(timeout=0)

    def submit(self, request: Request) -> Stream:
        """The stream of a request's output, after queueing the request.

        Raises:
            RequestError: the request does not fit the model. QueueFull: too many wait. EngineStopped: the engine does
                not run.
        """
        stream = Stream(request.with_seed(), lambda: self.cancel([stream], Stream.put_all))
        self.enter([(stream, stream.request)], Stream.put_all)
        return stream

    def enter(self, requests: Sequence[tuple[Any, Request]], deliver: Deliver) -> None:
        """Queue requests, all or none of them; the function `deliver` takes their output.

        Args:
            requests: pairs of a key and a request with a seed.
            deliver: function that the engine's thread calls with keys and new outputs. It must not block.

        Raises:
            RequestError, QueueFull, EngineStopped: see `submit`.
        """
        tasks = [self._task(key, request, deliver) for key, request in requests]
        with self._mutex:
            if self._refusal is not None:
                raise EngineStopped(self._refusal)
            if len(self._waiting) + len(tasks) > self.max_queue:
                self._counters["rejected"] += len(tasks)
                raise QueueFull(len(self._waiting), self._retry_after())
            self._waiting.extend(tasks)
            self._mutex.notify_all()

    def cancel(self, keys: Iterable[Hashable] | None, deliver: Deliver) -> None:
        """End the requests that were entered with these keys and this function; None: all with the function."""
        with self._mutex:
            self._cancelled.update((deliver, key) for key in ([None] if keys is None else keys))
            self._mutex.notify_all()

    def status(self) -> Status:
        """Whether requests are accepted, and the engine's counters."""
        now = {
            "running": len(self._running),
            "prefilling": len(self._prefill.tasks),
            "waiting": len(self._waiting),
            "prefix_bytes": self.prefixes.nbytes,
            "prefix_entries": len(self.prefixes),
        }
        return Status(self._refusal is None, defaultdict(int, {**self._counters, **now}), self._finished.copy())

    def stop(self, *, timeout: float | None = None) -> None:
        """Refuse new requests, finish all accepted ones, and end the thread.

        Args:
            timeout: seconds after which the remaining requests are cancelled; None: wait for all.
        """
        with self._mutex:
            if self._refusal in (None, _NOT_STARTED):
                self._refusal = "the engine is stopping"
            self._mutex.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
            with self._mutex:
                self._cancelled.add((None, None))
            self._thread.join()

    def _task(self, key: Any, request: Request, deliver: Deliver) -> Task:
        """The task of a request; RequestError if the request does not fit the model."""
        prompt, limit = request.prompt, self.context_limit
        most, least = request.max_tokens, request.max_tokens or 1
        if limit is not None and len(prompt) + least > limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and at least {least} are to follow, which is more than the "
                f"context limit of {limit}"
            )
        if most is None:
            if limit is None:
                raise RequestError("max_tokens is needed, since this model has no context limit")
            most = limit - len(prompt)
        if not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
            outside = next(token for token in prompt if not 0 <= token < self._vocabulary)
            raise RequestError(
                f"the prompt has token {outside}, which is outside the model's vocabulary of {self._vocabulary}",
                param="prompt",
            )
        ends = frozenset[int]() if request.ignore_eos else self._ends
        top_p = request.top_p if request.top_p < 1 else None
        sampling = Sampling(request.temperature, request.top_k, top_p) if request.temperature else Sampling()
        return Task(key, request, deliver, most, ends, sampling, prefix_keys(prompt[:-1], self.prompts.piece))

    def _retry_after(self) -> int:
        """Seconds after which the queue may be shorter, estimated from the time that requests take."""
        count = sum(self._finished.values())
        mean = self._counters["request_seconds"] / count if count else 1.0
        return max(1, min(60, round(mean * len(self._waiting) / self.table.widths[-1])))

    # Methods that the engine's thread calls.

    def _run(self, ready: Future[None]) -> None:
        try:
            if self.model.device.type == "cuda":
                torch.cuda.set_device(self.model.device)
            self.table.capture()
            self.prompts.capture()
        except BaseException as error:
            return ready.set_exception(error)
        with self._mutex:
            self._refusal = None if self._refusal == _NOT_STARTED else self._refusal
        ready.set_result(None)
        try:
            while self._wait_for_work():
                self._turn()
        except BaseException as error:  # after any error nobody may wait for the thread
            _log.exception("the engine stops: %s", error)
            self._give_up(error)

    def _wait_for_work(self) -> bool:
        """Whether there is something to do, after waiting for it; False: the engine must stop, and nothing is left."""

        def has_work() -> bool:
            return bool(self._waiting or self._cancelled or self._prefill.tasks or self._running or self._started)

        with self._mutex:
            self._mutex.wait_for(lambda: has_work() or self._refusal)
            return has_work()

    def _turn(self) -> None:
        """Admit requests, run a pass over pieces of prompts, start a step, hand out the tokens of the step before."""
        while len(self._passes) > 1:  # a pass that is composed later has more prompts
            self._passes.popleft()()
        self._end_cancelled()
        self._admit()
        self._run_prompts()
        try:
            self._start_step()
            while len(self._started) > (self._ahead if self._running else 0):
                self._hand_out(self._started[0])
                self._started.popleft()
                self._failures = 0
        except Exception as error:  # after several such steps in a row the device counts as lost
            self._fail_steps(error)
            self._failures += 1
            if self._failures == _FAILURES:
                raise

    def _end_cancelled(self) -> None:
        with self._mutex:
            cancelled, self._cancelled = self._cancelled, set()
            if not cancelled:
                return
            tasks = [*self._waiting, *self._prefill.tasks, *self._running.values()]
            leaving = {
                task
                for task in tasks
                if not cancelled.isdisjoint([(task.deliver, task.key), (task.deliver, None), (None, None)])
            }
            self._waiting = deque(task for task in self._waiting if task not in leaving)
        for task in leaving:
            self._end(task, "cancelled", Piece(finish_reason="cancelled"))
        self._deliver()

    def _admit(self) -> None:
        """Begin with the prompts of waiting requests, as many as there are rows."""
        free = self.table.widths[-1] - len(self._prefill.tasks) - len(self._running)
        with self._mutex:
            tasks = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        for task in tasks:
            self._prefill.add(task)

    def _run_prompts(self) -> None:
        """Run one pass over pieces of a few prompts. Finished prompts become rows of the table."""
        tasks = self._prefill.next_tasks()
        try:
            if tasks:
                self._passes.append(self._prefill.run(tasks))
                self._counters["pieces"] += len(tasks)
            for task in self._prefill.finished():
                tasks = [task]
                self._begin_row(task)
        except Exception as error:
            self._fail(tasks, error)
            _check_device(self.model.device)

    def _begin_row(self, task: Task) -> None:
        row = next(row for row in range(self.table.widths[-1]) if row not in self._running)
        prompt, seed = task.request.prompt, task.request.seed
        assert seed is not None
        self.table.put(row, task.state, prompt[-1], len(prompt) - 1, task.sampling, seed)
        task.state = None
        self._running[row] = task
        self._counters["prompt_tokens"] += len(prompt)
        self._counters["prefix_hits"] += task.cached > 0
        self._counters["prefix_misses"] += task.cached == 0
        self._counters["prefix_tokens"] += task.cached

    def _start_step(self) -> None:
        """Start the step for the next token of all running rows, at the smallest width that holds them."""
        if not self._running:
            return
        began = time.monotonic()
        width = self._move_together()
        self.table.step(width, max(task.way for task in self._running.values()))
        reporting = [row for row, task in self._running.items() if task.request.logprobs is not None]
        # The number is always the same, since the order of equally likely tokens depends on it.
        logprobs = self.table.read_log_probabilities(width, reporting, MOST_LOGPROBS) if reporting else None
        self._started.append(_Step(dict(self._running), self.table.read_tokens(width), reporting, logprobs, began))
        for row, task in [*self._running.items()]:
            task.steps += 1
            if task.steps == task.most:  # its last token is being computed
                del self._running[row]
        self._counters["steps"] += 1
        self._counters["width"] = width

    def _move_together(self) -> int:
        """The smallest width that holds all running rows, after moving rows beyond it into free rows."""
        width = next(width for width in self.table.widths if width >= len(self._running))
        beyond = [row for row in self._running if row >= width]
        if beyond:
            free = [row for row in range(width) if row not in self._running][: len(beyond)]
            self.table.move(beyond, free)
            for source, target in zip(beyond, free, strict=True):
                self._running[target] = self._running.pop(source)
        return width

    def _hand_out(self, step: _Step) -> None:
        """Wait for the tokens of a step, and pass them on; tokens of ended requests are dropped."""
        tokens = step.tokens().tolist()
        columns = [x.tolist() for x in step.logprobs()] if step.logprobs is not None else [(), (), ()]
        logprobs = dict(zip(step.reporting, zip(*columns, strict=True), strict=True))
        made = 0
        for row, task in step.tasks.items():
            if task.ended:
                continue
            if (token := tokens[row]) == NO_TOKEN:
                self._fail([task], self._nan_error(task))
                continue
            task.made += 1
            made += 1
            reason: FinishReason | None = None
            if token in task.ends or task.made == task.most:
                reason = "stop" if token in task.ends else "length"
            reported: tuple[TokenLogprob, ...] | None = None
            if row in logprobs:
                chosen, values, indices = logprobs[row]
                top = tuple(zip(indices, values, strict=True))[: task.request.logprobs]
                reported = (TokenLogprob(token_id=token, logprob=chosen, top=top),)
            output: Output = token
            if reason is not None or reported is not None or task.made == 1:
                output = Piece(
                    token_ids=(token,),
                    logprobs=reported,
                    finish_reason=reason,
                    cached_tokens=task.cached if task.made == 1 else 0,
                )
            if reason is not None:
                self._end(task, reason, output)
            else:
                self._outputs[task.deliver].append((task.key, output))
        self._deliver()
        self._counters["completion_tokens"] += made
        self._counters["step_seconds"] += time.monotonic() - step.began

    def _deliver(self) -> None:
        outputs, self._outputs = self._outputs, defaultdict(list)
        for deliver, made in outputs.items():
            deliver(made)

    def _end(self, task: Task, reason: str, last: Output) -> None:
        """End a request; its row is free for the next step."""
        task.ended = True
        if task in self._prefill.tasks:
            self._prefill.tasks.remove(task)
        for row in [row for row, other in self._running.items() if other is task]:
            del self._running[row]
        self._finished[reason] += 1
        self._counters["request_seconds"] += time.monotonic() - task.arrived
        self._outputs[task.deliver].append((task.key, last))

    def _fail(self, tasks: Iterable[Task], error: BaseException) -> None:
        """End requests by an error of the model."""
        tasks = [task for task in tasks if not task.ended]
        _log.error("the model failed on %d requests: %s", len(tasks), error, exc_info=error)
        for task in tasks:
            failure = EngineError(f"the model failed: {error}")
            failure.__cause__ = error
            self._end(task, "error", failure)
        self._deliver()

    def _fail_steps(self, error: BaseException) -> None:
        """End the requests of all rows and of all started steps by an error."""
        steps = [dict(self._running), *(step.tasks for step in self._started)]
        self._started.clear()
        self._fail({task for tasks in steps for task in tasks.values()}, error)

    def _nan_error(self, task: Task) -> FloatingPointError:
        """The error for a request whose next token is `NO_TOKEN`."""
        # For the message one piece of the prompt runs again: others wait meanwhile, and there is memory for one piece.
        ids = torch.tensor([task.request.prompt[: self.prompts.piece]], device=self.model.device)
        return FloatingPointError(
            f"it computed NaN or infinite logits for new token {task.made + 1}{origin_of_nan(self.model, ids)}"
        )

    def _give_up(self, error: BaseException) -> None:
        with self._mutex:
            self._refusal = f"the engine has failed: {error}"
            waiting, self._waiting = [*self._waiting], deque()
        self._fail_steps(error)
        self._fail([*waiting, *self._prefill.tasks], error)


def _check_device(device: torch.device) -> None:
    """Raise the error that a lost GPU raises at every call; a GPU that ran out of memory raises none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def unlimited(model: Any) -> bool:
    """Whether a model takes any number of tokens: our own without softmax layers, which read no positions."""
    return isinstance(model, DeltaRuleForCausalLM) and not has_softmax_layers(model)


def _context_limit(model: Any, given: int | None) -> int | None:
    """Most tokens of prompt and answer, None for any number; ValueError for more than the model has positions."""
    if unlimited(model):
        return given
    longest = max_positions(model)
    if given is not None and longest is not None and given > longest:
        raise ValueError(
            f"context_limit must be at most the max_position_embeddings={longest} of the model's configuration, "
            f"got {given}"
        )
    return longest if given is None else given


def _sizes_of_passes(model: Any, *, several: bool) -> tuple[int, ...]:
    """Numbers of prompts in one pass on a GPU; one number unless `several`.

    A pass of 16 takes less time per prompt than one of 8, and steps wait for it longer. Softmax layers reserve keys and
    values of the whole context for each prompt. Experts multiply the tokens of all prompts together, so that one
    prompt's results would depend on the others.
    """
    if any(name.endswith("experts") for name, _ in model.named_modules()):
        return (1,)
    if unlimited(model):
        return (1, 2, 4, 8, 16) if several else (8,)
    return (1, 2, 4) if several else (4,)
