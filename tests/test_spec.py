"""The registry, and specs that contradict themselves."""

import ast
import inspect
from dataclasses import FrozenInstanceError, replace

import pytest
from golden.freeze import RULES as NINE
from helpers import run_python
from outside_rule import forget_rules

import deltazoo
from deltazoo import rules
from deltazoo import spec as registry
from deltazoo.layers import DeltaRuleAttention
from deltazoo.spec import (
    Promises,
    RuleSpec,
    StepForm,
    get_rule,
    list_rules,
    register_rule,
    registered_layer,
    registered_promises,
    registering_module,
)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def my_rule(**changes: object) -> RuleSpec:
    return replace(get_rule("delta_net"), name="my_rule", hub_model_type=None, **changes)  # type: ignore[arg-type]


def test_the_nine_rules_are_registered_on_import() -> None:
    assert set(list_rules()) >= set(NINE)
    assert deltazoo.list_rules() == list_rules()
    for name in NINE:
        assert get_rule(name).name == name


@pytest.mark.parametrize("name", NINE)
def test_every_rule_names_its_source_and_equation(name: str) -> None:
    spec = get_rule(name)
    assert "arXiv:" in spec.paper
    assert "S_t = " in spec.equation and "S_{t-1}" in spec.equation
    assert spec.summary.endswith(".")


def test_equations_say_what_the_choices_say() -> None:
    for spec in map(get_rule, NINE):
        assert ("exp(g_t)" in spec.equation) == (spec.decay != "none"), spec.name
        assert ("Diag" in spec.equation) == (spec.decay == "channel"), spec.name
        assert (" 2 b_t" in spec.equation) == spec.allow_neg_eigval, spec.name
        assert ("(I - " in spec.equation) == spec.corrects, spec.name


def test_hub_types_are_those_of_published_checkpoints() -> None:
    assert {get_rule(name).hub_model_type for name in NINE} == {"delta_net", "gated_deltanet", "kda", "efla", None}


def test_rules_are_listed_as_written() -> None:
    """A file that imports another rule's would register that one too early if it came first."""
    names = run_python("import deltazoo\nprint(*deltazoo.list_rules())").split()
    (imported,) = (node for node in ast.parse(inspect.getsource(rules)).body if isinstance(node, ast.ImportFrom))
    written = [alias.name for alias in imported.names]
    assert [name for name in names if name in written] == written


def test_a_registered_rule_is_found(own_registry: None) -> None:
    spec = register_rule(my_rule(decay="scalar"))
    assert get_rule("my_rule") is spec
    assert list_rules()[-1] == "my_rule"


def test_registering_an_equal_spec_again_changes_nothing(own_registry: None) -> None:
    register_rule(my_rule())
    register_rule(my_rule())
    assert list_rules().count("my_rule") == 1


def test_a_taken_name_is_refused(own_registry: None) -> None:
    register_rule(my_rule())
    with pytest.raises(ValueError, match="'my_rule' is taken"):
        register_rule(my_rule(decay="scalar"))


def test_an_unknown_name_gets_the_nearest_match_and_the_list() -> None:
    with pytest.raises(
        ValueError, match=r"unknown rule 'gated_delta_net'; did you mean 'gated_deltanet'\? known: .*kda"
    ):
        get_rule("gated_delta_net")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_size": 2.0}, "step_size must be a name or a function, got 2.0"),
        ({"decay": "per_channel"}, "unknown decay 'per_channel'; did you mean 'channel'"),
        ({"output_gate": "lowrank"}, "unknown output_gate 'lowrank'; did you mean 'low_rank'"),
        ({"gate_activation": None}, "gate_activation must be a name or a function, got None"),
        ({"decay": "scalar", "decay_gate": abs, "decay_lower_bound": -5.0}, "decay_gate is 'abs'"),
        ({"step_size": "none", "allow_neg_eigval": True}, "allow_neg_eigval=True needs a correction term"),
        ({"step_size": "none", "num_micro_steps": 2}, "num_micro_steps=2 needs a correction term"),
        ({"step_size": "none", "erase_key": "separate"}, "erase_key='separate' needs a correction term"),
        ({"erase_key": "own"}, "unknown erase_key 'own'"),
        ({"erase_reads": "undecay"}, "unknown erase_reads 'undecay'; did you mean 'undecayed'"),
        ({"nonexpansive": "maybe"}, "unknown nonexpansive 'maybe'"),
        ({"num_micro_steps": 0}, "num_micro_steps must be a whole number of at least 1, got 0"),
        ({"num_micro_steps": True}, "num_micro_steps must be a whole number of at least 1, got True"),
        ({"head_dim": True}, "head_dim must be a whole number of at least 1, got True"),
        ({"decay_lower_bound": -5.0}, "decay_lower_bound needs a decay"),
        ({"decay_gate": abs}, "decay_gate='abs' needs decay='scalar' or"),
        ({"decay": "scalar", "decay_lower_bound": 5.0}, "must be negative, got 5.0"),
    ],
)
def test_contradictions_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        my_rule(**changes)
    assert "my_rule" in str(error.value)


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        get_rule("kda").decay = "scalar"  # type: ignore[misc]


