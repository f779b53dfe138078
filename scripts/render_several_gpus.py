"""Writes tables and pictures of docs/several_gpus.md from committed results: python scripts/render_several_gpus.py.

From benchmarks/results/several_gpus_*.jsonl (scripts/measure_several_gpus.py) and ranks_*.json
(scripts/train_on_ranks.py). The text of the page between the two comments `<!-- measured -->` and `<!-- end -->` is
replaced.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from deltazoo.workbench.figures import PALETTE, new_figure, save_figure
from deltazoo.workbench.markdown import picture, table
from deltazoo.workbench.provenance import Run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "several_gpus.md"
IMAGES = ROOT / "docs" / "images"
MEASURED = re.compile(r"(<!-- measured -->\n).*(<!-- end -->)", re.DOTALL)
TIMES = {"forward_ms": "forward", "forward_backward_ms": "forward and backward"}
Row = dict[str, Any]


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    draw_efficiency(efficiencies(rows()))
    for path in sorted(RESULTS.glob("ranks_*.json")):
        draw_curves(path)
    print(PAGE)


def page() -> str:
    """The page with the measured part made anew."""
    found = rows()
    parts = [shared_rows(found), models(found), traces(found), pictures(found), curves(), runs(found)]
    measured = "\n".join(part for part in parts if part)
    return MEASURED.sub(lambda match: f"{match[1]}\n{measured}\n{match[2]}", PAGE.read_text(encoding="utf-8"))


def rows() -> list[Row]:
    """All measured rows, each with its `Run`; a later one of the same thing replaces an earlier one."""
    found: dict[tuple[Any, ...], Row] = {}
    for path in sorted(RESULTS.glob("several_gpus_*.jsonl")):
        described: dict[str, Row] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if isinstance(row["run"], dict):
                described[row["run"]["id"]] = row["run"]
            elif "value" in row:
                key = [row.get(name) for name in ("case", "what", "size", "library", "tokens", "heads", "way", "graph")]
                found[(*key, row["measure"], row["ranks"])] = {**row, "run": described[row["run"]]}
    return list(found.values())


def partner(row: Row, found: list[Row], *ways: str) -> Row | None:
    """The row of one GPU that a row is compared with."""
    same = ("case", "what", "size", "library", "tokens", "heads", "graph", "measure", "ranks")
    for other in found:
        if other["way"] in ways and all(other.get(name) == row.get(name) for name in same):
            return other
    return None


def efficiency(row: Row, found: list[Row]) -> float | None:
    """Speed over that of one GPU times the number of GPUs; None for a row of one GPU or without a partner."""
    if "alone" in row["way"] or row["case"] == "trace":
        return None
    alone = partner(row, found, "alone", "long, alone")
    if alone is None:
        return None
    ratio = row["value"] / alone["value"]
    return (ratio if row["measure"] == "tokens_per_s" else 1 / ratio) / row["ranks"]


def shared_rows(found: list[Row]) -> str:
    """Operators, layers and the row of a million tokens."""
    lines = []
    for row in found:
        alone = partner(row, found, "alone")
        if row["way"] == "alone" or row["measure"] not in TIMES:
            continue
        share = efficiency(row, found)
        lines.append(
            [
                f"{row['case'].replace('million', 'model')}, {name(row)}"
                + (", CUDA graph" if row.get("graph") else ""),
                f"{row['tokens']:,}" + (f" x {row['heads']}" if "heads" in row else ""),
                TIMES[row["measure"]],
                str(row["ranks"]),
                "does not fit" if alone is None else f"{alone['value']:,.2f}",
                f"{row['value']:,.2f}",
                "" if share is None else f"{share:.0%}",
                memory(alone),
                memory(row),
            ]
        )
    if not lines:
        return ""
    columns = ["what", "tokens x heads", "pass", "GPUs", "one GPU, ms", "together, ms", "efficiency"]
    title = "**One row of tokens over several GPUs.** Peak memory in GiB, of one GPU.\n"
    return title + "\n" + table([*columns, "peak of one", "peak together"], lines, text_columns=3)


def models(found: list[Row]) -> str:
    """Training speed of whole models."""
    lines = []
    for row in found:
        if row["case"] != "model":
            continue
        share = efficiency(row, found)
        lines.append(
            [
                f"{name(row)}, {row['size']}",
                row["way"].replace("long, alone", "alone"),
                "1" if "alone" in row["way"] else str(row["ranks"]),
                f"{row['rows']} x {row['tokens']:,}",
                f"{row['value']:,.0f}",
                "" if share is None else f"{share:.0%}",
                memory(row),
            ]
        )
    if not lines:
        return ""
    columns = ["model", "way", "GPUs", "rows x tokens", "tokens/s", "efficiency", "peak GiB per GPU"]
    return "**Training.**\n\n" + table(columns, lines, text_columns=2)


def traces(found: list[Row]) -> str:
    """One sentence per trace."""
    lines = []
    for row in found:
        if row["measure"] == "hidden_share":
            (took,) = (other for other in found if other["measure"] == "exchange_ms" and other["what"] == row["what"])
            lines.append(
                f"In a trace of forward and backward of the {name(row)} layer ({row['tokens']:,} x {row['heads']} "
                f"heads, {row['ranks']} GPUs) other kernels ran during {row['value']:.0%} of the {took['value']:.2f} "
                "ms of NCCL's kernels, which includes waiting for the other rank.\n"
            )
    return "\n".join(lines)


def pictures(found: list[Row]) -> str:
    """Links to what `main` draws."""
    if not efficiencies(found):
        return ""
    return picture(IMAGES / "several_gpus_efficiency.png", PAGE, "Parallel efficiency by number of GPUs")


def curves() -> str:
    """Losses on several numbers of ranks, one paragraph per file."""
    parts = []
    for path in sorted(RESULTS.glob("ranks_*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        run, losses = Run(**content["run"]), content["losses"]
        first, *others = losses
        furthest = max(abs(a - b) for way in others for a, b in zip(losses[way], losses[first], strict=True))
        last = max(abs(losses[way][-1] - losses[first][-1]) for way in others)
        parts.append(
            f"The same model trained for {len(losses[first])} steps in float32 on {run.machine}, by "
            f"{'; '.join(label(way) for way in losses)}: no loss of any step is further than {furthest:.1e} from that "
            f"of one process, and the last ones differ by at most {last:.1e} "
            f"([losses](../{path.relative_to(ROOT).as_posix()})).\n"
        )
        parts.append(
            picture(IMAGES / f"several_gpus_{path.stem}.png", PAGE, "Training losses on several numbers of ranks")
        )
    return "\n".join(parts)


def runs(found: list[Row]) -> str:
    """Machines, versions and commits."""
    described = {row["run"]["id"]: (Run(**row["run"]), row["ranks"]) for row in found}
    lines = [
        f"* {ranks} x {run.machine}, driver {run.driver}, torch {run.torch}, Triton {run.triton}, transformers "
        f"{run.transformers}, {run.date[:10]}, commit {run.short_commit}"
        for run, ranks in described.values()
    ]
    return "Runs:\n\n" + "\n".join(lines) + "\n" if lines else ""


def name(row: Row) -> str:
    named = {"delta_net": "DeltaNet", "gated_deltanet": "Gated DeltaNet", "kda": "KDA", "llama": "Llama"}
    of = {"fla": " of flash-linear-attention", "torch": " of torch", "transformers": " of transformers"}
    return named.get(row["what"], row["what"]) + of.get(row["library"], "")


def label(way: str) -> str:
    """A way of scripts/train_on_ranks.py in words."""
    processes, _, shared = way.partition("-")
    words = {"": "DDP", "cp": "context parallelism", "fsdp": "FSDP2", "fsdp-cp": "FSDP2 x context parallelism"}
    return "one process" if way == "1" else f"{processes} with {words[shared]}"


def memory(row: Row | None) -> str:
    return f"{row['peak_gib']:.1f}" if row and row.get("peak_gib") else ""


def efficiencies(found: list[Row]) -> dict[str, dict[int, float]]:
    """By what was measured, the efficiency by number of GPUs."""
    points: dict[str, dict[int, float]] = {}
    for row in found:
        share = efficiency(row, found)
        if share is not None and row["measure"] in ("tokens_per_s", "forward_backward_ms"):
            shape = f"{row['tokens'] // 1024}k" + (f" x {row['heads']}" if "heads" in row else "")
            size = f" {row['size']}" if "size" in row else ""
            points.setdefault(f"{row['way']}: {name(row)}{size}, {shape}", {1: 1.0})[row["ranks"]] = share
    return points


def draw_efficiency(points: dict[str, dict[int, float]]) -> None:
    if not points:
        return
    figure, (axis,) = new_figure(1, width=8, height=4.5)
    for number, (what, by_ranks) in enumerate(sorted(points.items(), key=lambda item: -min(item[1].values()))):
        ranks = sorted(by_ranks)
        style = {
            "color": PALETTE[number % len(PALETTE)],
            "marker": "o",
            "linestyle": ["-", "--"][number // len(PALETTE) % 2],
        }
        axis.plot(ranks, [by_ranks[count] for count in ranks], label=what, **style)
    axis.set_xticks(sorted({count for by_ranks in points.values() for count in by_ranks}))
    axis.set_ylim(0, 1.1)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_xlabel("GPUs")
    axis.set_ylabel("parallel efficiency")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save_figure(figure, IMAGES / "several_gpus_efficiency.png")


def draw_curves(path: Path) -> None:
    losses = json.loads(path.read_text(encoding="utf-8"))["losses"]
    first = next(iter(losses))
    figure, (left, right) = new_figure(2, width=9, height=3.4)
    for number, (way, curve) in enumerate(losses.items()):
        steps = range(1, len(curve) + 1)
        width = 3.5 - 0.6 * number  # the curves lie on each other
        left.plot(steps, curve, label=label(way), color=PALETTE[number], linewidth=max(width, 0.7))
        if way != first:
            apart = [abs(a - b) for a, b in zip(curve, losses[first], strict=True)]
            right.plot(steps, apart, color=PALETTE[number], linewidth=0.9)
    left.set_ylabel("training loss, nats per token")
    right.set_ylabel("distance from one process")
    for axis in (left, right):
        axis.set_xlabel("step")
    left.legend(fontsize=7, frameon=False)
    save_figure(figure, IMAGES / f"several_gpus_{path.stem}.png")


if __name__ == "__main__":
    main()
