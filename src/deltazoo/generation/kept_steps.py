"""What a model keeps of captured steps between calls of `generate`."""

import sys
import threading
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from deltazoo.generation.capture import graphs_run_on
from deltazoo.generation.static_cache import bytes_when_fixed, fixed_cache
from deltazoo.generation.static_decoding import StaticDecoding
from deltazoo.generation.step import Fingerprint

__all__ = ["KeptSteps"]

_KEPT_SHARE = 64
"""A captured step is kept if its states, keys and values take no more than the device's memory over this."""


class KeptSteps:
    """The captured step of a model's last call, and how that call went; copies of the model start with an empty one.

    Attributes:
        last: how the last call ran its steps, in words.
        kept: for the next call, None if there is none.
        in_use: held while a call captures and replays; one at a time.
    """

    def __init__(self) -> None:
        self.last: str | None = None
        self.kept: StaticDecoding | None = None
        self.in_use = threading.Lock()
        self._of_thread = threading.local()
        self._failed: tuple[Fingerprint, str] | None = None

    def __deepcopy__(self, memo: object) -> "KeptSteps":
        return KeptSteps()

    def __reduce__(self) -> Any:
        return KeptSteps, ()

    @property
    def running(self) -> list[Any]:
        """This thread's calls of `generate`, outermost first: a `CapturedCall`, or None where nothing is captured."""
        return self._of_thread.__dict__.setdefault("running", [])

    @property
    def last_logits(self) -> list[Tensor] | None:
        """In a list the last logits `[B, 1, vocabulary]` of this thread's innermost call of `generate`, if it has any;
        None: it keeps none."""
        return getattr(self._of_thread, "last_logits", None)

    @last_logits.setter
    def last_logits(self, kept: list[Tensor] | None) -> None:
        self._of_thread.last_logits = kept

    def forget(self) -> None:
        """Free what is kept."""
        self.kept = None

    def take(self, model: Any, filled: Cache, rows: int, max_length: int) -> StaticDecoding:
        """An empty static cache: that of an earlier call, with its captured step, if they fit; otherwise a new one.

        Args:
            model: that generates.
            filled: the cache whose contents will be moved to the static one.
            rows: of the batch.
            max_length: tokens that softmax layers must be able to hold.

        Raises:
            ValueError: the model can have no such cache, or there is too little memory for it.
        """
        kept, self.kept = self.kept, None
        if kept is not None and kept.serves(model, rows, max_length):
            kept.cache.reset()
            return kept
        del kept
        _check_memory(filled, max_length, model.device)
        return StaticDecoding(fixed_cache(model, max_length), rows)

    def keep(self, decoding: StaticDecoding, device: torch.device) -> None:
        """Keep a captured step for the next call, unless it takes much memory."""
        if decoding.step is None or not graphs_run_on(device):
            return
        if decoding.step.cache_tensors.nbytes <= _total_bytes(device) // _KEPT_SHARE:
            self.kept = decoding

    def decline(self, reason: str, required: bool) -> None:
        """Record why a call runs the ordinary loop.

        Raises:
            ValueError: the call is required to capture its steps.
        """
        if required:
            raise ValueError(f"capture_step=True cannot act: {reason}")
        self.last = f"the ordinary loop: {reason}"

    def record_failure(self, model: Any, error: Exception) -> None:
        """Remember that the model's step cannot be captured as the model is now."""
        reason = f"capturing the step failed ({str(error).splitlines()[0]})"
        self._failed = Fingerprint(model), reason
        self.last = f"the ordinary loop: {reason}"

    def earlier_failure(self, model: Any) -> str | None:
        """Why the model's step could not be captured, if the model is still as it was then."""
        if self._failed is None or self._failed[0] != Fingerprint(model):
            return None
        return self._failed[1]


def _check_memory(cache: Cache, max_length: int, device: torch.device) -> None:
    needed, free = bytes_when_fixed(cache, max_length), _free_bytes(device)
    if 2 * needed > free:
        raise ValueError(
            f"the keys and values of {max_length} tokens take {needed / 2**30:.1f} GiB at once, and "
            f"{free / 2**30:.1f} GiB are free"
        )


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return sys.maxsize
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _total_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else sys.maxsize
