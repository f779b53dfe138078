"""The full suite: for one large GPU, a dozen runs at a time."""

from deltazoo.lab.claims import Claim
from deltazoo.lab.suites.language import LANGUAGE
from deltazoo.lab.suites.memory import MEMORY
from deltazoo.lab.suites.pixels import PIXELS
from deltazoo.lab.suites.state_tracking import STATE_TRACKING

__all__ = ["FULL"]

FULL: tuple[Claim, ...] = (*STATE_TRACKING, *MEMORY, *PIXELS, *LANGUAGE)
