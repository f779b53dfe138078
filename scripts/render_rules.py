"""Writes docs/rules.md and its picture, docs/images/rules.png, from the registry of rules.

    python scripts/render_rules.py

Everything about a rule comes from its spec. Who uses it, and which rules do not fit, is in the tables below.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import deltazoo  # noqa: F401  # registers the rules
from benchmarks.markdown import picture, table
from deltazoo.spec import NONEXPANSIVE_MEANING, RuleSpec, choice_name, get_rule, list_rules, registered_layer
from deltazoo.training.figures import BLUE, GREY, ORANGE, PINK, new_figure, save_figure

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "rules.md"
PICTURE = ROOT / "docs" / "images" / "rules.png"

USED_BY = {
    "gated_deltanet": "Qwen3-Next, Qwen3.5, Qwen4-Exp",
    "neg_gated_deltanet": "OLMo Hybrid",
    "kda": "Kimi Linear, GLM-5-Next, Bailing; with step sizes up to 2 (`allow_neg_eigval`) Solar-Open2",
    "lightning_attention": "MiniMax-01, MiniMax-M1",
    "mamba2_style": "simplifies Nemotron-H, Bamba, Zamba2, Falcon-H1",
}
"""Rule -> published models whose layers compute it, or the layer it is a simplification of."""

DO_NOT_FIT = {
    "MDN, momentum ([2605.05838](https://arxiv.org/abs/2605.05838))": "two matrix states that act on each other",
    "gated Oja (in flash-linear-attention)": "erases on the side of the values: a delta rule of the transposed state, "
    "which is still read by keys",
    "Mamba-3 ([2603.15569](https://arxiv.org/abs/2603.15569))": "rotates the state, and writes two inputs per token",
    "MesaNet ([2506.05233](https://arxiv.org/abs/2506.05233)), Gated KalmaNet "
    "([2511.21016](https://arxiv.org/abs/2511.21016))": "the output solves a linear system in a second state",
    "Kalman Delta Networks ([2609.07816](https://arxiv.org/abs/2609.07816))": "fits the operator, but its gains come "
    "from a nonlinear scan that the zoo does not have",
    "Titans, TTT, Atlas": "the memory is a network, trained by an inner optimiser: not linear in the state",
    "PaTH ([2505.16381](https://arxiv.org/abs/2505.16381))": "products of transitions inside softmax attention",
    "log-linear attention ([2506.04761](https://arxiv.org/abs/2506.04761))": "a state per level of a tree",
    "CyFA ([2609.36259](https://arxiv.org/abs/2609.36259))": "the state rotates through slots",
    "RWKV-7 ([2503.14456](https://arxiv.org/abs/2503.14456))": "its recurrence is two micro-steps with an erase key of "
    "their own, tested as such in tests/ops; its model is another family (token shift, state across layers)",
}
"""Rules that are not in the zoo, and why."""

DECAYS = {"none": "no decay", "scalar": "one decay per head", "channel": "one decay per key channel"}
KINDS = (
    "writes without erasing",
    "erases under the write key,\nstep in [0, 1]",
    "the same, step from\nthe length of the key",
    "the same, step in [0, 2]",
    "erases under another key,\nor what was there before the decay",
    "several steps per token",
)
SAFETY = {"yes": BLUE, "conditional": ORANGE, "no": PINK}
LEGEND = {
    "yes": "no input lets it grow",
    "conditional": "one token repeated by a bounded factor, several without bound",
    "no": "one token repeated without bound",
}
"""`NONEXPANSIVE_MEANING`, shorter."""

INTRODUCTION = """\
# The rules

Every rule of the zoo is one recurrence. A token lets the state decay, reads it under an erase key `e`, and writes what
is missing under its key `k`:

    S~  = D_t S_{t-1}                        decay
    u_t = beta_t (v_t - S~^T e_t)            what the state lacks; "undecayed" rules read S_{t-1} here
    S_t = S~ + k_t u_t^T                     write
    o_t = scale * S_t^T q_t                  read

In most rules `e = k`. A rule of several micro-steps repeats the two middle lines with keys, values and step sizes of
their own before it reads. [math.md](math.md) has the chunk form and the gradients; all rules share it.

"""

MIDDLE = """
The colour says whether the state stays bounded without writes. It follows from the transitions and is tested for
every rule:

{meaning}

