"""A request on its way through the engine."""

import time

from deltazoo.generation import Sampling, Snapshot
from deltazoo.generation.row_sampling import Way
from deltazoo.workbench.serve.requests import FinishReason, Piece, Stream, TokenLogprob
from deltazoo.workbench.serve.text_assembly import TextAssembly

__all__ = ["ServingTask"]


class ServingTask:
    """What the engine knows of a request.

    Args:
        stream: of its output.
        text: that its tokens become, if a stop string may end it; otherwise the reader of the stream makes it.
        keys: of the positions in its prompt where the state can be kept or found (`prefix_keys`).
        most: new tokens after which it ends.

    Attributes:
        to_run: the tokens of the prompt that passes run. The first step takes the last one.
        done: how many of them have been run.
        state: after them; None at the beginning, and once it is a row of the table.
        steps: how many steps have been started with its row.
        arrived: when.
    """

    def __init__(self, stream: Stream, text: TextAssembly | None, keys: dict[int, bytes], most: int) -> None:
        self.stream = stream
        self.request = request = stream.request
        self.text = text
        self.keys = keys
        self.most = most
        self.to_run = request.prompt[:-1]
        self.done = 0
        self.state: Snapshot | None = None
        self.steps = 0
        self.arrived = time.monotonic()
        top_p = request.top_p if request.top_p < 1 else None
        self.sampling = Sampling(request.temperature, request.top_k, top_p) if request.temperature else Sampling()
        self.way = Way.of(self.sampling)

    def piece_of(self, token: int, logprob: TokenLogprob | None, is_end: bool) -> Piece:
        """The output that one more token makes; `is_end`: it is an end token, which has no text."""
        text = "" if is_end or self.text is None else self.text.add([token])
        reason: FinishReason | None = None
        if is_end or (self.text is not None and self.text.stopped):
            reason = "stop"
        elif self.stream.completion_tokens + 1 == self.most:
            reason = "length"
        if reason is not None and self.text is not None:
            text += self.text.finish()
            reason = "stop" if self.text.stopped else reason
        logprobs = None if logprob is None else (logprob,)
        return Piece(text=text, token_ids=(token,), logprobs=logprobs, finish_reason=reason)
