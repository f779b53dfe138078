"""PTX as a list of instructions."""

from __future__ import annotations

import re

WAIT = re.compile(
    r"\{\s*\.reg \.pred complete;\s*waitLoop:\s*mbarrier\.try_wait\.parity\.shared(?:::cta)?\.b64 complete, "
    r"(\[[^\]]*\]), (%\w+|\d+);\s*@!complete bra\.uni waitLoop;\s*\}"
)
"""A loop that tries until a barrier in shared memory has completed a phase: one instruction here."""


class Program:
    """Parsed PTX: parameters, instructions as (predicate, operation, operands, text), labels, lines of the source."""

    def __init__(self, ptx: str) -> None:
        self.threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])  # type: ignore[index]
        self.parameters = re.findall(r"\.param \.(\w+)[^,\n)]*?(\w+_param_\d+)", ptx)
        self.code: list[tuple[str | None, str, list[str], str]] = []
        self.labels: dict[str, int] = {}
        self.sources: list[tuple[str, int]] = []
        """File and line of every instruction."""
        files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx))
        source = ("", 0)
        ptx = re.sub(r"\.loc\s+(\d+)\s+(\d+)[^\n]*", r".loc \1 \2;", ptx)
        body = re.sub(r"//[^\n]*|\.pragma[^\n]*", "", ptx[ptx.index("{", ptx.index(".reqntid")) + 1 :])
        body = WAIT.sub(r"mbarrier.wait \1, \2;", body)
        for piece in re.split(r"(\$L\w+:)|;", body):
            text = " ".join((piece or "").split())
            if text.startswith("}"):
                break
            if text.startswith(".loc"):
                _, file, line = text.split()
                source = (files.get(file, ""), int(line))
            elif text.startswith("$L"):
                self.labels[text[:-1]] = len(self.code)
            elif text and not text.startswith(".reg"):
                predicate, operation, rest = re.fullmatch(r"(@!?%p\d+)? ?([\w.:]+) ?(.*)", text).groups()  # type: ignore[union-attr]
                operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s{\[]+", rest)
                self.code.append((predicate, operation, operands, text))
                self.sources.append(source)
