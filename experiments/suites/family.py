"""The family suite: every registered rule on the same tasks, at one size and on the same data, for one large GPU.

A rule enters by being registered. On state tracking a rule that allows it runs a second time with the doubled step
size. Seeds are few and trainings short: a lead of a few hundredths is noise, so leads that papers report count as
"warn" where they are missed, and only what the theory excludes can FAIL.
"""

from dataclasses import replace

import torch

from deltazoo.layers import make_layer
from deltazoo.spec import get_rule, list_rules
from experiments.claims import Check, Claim, Missing, Scores, at_least, at_most, lead, show
from experiments.configurations import parse_configuration
from experiments.experiment import Experiment, Recipe


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


_SIDE_BY_SIDE = (*_RULES, *_DOUBLED)
_TWO_STEPS = (*_SIDE_BY_SIDE, *(name for name in _STEPS_AND_RANGE[2:] if name not in _SIDE_BY_SIDE))
PARITY = Experiment(
    "parity",
    _TRACKING,
    _SIDE_BY_SIDE,
    headline=128,
    train_lengths=(3, 40),
    test=(40, 128, 256),
    weight_decay=0.1,
    steps=1000,
)
S3 = Experiment(
    "s3",
    _GROUPS,
    _TWO_STEPS,
    headline=128,
    num_heads=8,
    head_dim=16,
    train_lengths=(3, 32),
    test=(32, 128, 256),
    steps=1000,
)
SWAPS = Experiment(
    "s5_swaps", _GROUPS, _SIDE_BY_SIDE, headline=64, train_lengths=(3, 32), test=(32, 64, 128), steps=600
)
A5 = Experiment("a5", _WORDS, _TWO_STEPS, headline=16)
S5 = Experiment("s5", _WORDS, (*_TWO_STEPS, *_FOUR_STEPS), headline=16)
_DEEP = replace(_WORDS, num_layers=3, use_short_conv=True, learning_rate=1e-3)
A5_DEEP = Experiment("a5_deep", _DEEP, _STEPS_AND_RANGE, task="a5", headline=16)
S5_DEEP = Experiment("s5_deep", _DEEP, _STEPS_AND_RANGE, task="s5", headline=16)
OVERWRITE = Experiment("overwrite", _MEMORY, _RULES, task="overwrite_large", seeds=(0, 1))
RESET = Experiment(
    "selective_reset",
    _MEMORY,
    _RULES,
    seeds=(0, 1),
    headline=32,
    num_layers=1,
    head_dim=16,
    mlp_multiple=2,
    train_lengths=(32, 32),
    test=(8, 16, 32),
    batch_size=64,
    steps=600,
)
NEEDLE = Experiment(
    "needle",
    _MEMORY,
    _RULES,
    task="needle_number",
    headline=16384,
    hidden_size=128,
    num_heads=2,
    train_lengths=(64, 256),
    test=(256, 2048, 16384),
    test_sequences=64,
    batch_size=64,
    learning_rate=1e-3,
)
BYTES = Experiment(
    "byte_text",
    Recipe(),
    _RULES,
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
)
_COMPARISON = (PARITY, S3, SWAPS, A5, S5, OVERWRITE, RESET, NEEDLE, BYTES)

_BY_NAME = {experiment.name: experiment for experiment in _COMPARISON}


def _first_three(scores: Scores) -> list[Check]:
    """The best configurations of each experiment, in the mean of seeds; a table may have holes."""
    checks = []
    for experiment in _COMPARISON:
        found = {}
        for name in experiment.configurations:
            try:
                found[name] = scores.mean(experiment.name, name, experiment.headline)
            except Missing:
                continue
        first = sorted(found, key=found.__getitem__, reverse=experiment.task.metric != "bits")[:3]
        shown = ", ".join(f"{name} {found[name]:.3f}" for name in first)
        checks.append(Check("printed", f"{experiment.name} at {experiment.headline:,}, the first three: {shown}"))
    return checks


def _is_oblique(rule: str) -> bool:
    """Whether a rule reads the state under another key than it writes, or before the decay."""
    spec = get_rule(rule)
    return spec.erase_key == "separate" or spec.erase_reads == "undecayed"


