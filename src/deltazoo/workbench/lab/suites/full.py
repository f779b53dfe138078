"""The full suite: for one large GPU, a dozen runs at a time."""

from deltazoo.workbench.lab.claims import Claim
from deltazoo.workbench.lab.suites.language import LANGUAGE
from deltazoo.workbench.lab.suites.memory import MEMORY
from deltazoo.workbench.lab.suites.pixels import PIXELS
from deltazoo.workbench.lab.suites.state_tracking import STATE_TRACKING

__all__ = ["FULL"]

FULL: tuple[Claim, ...] = (*STATE_TRACKING, *MEMORY, *PIXELS, *LANGUAGE)
