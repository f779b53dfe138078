"""The serving engine: one thread that runs one model for many requests at once.

A request waits in a queue until a row is free. Then its prompt, all but the last token, runs in pieces; the state
after them becomes a row of the table (`deltazoo.generation.row_table`), and every step adds a token to all rows. One
turn of the loop is

    admit requests | one pass over pieces of prompts | start a step | hand out the tokens of the step before

so a step never waits for more than one pass, and a GPU works on a step while the host handles the one before it.

What is promised. Every shape is fixed: prompts are always divided into the same pieces, steps have one of a few widths,
and passes over prompts one of a few sizes, or a single one where there is a single width. So the tokens of a request at
one width do not depend on the other requests, bit for bit, nor on what the prefix cache knows. Between widths and
between sizes logits differ by rounding. Where tokens must be the same at any load, give the engine one width.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from deltazoo.generation.nan_origin import origin_of_nan
from deltazoo.generation.prompt_rows import PromptRows
from deltazoo.generation.row_table import RowTable
from deltazoo.generation.sampling import NO_TOKEN
from deltazoo.serving.model_limits import context_limit_of, end_tokens_of, sizes_of_passes
from deltazoo.serving.prefill import Prefill
from deltazoo.serving.prefix_cache import PrefixCache, prefix_keys
from deltazoo.serving.requests import (
    MOST_LOGPROBS,
    EngineError,
    EngineStopped,
    Output,
    Piece,
    QueueFull,
    Request,
    RequestError,
    Status,
    Stream,
)
from deltazoo.serving.serving_task import Deliver, ServingTask
from deltazoo.serving.started_step import StartedStep
from deltazoo.serving.tally import Tally

__all__ = ["Engine"]

_log = logging.getLogger(__name__)

_FAILURES = 3
"""Steps that fail one after another before the engine gives up."""


class Engine:
    """Continues prompts for many clients with one model.

    `with Engine(...) as engine` starts it, and at the end cancels what still runs.

    Args:
        model: a causal language model with delta-rule layers, in evaluation mode, on the device where it stays. It must
            not change while the engine runs.
        tokenizer: of the model.
        widths: numbers of rows that a step can have; the largest is the most requests that run at once. With a single
            one tokens are the same at any load.
        prompt_piece: most tokens of a prompt in one pass, and the distance of the positions where prefixes are found.
        max_queue: most requests that wait for a row.
        context_limit: most tokens of prompt and answer; default: none for models that are `unlimited`, for others the
            configuration's `max_position_embeddings`. Softmax layers reserve keys and values of so many tokens for
            every row.
        prefix_memory: most bytes of states that the prefix cache keeps on the model's device; 0: none.
        eos_token_id: tokens that end an answer; default: the model's, else the tokenizer's.

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
        eos_token_id: int | Sequence[int] | None = None,
    ) -> None:
        _check_options(widths=min(widths, default=0), prompt_piece=prompt_piece, max_queue=max_queue)
        _check_options(context_limit=1 if context_limit is None else context_limit)
        if prefix_memory < 0:
            raise ValueError(f"prefix_memory must be at least 0 bytes, got {prefix_memory}")
        self.model = model
        self.tokenizer = tokenizer
        self.max_queue = max_queue
        self.context_limit = context_limit = context_limit_of(model, context_limit)
        self.table = RowTable(model, widths, context_limit)
        padded = model.device.type == "cuda"
        sizes = sizes_of_passes(model, several=len(self.table.widths) > 1) if padded else (1,)
        self.prompts = PromptRows(model, sizes, prompt_piece, self.table.empty, padded=padded, max_length=context_limit)
        self.prefixes = PrefixCache(prefix_memory)
        self._ends = end_tokens_of(model, tokenizer, eos_token_id)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._tally = Tally()
        self._thread: threading.Thread | None = None

        # What clients and the engine's thread share, under the mutex:
        self._mutex = threading.Condition()
        self._waiting: deque[ServingTask] = deque()
        self._cancelled: set[tuple[Deliver, Hashable]] = set()
        self._cancel_all = False
        self._stopping = False
        self._refusal: str | None = "the engine has not been started"

        # Of the engine's thread alone:
        self._prefill = Prefill(self.prompts, self.prefixes)
        self._running: dict[int, ServingTask] = {}
        self._passes: deque[Callable[[], None]] = deque()
        """Passes over prompts that may not be done yet; the second-last is waited for before another one is begun."""
        self._started: deque[StartedStep] = deque()
        self._outputs: dict[Deliver, list[tuple[Any, Output]]] = {}
        """What has been made, and by which function it is delivered."""
        self._ahead = 1 if model.device.type == "cuda" else 0  # a CPU does one thing at a time
        self._failures = 0

    # What clients call.

    def start(self) -> None:
        """Start the thread, and return once it has captured its steps.

        Raises:
            Exception: what the model raised meanwhile. RuntimeError: the engine has been started before.
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
        """Queue a request; the stream yields its output.

        Raises:
            RequestError: it does not fit the model. QueueFull: too many wait. EngineStopped: the engine does not run.
        """
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        """Queue requests, all or none of them.

        Raises:
            RequestError, QueueFull, EngineStopped: see `submit`.
        """
        streams = [Stream(request.with_seed(), self._cancel_stream) for request in requests]
        self.enter([(stream, stream.request) for stream in streams], Stream.deliver)
        return streams

    def enter(self, requests: Sequence[tuple[Any, Request]], deliver: Deliver) -> None:
        """Queue requests, all or none of them, whose output a function takes.

        Args:
            requests: each with a key, and with a seed.
            deliver: called by the engine's thread with some keys and what was made for them. It must not block.

        Raises:
            RequestError, QueueFull, EngineStopped: see `submit`.
        """
        tasks = [self._task(key, request, deliver) for key, request in requests]
        with self._mutex:
            if self._refusal is not None:
                raise EngineStopped(self._refusal)
            if len(self._waiting) + len(tasks) > self.max_queue:
                self._tally.add(rejected=len(tasks))
                raise QueueFull(len(self._waiting), self._retry_after())
            self._waiting.extend(tasks)
            self._mutex.notify_all()

    def cancel(self, keys: Iterable[Hashable], deliver: Deliver) -> None:
        """End requests, named by the key and the function that they were entered with."""
        with self._mutex:
            self._cancelled.update((deliver, key) for key in keys)
            self._mutex.notify_all()

    def status(self) -> Status:
        """Whether requests are accepted; what the engine has done, and does now."""
        with self._mutex:
            running, waiting = self._refusal is None, len(self._waiting)
        return Status(running, replace(self._tally.read(), waiting=waiting))

    def stop(self, *, timeout: float | None = None) -> None:
        """Refuse new requests, finish all accepted ones, and end the thread.

        Args:
            timeout: seconds after which the requests that are left are cancelled; None: wait for all.
        """
        with self._mutex:
            self._stopping, self._refusal = True, self._refusal or "the engine is stopping"
            self._mutex.notify_all()
        if self._thread is None:
            return
        self._thread.join(timeout)
        with self._mutex:
            self._cancel_all = True
        self._thread.join()

    def _cancel_stream(self, stream: Stream) -> None:
        self.cancel([stream], Stream.deliver)

    def _task(self, key: Any, request: Request, deliver: Deliver) -> ServingTask:
        most = self._check(request)
        return ServingTask(key, request, deliver, prefix_keys(request.prompt[:-1], self.prompts.piece), most)

    def _check(self, request: Request) -> int:
        """The number of new tokens after which a request ends; RequestError if it does not fit."""
        length, limit = len(request.prompt), self.context_limit
        if not 0 <= min(request.prompt) <= max(request.prompt) < self._vocabulary:
            outside = next(token for token in request.prompt if not 0 <= token < self._vocabulary)
            raise RequestError(
                f"the prompt has token {outside}, which is outside the model's vocabulary of {self._vocabulary}",
                param="prompt",
            )
        if limit is None:
            if request.max_tokens is None:
                raise RequestError("max_tokens is needed, since this model has no context limit")
            return request.max_tokens
        least = request.max_tokens or 1
        if length + least > limit:
            raise RequestError(
                f"the prompt has {length} tokens and at least {least} are to follow, which is more than the context "
                f"limit of {limit}"
            )
        return request.max_tokens or limit - length

    def _retry_after(self) -> int:
        """Seconds in which the queue may get shorter, from the time that requests take."""
        took = self._tally.read().request_seconds
        mean = took.total / took.count if took.count else 1.0
        return max(1, min(60, round(mean * len(self._waiting) / self.table.widths[-1])))

    # The engine's thread.

    def _run(self, ready: Future[None]) -> None:
        try:
            if self.model.device.type == "cuda":
                torch.cuda.set_device(self.model.device)
            self.table.capture()
            self.prompts.capture()
        except BaseException as error:
            return ready.set_exception(error)
        with self._mutex:
            self._refusal = "the engine is stopping" if self._stopping else None
        ready.set_result(None)
        try:
            while self._wait_for_work():
                self._turn()
        except BaseException as error:  # whatever it is, nobody must wait for the thread
            _log.exception("the engine stops: %s", error)
            self._give_up(error)

    def _wait_for_work(self) -> bool:
        """Return once there is something to do; False: the engine is to stop, and nothing is left."""
        with self._mutex:
            self._mutex.wait_for(lambda: self._has_work() or self._stopping)
            return self._has_work()

    def _has_work(self) -> bool:
        return bool(self._waiting or self._cancelled or self._prefill.tasks or self._running or self._started)

    def _turn(self) -> None:
        """Take in what clients want, run prompts one piece further, start a step, hand out the tokens of the last."""
        while len(self._passes) > 1:  # a pass that is put together late has more prompts in it
            self._passes.popleft()()
        self._end_cancelled()
        self._admit()
        self._run_prompts()
        self._start_step()
        while len(self._started) > (self._ahead if self._running else 0):
            self._hand_out(self._started.popleft())
        self._tally.set(
            running=len(self._running),
            prefilling=len(self._prefill.tasks),
            prefix_bytes=self.prefixes.nbytes,
            prefix_entries=len(self.prefixes),
        )

    def _end_cancelled(self) -> None:
        with self._mutex:
            cancelled, self._cancelled = self._cancelled, set()
            if not (cancelled or self._cancel_all):
                return
            tasks = [*self._waiting, *self._prefill.tasks, *self._running.values()]
            leaving = [task for task in tasks if self._cancel_all or (task.deliver, task.key) in cancelled]
            self._waiting = deque(task for task in self._waiting if task not in leaving)
        for task in leaving:
            self._finish(task, Piece(finish_reason="cancelled"))
        self._deliver()

    def _admit(self) -> None:
        """Begin with the prompts of waiting requests, as many as will find a row."""
        while len(self._prefill.tasks) + len(self._running) < self.table.widths[-1]:
            with self._mutex:
                if not self._waiting:
                    return
                task = self._waiting.popleft()
            self._prefill.add(task)

    def _run_prompts(self) -> None:
        """One pass over pieces of a few prompts. Those that are through become rows of the table."""
        tasks = self._prefill.next_tasks()
        if tasks:
            try:
                self._passes.append(self._prefill.run(tasks))
                self._tally.add(pieces=len(tasks))
            except Exception as error:
                self._fail_prompts(tasks, error)
        for task in self._prefill.finished():
            try:
                self._begin_row(task)
            except Exception as error:
                self._fail_prompts([task], error)

    def _begin_row(self, task: ServingTask) -> None:
        row = next(row for row in range(self.table.widths[-1]) if row not in self._running)
        self.table.put(row, task.state, task.request.prompt[-1], len(task.to_run), task.sampling, task.seed)
        task.state = None
        self._running[row] = task
        self._tally.add(
            prompt_tokens=len(task.request.prompt),
            prefix_hits=int(task.cached > 0),
            prefix_misses=int(task.cached == 0),
            prefix_tokens=task.cached,
        )

    def _start_step(self) -> None:
        """Start the next token of all running rows, at the smallest width that holds them."""
        if not self._running:
            return
        try:
            began = time.monotonic()
            width = self._move_together()
            self.table.step(width, max(task.way for task in self._running.values()))
            reporting = [row for row, task in self._running.items() if task.request.logprobs is not None]
            log_probabilities = None
            if reporting:  # always as many, since the order of equally likely tokens depends on how many there are
                log_probabilities = self.table.read_log_probabilities(width, reporting, MOST_LOGPROBS)
            tokens = self.table.read_tokens(width)
        except Exception as error:
            return self._fail_step(self._running.values(), error)
        self._started.append(StartedStep(dict(self._running), tokens, log_probabilities, reporting, began))
        for row, task in [*self._running.items()]:
            task.steps += 1
            if task.steps == task.most:  # its last token is on its way
                del self._running[row]
        self._tally.add(steps=1)
        self._tally.set(width=width)

    def _move_together(self) -> int:
        """Move rows beyond the smallest possible width to free rows within; returns that width."""
        width = next(width for width in self.table.widths if width >= len(self._running))
        beyond = [row for row in self._running if row >= width]
        if beyond:
            free = [row for row in range(width) if row not in self._running][: len(beyond)]
            self.table.move(beyond, free)
            for source, target in zip(beyond, free, strict=True):
                self._running[target] = self._running.pop(source)
        return width

    def _hand_out(self, step: StartedStep) -> None:
        """Wait for the tokens of a step, and pass them to their streams."""
        try:
            tokens = step.tokens().tolist()
            logprobs = step.logprobs_of(tokens)
        except Exception as error:
            return self._fail_step(step.rows.values(), error)
        self._failures = 0
        for row, task in step.rows.items():
            if tokens[row] == NO_TOKEN and not task.ended:
                self._fail([task], self._nan_error(task))
        now = time.monotonic()
        tasks = [(row, task) for row, task in step.rows.items() if not task.ended]
        for row, task in tasks:
            if task.made == 0:
                self._tally.add_first_token(now - task.arrived)
            is_end = tokens[row] in self._ends and not task.request.ignore_eos
            output = task.output_of(tokens[row], logprobs.get(row), is_end)
            if isinstance(output, Piece) and output.finish_reason is not None:
                self._finish(task, output)
            else:
                self._add_output(task, output)
        self._deliver()
        self._tally.add(completion_tokens=len(tasks), step_seconds=now - step.began)

    def _add_output(self, task: ServingTask, output: Output) -> None:
        self._outputs.setdefault(task.deliver, []).append((task.key, output))

    def _deliver(self) -> None:
        outputs, self._outputs = self._outputs, {}
        for deliver, made in outputs.items():
            deliver(made)

    def _finish(self, task: ServingTask, last: Piece) -> None:
        """End a request; its row is free for the next step."""
        assert last.finish_reason is not None
        self._leave(task)
        self._tally.add_end(last.finish_reason, time.monotonic() - task.arrived)
        self._add_output(task, last)

    def _fail(self, tasks: Iterable[ServingTask], error: BaseException) -> None:
        """End requests with the model's error."""
        tasks = [task for task in tasks if not task.ended]
        _log.error("the model failed on %d requests: %s", len(tasks), error, exc_info=error)
        for task in tasks:
            self._leave(task)
            self._tally.add_end("error", time.monotonic() - task.arrived)
            failure = EngineError(f"the model failed: {error}")
            failure.__cause__ = error
            self._add_output(task, failure)
        self._deliver()

    def _nan_error(self, task: ServingTask) -> FloatingPointError:
        """The error for a request whose next token is `NO_TOKEN`."""
        # Only one piece of the prompt is run again for the message: others wait meanwhile, and its memory is at hand.
        ids = torch.tensor([task.request.prompt[: self.prompts.piece]], device=self.model.device)
        return FloatingPointError(
            f"it computed NaN or infinite logits for new token {task.made + 1}{origin_of_nan(self.model, ids)}"
        )

    def _fail_prompts(self, tasks: Iterable[ServingTask], error: Exception) -> None:
        """End requests whose prompts failed; a device that works no longer ends the engine."""
        self._fail(tasks, error)
        _check_device(self.model.device)

    def _fail_step(self, tasks: Iterable[ServingTask], error: Exception) -> None:
        """End the requests of a step; after some such steps in a row the device is taken to be lost."""
        self._fail([*tasks], error)
        self._failures += 1
        if self._failures == _FAILURES:
            raise error

    def _leave(self, task: ServingTask) -> None:
        task.ended = True
        if task in self._prefill.tasks:
            self._prefill.tasks.remove(task)
        for row in [row for row, other in self._running.items() if other is task]:
            del self._running[row]

    def _give_up(self, error: BaseException) -> None:
        with self._mutex:
            self._refusal = f"the engine has failed: {error}"
            waiting, self._waiting = [*self._waiting], deque()
        started = [task for step in self._started for task in step.rows.values()]
        self._started.clear()
        self._fail({*waiting, *self._prefill.tasks, *self._running.values(), *started}, error)
        self._tally.set(running=0, prefilling=0)


def _check_device(device: torch.device) -> None:
    """Raise what a lost GPU raises at every call; one that ran out of memory works."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_options(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
