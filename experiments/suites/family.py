"""The family suite: every registered rule on the same tasks, at one size and on the same data, for one large GPU.

A rule enters by being registered. On state tracking a rule that allows it runs a second time with the doubled step
size. Seeds are few and trainings short: a lead of a few hundredths is noise, so leads that papers report count as
"warn" where they are missed, and only what the theory excludes can FAIL.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from deltazoo.layers import make_layer
from deltazoo.spec import get_rule, list_rules
from experiments.claims import Check, Claim, Missing, Scores, gap
from experiments.configurations import label_of, parse_configuration
from experiments.experiment import Experiment
from experiments.recipe import Recipe
from experiments.task import Task
from experiments.tasks.byte_text import BYTE_TEXT
from experiments.tasks.groups import A5, S3, S5, S5_SWAPS
from experiments.tasks.needle import NUMBER
from experiments.tasks.overwrite import OVERWRITE_LARGE
from experiments.tasks.parity import PARITY
from experiments.tasks.reset import SELECTIVE_RESET

__all__ = ["FAMILY"]


def _can_double(rule: str) -> bool:
    """Whether the rule has a form with the doubled step size that is not a rule of its own."""
    spec = get_rule(rule)
    if not spec.corrects or spec.allow_neg_eigval or f"neg_{rule}" in list_rules():
        return False
    try:
        with torch.device("meta"):
            make_layer(spec, 16, 1, 16, expand_v=1.0, allow_neg_eigval=True)
    except ValueError:
        return False
    return True


_RULES = tuple(list_rules())
_DOUBLED = tuple(f"{rule}+neg" for rule in _RULES if _can_double(rule))
_STEPS_AND_RANGE = ("gated_deltanet", "neg_gated_deltanet", "gated_deltanet+x2", "neg_gated_deltanet+x2")
_FOUR_STEPS = ("gated_deltanet+x4", "neg_gated_deltanet+x4")

_TRACKING = Recipe(
    hidden_size=128,
    num_heads=4,
    head_dim=32,
    mlp_ratio=4.0,
    batch_size=256,
    draw_ahead=8,
    learning_rate=3e-3,
    test_sequences=512,
)
_GROUPS = replace(_TRACKING, use_short_conv=False, curriculum=0.5)
_WORDS = replace(_GROUPS, train_lengths=(2, 8), test=(8, 16, 32), steps=3000)
_MEMORY = Recipe(
    num_layers=2,
    hidden_size=64,
    num_heads=1,
    head_dim=64,
    mlp_ratio=4.0,
    train_lengths=(128, 128),
    test=(128, 256),
    batch_size=128,
    learning_rate=3e-3,
    steps=800,
    mlp_multiple=8,
    bf16=True,
)


def _tracking(name: str, task: Task, recipe: Recipe, headline: int, further: tuple[str, ...] = ()) -> Experiment:
    return Experiment(
        name=name,
        task=task,
        recipe=recipe,
        configurations=tuple(dict.fromkeys((*_RULES, *_DOUBLED, *further))),
        headline=headline,
    )


PARITY_FAMILY = _tracking(
    "parity",
    PARITY,
    replace(_TRACKING, train_lengths=(3, 40), test=(40, 128, 256), weight_decay=0.1, steps=1000),
    128,
)
S3_FAMILY = _tracking(
    "s3",
    S3,
    replace(_GROUPS, num_heads=8, head_dim=16, train_lengths=(3, 32), test=(32, 128, 256), steps=1000),
    128,
    _STEPS_AND_RANGE[2:],
)
SWAPS_FAMILY = _tracking(
    "s5_swaps", S5_SWAPS, replace(_GROUPS, train_lengths=(3, 32), test=(32, 64, 128), steps=600), 64
)
A5_FAMILY = _tracking("a5", A5, _WORDS, 16, _STEPS_AND_RANGE[2:])
S5_FAMILY = _tracking("s5", S5, _WORDS, 16, (*_STEPS_AND_RANGE[2:], *_FOUR_STEPS))
_DEEP = replace(_WORDS, num_layers=3, use_short_conv=True, learning_rate=1e-3)
A5_DEEP = Experiment(name="a5_deep", task=A5, recipe=_DEEP, configurations=_STEPS_AND_RANGE, headline=16)
S5_DEEP = Experiment(name="s5_deep", task=S5, recipe=_DEEP, configurations=_STEPS_AND_RANGE, headline=16)
OVERWRITE_FAMILY = Experiment(
    name="overwrite", task=OVERWRITE_LARGE, recipe=_MEMORY, configurations=_RULES, seeds=(0, 1)
)
RESET_FAMILY = Experiment(
    name="selective_reset",
    task=SELECTIVE_RESET,
    recipe=replace(
        _MEMORY,
        num_layers=1,
        head_dim=16,
        mlp_multiple=2,
        train_lengths=(32, 32),
        test=(8, 16, 32),
        batch_size=64,
        steps=600,
    ),
    configurations=_RULES,
    seeds=(0, 1),
    headline=32,
)
NEEDLE_FAMILY = Experiment(
    name="needle",
    task=NUMBER,
    recipe=replace(
        _MEMORY,
        hidden_size=128,
        num_heads=2,
        train_lengths=(64, 256),
        test=(256, 2048, 16384),
        test_sequences=64,
        batch_size=64,
        learning_rate=1e-3,
    ),
    configurations=_RULES,
    headline=16384,
)
BYTES_FAMILY = Experiment(
    name="byte_text",
    task=BYTE_TEXT,
    recipe=Recipe(
        num_layers=3,
        hidden_size=256,
        num_heads=4,
        head_dim=64,
        mlp_ratio=4.0,
        train_lengths=(512, 512),
        test=(512, 2048, 8192),
        test_sequences=128,
        batch_size=32,
        learning_rate=2e-3,
        weight_decay=0.1,
        steps=500,
        mlp_multiple=8,
        bf16=True,
    ),
    configurations=_RULES,
)
_COMPARISON = (
    PARITY_FAMILY,
    S3_FAMILY,
    SWAPS_FAMILY,
    A5_FAMILY,
    S5_FAMILY,
    OVERWRITE_FAMILY,
    RESET_FAMILY,
    NEEDLE_FAMILY,
    BYTES_FAMILY,
)


def _lead(scores: Scores, experiment: Experiment, better: str, worse: str, bound: float) -> Check:
    """By how much one configuration is ahead of another at the experiment's headline, in the mean of seeds."""
    ours, theirs = (scores.mean(experiment.name, name, experiment.shown) for name in (better, worse))
    if experiment.task.metric == "bits":
        ours, theirs = theirs, ours
    what = f"{experiment.name} at {experiment.shown:,}: {label_of(better)} ahead of {label_of(worse)} by"
    return gap(what, ours - theirs, bound, otherwise="warn")