def test_a_layer_class_is_registered_with_its_spec(own_registry: None) -> None:
    @register_rule(my_rule())
    class MyRule(DeltaRuleAttention):
        pass

    assert get_rule("my_rule") == my_rule()
    assert registered_layer("my_rule") is MyRule and registered_layer("delta_net") is None
    register_rule(my_rule())  # equal, with no layer: nothing changes
    register_rule(my_rule(), layer=MyRule)
    assert registered_layer("my_rule") is MyRule

    class Other(DeltaRuleAttention):
        pass

    with pytest.raises(ValueError, match="'my_rule' has a layer class already"):
        register_rule(my_rule(), layer=Other)
    with pytest.raises(TypeError, match=r"must be a subclass of deltazoo.layers.DeltaRuleAttention, got <class 'dict'"):
        register_rule(replace(my_rule(), name="other"), layer=dict)


def test_promises_are_made_where_a_class_is_registered(own_registry: None) -> None:
    with pytest.raises(ValueError, match="'my_rule': step_form and gain_at_most_one describe a layer class"):
        register_rule(my_rule(), gain_at_most_one=True)

    @register_rule(my_rule())
    class MyRule(DeltaRuleAttention):
        pass

    assert registered_promises("my_rule") == registered_promises("unknown") == Promises()
    register_rule(my_rule(), layer=MyRule, step_form=StepForm("fixed"), gain_at_most_one=True)
    register_rule(my_rule())
    assert registered_promises("my_rule") == Promises(StepForm("fixed"), gain_at_most_one=True)

    line = r"Former.step_form belongs to the registration of the rule: write .*\(SPEC, layer=Former, step_form="
    with pytest.raises(TypeError, match=line):

        class Former(DeltaRuleAttention):
            def step_form(self) -> StepForm:
                return StepForm("fixed")


def test_a_rule_from_outside_cannot_pass_for_one_of_the_zoo(own_registry: None) -> None:
    """A copy of DeltaNet's spec under another name would be trained and saved as DeltaNet."""
    with pytest.raises(ValueError, match="hub_model_type='delta_net' would load as another model"):
        register_rule(replace(get_rule("delta_net"), name="my_rule"))
    assert "my_rule" not in list_rules()

    class MyDeltaNet(DeltaRuleAttention):
        pass

    with pytest.raises(ValueError, match="'delta_net' comes with deltazoo and has no layer class of its own"):
        get_rule("delta_net")(MyDeltaNet)
    assert registered_layer("delta_net") is None


def test_the_module_of_a_rule_is_remembered(own_registry: None) -> None:
    register_rule(my_rule())
    assert registering_module("my_rule") == __name__
    assert registering_module("kda") is None
    with pytest.raises(ValueError, match="unknown rule 'my_rul'; did you mean 'my_rule'"):
        registering_module("my_rul")


def test_a_layer_class_may_be_named_and_is_imported_when_it_is_used(own_registry: None) -> None:
    register_rule(my_rule(), layer="deltazoo.layers.delta_attention.DeltaRuleAttention")
    assert registered_layer("my_rule") is DeltaRuleAttention


def test_rules_are_listed_without_torch() -> None:
    code = "import sys, deltazoo.rules, deltazoo.spec as s; print(len(s.list_rules()), 'torch' in sys.modules)"
    number, has_torch = run_python(code).split()
    assert int(number) >= len(NINE) and has_torch == "False"


CELL = """
from deltazoo import RuleSpec, register_rule
from deltazoo.layers import DeltaRuleAttention

def step(b, k):
    return b

@register_rule(RuleSpec(name="cell_rule", paper="-", summary="-", equation="-", step_size=step))
class CellRule(DeltaRuleAttention):
    pass
"""


def test_a_cell_of_a_notebook_can_run_again() -> None:
    """It makes another function and another class of the same names."""
    with forget_rules():
        first, second = {"__name__": "__main__"}, {"__name__": "__main__"}
        exec(CELL, first)
        exec(CELL, second)
        assert get_rule("cell_rule").step_size is second["step"] is not first["step"]
        assert registered_layer("cell_rule") is second["CellRule"]
        register_rule(get_rule("cell_rule"))
        assert registered_layer("cell_rule") is second["CellRule"]
        with pytest.raises(ValueError, match="taken by another spec, registered by __main__: choose another"):
            exec(CELL, {"__name__": "a_module"})


def test_an_earlier_revision_of_a_rule_stays_known() -> None:
    newest, first = get_rule("eda"), get_rule("eda", revision=1)
    assert (newest.output_gate, newest.revision) == ("full", 2) and newest is get_rule("eda", revision=2)
    assert (first.output_gate, first.revision, first.name) == ("low_rank", 1, "eda")
    with pytest.raises(ValueError, match="rule 'eda' has the revisions 1 to 2, got 3"):
        get_rule("eda", revision=3)
    with pytest.raises(ValueError, match="rule 'kda' has the revisions 1 to 1, got 0"):
        get_rule("kda", revision=0)
