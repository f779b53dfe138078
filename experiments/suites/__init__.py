"""The suites: `mini` and `causes` for a CPU (three minutes, half an hour), `full` and `family` for one large GPU."""

from deltazoo.names import unknown
from experiments.claims import Claim
from experiments.suites.causes import CAUSES
from experiments.suites.family import FAMILY
from experiments.suites.full import FULL
from experiments.suites.mini import MINI

__all__ = ["SUITES", "get_suite"]

SUITES: dict[str, tuple[Claim, ...]] = {"mini": MINI, "full": FULL, "family": FAMILY, "causes": CAUSES}


def get_suite(name: str) -> tuple[Claim, ...]:
    """The claims of a suite.

    Raises:
        ValueError: no such suite.
    """
    if name not in SUITES:
        raise ValueError(unknown("suite", name, [*SUITES, "text", "text-conversions"]))
    return SUITES[name]
