"""One update of a lab model: loss, gradients, AdamW. On a GPU it is recorded once and replayed as one CUDA graph.

A model of the lab is so small that the GPU waits for the launches of an update, not for its arithmetic. A graph repeats
the launches on fixed tensors, so batches on a GPU are padded to one length (`Questions.of`).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.layers import parameter_groups
from experiments.network import LabModel
from experiments.recipe import Recipe
from experiments.task import IGNORED, Batch

__all__ = ["Questions", "Update", "answer", "training_stream"]

# Below this many steps along time the token loop beats the chunk form on a CPU, where a chunk is always 64 tokens.
_LOOP_UP_TO = 48


class Questions(NamedTuple):
    """A batch with its answered tokens picked out, on the device of the model."""

    inputs: Tensor
    tokens: Tensor
    """`[N]`, positions of the answers among the flattened tokens."""
    answers: Tensor
    """`[N]`; `IGNORED` in a padded batch where nothing is asked."""
    graded: Tensor
    """`[N]` bool."""

    @classmethod
    def of(
        cls, batch: Batch, device: torch.device, *, graded_only: bool = False, padded_to: int | None = None
    ) -> "Questions":
        """Pick the answered tokens, or only the graded ones.

        With `padded_to`, all tokens of sequences padded at the end to that length are picked, so that every batch has
        the same shapes. No answer sees the padding, which follows it.
        """
        if padded_to is not None:
            missing = padded_to - batch.targets.shape[1]
            inputs = F.pad(batch.inputs, (0, missing) if batch.inputs.dim() == 2 else (0, 0, 0, missing))
            targets = F.pad(batch.targets, (0, missing), value=IGNORED)
            tokens = torch.arange(targets.numel())
            batch = Batch(inputs, targets, F.pad(batch.graded, (0, missing)))
        else:
            # Picked before the copy to the GPU: their number is known here without waiting for it.
            tokens = (batch.graded if graded_only else batch.targets != IGNORED).flatten().nonzero()[:, 0]
        parts = (batch.inputs, tokens, batch.targets.flatten()[tokens], batch.graded.flatten()[tokens])
        if device.type == "cuda":  # a copy from pageable memory would wait for everything queued on the GPU
            return cls(*(x.contiguous().pin_memory().to(device, non_blocking=True) for x in parts))
        return cls(*(x.to(device) for x in parts))


def answer(model: LabModel, questions: Questions, recipe: Recipe) -> Tensor:
    """Logits `[N, classes]` float32."""
    on_cpu = questions.inputs.device.type == "cpu"
    model.use_backend("reference" if on_cpu and questions.inputs.shape[1] * model.micro_steps <= _LOOP_UP_TO else None)
    with torch.autocast(questions.inputs.device.type, torch.bfloat16, enabled=recipe.bf16):
        return model(questions.inputs, questions.tokens).float()


@contextmanager
def training_stream(device: torch.device) -> Iterator[None]:
    """On a GPU a stream of its own, which a recording needs; elsewhere nothing."""
    if device.type != "cuda":
        yield
        return
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


class Update:
    """Updates a model batch by batch, within `training_stream`.

    On a GPU the first two updates run as they are: one compiles kernels, one fails where the host would wait for the
    GPU. Then an update is recorded. A model that cannot be recorded is trained without, slower, with a warning.
    """

    def __init__(self, model: LabModel, recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self._on_gpu = next(model.parameters()).device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            parameter_groups(model, recipe.weight_decay),
            lr=recipe.learning_rate,
            betas=recipe.betas,
            fused=True,
            capturable=self._on_gpu,
        )
        if self._on_gpu:
            for group in self._optimizer.param_groups:
                group["lr"] = torch.tensor(recipe.learning_rate, device=next(model.parameters()).device)
        self._updates = 0
        self._records = self._on_gpu
        self._recorded: Callable[[Questions], Tensor] | None = None

    def __call__(self, questions: Questions, learning_rate: float) -> Tensor:
        """Update the parameters.

        Returns:
            `[2]`: the loss in nats and the accuracy on the graded answers, both before the update.
        """
        for group in self._optimizer.param_groups:
            if self._on_gpu:
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate
        self._updates += 1
        if not self._records or self._updates == 1:
            return self._update(questions)
        try:
            if self._updates == 2:
                with _no_waiting():
                    return self._update(questions)
            if self._recorded is None:
                self._recorded = self._record(questions)
        except RuntimeError as error:
            self._records = False
            warnings.warn(f"trained without a CUDA graph: {error}", stacklevel=2)
            return self._update(questions)
        return self._recorded(questions)

    def _record(self, example: Questions) -> Callable[[Questions], Tensor]:
        """An update as one CUDA graph, which reads a copy of each batch."""
        fixed = Questions(*(x.clone() for x in example))
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # The backward pass runs in other threads.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                found = self._update(fixed)
        finally:
            torch.cuda.set_stream(stream)

        def update(questions: Questions) -> Tensor:
            for kept, new in zip(fixed, questions, strict=True):
                kept.copy_(new)
            graph.replay()
            return found.clone()

        return update

    def _update(self, questions: Questions) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        logits = answer(self._model, questions, self._recipe)
        loss = F.cross_entropy(logits, questions.answers, ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._recipe.clip)
        self._optimizer.step()
        hits = (logits.detach().argmax(-1) == questions.answers) & questions.graded
        return torch.stack([loss.detach(), hits.sum() / questions.graded.sum().clamp(min=1)])


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Operations that make the host wait for the GPU raise RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
