"""The prefix cache: where states are found, and how much memory they take."""

import pytest
import torch

from deltazoo.generation import Snapshot
from deltazoo.serving.prefill import PrefixCache, prefix_keys


def state(size=10):
    return Snapshot(("delta_rule",), ({"recurrent": torch.zeros(1, size)},), 1)


@pytest.mark.parametrize(("length", "places"), [(0, []), (3, [3]), (4, [4]), (9, [4, 8, 9])])
def test_places(length, places):
    assert list(prefix_keys(range(length), 4)) == places


def test_keys_depend_on_all_tokens_before_and_on_none_after():
    keys, other = prefix_keys((1, 2, 3, 4, 5, 6), 2), prefix_keys((1, 2, 3, 9, 5, 6, 7), 2)
    assert keys[2] == other[2] and keys[4] != other[4] and keys[6] != other[6]
    assert len({*keys.values(), *other.values()}) == 6


def test_the_end_of_a_prompt_is_found_by_the_same_prompt_alone():
    cache = PrefixCache(10**6)
    for length, key in prefix_keys(range(6), 4).items():
        cache.put(key, state(length))
    found = {count: cache.find(prefix_keys(range(count), 4))[0] for count in (3, 4, 5, 6, 7, 8)}
    assert found == {3: 0, 4: 4, 5: 4, 6: 6, 7: 4, 8: 4}


def test_the_least_recently_used_go_first():
    cache = PrefixCache(3 * 40)
    for number in range(3):
        cache.put(bytes([number]), state())
    assert cache.find({1: b"\0"})[0] == 1  # used
    cache.put(b"\1", state())  # put again
    cache.put(b"\3", state())
    assert [cache.find({1: bytes([number])})[0] for number in range(4)] == [1, 1, 0, 1]
    assert (len(cache), cache.nbytes) == (3, 120)


def test_states_larger_than_the_memory():
    cache = PrefixCache(120)
    cache.put(b"small", state())
    cache.put(b"large", state(31))
    assert len(cache) == 1 and cache.find({1: b"large"}) == (0, None)
    cache.put(b"most", state(30))
    assert len(cache) == 1 and cache.nbytes == 120
    none = PrefixCache(0)
    none.put(b"small", state())
    assert len(none) == none.nbytes == 0
