"""A decoding step that has been started, and what is read of it later."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deltazoo.serving.requests import TokenLogprob
from deltazoo.serving.serving_task import ServingTask

__all__ = ["StartedStep"]


@dataclass(frozen=True)
class StartedStep:
    """A step whose tokens have not been read."""

    rows: dict[int, ServingTask]
    tokens: Callable[[], Any]
    log_probabilities: Callable[[], tuple[Any, ...]] | None
    reporting: list[int]
    """Rows whose log-probabilities were asked for."""
    began: float

    def logprobs_of(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """By row, for the rows that asked; waits for the step."""
        if self.log_probabilities is None:
            return {}
        chosen, values, indices = (x.tolist() for x in self.log_probabilities())
        found = {}
        for i, row in enumerate(self.reporting):
            count = self.rows[row].request.logprobs or 0
            top = tuple(zip(indices[i][:count], values[i][:count], strict=True))
            found[row] = TokenLogprob(token_id=tokens[row], logprob=chosen[i], top=top)
        return found
