"""Writes tables and pictures of docs/several_gpus.md from committed results: python scripts/render_several_gpus.py.

From benchmarks/results/several_gpus_*.jsonl (scripts/measure_several_gpus.py) and ranks_*.json
(scripts/train_on_ranks.py). The text of the page between the two comments `<!-- measured -->` and `<!-- end -->` is
replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.markdown import picture, table, with_part
from benchmarks.provenance import Run
from deltazoo.training.figures import PALETTE, new_figure, save_figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "several_gpus.md"
IMAGES = ROOT / "docs" / "images"
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
    parts = [models(found), shared_rows(found), traces(found), failures(), pictures(found), curves(), runs(found)]
    measured = "\n".join(part for part in parts if part)
    return with_part(PAGE.read_text(encoding="utf-8"), "<!-- measured -->", measured, end="<!-- end -->")


def lines() -> Iterator[Row]:
    """All lines of result files with a measurement or an error, each with its `Run` as a dictionary."""
    for path in sorted(RESULTS.glob("several_gpus_*.jsonl")):
        described: dict[str, Row] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if isinstance(row["run"], dict):
                described[row["run"]["id"]] = row["run"]
            else:
                yield {**row, "run": described[row["run"]]}


THING = ("case", "what", "size", "library", "tokens", "heads", "rows", "graph", "measure", "ranks")
"""Keys of a row that say what was measured, but for the way and the machine."""


def rows() -> list[Row]:
    """All measured rows; a later one of the same thing on the same machine replaces an earlier one."""
    found = {(machine(row), row["way"], *map(row.get, THING)): row for row in lines() if "value" in row}
    return list(found.values())


def partner(row: Row, found: list[Row], *ways: str) -> Row | None:
    """The row of one GPU that a row is compared with."""
    for other in found:
        same = machine(other) == machine(row) and all(other.get(key) == row.get(key) for key in THING)
        if same and other["way"] in ways:
            return other
    return None


def machine(row: Row) -> str:
    """The card's name without its maker and memory."""
    return re.sub(r"^NVIDIA | \d+GB.*$", "", Run(**row["run"]).machine)


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
    cells = []
    for row in found:
        if row["way"] == "alone" or row["measure"] not in TIMES:
            continue
        alone, share = partner(row, found, "alone"), efficiency(row, found)
        cells.append(
            [
                f"{row['case'].replace('million', 'model')}, {name(row)}"
                + (", CUDA graph" if row.get("graph") else ""),
                f"{row['tokens']:,}" + (f" x {row['heads']}" if "heads" in row else ""),
                TIMES[row["measure"]],
                f"{row['ranks']} x {machine(row)}",
                "" if alone is None else f"{alone['value']:,.2f}",
                f"{row['value']:,.2f}",
                "" if share is None else f"{share:.0%}",
                memory(alone),
                memory(row),
            ]
        )
    if not cells:
        return ""
    columns = ["what", "tokens x heads", "pass", "GPUs", "one GPU, ms", "together, ms", "efficiency"]
    title = "**One row of tokens over several GPUs.** Peak memory in GiB, of one GPU.\n"
    return title + "\n" + table([*columns, "peak of one", "peak together"], cells, text_columns=4)


def models(found: list[Row]) -> str:
    """Training speed of whole models."""
    cells = []
    for row in found:
        if row["case"] != "model":
            continue
        share = efficiency(row, found)
        cells.append(
            [
                f"{name(row)}, {row['size']}",
                row["way"].replace("long, alone", "alone"),
                f"{1 if 'alone' in row['way'] else row['ranks']} x {machine(row)}",
                f"{row['rows']} x {row['tokens']:,}",
                f"{row['value']:,.0f}",
                "" if share is None else f"{share:.0%}",
                memory(row),
            ]
        )
    if not cells:
        return ""
    columns = ["model", "way", "GPUs", "rows x tokens", "tokens/s", "efficiency", "peak GiB per GPU"]
    return (
        "**Training.** Under DDP and FSDP2 every GPU has so many rows, under CP (context parallelism) and TP (tensor "
        "parallelism) the GPUs share them. Efficiency is the speed over that of one GPU times the number of GPUs.\n\n"
        + table(columns, cells, text_columns=3)
    )


TRACED = {"wall_ms": "call, ms", "kernels_ms": "kernels, ms", "exchange_ms": "NCCL, ms"}
SHARES = {"hidden_share": "NCCL hidden", "idle_share": "no kernel"}