Rules that are not "yes" rely on their decay; [precision.md](precision.md#does-the-state-stay-bounded) says what that
means in use.

## Which one to take

* **A layer that large models are trained with**: `gated_deltanet` (one decay per head) or `kda` (one per key channel).
  Both are in several [published models](#in-published-models). The operator is faster with one decay per head
  ([benchmarks.md](benchmarks.md)).
* **State tracking** (parity, permutations): a rule with eigenvalues down to -1, such as `neg_gated_deltanet`, or
  `gated_deltaproduct` with several steps per token. Step sizes in [0, 1] cannot track parity
  ([2411.12537](https://arxiv.org/abs/2411.12537)).
* **The newest rules**: their papers report averages over language tasks above those of KDA, each in its own setting:
  `gated_deltanet2` 53.11 against 52.28 (1.3 B parameters, 100 B tokens,
  [2605.22791](https://arxiv.org/abs/2605.22791)); `eda` 28.44 against 27.81 (2.5 B, 400 B tokens, 3:1 hybrid) and
  49.38 against 48.31 (25 B mixture of experts, [2606.26560](https://arxiv.org/abs/2606.26560)). EDA's authors also
  report that it recalls old values under their own key less well than KDA. None of these figures were repeated here.
* **A small language model**: three layers of a rule to one of softmax attention ([how](models.md#build)). In our own
  comparison on [real text](text.md) such hybrids of `comba`, `eda`, `pgdn` and `gated_longhorn` are ahead of softmax
  attention and of every rule alone. No rule alone is ahead of softmax attention there, and only `gated_longhorn` is
  ahead of Gated DeltaNet.
* **Keys whose length means something**: `efla`, `longhorn`, `kaczmarz` and their gated forms take keys of any length.
* **A baseline without an erase**: `gla`, `lightning_attention`, `mamba2_style`, `linear_attention`.

Every rule as a language model of one size on the same text, and what it costs: [text.md](text.md). What small models of
each learn on tasks: [lab.md](lab.md).

## All of them

`mixer` is the name in a configuration and on the command line; `deltazoo show NAME` prints a rule in full. The step
size comes from a gate, a sigmoid of the token: `euler` takes it as it is, the others make it depend on the length of
the key ([math.md](math.md#4-step-sizes)), "doubled" reaches 2 instead of 1. `fg2_gdn`, `gated_deltanet2` and `qed` have
gates per channel in place of one number per head. `lines` is the length of the rule's file in
`src/deltazoo/rules/`, docstring included, and that of its layer's file where its spec alone does not say everything,
with those that it builds on: some rules share them.

"""

AFTER = """
Choices combine: `dataclasses.replace(get_rule("efla"), decay="channel")` is a spec like any other.
`allow_neg_eigval` and `num_micro_steps` are options of every layer whose rule has them. A rule of your own is one file:
[new_rules.md](new_rules.md).

## How the short convolutions start

A new model's taps are uniform within 1 / sqrt(4), nn.Conv1d's start, in every rule. `conv_initializer_range`, of layers
and configurations, makes them normal with that standard deviation. Authors' models start them in both ways:

| start | rules, as their authors train them |
| --- | --- |
| uniform | `gated_deltanet` and `kaczmarz` (NVlabs' code), `mamba2_style` (Mamba2) |
| normal, 0.02 | `delta_net`, `kda`, `gated_deltaproduct`, `pgdn`, `pkda`, `q_delta` (in flash-linear-attention) |
| normal, 0.006 | `comba_unit_erase` |
| no convolution in the published model | `gla`, `lightning_attention` |
| not known, or no published model | all others |

flash-linear-attention and transformers start convolutions as they start linear maps, in models of every type.
Uniform is the default of all, since it was better on text. In bits per byte of Python source (2.5 M parameters, 500
steps, one seed) it is ahead for all ten rules that we compared: by 0.006 to 0.04 for delta rules with unit keys,
`efla` and `longhorn`, by 0.09 to 0.17 for `gated_efla`, `gated_longhorn`, `mamba2_style` and `linear_attention`. For
rules that take keys of any length the start matters most, since the length of a key is its step size: the median
eigenvalue of `efla` at the start is 0.09 with uniform taps, 0.99 with normal ones. On rows 16 times as long as in
training its loss rises by 0.45 bits with the first, by 1.05 with the second. On a small task of overwriting the normal
start is the better one for rules with a decay per head (accuracy of `gated_deltanet` 0.989 against 0.963, means of
three seeds), and `efla` and `longhorn` solve it with both ([results](../benchmarks/results/conv_starts.json),
`scripts/compare_conv_starts.py`).

## Rules that were corrected

A saved model loads as the rule was when it was saved: its configuration says so by `mixer_revision`, and one without
the key has the first revision. New models have the newest; `get_rule("eda", revision=1)` is an earlier one. The
measurements of [text.md](text.md), [lab.md](lab.md) and [rule_costs.md](rule_costs.md) were made with the first.

| rule | first revision | second revision |
| --- | --- | --- |
| `eda` | output gate of low rank, as KDA's | a full one, which the parameter counts of the paper imply |
| `pgdn` | Gated DeltaNet's sizes and output gate | the authors' heads of 128, values as wide, no output gate |
| `lightning_attention` | queries times K^-1/2, rates 2^(-8 h / H) for any H heads | neither; rates as in ALiBi |

## In published models

{used}

`configs/` has a 3:1 hybrid with softmax attention for each of them. Models of transformers are run by these rules
through [`deltazoo.accelerate`](other_libraries.md).

## What is not in the zoo

{not_here}

`scripts/render_rules.py` writes this page from the specs in `src/deltazoo/rules/`.
"""


def kind_of(spec: RuleSpec) -> str:
    """The rule's place on the second axis of the picture: how it erases and steps."""
    if not spec.corrects:
        return KINDS[0]
    if spec.num_micro_steps > 1:
        return KINDS[5]
    if spec.erase_key == "separate" or spec.erase_reads == "undecayed":
        return KINDS[4]
    if spec.allow_neg_eigval:
        return KINDS[3]
    return KINDS[1] if spec.step_size == "euler" else KINDS[2]


def paper_number(spec: RuleSpec) -> str:
    """arXiv number of the rule's paper, or an empty string."""
    found = re.search(r"\d{4}\.\d{5}", spec.paper)
    return found[0] if found else ""


def draw(path: Path) -> Path:
    """The zoo on its two axes: decay across, erase and step down."""
    cells: dict[tuple[str, str], list[RuleSpec]] = defaultdict(list)
    for name in list_rules():
        spec = get_rule(name)
        cells[kind_of(spec), spec.decay].append(spec)
    heights = [max(1, *(len(cells[kind, decay]) for decay in DECAYS)) for kind in KINDS]
    figure, (axis,) = new_figure(1, width=11, height=0.42 * sum(heights) + 1.4)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    top = 0.0
    for row, (kind, height) in enumerate(zip(KINDS, heights, strict=True)):
        if row % 2 == 0:
            axis.axhspan(-top, -top - height, color="#F3F3F3", zorder=0)
        axis.text(-0.02, -top - height / 2, kind, ha="right", va="center", fontsize=10)
        for column, decay in enumerate(DECAYS):
            for line, spec in enumerate(cells[kind, decay]):
                draw_rule(axis, column + 0.04, -top - line - 0.5, spec)
        top += height
    for column, name in enumerate(DECAYS.values()):
        axis.text(column + 0.04, 0.3, name, ha="left", va="bottom", fontsize=11, fontweight="bold")
    axis.set_xlim(0, len(DECAYS))
    axis.set_ylim(-top, 1)
    axis.set_xticks([])
    axis.set_yticks([])
    handles = [axis.scatter([], [], color=colour, label=f"{name}: {LEGEND[name]}") for name, colour in SAFETY.items()]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
        title="does the state stay bounded without writes?",
    )
    return save_figure(figure, path)


def draw_rule(axis: Any, x: float, y: float, spec: RuleSpec) -> None:
    """One rule: its safety as a dot, name, paper, and who uses it."""
    axis.scatter([x], [y], color=SAFETY[spec.nonexpansive_class], s=28, zorder=3)
    axis.text(x + 0.035, y, spec.name, va="center", fontsize=10, family="monospace")
    note = USED_BY.get(spec.name, "").partition(";")[0]
    if note:
        axis.text(x + 0.035, y - 0.38, note, va="center", fontsize=7.5, color="#444444")
    axis.text(x + 0.93, y, paper_number(spec), va="center", ha="right", fontsize=8, color=GREY)


def lines(spec: RuleSpec) -> str:
    """Length of the rule's file and, after a plus, of its layer's and of those that it builds on."""
    files = sorted((ROOT / "src" / "deltazoo" / "rules").glob("*.py"))
    own = [next(file for file in files if f'name="{spec.name}"' in file.read_text())]
    layers = inspect.getmro(registered_layer(spec.name) or object)
    layer_files = [Path(inspect.getfile(layer)) for layer in layers if layer.__module__.startswith("deltazoo.rules.")]
    own += dict.fromkeys(layer_files)  # two layers may be in one file
    return " + ".join(str(len(file.read_text().splitlines())) for file in own)


def row(spec: RuleSpec) -> list[str]:
    """The rule's row in the table."""
    number = paper_number(spec)
    step = choice_name(spec.step_size) if spec.corrects else "no erase"
    erases = "-"
    if spec.corrects:
        erases = {"tied": "`k`", "separate": "own"}[spec.erase_key]
        erases += ", before the decay" if spec.erase_reads == "undecayed" else ""
    return [
        f"`{spec.name}`",
        spec.summary,
        spec.decay,
        f"{step}, doubled" if spec.allow_neg_eigval else step,
        erases,
        str(spec.num_micro_steps),
        spec.nonexpansive_class,
        lines(spec),
        f"[{number}](https://arxiv.org/abs/{number})" if number else spec.paper,
    ]


def page() -> str:
    """The text of docs/rules.md."""
    header = ["`mixer`", "in one sentence", "decay", "step size", "erases under", "steps", "bounded", "lines", "paper"]
    used = [[f"`{name}`", models] for name, models in USED_BY.items()]
    meaning = "\n".join(f"* **{name}**: {text}" for name, text in NONEXPANSIVE_MEANING.items())
    return (
        INTRODUCTION
        + picture(PICTURE, PAGE, "The rules by their decay, and by how they erase and step")
        + MIDDLE.format(meaning=meaning)
        + table(header, [row(get_rule(name)) for name in list_rules()])
        + AFTER.format(
            used=table(["rule", "models"], used).strip(),
            not_here=table(["rule", "why not"], [list(entry) for entry in DO_NOT_FIT.items()]).strip(),
        )
    )


if __name__ == "__main__":
    print(draw(PICTURE))
    PAGE.write_text(page())
    print(PAGE)
