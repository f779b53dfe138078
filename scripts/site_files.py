"""A hook of mkdocs: pages and files outside docs/ become part of the site, and links between them hold.

README.md is the first page, CHANGELOG.md the last; docs/README.md gives their order. Every other file of the repository
that a page links to is copied, as text, under `files/`. Links are written as they work in the repository; here they are
rewritten. Formulas, written as GitHub reads them, become MathML, which browsers show without a script. The page on the
command line is written from the commands themselves.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from deltazoo.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))|^(\[[^\]]+\]: )(\S+)()$", re.MULTILINE)
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"^```math\n(.*?)^```$|\$`(.+?)`\$", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^\* \[(.+?)\]\((.+?)\)", re.MULTILINE)
COMMANDS = re.compile(r"^<!-- commands: .* -->$", re.MULTILINE)
ORDER = "docs/README.md"
NO_PAGES = {ORDER, "docs/log.md"}
TEXT = {".txt", ".json", ".svg", ".png"}  # what a browser shows; other files are copied as .txt


def site_path(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    if path.startswith("docs/") and path not in NO_PAGES:
        return path.removeprefix("docs/")
    if path in PAGES:
        return PAGES[path]
    if not (ROOT / path).is_file():
        raise PluginError(f"a page links to {path}, which is no file of this repository")
    return f"files/{path}" if Path(path).suffix in TEXT else f"files/{path}.txt"


def repository_path(page: str) -> str:
    """The file in the repository of a page of the site."""
    return next((source for source, name in PAGES.items() if name == page), f"docs/{page}")


def rewrite(markdown: str, page: str) -> tuple[str, dict[str, str]]:
    """The page with its links as the site needs them, and the linked files outside docs/ by their new path."""
    source = repository_path(page)
    linked: dict[str, str] = {}

    def link(match: re.Match[str]) -> str:
        before, target, after = match[1] or match[4], match[2] or match[5], match[3] or ""
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        target, hash_mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        new = site_path(path)
        if new.startswith("files/"):
            linked[new] = path
        return f"{before}{posixpath.relpath(new, posixpath.dirname(page) or '.')}{hash_mark}{anchor}{after}"

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(link, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(link, markdown[end:])]), linked


def mathml(formula: str, display: bool) -> str:
    """A formula in TeX as MathML; the converter knows `align*` and not its synonym `aligned`."""
    return convert(formula.replace("{aligned}", "{align*}"), display="block" if display else "inline")


def command_lines(name: str, command: Any) -> Iterator[str]:
    """Markdown of a command, its options and its subcommands."""
    if name != "deltazoo":
        yield from (f"## {name}", "", re.sub(r"\[/?[a-z]*\]", "", command.help or ""), "")
        yield from ("| argument or option | |", "|---|---|")
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                words = f"`{parameter.name}`"
            else:
                words = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
            default = parameter.default
            shown = "" if default in (None, "", True, False, (), []) or parameter.required else f" Default: {default}."
            yield f"| {words} | {(parameter.help or '').replace('|', chr(92) + '|')}{shown} |"
        yield ""
    for inner, subcommand in getattr(command, "commands", {}).items():
        yield from command_lines(inner if name == "deltazoo" else f"{name} {inner}", subcommand)


def navigation(order: str) -> list[dict[str, list[dict[str, str]]]]:
    """The titles and pages of each section of docs/README.md, in its order."""
    sections = [section.partition("\n") for section in order.split("\n## ")[1:]]
    return [
        {title: [{name: site_path(posixpath.normpath(f"docs/{path}"))} for name, path in ENTRY.findall(text)]}
        for title, _, text in sections
    ]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation."""
    config.nav = navigation((ROOT / ORDER).read_text(encoding="utf-8"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository, and whatever the pages link to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page in [file for file in files if file.is_documentation_page()]:
        for name, path in rewrite(page.content_string, page.src_uri)[1].items():
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links as the site needs them; formulas by number, so that Markdown finds nothing to format in them."""
    page.meta["formulas"] = [mathml(match[1] or match[2], bool(match[1])) for match in FORMULA.finditer(markdown)]
    numbers = iter(range(len(page.meta["formulas"])))
    markdown = COMMANDS.sub(lambda _: "\n".join(command_lines("deltazoo", typer.main.get_command(app))), markdown)
    markdown = FORMULA.sub(lambda _: f"@formula{next(numbers)}@", markdown)
    return rewrite(markdown, page.file.src_uri)[0]


def on_page_content(html: str, page: Page, **_: object) -> str:
    """The formulas in their places."""
    formulas = page.meta["formulas"]
    return re.sub(r"@formula(\d+)@", lambda match: formulas[int(match[1])], html)
