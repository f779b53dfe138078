"""`deltazoo check`: right rules pass, and every wrong rule fails the check for its fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import call
from outside_rule import RULES, forget_rules

from deltazoo.spec import DeltaRuleSpec, list_variants, register_variant
from deltazoo.workbench.check import CHECKS, check_rule
from deltazoo.workbench.rule_files import load_rule_file

# File -> the checks that must fail, and words from the message of the first.
WRONG = {
    "reads_the_future": (
        ["no token reads the future", "padded = alone", "packed = alone"],
        "the rule reads the future",
    ),
    "expands_the_state": (["the state does not expand"], "so it grows without bound"),
    "positive_log_decay": (["the state does not expand"], "must not be positive"),
    "decodes_otherwise": (["decoding = training", "generation with a cache = without"], "one token at a time"),
    "sees_its_neighbours": (["decoding = training", "packed = alone"], "one token at a time"),
    "wrong_gradient": (["gradients = finite differences"], "finite differences say"),
    "forgets_on_reload": (["reloaded = saved"], "neither a parameter nor in the configuration"),
    "unused_parameter": (["every parameter is filled and acts"], "parameter 'time' gets no gradient"),
}


@pytest.mark.parametrize("variant", list_variants())
def test_rules_of_the_zoo_pass(variant: str) -> None:
    findings = list(check_rule(variant))
    assert {finding.title: finding.problem for finding in findings} == dict.fromkeys(CHECKS)
    assert not any(finding.remark for finding in findings)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name: str) -> None:
    expected, words = WRONG[name]
    with forget_rules():
        assert load_rule_file(RULES / f"{name}.py") == [name]
        found = {finding.title: finding.problem for finding in check_rule(name) if finding.problem}
    assert set(expected) <= set(found)
    assert words in (found[expected[0]] or "")


def test_a_rule_that_draws_random_numbers_is_called_so_and_not_checked_further() -> None:
    with forget_rules():
        load_rule_file(RULES / "draws_random_numbers.py")
        (finding,) = check_rule("draws_random_numbers")
    assert "two equal calls give different outputs" in (finding.problem or "")


def test_a_misspelt_step_size_is_said_once() -> None:
    with forget_rules():
        register_variant(DeltaRuleSpec(name="misspelt", paper="", summary="", equation="", step_size="eulr"))
        (finding,) = check_rule("misspelt")
    assert "raised ValueError: unknown step_size 'eulr'; did you mean 'euler'?" in (finding.problem or "")


def test_a_step_size_that_is_clipped_is_mentioned() -> None:
    with forget_rules():
        load_rule_file(RULES / "clipped_step.py")
        findings = {finding.title: finding for finding in check_rule("clipped_step")}
    assert not any(finding.problem for finding in findings.values())
    remark = findings["the state does not expand"].remark or ""
    assert "is clipped" in remark and "no gradient reaches the gate" in remark


def test_a_right_rule_outside_the_package_passes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with forget_rules():
        assert call("check", str(RULES / "trapezoid.py")) == 0
    shown = capsys.readouterr().out
    assert shown.count("  ok    ") == len(CHECKS) and "WRONG" not in shown


def test_the_command_says_what_is_wrong_and_exits_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {title: CHECKS[title] for title in list(CHECKS)[:4]}
    monkeypatch.setattr("deltazoo.workbench.check.rule_check.CHECKS", first)
    with forget_rules():
        assert call("check", str(RULES / "reads_the_future.py")) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "WRONG no token reads the future" in shown and "1 check has found something wrong" in shown

    (tmp_path / "empty_rule.py").write_text("import deltazoo\n")
    assert call("check", str(tmp_path / "empty_rule.py")) == 1
    assert "registers no variant" in " ".join(capsys.readouterr().err.split())
    assert call("check", "kad") == 1
    assert "did you mean 'kda'" in " ".join(capsys.readouterr().err.split())