def traces(found: list[Row]) -> str:
    """One line of a table per trace."""
    by_thing: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in found:
        if row["case"] == "trace":
            thing = (machine(row), row["way"], *(row.get(key) for key in THING if key != "measure"))
            by_thing.setdefault(thing, {})[row["measure"]] = row
    cells = []
    for measures in by_thing.values():
        row = next(iter(measures.values()))
        cells.append(
            [
                f"layer, {name(row)}" if "heads" in row else f"model, {name(row)}, {row['size']}",
                f"{row['tokens']:,} x {row['heads']} heads" if "heads" in row else f"{row['rows']} x {row['tokens']:,}",
                row["way"],
                f"{1 if row['way'] == 'alone' else row['ranks']} x {machine(row)}",
                *(f"{measures[key]['value']:,.2f}" if key in measures else "" for key in TRACED),
                *(f"{measures[key]['value']:.0%}" if key in measures else "" for key in SHARES),
            ]
        )
    if not cells:
        return ""
    columns = ["what", "tokens", "way", "GPUs", *TRACED.values(), *SHARES.values()]
    return (
        "**Traces** of forward and backward of a layer, and of a training step of a model. The time of NCCL's kernels "
        "includes waiting for the other rank; it is hidden while other kernels run. While no kernel runs, the GPU "
        "waits for the host, which the tracer slows down. The time of the call was taken without the tracer.\n\n"
        + table(columns, cells, text_columns=4)
    )


def failures() -> str:
    """Cases that ended in an error and were not measured later on the same machine."""
    failed: dict[tuple[str, str], str] = {}
    for row in lines():
        key = (f"{row['ranks']} x {machine(row)}", case_name(row))
        if "error" in row:
            failed[key] = "ran out of memory" if row["error"].startswith("OutOfMemoryError") else "failed"
        else:
            failed.pop(key, None)
    by_kind: dict[tuple[str, str], list[str]] = {}
    for (gpus, case), kind in failed.items():
        by_kind.setdefault((gpus, kind), []).append(f"`{case}`")
    sentences = [f"{', '.join(cases)} {kind} on {gpus}." for (gpus, kind), cases in sorted(by_kind.items())]
    return "Cases of the script without a figure: " + " ".join(sentences) + "\n" if sentences else ""


def case_name(row: Row) -> str:
    """A case of scripts/measure_several_gpus.py."""
    if "error" in row:
        return row["case"]
    way = row["way"].replace(", ", "-").replace(" x ", "-")
    return row.get("name", f"model-{row['what']}-{row['size']}-{way}" if row["case"] == "model" else row["case"])


def pictures(found: list[Row]) -> str:
    """Links to what `main` draws."""
    if not efficiencies(found):
        return ""
    return picture(IMAGES / "several_gpus_efficiency.png", PAGE, "Parallel efficiency by machine and number of GPUs")


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
            f"{'; '.join(label(way) for way in losses)}. Losses differ from those of one process by at most "
            f"{furthest:.1e} at any step, and by at most {last:.1e} at the last "
            f"([losses](../{path.relative_to(ROOT).as_posix()})).\n"
        )
        parts.append(
            picture(IMAGES / f"several_gpus_{path.stem}.png", PAGE, "Training losses on several numbers of ranks")
        )
    return "\n".join(parts)


def runs(found: list[Row]) -> str:
    """Machines, versions and commits."""
    described = {row["run"]["id"]: (Run(**row["run"]), row["ranks"]) for row in found}
    listed = [
        f"* {ranks} x {run.machine}, driver {run.driver}, torch {run.torch}, Triton {run.triton}, transformers "
        f"{run.transformers}, {run.date[:10]}, commit {run.short_commit}"
        for run, ranks in described.values()
    ]
    return "Runs:\n\n" + "\n".join(listed) + "\n" if listed else ""


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


def efficiencies(found: list[Row]) -> dict[str, dict[str, float]]:
    """By machine and number of GPUs, the efficiency of what was measured."""
    points: dict[str, dict[str, float]] = {}
    for row in found:
        share = efficiency(row, found)
        if share is not None and row["measure"] in ("tokens_per_s", "forward_backward_ms"):
            shape = f"{row['tokens'] // 1024}k" + (f" x {row['heads']}" if "heads" in row else "")
            rows_of = f"{row['rows']} x " if "rows" in row else ""
            size = f" {row['size']}" if "size" in row else ""
            kind = f"{row['case']}, " if "heads" in row else ""
            graph = ", CUDA graph" if row.get("graph") else ""
            what = f"{row['way']}: {kind}{name(row)}{size}, {rows_of}{shape}{graph}"
            points.setdefault(f"{row['ranks']} x {machine(row)}", {})[what] = share
    return points


def draw_efficiency(points: dict[str, dict[str, float]]) -> None:
    if not points:
        return
    best = {
        what: max(shares.get(what, 0) for shares in points.values()) for shares in points.values() for what in shares
    }
    listed = sorted(best, key=lambda what: best[what])
    figure, (axis,) = new_figure(1, width=8, height=1 + 0.24 * len(listed))
    for number, (gpus, shares) in enumerate(points.items()):
        there = [what for what in listed if what in shares]
        axis.scatter(
            [shares[what] for what in there],
            [listed.index(what) for what in there],
            color=PALETTE[number % len(PALETTE)],
            marker="os^Dvp"[number % 6],
            label=gpus,
            zorder=3,
        )
    axis.set_yticks(range(len(listed)), listed, fontsize=7)
    axis.set_xlim(0, 1.05)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_xlabel("parallel efficiency")
    axis.grid(axis="both", alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", frameon=False)
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
