"""Every Python block of the documentation runs, page by page, from top to bottom in one namespace."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from fake_hub import Hub

from deltazoo import spec

ROOT = Path(__file__).resolve().parents[2]
# Also inside lists, where blocks are indented.
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    if BLOCK.search(page.read_text(encoding="utf-8"))
]


def python_blocks(text: str) -> list[str]:
    """Every fenced block, after as many empty lines as stand before it: tracebacks then name the page's lines."""
    return ["\n" * text.count("\n", 0, b.start(1)) + textwrap.dedent(b[1]) for b in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch)
    monkeypatch.setattr(spec, "_REGISTRY", dict(spec._REGISTRY))  # a page may register one
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    namespace: dict[str, object] = {"__name__": "recipes"}
    for block in python_blocks((ROOT / page).read_text(encoding="utf-8")):
        exec(compile(block, str(ROOT / page), "exec"), namespace)
    torch._dynamo.reset()


def test_the_pages_that_must_have_recipes_have_them() -> None:
    assert {"README.md", "docs/huggingface.md"} <= set(PAGES)


def test_no_block_is_overlooked() -> None:
    """A fence in another spelling would not be run."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = page.read_text(encoding="utf-8")
        opened = re.findall(r"^\s*(?:```|~~~)\s*(?:py|python|Python|pycon)\b", text, re.MULTILINE)
        assert len(opened) == len(BLOCK.findall(text)), page


def test_a_block_that_fails_names_its_line() -> None:
    (block,) = python_blocks("# Page\n\n```python\nx = 1\nraise ValueError(x)\n```\n")
    with pytest.raises(ValueError) as caught:
        exec(compile(block, "page.md", "exec"), {})
    assert caught.traceback[-1].lineno + 1 == 5
