"""Every Python block of the documentation runs, page by page, from top to bottom in one namespace.

A block that needs a GPU, several processes or minutes has the comment `<!-- not run: reason -->` on the line before it.
A `text` block right after a Python block is what that one prints.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from fake_hub import Hub
from several_processes import run_in_processes
from tiny_models import tiny_model
from tiny_runs import for_the_installed_version, run_python

from deltazoo import spec

ROOT = Path(__file__).resolve().parents[2]
# Also inside lists, where blocks are indented.
BLOCK = re.compile(r"(?:^ *<!-- not run: (.+?) -->\n)?^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\n+```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = {"docs/training.md": ["needs two processes, torchrun --nproc-per-node 2"] * 4}
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    if BLOCK.search(page.read_text(encoding="utf-8"))
]


def python_blocks(text: str) -> list[tuple[str, str | None]]:
    """Every block that is run, after as many empty lines as are above it: tracebacks then name the page's lines.

    With each, what the page says that it prints.
    """
    blocks = []
    for block in BLOCK.finditer(text):
        if not block[1]:
            output = OUTPUT.match(text, block.end())
            source = "\n" * text.count("\n", 0, block.start(2)) + for_the_installed_version(textwrap.dedent(block[2]))
            blocks.append((source, output and output[1]))
    return blocks


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Hub(monkeypatch)
    monkeypatch.setattr(spec, "_REGISTRY", dict(spec._REGISTRY))  # a page may register one
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    namespace: dict[str, object] = {"__name__": "recipes"}
    for block, output in python_blocks((ROOT / page).read_text(encoding="utf-8")):
        capsys.readouterr()
        exec(compile(block, str(ROOT / page), "exec"), namespace)
        assert output is None or capsys.readouterr().out == output
    torch._dynamo.reset()


def test_blocks_for_two_processes_run(tmp_path: Path) -> None:
    text = for_the_installed_version((ROOT / "docs" / "training.md").read_text(encoding="utf-8"))
    blocks = [part.split("```python\n")[1].split("\n```")[0] for part in text.split("<!-- not run: needs two")[1:]]
    assert len(blocks) == 4
    tiny_model("hybrid_kda", vocab_size=258, num_heads=2).save_pretrained(tmp_path / "my_model")
    found = run_in_processes(2, run_python, "\n".join(blocks), tmp_path, "float(loss)")
    assert all(torch.isfinite(torch.tensor(found)))


def test_few_blocks_are_not_run() -> None:
    reasons = {
        page: [b[1] for b in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")) if b[1]] for page in PAGES
    }
    assert {page: found for page, found in reasons.items() if found} == NOT_RUN


def test_the_pages_that_must_have_recipes_have_them() -> None:
    assert {"README.md", "docs/models.md", "docs/generation.md", "docs/training.md"} <= set(PAGES)


def test_no_block_is_overlooked() -> None:
    """A fence in another spelling would not be run."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = page.read_text(encoding="utf-8")
        opened = re.findall(r"^\s*(?:```|~~~)\s*(?:py|python|Python|pycon)\b", text, re.MULTILINE)
        assert len(opened) == len(BLOCK.findall(text)), page


def test_no_table_is_cut_in_two() -> None:
    """Rows after an empty line have no header, and are shown as text."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for rows in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.fullmatch(r"[|: -]+", rows.split("\n")[1]), (page, rows)


def test_a_block_that_fails_names_its_line() -> None:
    ((block, _),) = python_blocks("# Page\n\n```python\nx = 1\nraise ValueError(x)\n```\n")
    with pytest.raises(ValueError) as caught:
        exec(compile(block, "page.md", "exec"), {})
    assert caught.traceback[-1].lineno + 1 == 5
