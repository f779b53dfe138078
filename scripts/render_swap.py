"""Writes the measured part of docs/conversions.md and its pictures from benchmarks/results/swap_*.json.

    python scripts/render_swap.py

The part lies between two marked lines of the page; the rest of the page is left alone.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

from deltazoo.workbench.convert.conversion_plots import draw_conversion, draw_ranking
from deltazoo.workbench.convert.layer_ranking import LayerScore, Ranking

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "conversions.md"
IMAGES = ROOT / "docs" / "images"
BEGIN = "<!-- measured: written by scripts/render_swap.py from benchmarks/results/swap_*.json -->"
END = "<!-- end of what was measured -->"
STAGES = ("transfer", "align", "distill", "finetune")
WANTED = {"all": 0.90, "half": 0.97}
# Okabe and Ito's palette, as in the other pictures.
COLOURS = {"delta_net": "#0072B2", "gated_deltanet": "#009E73", "kda": "#D55E00", "efla": "#CC79A7"}
SPARE = "#8C8C8C"
DASHES = {"all": "-", "half": "--"}
MARKERS = {"all": "o", "half": "s"}


def main() -> None:
    parts = [BEGIN, ""]
    for path in sorted((ROOT / "benchmarks" / "results").glob("swap_*.json")):
        parts.append(section(path.stem, json.loads(path.read_text(encoding="utf-8"))))
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + "\n".join(parts) + END + after, encoding="utf-8")
    print(PAGE)


def section(name: str, record: dict[str, Any]) -> str:
    """All that one result file has to say."""
    run, teacher, arms = record["run"], record["teacher"], record["arms"]
    machine = run["gpu"] or f"{teacher['device']} ({run['cpu']})"
    sizes = teacher["llama"]
    minutes = sum(arm["processor_seconds"] for arm in arms) / 60
    tokens = arms[0]["tokens"]
    lines = [
        f"### Preset {record['preset']}\n",
        f"{machine}, torch {run['torch']}, transformers {run['transformers']}, Python {run['python']}, commit "
        f"`{run['commit'][:12]}`. Text: {teacher['text']}. A Llama of {teacher['parameters'] / 1e6:.1f} M parameters "
        f"({sizes['num_hidden_layers']} layers of width {sizes['hidden_size']}, {sizes['num_attention_heads']} heads) "
        f"read {teacher['tokens']:,} tokens in {teacher['seconds']:,.0f} s; each conversion reads {tokens:,} "
        f"({tokens / teacher['tokens']:.0%}), and so does the same hybrid from scratch. The {len(arms)} conversions "
        f"took {minutes:.1f} minutes of processor time, scoring and the runs from scratch included.\n",
        f"Command: `python scripts/convert_standard_library.py {' '.join(run['command'])}`\n",
        "Held-out bits per byte:\n",
        table(
            ["variant", "layers", "teacher", "after transfer", "aligned", "distilled", "fine-tuned", "from scratch"],
            (score_cells(arm) for arm in arms),
        ),
        *further_part(teacher),
        "Share of the gap between transfer and teacher that the conversion recovered, "
        "`(transfer - converted) / (transfer - teacher)`, and the same with the teacher trained on in its place:\n",
        table(
            ["variant", "layers swapped", "recovered", "wanted", "", "teacher trained on"],
            (gap_cells(arm, teacher.get("further")) for arm in arms),
        ),
        picture(draw_arms(IMAGES / f"{name}_arms.png", record), "Held-out bits per byte from stage to stage"),
    ]
    shown = max(arms, key=lambda arm: len(arm["layers"]))
    histories = {stage: found["history"] for stage, found in shown["stages"].items()}
    title = f"{shown['variant']}, {len(shown['layers'])} of {sizes['num_hidden_layers']} layers swapped"
    curves = draw_conversion(IMAGES / f"{name}_curves.png", histories, shown["scores"], title)
    lines += ["All loss curves of one conversion:\n", picture(curves, f"Loss curves: {title}")]
    ranked = [arm for arm in arms if arm["ranking"]]
    if ranked:
        lines += ['Which layers are missed least; the better half is what the arms "half" swap:\n']
        lines += [picture(draw_one_ranking(IMAGES / f"{name}_ranking.png", ranked[0]), "Rise in loss by layer")]
    if teacher["recall"] is not None:
        lines += [recall_part(record)]
    lines += [decoding_part(name, record)]
    return "\n".join(lines)


def score_cells(arm: dict[str, Any]) -> list[str]:
    scores = arm["scores"]
    names = ("original", *STAGES, "scratch")
    return [f"`{arm['variant']}`", layer_names(arm), *(f"{scores[n]:.3f}" if n in scores else "" for n in names)]


def further_part(teacher: dict[str, Any]) -> list[str]:
    """What the same training makes of the teacher, where the recipe trains whole models."""
    if teacher.get("further") is None:
        return []
    return [
        "The teacher trained on, that is put through the same distillation and fine-tuning with nothing swapped, "
        f"scores {teacher['further']:.3f}: it had not learned all it could, and what a conversion recovers beyond 100% "
        "it owes to the text. The last column of the next table measures against this teacher.\n"
    ]


def recovered(arm: dict[str, Any], goal: float) -> float:
    """Share of the way from transfer to a score that the last stage has gone."""
    scores = arm["scores"]
    last = [scores[stage] for stage in STAGES if stage in scores][-1]
    return (scores["transfer"] - last) / (scores["transfer"] - goal)


def gap_cells(arm: dict[str, Any], further: float | None) -> list[str]:
    share, wanted = recovered(arm, arm["scores"]["original"]), WANTED[arm["share"]]
    return [
        f"`{arm['variant']}`",
        layer_names(arm),
        f"{share:.1%}",
        f"{wanted:.0%}",
        "met" if share >= wanted else "missed",
        "" if further is None else f"{recovered(arm, further):.1%}",
    ]


def layer_names(arm: dict[str, Any]) -> str:
    return "all" if arm["share"] == "all" else "half: " + ", ".join(map(str, arm["layers"]))


def recall_part(record: dict[str, Any]) -> str:
    """Both probes in one table, with what guessing would give."""
    teacher = record["teacher"]["recall"]
    header = ["model", *(f"{probe['length']} tokens copied" for probe in teacher["copying"])]
    header += [f"{probe['num_pairs']} pairs (chance {1 / probe['num_pairs']:.0%})" for probe in teacher["pairs"]]
    rows = [["teacher", *recall_cells(teacher)]]
    for arm in record["arms"]:
        for state in ("transfer", "converted", "scratch"):
            rows.append([f"`{arm['variant']}`, {arm['share']}, {state}", *recall_cells(arm["recall"][state])])
    named = max(probe["accuracy"] for probe in teacher["pairs"])
    near_chance = all(probe["among_shown"] * probe["num_pairs"] < 1.5 for probe in teacher["pairs"])
    verdict = " Even the teacher is near chance, so the pairs tell nothing at this size." if near_chance else ""
    return (
        "Recall within the context. Copying: a held-out passage is shown twice in a row; the bits that its tokens cost "
        "less the second time, each. Pairs: random tokens are shown in pairs, twice in two orders; the share of second "
        "tokens that, at the second showing, are likelier than those of all other pairs. (Likelier than every token of "
        f"the vocabulary is at best {named:.1%} of them, for the teacher.){verdict}\n\n{table(header, rows)}"
    )


def recall_cells(found: dict[str, Any]) -> list[str]:
    copying = (f"{probe['first'] - probe['second']:+.2f}" for probe in found["copying"])
    return [*copying, *(f"{probe['among_shown']:.0%}" for probe in found["pairs"])]


def decoding_part(name: str, record: dict[str, Any]) -> str:
    rows = record["decoding"]
    memory = "peak_bytes" if rows[0]["peak_bytes"] is not None else "cache_bytes"
    header = ["model", "context", "tokens/s", "context read in, s", "cache, MiB"]
    cells = [
        [
            row["model"],
            f"{row['context']:,}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['prefill_seconds']:.2f}",
            f"{row['cache_bytes'] / 2**20:.2f}",
        ]
        for row in rows
    ]
    drawn = draw_decoding(IMAGES / f"{name}_decoding.png", rows, memory)
    return (
        "Decoding behind a long context, one sequence, medians of 32 tokens:\n\n"
        f"{picture(drawn, 'Decoding speed and memory')}\n{table(header, cells)}"
    )


def draw_arms(path: Path, record: dict[str, Any]) -> Path:
    """One line per arm from transfer to the last stage; crosses are the runs from scratch."""
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    arms = record["arms"]
    places = range(len(STAGES))
    for arm in arms:
        colour = COLOURS.get(arm["variant"], SPARE)
        bits = [arm["scores"].get(stage) for stage in STAGES]
        share = arm["share"]
        label = f"{arm['variant']}, {share}"
        axis.plot(places, bits, DASHES[share], marker=MARKERS[share], color=colour, label=label)
        axis.plot(len(STAGES), arm["scores"]["scratch"], MARKERS[share], fillstyle="none", color=colour)
    axis.axhline(arms[0]["scores"]["original"], color="black", linestyle=":", label="teacher")
    if record["teacher"].get("further") is not None:
        axis.axhline(record["teacher"]["further"], color="black", linestyle="-.", label="teacher trained on")
    axis.set_xticks(
        [*places, len(STAGES)], ["after\ntransfer", "aligned", "distilled", "fine-tuned", "from scratch\n(same tokens)"]
    )
    axis.set_ylabel("held-out bits per byte")
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    return save(figure, path)


def draw_one_ranking(path: Path, arm: dict[str, Any]) -> Path:
    layers = tuple(LayerScore(**score) for score in arm["ranking"])
    ranking = Ranking(arm["variant"], layers[0].loss - layers[0].rise, 0, layers)
    return draw_ranking(path, ranking, arm["layers"])


def draw_decoding(path: Path, rows: list[dict[str, Any]], memory: str) -> Path:
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.2), layout="constrained")
    models = list(dict.fromkeys(row["model"] for row in rows))
    styles = zip(models, ("#000000", "#0072B2", "#D55E00"), ("^", "s", "o"), strict=False)
    for model, colour, marker in styles:
        found = [row for row in rows if row["model"] == model]
        contexts = [row["context"] for row in found]
        style = {"color": colour, "marker": marker, "label": model}
        axes[0].plot(contexts, [row["tokens_per_second"] for row in found], **style)
        axes[1].plot(contexts, [row[memory] / 2**20 for row in found], **style)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("context, tokens")
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("decoded tokens per second")
    axes[1].set_yscale("log")
    kind = "cache" if memory == "cache_bytes" else "peak memory above the weights"
    axes[1].set_ylabel(f"{kind}, MiB")
    axes[1].legend(frameon=False, fontsize=8)
    return save(figure, path)


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * 2 + "|---:" * (len(header) - 2) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def picture(path: Path, caption: str) -> str:
    return f"![{caption}]({path.relative_to(PAGE.parent).as_posix()})\n"


def save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