_SIGNED = tuple(name for name in (*_RULES, *_DOUBLED) if parse_configuration(name).is_doubled)
_UNSIGNED_OBLIQUE = tuple(name for name in _RULES if name not in _SIGNED and _is_oblique(name))
_POSITIVE = tuple(name for name in _RULES if name not in (*_SIGNED, *_UNSIGNED_OBLIQUE))
"""Rules whose transitions have eigenvalues in [0, 1] only: symmetric ones, on the decayed state."""


_WORDS_OF_GROUPS = ("a5", "a5_deep", "s5", "s5_deep")
_PUBLISHED: tuple[tuple[str, str, str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "gated_deltanet",
        "Gated DeltaNet models language better than DeltaNet.",
        "1.3B, 100B tokens: perplexity 16.42 against 17.71 (arXiv:2412.06464)",
        (("byte_text", "gated_deltanet", "delta_net"),),
    ),
    (
        "kda",
        "KDA recalls and models language better than Gated DeltaNet.",
        "Recall, palindromes and stacks in fewer steps (arXiv:2510.26692, figures); selective forgetting is "
        "its motivation",
        (
            ("overwrite", "kda", "gated_deltanet"),
            ("selective_reset", "kda", "gated_deltanet"),
            ("byte_text", "kda", "gated_deltanet"),
        ),
    ),
    (
        "gla",
        "A decay that depends on the token models language better than a fixed one, or none.",
        "340M and 1.3B: lower perplexity than RetNet, whose decay is fixed (arXiv:2312.06635)",
        (("byte_text", "gla", "linear_attention"), ("byte_text", "gla", "lightning_attention")),
    ),
    (
        "kaczmarz",
        "Kaczmarz' step recalls more than Gated DeltaNet and models language better.",
        "0.4B, 1B tokens: validation perplexity 8.09 against 8.50; multi-query recall +7.03 points (arXiv:2605.08587)",
        (("overwrite", "kaczmarz", "gated_deltanet"), ("byte_text", "kaczmarz", "gated_deltanet")),
    ),
    (
        "gated_deltanet2",
        "Gated DeltaNet-2 recalls more than KDA and models language better.",
        "1.3B, 100B tokens: UUID needle at 2k 89.8 against 63.2, average 53.11 against 52.28 (arXiv:2605.22791)",
        (
            ("overwrite", "gated_deltanet2", "kda"),
            ("needle", "gated_deltanet2", "kda"),
            ("byte_text", "gated_deltanet2", "kda"),
        ),
    ),
    (
        "qed",
        "QED finds a needle in longer contexts than Gated DeltaNet-2.",
        "About twice the usable context on S-NIAH-1 (arXiv:2608.13668, abstract)",
        (("needle", "qed", "gated_deltanet2"),),
    ),
    (
        "q_delta",
        "Q-Delta finds needles better than Gated DeltaNet and models language better.",
        "1.3B, 30B tokens: S-NIAH 90.0 against 83.5, average 53.47 against 52.77 (arXiv:2606.08804)",
        (("needle", "q_delta", "gated_deltanet"), ("byte_text", "q_delta", "gated_deltanet")),
    ),
    (
        "pgdn",
        "A preconditioned key helps Gated DeltaNet to recall and to model language.",
        "Consistent gains on synthetic recall, at 340M and at 1B (arXiv:2604.21100, abstract)",
        (("overwrite", "pgdn", "gated_deltanet"), ("byte_text", "pgdn", "gated_deltanet")),
    ),
    (
        "pkda",
        "A preconditioned key helps KDA to recall and to model language.",
        "Consistent gains on synthetic recall, at 340M and at 1B (arXiv:2604.21100, abstract)",
        (("overwrite", "pkda", "kda"), ("byte_text", "pkda", "kda")),
    ),
    (
        "eda",
        "EDA models language better than KDA and clears what is stale, but recalls old values under their own "
        "key worse.",
        "2.5B and 25B hybrids, 400B tokens: average 28.44 against 27.81, 49.38 against 48.31; the recall is "
        "the limit that its authors state (arXiv:2606.26560)",
        (("byte_text", "eda", "kda"), ("selective_reset", "eda", "kda"), ("overwrite", "kda", "eda")),
    ),
    (
        "fg2_gdn",
        "A step size per channel is level with KDA.",
        "1.3B, 100B tokens: RULER at 16k 44.6 against 44.9, elsewhere mixed (arXiv:2604.19021)",
        (("needle", "fg2_gdn", "kda"), ("overwrite", "fg2_gdn", "kda"), ("byte_text", "fg2_gdn", "kda")),
    ),
    (
        "comba",
        "Comba models language better than Gated DeltaNet.",
        "Ahead at 340M and 1.3B (arXiv:2506.02475, as others report it)",
        (("byte_text", "comba", "gated_deltanet"),),
    ),
)
"""(rule, what its paper says, its figures, experiments that should show it: ahead, behind)."""