def _comparison(scores: Scores) -> list[Check]:
    checks = []
    for experiment in _COMPARISON:
        in_bits = experiment.task.metric == "bits"
        found = {}
        for name in experiment.configurations:
            try:
                found[name] = scores.mean(experiment.name, name, experiment.shown)
            except Missing:  # a table may have holes
                continue
        if found:
            first = sorted(found, key=lambda name: found[name], reverse=not in_bits)[:3]
            shown = ", ".join(f"{label_of(name)} {found[name]:.3f}" for name in first)
            checks.append(Check("printed", f"{experiment.name} at {experiment.shown:,}, the first three: {shown}"))
    if not checks:
        raise Missing("no experiment has a result")
    return checks


def _is_doubled(name: str) -> bool:
    configuration = parse_configuration(name)
    assert configuration.spec is not None
    return bool(configuration.options.get("allow_neg_eigval", configuration.spec.allow_neg_eigval))


def _positive() -> list[str]:
    """Rules whose transitions have eigenvalues in [0, 1] only: symmetric ones, on the decayed state."""
    return [name for name in _RULES if not _is_doubled(name) and name not in _oblique()]


def _oblique() -> list[str]:
    """Rules that read the state under another key than they write, or before the decay."""
    specs = {name: get_rule(name) for name in _RULES}
    return [name for name, spec in specs.items() if spec.erase_key == "separate" or spec.erase_reads == "undecayed"]


