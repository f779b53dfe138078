"""The full suite: for one large GPU, a dozen runs at a time."""

from experiments.claims import Claim
from experiments.suites.language import LANGUAGE
from experiments.suites.memory import MEMORY
from experiments.suites.pixels import PIXELS
from experiments.suites.state_tracking import STATE_TRACKING

__all__ = ["FULL"]

FULL: tuple[Claim, ...] = (*STATE_TRACKING, *MEMORY, *PIXELS, *LANGUAGE)
