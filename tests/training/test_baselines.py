"""The baselines against slow implementations of their definitions."""

from __future__ import annotations

import gzip
import lzma
import math
import random
from collections import Counter

import pytest

from deltazoo.training.baselines import ByteContextModel, baselines, gzip_bits_per_byte, xz_bits_per_byte
from deltazoo.training.data import Document

TEXT = (b"the cat sat on the mat, the dog sat on the cat. " * 3 + b"\x00\xff end") * 2
OTHER = b"the dog sat on a mat \xfe"


def slow_bits(train: list[bytes], scored: list[bytes], order: int) -> float:
    """Witten and Bell's method C with dictionaries, byte by byte."""
    counts: dict[bytes, Counter[int]] = {}
    for document in train:
        for i, byte in enumerate(document):
            for n in range(min(order, i) + 1):
                counts.setdefault(document[i - n : i], Counter())[byte] += 1

    def probability(byte: int, context: bytes) -> float:
        shorter = probability(byte, context[1:]) if context else 1 / 256
        seen = counts.get(context)
        return (seen[byte] + len(seen) * shorter) / (seen.total() + len(seen)) if seen else shorter

    bits = sum(
        -math.log2(probability(byte, document[max(0, i - order) : i]))
        for document in scored
        for i, byte in enumerate(document)
    )
    return bits / sum(map(len, scored))


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_context_model_is_witten_bell(order: int) -> None:
    train, scored = [TEXT, b"x", b"", OTHER[::-1]], [OTHER, b"q", b"xy", b"", b"the"]
    fitted = ByteContextModel(order).fit(train).bits_per_byte(scored)
    assert fitted == pytest.approx(slow_bits(train, scored, order), rel=1e-9)


def test_without_training_text_every_byte_costs_eight_bits() -> None:
    assert ByteContextModel(2).fit([]).bits_per_byte([TEXT]) == pytest.approx(8.0)


def test_fitting_in_two_parts_is_fitting_at_once() -> None:
    at_once = ByteContextModel(2).fit([TEXT, OTHER])
    in_parts = ByteContextModel(2).fit([TEXT]).fit([OTHER])
    assert at_once.bits_per_byte([OTHER, b"zebra"]) == in_parts.bits_per_byte([OTHER, b"zebra"])


def test_more_context_helps_on_text() -> None:
    bits = [ByteContextModel(order).fit([TEXT] * 5).bits_per_byte([TEXT]) for order in (0, 1, 2)]
    assert bits[0] > bits[1] > bits[2]


@pytest.mark.parametrize("order", [-1, 3])
def test_an_order_without_a_table_is_refused(order: int) -> None:
    with pytest.raises(ValueError, match="order must be 0, 1 or 2"):
        ByteContextModel(order)


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(ValueError, match="no byte to score"):
        ByteContextModel(1).fit([TEXT]).bits_per_byte([b""])
    for compressor in (gzip_bits_per_byte, xz_bits_per_byte):
        with pytest.raises(ValueError, match="no byte to compress"):
            compressor(b"")


def test_the_compressors_are_gzip_9_and_xz_9() -> None:
    data = random.Random(0).randbytes(300) + TEXT
    assert gzip_bits_per_byte(data) == 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)
    assert xz_bits_per_byte(data) == 8 * len(lzma.compress(data, preset=9)) / len(data)


def test_a_primed_compressor_pays_only_for_what_is_new() -> None:
    data = random.Random(1).randbytes(200_000)
    assert xz_bits_per_byte(data) >= 8
    assert xz_bits_per_byte(data, primed_with=data) < 0.1


def test_the_comparison_measures_what_it_can() -> None:
    def document(text: bytes) -> Document:
        return Document("name", text.decode("latin-1"), "name")

    held_out = [document(OTHER), document(b"more")]
    without = baselines([], held_out)
    assert [line.name for line in without] == ["gzip -9", "xz -9"]
    complete = baselines([document(TEXT)], held_out, primed=True)
    assert [line.name for line in complete] == ["gzip -9", "xz -9", "xz -9, primed", "order-2 byte model"]
    scored = [one.text.encode() for one in held_out]
    known = document(TEXT).text.encode()
    assert complete[3].bits_per_byte == pytest.approx(slow_bits([known], scored, 2), rel=1e-9)
    assert complete[2].has_seen == complete[3].has_seen == "the training text"