def _published(rule: str, statement: str, paper: str, leads: tuple[tuple[str, str, str], ...]) -> Claim:
    # "Level" means at most .05 behind.
    bound = -0.05 if rule == "fg2_gdn" else 0.0
    return Claim(
        name=rule,
        statement=statement,
        paper=paper,
        differences="models of 0.1 to 3 million parameters trained for minutes; tasks of ours, bytes of Python source",
        experiments=tuple({name: _BY_NAME[name] for name, *_ in leads}.values()),
        gates=tuple(
            lead(name, ahead, behind, _BY_NAME[name].headline, bound, "warn", of=Scores.mean)
            for name, ahead, behind in leads
        ),
    )


FAMILY: tuple[Claim, ...] = (
    Claim(
        name="comparison",
        statement="Every rule on every task, at one size and on the same data.",
        paper="none: one comparison of all",
        differences="state tracking in one layer, without convolutions but for parity; figures only",
        experiments=_COMPARISON,
        gates=(_first_three,),
    ),
    Claim(
        name="range",
        statement="Negative eigenvalues let one layer of any rule track parity and swaps; without them none does.",
        paper="Parity 1.0 against .017 (scaled), swaps of five objects solved by one DeltaNet [-1,1] layer "
        "(arXiv:2411.12537)",
        differences="1 layer, 600 and 1,000 steps; rules with an erase key of their own, or that erase what they read "
        "before the decay, are shown without a gate: their transitions need not have eigenvalues in [0, 1]",
        experiments=(PARITY, SWAPS),
        gates=(
            at_least("parity", _SIGNED, 128, 0.90, "warn"),
            at_most("parity", _POSITIVE, 128, 0.60),
            at_least("s5_swaps", _SIGNED, 64, 0.90, "warn"),
            at_most("s5_swaps", _POSITIVE, 64, 0.10),
            show("parity", _UNSIGNED_OBLIQUE, 128),
            show("s5_swaps", _UNSIGNED_OBLIQUE, 64),
        ),
    ),
    Claim(
        name="two_steps",
        statement="One layer follows S3 only with two Householder steps per token and negative eigenvalues.",
        paper="Only n = 2 with [-1,1] converges (arXiv:2502.10297, figure; train 128, test 512)",
        differences="trained on up to 32 moves for 1,000 steps of 256, tested at 128",
        experiments=(S3,),
        gates=(
            at_least("s3", ("neg_gated_deltanet+x2", "gated_deltaproduct"), 128, 0.95, "warn"),
            at_most("s3", ("neg_delta_net", "neg_gated_deltanet", "gated_deltanet+x2", *_POSITIVE), 128, 0.60),
        ),
    ),
    Claim(
        name="steps_or_range",
        statement="On A5 and S5 the range of beta decides, and more micro-steps per token add little.",
        paper="Reported by a third party, no publication known to us; the theory asks "
        "for both: products of n reflections need n steps (arXiv:2502.10297)",
        differences="one layer without convolution, and three with, on 2 to 8 moves for 3,000 steps, tested at 16; "
        "one seed",
        experiments=(A5, S5, A5_DEEP, S5_DEEP),
        gates=(
            *(lead(name, _STEPS_AND_RANGE[1], _STEPS_AND_RANGE[0], 16, 0.30, "warn") for name in _WORDS_OF_GROUPS),
            *(show(name, _STEPS_AND_RANGE, 16) for name in _WORDS_OF_GROUPS),
            show("s5", _FOUR_STEPS, 16),
        ),
    ),
    *(_published(*row) for row in _PUBLISHED),
)
