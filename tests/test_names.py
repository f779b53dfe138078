"""The sentence for a name that is not among the known ones."""

from __future__ import annotations

import pytest

from deltazoo.names import did_you_mean, one_slip_away, unknown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("rule", "kdaa", ["kda", "delta_net"]),
            "unknown rule 'kdaa'; did you mean 'kda'? known: kda, delta_net",
        ),
        (("rule", "zzz", ("kda",)), "unknown rule 'zzz'; known: kda"),
        (("value", 3, ("a", "b")), "unknown value 3; known: a, b"),
        (("key", "x", {}), "unknown key 'x'; known: "),
        (("rule", "KDA", ["kda"]), "unknown rule 'KDA'; did you mean 'kda'? known: kda"),
        (
            ("rule", "Gated DeltaNet-2", ["gated_deltanet", "gated_deltanet2"]),
            "unknown rule 'Gated DeltaNet-2'; did you mean 'gated_deltanet2'? known: gated_deltanet, gated_deltanet2",
        ),
    ],
)
def test_the_sentence_names_the_nearest_and_lists_all(arguments: tuple, sentence: str) -> None:
    assert unknown(*arguments) == sentence


def test_the_section_is_shown_and_not_compared() -> None:
    known = ["steps", "traininga"]
    assert unknown("key", "stepps", known, within="training.").startswith(
        "unknown key 'training.stepps'; did you mean 'steps'?"
    )
    assert did_you_mean("nothing like it", known) == ""


@pytest.mark.parametrize(
    ("given", "meant"),
    [("hiden_size", "hidden_size"), ("hidden_sizes", "hidden_size"), ("hidden_szie", "hidden_size")]
    + [("hidden_dim", None), ("hidden_size", None), ("hiddn_siz", None)],
)
def test_one_slip_is_one_character_or_two_neighbours_swapped(given: str, meant: str | None) -> None:
    assert one_slip_away(given, ["hidden_size", "head_dim"]) == meant