def _range(scores: Scores) -> list[Check]:
    doubled = [name for name in (*_RULES, *_DOUBLED) if _is_doubled(name)]
    ungated = [name for name in _oblique() if not _is_doubled(name)]
    return [
        *(scores.at_least("parity", name, 128, 0.90, otherwise="warn") for name in doubled),
        *(scores.at_most("parity", name, 128, 0.60) for name in _positive()),
        *(scores.at_least("s5_swaps", name, 64, 0.90, otherwise="warn") for name in doubled),
        *(scores.at_most("s5_swaps", name, 64, 0.10) for name in _positive()),
        *(scores.show("parity", name, 128, named=True) for name in ungated),
        *(scores.show("s5_swaps", name, 64, named=True) for name in ungated),
    ]


def _s3(scores: Scores) -> list[Check]:
    two_steps = [name for name in ("neg_gated_deltanet+x2", "gated_deltaproduct") if name.split("+")[0] in _RULES]
    one_step = ("neg_delta_net", "neg_gated_deltanet")
    return [
        *(scores.at_least("s3", name, 128, 0.95, otherwise="warn") for name in two_steps),
        *(scores.at_most("s3", name, 128, 0.60) for name in (*one_step, "gated_deltanet+x2", *_positive())),
    ]


def _steps_or_range(scores: Scores) -> list[Check]:
    checks = []
    for name in ("a5", "a5_deep", "s5", "s5_deep"):
        positive, signed, two, both = (scores.mean(name, mixer, 16) for mixer in _STEPS_AND_RANGE)
        checks += [
            gap(f"{name}: what the range adds to one step", signed - positive, 0.30, otherwise="warn"),
            Check("printed", f"{name}: what a second step adds in [0,1]: {two - positive:+.3f}"),
            Check("printed", f"{name}: what a second step adds in [-1,1]: {both - signed:+.3f}"),
            Check("printed", f"{name}: what the range adds to two steps: {both - two:+.3f}"),
        ]
    return [*checks, *(scores.show("s5", mixer, 16, named=True) for mixer in _FOUR_STEPS)]


_SMALL = "models of 0.1 to 3 million parameters trained for minutes"


@dataclass(frozen=True, kw_only=True)
class _Published:
    """What the paper of a rule reports, and leads of the rule at the headlines of experiments that should show it."""

    rule: str
    statement: str
    paper: str
    differences: str
    leads: tuple[tuple[Experiment, str, str, float], ...]
    """(experiment, ahead, behind, by at least)"""

    def claims(self) -> Iterable[Claim]:
        """The claim, once all the rules that it names are registered."""
        names = {self.rule, *(name.split("+")[0] for _, *pair, _ in self.leads for name in pair)}
        if names <= set(_RULES):
            yield Claim(
                name=self.rule,
                statement=self.statement,
                paper=self.paper,
                differences=self.differences,
                experiments=tuple({experiment.name: experiment for experiment, *_ in self.leads}.values()),
                judge=lambda scores: [_lead(scores, *lead) for lead in self.leads],
            )


