"""The suites of claims: `mini` and `causes` for a CPU (three minutes, half an hour), `full` and `family` for a GPU."""

from experiments.claims import Lab
from experiments.suites.causes import CAUSES
from experiments.suites.family import FAMILY
from experiments.suites.full import FULL
from experiments.suites.mini import MINI

LABS = {"mini": Lab(MINI), "full": Lab(FULL), "family": Lab(FAMILY), "causes": Lab(CAUSES)}
