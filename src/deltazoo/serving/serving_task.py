"""A request on its way through the engine."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from deltazoo.generation import Sampling, Snapshot
from deltazoo.generation.row_copies import RowState
from deltazoo.generation.row_sampling import Way
from deltazoo.serving.requests import FinishReason, Output, Piece, Request, TokenLogprob

__all__ = ["Deliver", "ServingTask"]

Deliver = Callable[[Sequence[tuple[Any, Output]]], None]
"""Takes what the engine made for some requests, each by its key."""


class ServingTask:
    """What the engine knows of a request.

    Args:
        key: names the request to `deliver`.
        request: with a seed.
        deliver: takes its output.
        keys: of the positions in its prompt where the state can be kept or found (`prefix_keys`).
        most: new tokens after which it ends.

    Attributes:
        to_run: the tokens of the prompt that passes run. The first step takes the last one.
        done: how many of them have been run.
        cached: how many of those the prefix cache had.
        state: after them; None at the beginning, and once it is a row of the table.
        steps: how many steps have been started with its row.
        made: how many tokens have been handed out.
        ended: whether its last output has been handed out.
        arrived: when.
    """

    def __init__(
        self,
        key: Any,
        request: Request,
        deliver: Deliver,
        keys: dict[int, bytes],
        most: int,
    ) -> None:
        assert request.seed is not None
        self.key = key
        self.request = request
        self.seed = request.seed
        self.deliver = deliver
        self.keys = keys
        self.most = most
        self.to_run = request.prompt[:-1]
        self.done = self.cached = self.steps = self.made = 0
        self.state: RowState | Snapshot | None = None
        self.ended = False
        self.arrived = time.monotonic()
        top_p = request.top_p if request.top_p < 1 else None
        self.sampling = Sampling(request.temperature, request.top_k, top_p) if request.temperature else Sampling()
        self.way = Way.of(self.sampling)

    def output_of(self, token: int, logprob: TokenLogprob | None, is_end: bool) -> Output:
        """What one more token makes; `is_end`: it is an end token."""
        self.made += 1
        reason: FinishReason | None = "stop" if is_end else "length" if self.made == self.most else None
        cached = self.cached if self.made == 1 else 0
        if reason is None and logprob is None and not cached:
            return token
        logprobs = None if logprob is None else (logprob,)
        return Piece(token_ids=(token,), logprobs=logprobs, finish_reason=reason, cached_tokens=cached)