_PUBLISHED = (
    _Published(
        rule="gated_deltanet",
        statement="Gated DeltaNet models language better than DeltaNet.",
        paper="1.3B, 100B tokens: perplexity 16.42 against 17.71 (arXiv:2412.06464)",
        differences=f"{_SMALL}; bits per byte of Python source",
        leads=((BYTES_FAMILY, "gated_deltanet", "delta_net", 0.0),),
    ),
    _Published(
        rule="kda",
        statement="KDA recalls and models language better than Gated DeltaNet.",
        paper="Recall, palindromes and stacks in fewer steps (arXiv:2510.26692, figures); selective forgetting is its "
        "motivation",
        differences=f"{_SMALL}; tasks of ours",
        leads=(
            (OVERWRITE_FAMILY, "kda", "gated_deltanet", 0.0),
            (RESET_FAMILY, "kda", "gated_deltanet", 0.0),
            (BYTES_FAMILY, "kda", "gated_deltanet", 0.0),
        ),
    ),
    _Published(
        rule="gla",
        statement="A decay that depends on the token models language better than a fixed one, or none.",
        paper="340M and 1.3B: lower perplexity than RetNet, whose decay is fixed (arXiv:2312.06635)",
        differences=f"{_SMALL}; Lightning Attention stands for a fixed decay per head",
        leads=(
            (BYTES_FAMILY, "gla", "linear_attention", 0.0),
            (BYTES_FAMILY, "gla", "lightning_attention", 0.0),
        ),
    ),
    _Published(
        rule="kaczmarz",
        statement="Kaczmarz' step recalls more than Gated DeltaNet and models language better.",
        paper="0.4B, 1B tokens: validation perplexity 8.09 against 8.50; multi-query recall +7.03 points "
        "(arXiv:2605.08587)",
        differences=f"{_SMALL}; recall with overwrites",
        leads=(
            (OVERWRITE_FAMILY, "kaczmarz", "gated_deltanet", 0.0),
            (BYTES_FAMILY, "kaczmarz", "gated_deltanet", 0.0),
        ),
    ),
    _Published(
        rule="gated_deltanet2",
        statement="Gated DeltaNet-2 recalls more than KDA and models language better.",
        paper="1.3B, 100B tokens: UUID needle at 2k 89.8 against 63.2, average 53.11 against 52.28 (arXiv:2605.22791)",
        differences=f"{_SMALL}; recall with overwrites, a needle of seven digits",
        leads=(
            (OVERWRITE_FAMILY, "gated_deltanet2", "kda", 0.0),
            (NEEDLE_FAMILY, "gated_deltanet2", "kda", 0.0),
            (BYTES_FAMILY, "gated_deltanet2", "kda", 0.0),
        ),
    ),
    _Published(
        rule="qed",
        statement="QED finds a needle in longer contexts than Gated DeltaNet-2.",
        paper="About twice the usable context on S-NIAH-1 (arXiv:2608.13668, abstract)",
        differences=f"{_SMALL}; a needle of seven digits in random words, 64 times the training length",
        leads=((NEEDLE_FAMILY, "qed", "gated_deltanet2", 0.0),),
    ),
    _Published(
        rule="q_delta",
        statement="Q-Delta finds needles better than Gated DeltaNet and models language better.",
        paper="1.3B, 30B tokens: S-NIAH 90.0 against 83.5, average 53.47 against 52.77 (arXiv:2606.08804)",
        differences=f"{_SMALL}; a needle of seven digits",
        leads=(
            (NEEDLE_FAMILY, "q_delta", "gated_deltanet", 0.0),
            (BYTES_FAMILY, "q_delta", "gated_deltanet", 0.0),
        ),
    ),
    _Published(
        rule="pgdn",
        statement="A preconditioned key helps Gated DeltaNet to recall and to model language.",
        paper="Consistent gains on synthetic recall, at 340M and at 1B (arXiv:2604.21100, abstract)",
        differences=f"{_SMALL}; recall with overwrites",
        leads=(
            (OVERWRITE_FAMILY, "pgdn", "gated_deltanet", 0.0),
            (BYTES_FAMILY, "pgdn", "gated_deltanet", 0.0),
        ),
    ),
    _Published(
        rule="pkda",
        statement="A preconditioned key helps KDA to recall and to model language.",
        paper="Consistent gains on synthetic recall, at 340M and at 1B (arXiv:2604.21100, abstract)",
        differences=f"{_SMALL}; recall with overwrites",
        leads=((OVERWRITE_FAMILY, "pkda", "kda", 0.0), (BYTES_FAMILY, "pkda", "kda", 0.0)),
    ),
    _Published(
        rule="eda",
        statement="EDA models language better than KDA and clears what is stale, but recalls old values under their "
        "own key worse.",
        paper="2.5B and 25B hybrids, 400B tokens: average 28.44 against 27.81, 49.38 against 48.31; the recall is the "
        "limit that its authors state (arXiv:2606.26560)",
        differences=f"{_SMALL}, no softmax layers; recall with overwrites; selective forgetting is the motivation",
        leads=(
            (BYTES_FAMILY, "eda", "kda", 0.0),
            (RESET_FAMILY, "eda", "kda", 0.0),
            (OVERWRITE_FAMILY, "kda", "eda", 0.0),
        ),
    ),
    _Published(
        rule="fg2_gdn",
        statement="A step size per channel is level with KDA.",
        paper="1.3B, 100B tokens: RULER at 16k 44.6 against 44.9, elsewhere mixed (arXiv:2604.19021)",
        differences=f"{_SMALL}; level means at most .05 behind",
        leads=(
            (NEEDLE_FAMILY, "fg2_gdn", "kda", -0.05),
            (OVERWRITE_FAMILY, "fg2_gdn", "kda", -0.05),
            (BYTES_FAMILY, "fg2_gdn", "kda", -0.05),
        ),
    ),
    _Published(
        rule="comba",
        statement="Comba models language better than Gated DeltaNet.",
        paper="Ahead at 340M and 1.3B (arXiv:2506.02475, as others report it)",
        differences=f"{_SMALL}; bits per byte of Python source",
        leads=((BYTES_FAMILY, "comba", "gated_deltanet", 0.0),),
    ),
)

