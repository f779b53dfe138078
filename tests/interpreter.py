"""Triton's interpreter, in which children of the tests run kernels on a CPU."""

import os
from typing import Any


def remap_once_per_launch() -> None:
    """Where kernels are interpreted, remap the functions of Triton's language once per launch.

    The interpreter does it at every call of a function by a kernel, too, where all are remapped already: half its time.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    remap = interpreter._patch_lang

    def remap_what_is_not(function: Any) -> Any:
        languages = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        left = [f for language in languages for f in (language.load, language.tensor.__add__) if tl.core.is_builtin(f)]
        return remap(function) if left or not languages else interpreter._LangPatchScope()

    interpreter._patch_lang = remap_what_is_not
