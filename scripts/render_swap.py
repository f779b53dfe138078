"""Writes the measured part of docs/conversions.md and its pictures from benchmarks/results/swap_*.json.

    python scripts/render_swap.py

The part stands between two marked lines of the page; the rest of the page stays as it is.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.markdown import picture, table, with_part
from deltazoo.training.conversion_plots import draw_conversion, draw_ranking
from deltazoo.training.figures import BLUE, GREEN, GREY, ORANGE, PINK, new_figure, save_figure
from deltazoo.training.layer_ranking import LayerScore, Ranking

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "conversions.md"
IMAGES = ROOT / "docs" / "images"
BEGIN = "<!-- measured: written by scripts/render_swap.py from benchmarks/results/swap_*.json -->"
STAGES = ("transfer", "align", "distill", "finetune")
TARGETS = {"all": 0.90, "half": 0.97}
COLOURS = {"delta_net": BLUE, "gated_deltanet": GREEN, "kda": ORANGE, "efla": PINK}
SPARE = GREY
DASHES = {"all": "-", "half": "--"}
MARKERS = {"all": "o", "half": "s"}


def main() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("swap_*.json"))
    sections = "\n".join(section(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in results)
    PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), BEGIN, sections.rstrip("\n")), encoding="utf-8")
    print(PAGE)


def section(name: str, record: dict[str, Any]) -> str:
    """All that one result file has to say."""
    run, teacher, conversions = record["run"], record["teacher"], record["arms"]
    machine = run["gpu"] or f"{teacher['device']} ({run['cpu']})"
    sizes = teacher["llama"]
    minutes = sum(conversion["processor_seconds"] for conversion in conversions) / 60
    tokens, further = conversions[0]["tokens"], teacher.get("further")
    lines = [
        f"### Preset {record['preset']}\n",
        f"{machine}, torch {run['torch']}, transformers {run['transformers']}, Python {run['python']}, commit "
        f"`{run['commit'][:12]}`. Text: {teacher['text']}. A Llama of {teacher['parameters'] / 1e6:.1f} M parameters "
        f"({sizes['num_hidden_layers']} layers of width {sizes['hidden_size']}, {sizes['num_attention_heads']} heads) "
        f"read {teacher['tokens']:,} tokens in {teacher['seconds']:,.0f} s; each conversion reads {tokens:,} "
        f"({tokens / teacher['tokens']:.0%}), and so does the same hybrid from scratch. The {len(conversions)} "
        f"conversions took {minutes:.1f} minutes of processor time, with scoring and the runs from scratch.\n",
        f"Command: `python scripts/convert_standard_library.py {' '.join(run['command'])}`\n",
        "Held-out bits per byte:\n",
        table(
            ["rule", "layers", "teacher", "after transfer", "aligned", "distilled", "fine-tuned", "from scratch"],
            map(score_cells, conversions),
            text_columns=2,
        ),
        *further_part(teacher),
        "Share of the gap between transfer and teacher that the conversion recovered, "
        "`(transfer - converted) / (transfer - teacher)`"
        + (", and the same with the teacher trained further in its place" if further else "")
        + ":\n",
        table(
            [
                "rule",
                "layers swapped",
                "recovered",
                "target",
                "verdict",
                *["teacher trained further"] * bool(further),
            ],
            (gap_cells(conversion, further) for conversion in conversions),
            text_columns=2,
        ),
        picture(draw_stages(IMAGES / f"{name}_stages.png", record), PAGE, "Held-out bits per byte from stage to stage"),
    ]
    shown = max(conversions, key=lambda conversion: len(conversion["layers"]))
    histories = {stage: found["history"] for stage, found in shown["stages"].items()}
    title = f"{shown['rule']}, {len(shown['layers'])} of {sizes['num_hidden_layers']} layers swapped"
    curves = draw_conversion(IMAGES / f"{name}_curves.png", histories, shown["scores"], title)
    lines += ["All loss curves of one conversion:\n", picture(curves, PAGE, f"Loss curves: {title}")]
    ranked = [conversion for conversion in conversions if conversion["ranking"]]
    if ranked:
        lines += [
            'Rise in loss when one layer is swapped. The conversions marked "half" swap the half that costs least:\n'
        ]
        lines += [picture(draw_one_ranking(IMAGES / f"{name}_ranking.png", ranked[0]), PAGE, "Rise in loss by layer")]
    if teacher["recall"] is not None:
        lines += [recall_part(record)]
    return "\n".join(lines)


def score_cells(conversion: dict[str, Any]) -> list[str]:
    scores = conversion["scores"]
    names = ("original", *STAGES, "scratch")
    return [
        f"`{conversion['rule']}`",
        layer_names(conversion),
        *(f"{scores[n]:.3f}" if n in scores else "" for n in names),
    ]


def further_part(teacher: dict[str, Any]) -> list[str]:
    """What the same training makes of the teacher, where the recipe trains whole models."""
    if teacher.get("further") is None:
        return []
    return [
        "The teacher trained further, by the same distillation and fine-tuning with nothing swapped, scores "
        f"{teacher['further']:.3f}. So the teacher had not learned all it could, and a conversion can recover more "
        "than 100% because it reads more text. The last column of the next table compares with this teacher.\n"
    ]


def recovered(conversion: dict[str, Any], goal: float) -> float:
    """Share of the way from transfer to a score that the last stage has gone."""
    scores = conversion["scores"]
    last = [scores[stage] for stage in STAGES if stage in scores][-1]
    return (scores["transfer"] - last) / (scores["transfer"] - goal)


def gap_cells(conversion: dict[str, Any], further: float | None) -> list[str]:
    share, target = recovered(conversion, conversion["scores"]["original"]), TARGETS[conversion["share"]]
    return [
        f"`{conversion['rule']}`",
        layer_names(conversion),
        f"{share:.1%}",
        f"{target:.0%}",
        "met" if share >= target else "missed",
        *([] if further is None else [f"{recovered(conversion, further):.1%}"]),
    ]


def layer_names(conversion: dict[str, Any]) -> str:
    return "all" if conversion["share"] == "all" else "half: " + ", ".join(map(str, conversion["layers"]))


def recall_part(record: dict[str, Any]) -> str:
    """Both probes in one table, with what guessing would give."""
    teacher = record["teacher"]["recall"]
    header = ["model", *(f"{probe['length']} tokens copied" for probe in teacher["copying"])]
    header += [f"{probe['num_pairs']} pairs (chance {1 / probe['num_pairs']:.0%})" for probe in teacher["pairs"]]
    rows = [["teacher", *recall_cells(teacher)]]
    for conversion in record["arms"]:
        for state in ("transfer", "converted", "scratch"):
            rows.append(
                [
                    f"`{conversion['rule']}`, {conversion['share']}, {state}",
                    *recall_cells(conversion["recall"][state]),
                ]
            )
    named = max(probe["accuracy"] for probe in teacher["pairs"])
    near_chance = all(probe["among_shown"] * probe["num_pairs"] < 1.5 for probe in teacher["pairs"])
    verdict = " Even the teacher is near chance, so the pairs show nothing at this size." if near_chance else ""
    return (
        "Recall within the context. **Copied**: a held-out passage is shown twice in a row; the table says how many "
        "bits per token the second showing costs less. **Pairs**: pairs of random tokens are shown twice, in two "
        "orders; the table says in how many pairs the second token is, at the second showing, likelier than those of "
        f"all other pairs. (For the teacher, at best {named:.1%} are likelier than every token of the vocabulary.)"
        f"{verdict}\n\n" + table(header, rows, text_columns=2)
    )


def recall_cells(found: dict[str, Any]) -> list[str]:
    copying = (f"{probe['first'] - probe['second']:+.2f}" for probe in found["copying"])
    return [*copying, *(f"{probe['among_shown']:.0%}" for probe in found["pairs"])]


def draw_stages(path: Path, record: dict[str, Any]) -> Path:
    """One line per conversion from transfer to the last stage; open marks are the runs from scratch."""
    figure, [axis] = new_figure(1, width=8, height=4.5)
    conversions = record["arms"]
    positions = range(len(STAGES))
    for conversion in conversions:
        colour = COLOURS.get(conversion["rule"], SPARE)
        bits = [conversion["scores"].get(stage) for stage in STAGES]
        share = conversion["share"]
        label = f"{conversion['rule']}, {share}"
        axis.plot(positions, bits, DASHES[share], marker=MARKERS[share], color=colour, label=label)
        axis.plot(len(STAGES), conversion["scores"]["scratch"], MARKERS[share], fillstyle="none", color=colour)
    axis.axhline(conversions[0]["scores"]["original"], color="black", linestyle=":", label="teacher")
    if record["teacher"].get("further") is not None:
        axis.axhline(record["teacher"]["further"], color="black", linestyle="-.", label="teacher trained further")
    axis.set_xticks(
        [*positions, len(STAGES)],
        ["after\ntransfer", "aligned", "distilled", "fine-tuned", "from scratch\n(same tokens)"],
    )
    axis.set_ylabel("held-out bits per byte")
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    return save_figure(figure, path, dpi=150)


def draw_one_ranking(path: Path, conversion: dict[str, Any]) -> Path:
    layers = tuple(LayerScore(**score) for score in conversion["ranking"])
    ranking = Ranking(conversion["rule"], layers[0].loss - layers[0].rise, 0, layers)
    return draw_ranking(path, ranking, conversion["layers"])


if __name__ == "__main__":
    main()
