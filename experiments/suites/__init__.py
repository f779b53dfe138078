"""The suites of claims: `mini` for a CPU (three minutes), `full` and `family` for a GPU."""

from experiments.claims import Lab
from experiments.suites.family import FAMILY
from experiments.suites.full import FULL
from experiments.suites.mini import MINI

LABS = {"mini": Lab(MINI), "full": Lab(FULL), "family": Lab(FAMILY)}
