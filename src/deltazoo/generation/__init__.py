"""Generation: the loop of `deltazoo.generate`, captured steps for `model.generate`, and the cache of states.

`Decoder` and `generate` run a prompt in pieces, then steps that include the sampling; on a GPU a step is one CUDA
graph. `snapshot`, `restore`, `fork` and `detach` treat the states in a cache as values (`deltazoo.generation.states`).
"""

from deltazoo.generation.decoder import Decoder, generate
from deltazoo.generation.sampling import Sampling
from deltazoo.generation.states import Snapshot, detach, fork, restore, snapshot

__all__ = ["Decoder", "Sampling", "Snapshot", "detach", "fork", "generate", "restore", "snapshot"]
