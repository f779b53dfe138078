"""`deltazoo check`: right rules pass, and every wrong rule fails the check for its fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import call
from outside_rule import RULES, forget_rules
from torch import Tensor

from deltazoo.checks import CHECKS, check_rule
from deltazoo.cli.options import load_rule_file
from deltazoo.layers import DeltaRuleAttention, LayerInput
from deltazoo.spec import ANOTHER_FORM, RuleSpec, list_rules, register_rule

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


@pytest.mark.parametrize("rule", list_rules())
def test_rules_of_the_zoo_pass(rule: str) -> None:
    findings = list(check_rule(rule))
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


def test_an_exception_is_shown_once_with_its_place_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    path = RULES / "raises.py"
    line = 1 + path.read_text().splitlines().index("        return super().step_gate(x) * torch.ones(3)")
    where = f"{path}, line {line}, in step_gate(x.hidden_states: [2, 70, 24] torch.float64)"
    with forget_rules():
        load_rule_file(path)
        first, *others = check_rule("raises")
        assert call("check", str(path)) == 1
        shown = capsys.readouterr().out
        assert call("--traceback", "check", str(path)) == 1
        with_traceback = capsys.readouterr().out
    assert (first.problem or "").startswith("raised RuntimeError: The size of tensor a (4) must match")
    assert (first.problem or "").endswith(f"\n{where}")
    assert {finding.problem for finding in others} == {"raised the same error"} and len(others) == len(CHECKS) - 1
    assert shown.count(str(path)) == 1 and "Traceback" not in shown
    assert with_traceback.count("Traceback (most recent call last)") == 1 and where in with_traceback


def test_an_input_that_the_operator_refuses_names_the_rule() -> None:
    with forget_rules():

        class ShortGate(DeltaRuleAttention):
            def step_gate(self, x: LayerInput) -> Tensor:
                return super().step_gate(x)[:, :-1]

        register_rule(
            RuleSpec(name="short_gate", paper="", summary="", equation="", step_size="euler"), layer=ShortGate
        )
        first, *_ = check_rule("short_gate")
    problem = first.problem or ""
    assert "raised ValueError: beta must have shape (2, 70, 4) to match k and v, got (2, 69, 4)" in problem
    assert f"In no line of {__name__}: what the rule returned was refused." in problem


def test_a_class_with_an_operator_of_its_own_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It passed 11 of 12 checks, and reports described the operator that it did not run."""
    path = tmp_path / "own_operator.py"
    path.write_text(
        "import deltazoo\n\n"
        "class OwnOperator(deltazoo.DeltaRuleAttention):\n"
        "    def apply_rule(self, inputs, past, sequences):\n"
        "        raise NotImplementedError\n"
    )
    assert call("check", str(path)) == 1
    shown = "".join(capsys.readouterr().err.split())  # the terminal breaks lines, in a path too
    for part in (
        f"{path}, line 3: TypeError: OwnOperator overrides apply_rule, the call of the operator",
        "an nn.Module of its own, which keeps its state in a deltazoo.layers.StateStore",
    ):
        assert "".join(part.split()) in shown

    class Mixed:
        def apply_rule(self) -> None: ...

    with pytest.raises(TypeError, match="Both overrides apply_rule"):
        type("Both", (Mixed, DeltaRuleAttention), {})


def test_a_forward_pass_without_the_operator_is_no_rule() -> None:
    with forget_rules():

        class Skips(DeltaRuleAttention):
            def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
                return hidden_states

        register_rule(RuleSpec(name="skips", paper="", summary="", equation="", step_size="euler"), layer=Skips)
        found = {finding.title: finding.problem for finding in check_rule("skips")}
    assert "calls no operator" in (found["the state does not expand"] or "")


def test_a_misspelt_step_size_is_said_once() -> None:
    with forget_rules():
        register_rule(RuleSpec(name="misspelt", paper="", summary="", equation="", step_size="eulr"))
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
    monkeypatch.setattr("deltazoo.checks.promises.CHECKS", first)
    with forget_rules():
        assert call("check", str(RULES / "reads_the_future.py")) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "WRONG no token reads the future" in shown and "1 check has found something wrong" in shown

    (tmp_path / "empty_rule.py").write_text("import deltazoo\n")
    assert call("check", str(tmp_path / "empty_rule.py")) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "registers no rule" in shown and ANOTHER_FORM in shown
    for name in ("MesaNet", "log_linear", "mamba-3"):
        assert call("check", name) == 1
        shown = " ".join(capsys.readouterr().err.split())
        assert shown == f"Error: rule '{name}' does not have the form of the operator: {ANOTHER_FORM}"
    assert call("check", "kad") == 1
    assert "did you mean 'kda'" in " ".join(capsys.readouterr().err.split())
