"""States after the beginnings of prompts, found by their tokens.

Where a hit may be. A state depends in its last bits on how the tokens before it were divided into forward passes. A
prompt is divided at multiples of the piece, and at its own end. So a prompt may start from a state

* at a multiple of the piece, which every prompt with these first tokens reaches by the same passes;
* at the end of a prompt, if its own end is there: the same prompt once more, for another sample.

Both give the bits that running the prompt from its beginning would give. The state at the end of an answer is not kept:
it was made token by token, and the next turn of the conversation must not depend on whether it is still there. That
turn finds the state at the last multiple of the piece within the former prompt, and runs the former answer as a part of
its own prompt.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from deltazoo.generation import Snapshot

__all__ = ["PrefixCache", "prefix_keys"]


def prefix_keys(tokens: Sequence[int], piece: int) -> dict[int, bytes]:
    """Keys of the positions of a prompt at which its state can be kept or found, by the number of tokens before them.

    Args:
        tokens: of the prompt.
        piece: of the passes over it.

    Returns:
        Digests of all tokens before each multiple of the piece, and before the end.
    """
    numbers, digest, keys = np.asarray(tokens, dtype=np.int64), b"", {}
    for start, end in pairwise([*range(0, len(tokens), piece), len(tokens)]):
        digest = blake2b(digest + numbers[start:end].tobytes(), digest_size=16).digest()
        keys[end] = digest
    return keys


class PrefixCache:
    """States by key; when they take too much memory, those go that have not been used for longest.

    Args:
        memory: most bytes of all states; 0: keep none.

    Attributes:
        nbytes: of all states.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.nbytes = 0
        self._states: OrderedDict[bytes, Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def find(self, keys: dict[int, bytes]) -> tuple[int, Snapshot | None]:
        """The longest known beginning of a prompt: its number of tokens and the state after them; 0 and None: none."""
        for length in sorted(keys, reverse=True):
            state = self._states.get(keys[length])
            if state is not None:
                self._states.move_to_end(keys[length])
                return length, state
        return 0, None

    def put(self, key: bytes, state: Snapshot) -> None:
        """Keep a state, unless it is larger than all the memory."""
        if key in self._states:
            return self._states.move_to_end(key)
        if state.nbytes > self.memory:
            return
        self._states[key] = state
        self.nbytes += state.nbytes
        while self.nbytes > self.memory:
            _, oldest = self._states.popitem(last=False)
            self.nbytes -= oldest.nbytes