FAMILY: tuple[Claim, ...] = (
    Claim(
        name="comparison",
        statement="Every rule on every task, at one size and on the same data.",
        paper="none: one comparison of all",
        differences="state tracking in one layer, without convolutions but for parity; figures only",
        experiments=_COMPARISON,
        judge=_comparison,
        picture="table",
    ),
    Claim(
        name="range",
        statement="Negative eigenvalues let one layer of any rule track parity and swaps; without them none does.",
        paper="Parity 1.0 against .017 (scaled), swaps of five objects solved by one DeltaNet [-1,1] layer "
        "(arXiv:2411.12537)",
        differences="1 layer, 600 and 1,000 steps; rules with an erase key of their own, or that erase what they read "
        "before the decay, are shown without a gate: their transitions need not have eigenvalues in [0, 1]",
        experiments=(PARITY_FAMILY, SWAPS_FAMILY),
        judge=_range,
    ),
    Claim(
        name="two_steps",
        statement="One layer follows S3 only with two Householder steps per token and negative eigenvalues.",
        paper="Only n = 2 with [-1,1] converges (arXiv:2502.10297, figure; train 128, test 512)",
        differences="trained on up to 32 moves for 1,000 steps of 256, tested at 128",
        experiments=(S3_FAMILY,),
        judge=_s3,
    ),
    Claim(
        name="steps_or_range",
        statement="On A5 and S5 the range of beta decides, and more micro-steps per token add little.",
        paper="Reported by a third party, no publication known to us; the theory asks "
        "for both: products of n reflections need n steps (arXiv:2502.10297)",
        differences="one layer without convolution, and three with, on 2 to 8 moves for 3,000 steps, tested at 16; "
        "one seed",
        experiments=(A5_FAMILY, S5_FAMILY, A5_DEEP, S5_DEEP),
        judge=_steps_or_range,
    ),
    *(claim for published in _PUBLISHED for claim in published.claims()),
)
