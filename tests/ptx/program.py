"""PTX as a list of instructions."""

from __future__ import annotations

import re

WAIT = re.compile(
    r"\{ \.reg \.pred complete; waitLoop: mbarrier\.try_wait\.parity\.shared\.b64 complete, (\[[^\]]*\]), (%\w+|\d+); "
    r"@!complete bra\.uni waitLoop; \}".replace(" ", r"(?:\s|\.loc \d+ \d+;)*")
)
"""A loop that tries until a barrier in shared memory has completed a phase: one instruction here."""

KNOWN = re.compile(
    r"""# Arithmetic.
    (add|sub) \. (f32|[su](16|32|64)|b?f16(x2)?) | (neg|abs) \. (f32|s32|s64|b?f16(x2)?) |
    (min|max) \. (f32|[su](32|64)) | mul \. (f32 | lo\.[su](16|32|64) | hi\.[su]32) |
    (mul|mad) \. wide\.(s32|u32|u16) | mad \. lo\.[su](32|64) |
    fma \. rn\.f32 | div \. (full|rn|approx)\.f32 | (div|rem) \. [su](32|64) | (ex2|rcp) \. approx(\.ftz)?\.f32 |
    (and|or|xor|not) \. (pred|b(16|32|64)) | shl \. b(16|32|64) | shr \. (u16|[su](32|64)) |
    bfe \. [su]32 | prmt \. b32 | mov \. (pred|[bu](16|32|64)) | selp \. (f32|b(16|32|64)) |
    setp \. (eq|ne)\.b(16|32|64) | setp \. (lt|le|gt|ge)\.(u16|[su](32|64)) |
    setp \. (eq|ne|(lt|le|gt|ge)u?|num|nan)\.(f32|b?f16) |
    cvt \. (s64\.s32 | u16\.u32 | u32\.u16 | u32\.u64 | u64\.u32 | f32\.(bf16|f16)) | cvta \. (param|global)\.u64 |
    cvt \. (rn\.(bf16|f16)(x2)?\.f32 | rn\.(bf16|f16|f32)\.[su]32 | rna\.tf32\.f32 | rzi\.s32\.f32) |
    cvt \. rmi(\.ftz)?\.f32\.f32 |
    # Ways of the threads, and values of other threads.
    ret | bra (\.uni)? | brx \. idx | \. branchtargets | (bar|bar\.warp|barrier) \. sync | elect \. sync |
    setmaxnreg \. (inc|dec)\.sync\.aligned\.u32 |
    shfl \. sync\.(bfly|idx|up|down)\.b32 | redux \. sync\.((min|max|add)\.[su]32|or\.b32) |
    # Memory.
    ld \. param\.[bsuf](32|64) | ld \. (shared|global)(\.s32|(\.v[24])?\.[buf](8|16|32|64)) |
    st \. (shared|global)(\.v[24])?\.[bsuf](8|16|32|64) |
    (ld|st)matrix \. sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16 | fence \. proxy\.async\.shared |
    cp \. async\.(c[ag]\.shared\.global | commit_group | wait_group | bulk\.commit_group | bulk\.wait_group\.read) |
    cp \. async\.bulk\.tensor\.[23]d\.global\.shared\.bulk_group |
    cp \. async\.bulk\.tensor\.[23]d\.shared(::cluster)?\.global\.mbarrier::complete_tx::bytes |
    mbarrier \. ((init|inval|arrive|arrive\.expect_tx)\.shared\.b64 | wait) |
    # Products.
    mma \. sync\.aligned\.m16n8k(16|8)\.row\.col\.f32(\.(bf16|f16|tf32)){2}\.f32 |
    wgmma \. (fence|commit_group|wait_group)\.sync\.aligned |
    wgmma \. mma_async\.sync\.aligned\.m64n\d+k(16|8)\.f32(\.(bf16|f16|tf32)){2}
    """,
    re.VERBOSE,
)
"""Operations, modifiers included, of which the model knows the meaning."""


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
        body = body.replace(".shared::cta", ".shared")  # one state space under two names
        body = WAIT.sub(r"mbarrier.wait \1, \2;", body)
        for piece in re.split(r"^\s*([$\w]+:)\s|;", body, flags=re.MULTILINE):
            text = " ".join((piece or "").split())
            if text.startswith("}"):
                break
            if text.startswith(".loc"):
                _, file, line = text.split()
                source = (files.get(file, ""), int(line))
            elif text.endswith(":"):
                self.labels[text[:-1]] = len(self.code)
            elif text and not text.startswith(".reg"):
                predicate, operation, rest = re.fullmatch(r"(@!?%p\d+)? ?([\w.:]+) ?(.*)", text).groups()  # type: ignore[union-attr]
                if not KNOWN.fullmatch(operation):
                    raise NotImplementedError(text)
                operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s{\[]+", rest)
                self.code.append((predicate, operation, operands, text))
                self.sources.append(source)
