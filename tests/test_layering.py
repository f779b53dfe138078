"""Who may import whom, read from the source (function bodies included), so that no layer grows roots upwards."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "deltazoo"

LIBRARY = ("runtime", "ops", "spec", "layers", "rules", "generation", "distributed", "models", "interop", "swap")

# Every part of the library, lowest first, with the parts it may import besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "_lazy": set(),
    "names": set(),
    "runtime": set(),
    "ops": {"runtime"},
    "spec": {"runtime", "ops"},
    "layers": {"runtime", "ops", "spec"},
    "rules": {"runtime", "ops", "spec", "layers"},
    "_auto_registration": {"spec"},
    "generation": {"runtime", "ops", "spec", "layers", "rules"},
    "distributed": {"_lazy", "runtime", "ops", "spec", "layers", "rules", "generation"},
    "models": {
        *("runtime", "ops", "spec", "layers", "rules", "_auto_registration"),
        *("generation", "distributed"),
    },
    "interop": {"_lazy", "runtime", "ops", "spec", "layers", "rules", "generation", "distributed", "models"},
    "swap": {*("_lazy", "_auto_registration"), *LIBRARY},
}
# Every part may use the messages for unknown names.
for allowed in MAY_IMPORT.values():
    allowed.add("names")
# The workbench and the root of the package may import everything; nothing above imports the workbench.
for above in ("workbench", "__init__", "__main__"):
    MAY_IMPORT[above] = {*MAY_IMPORT}

# What the lower parts may take from outside; the rest may use every declared dependency.
OUTSIDE: dict[str, set[str]] = {
    "names": set(),
    "runtime": set(),
    "ops": {"torch", "einops"},
    "spec": {"torch", "einops"},
    "layers": {"torch", "einops"},
    "rules": {"torch", "einops"},
}

# Everything else imports one of these packages inside a function, and only where Triton runs.
MAY_IMPORT_TRITON = ("deltazoo.ops.triton", "deltazoo.ops.fused.kernels", "benchmarks")

SEPARATE_BACKENDS = ("reference", "chunkwise", "triton")


def imported_modules(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Absolute names of everything ``source`` imports; ``from a import b`` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*parents, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Sentences about the imports of ``module`` that the rules forbid."""
    parts = module.split(".")
    part = parts[1] if len(parts) > 1 else "__init__"
    found = set()
    for name in imported_modules(source, module, is_package=is_package):
        root, *inner = name.split(".")
        if root == "deltazoo":
            target = inner[0] if inner and inner[0] in MAY_IMPORT else None
            if target is None and part in OUTSIDE:
                found.add(f"{module} imports {name}: the package root lies above it")
            elif target is not None and target != part and target not in MAY_IMPORT.get(part, set()):
                found.add(f"{module} imports deltazoo.{target}, which lies above it")
            if part == target == "ops" and len(inner) > 1 and len(parts) > 2:
                mine, theirs = parts[2], inner[1]
                if mine != theirs and mine in SEPARATE_BACKENDS and theirs in SEPARATE_BACKENDS:
                    found.add(f"{module} imports the backend {theirs}; backends stay independent of each other")
        elif root in sys.stdlib_module_names or not root:
            continue
        elif root == "triton":
            if not module.startswith(MAY_IMPORT_TRITON):
                found.add(f"{module} imports triton; only {', '.join(MAY_IMPORT_TRITON)} may")
        elif part in OUTSIDE and root not in OUTSIDE[part]:
            found.add(f"{module} imports {root}; {part} may use {', '.join(sorted(OUTSIDE[part]))} alone")
    return sorted(found)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        names = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(names[:-1] if names[-1] == "__init__" else names), path


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda x: x if isinstance(x, str) else "")
def test_imports_point_downwards(module: str, path: Path) -> None:
    assert not violations(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, each sorted; `imports` has every module's own."""
    reachable = {module: set(targets) for module, targets in imports.items()}
    for middle in imports:
        for targets in reachable.values():
            if middle in targets:
                targets |= reachable[middle]
    mutual = {module: frozenset(t for t in reachable[module] if module in reachable[t]) for module in imports}
    return sorted(sorted(group) for group in {*mutual.values()} if group)


def imports_of(source: str, module: str, known: set[str], *, is_package: bool) -> set[str]:
    """The modules among ``known`` that ``module`` imports when it is imported or used; not what type checkers read."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    names = {
        name if name in known else name.rpartition(".")[0]
        for name in imported_modules(ast.unparse(tree), module, is_package=is_package)
    }
    # Python imports the packages around a module before it; those around both are there already.
    names |= {package for name in names & known for package in _packages_around(name)} - {*_packages_around(module)}
    return names & known - {module}


def _packages_around(module: str) -> Iterator[str]:
    while module := module.rpartition(".")[0]:
        yield module


def test_no_module_imports_in_a_circle() -> None:
    """Imports inside functions count: one that is there to break a circle hides it.

    Names given to `importlib.import_module` are not seen: packages import what they offer lazily, and
    `_auto_registration` the models when transformers first asks for one of their types.
    """
    paths = dict(modules())
    imports = {
        module: imports_of(path.read_text(encoding="utf-8"), module, {*paths}, is_package=path.name == "__init__.py")
        for module, path in paths.items()
    }
    assert not circles(imports)


def test_a_circle_is_noticed() -> None:
    known = {"deltazoo.a", "deltazoo.b", "deltazoo.c"}
    sources = {
        "deltazoo.a": "from deltazoo.b import x",
        "deltazoo.b": "def f():\n    from deltazoo import c",
        "deltazoo.c": "import deltazoo.a",
    }
    imports = {module: imports_of(source, module, known, is_package=False) for module, source in sources.items()}
    assert circles(imports) == [sorted(known)]
    only_for_types = "if TYPE_CHECKING:\n    import deltazoo.a"
    assert not circles({**imports, "deltazoo.c": imports_of(only_for_types, "deltazoo.c", known, is_package=False)})


def test_every_part_of_the_package_has_its_place() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts <= set(MAY_IMPORT), f"say in MAY_IMPORT what {sorted(parts - set(MAY_IMPORT))} may import"


def test_a_file_name_says_what_is_in_the_file() -> None:
    names = Counter(path.name for _, path in modules() if path.name not in ("__init__.py", "__main__.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_no_drawer_for_odds_and_ends() -> None:
    names = ("utils", "util", "helpers", "misc", "common")
    drawers = [module for module, _ in modules() if module.split(".")[-1] in names]
    assert not drawers, f"a helper lives with its owner, not in {drawers}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deltazoo.ops.api", "from deltazoo.layers import SwiGLU"),
        ("deltazoo.ops.api", "def f():\n    import deltazoo.models.auto_classes"),
        ("deltazoo.ops.api", "from deltazoo import spec"),
        ("deltazoo.ops.api", "from ..layers.norm import RMSNorm"),
        ("deltazoo.ops.chunkwise", "from deltazoo.ops.reference import recurrent_loop"),
        ("deltazoo.ops.chunkwise", "from deltazoo.ops import reference"),
        ("deltazoo.ops.chunkwise", "from . import reference"),
        ("deltazoo.ops.triton.chunk.scan", "from deltazoo.ops.chunkwise import chunkwise"),
        ("deltazoo.ops.decay", "import triton"),
        ("deltazoo.ops.fused.fused_functions", "import triton"),
        ("deltazoo.ops.decay", "import numpy as np"),
        ("deltazoo.layers.norm", "from deltazoo import delta_rule"),
        ("deltazoo.layers.norm", "import deltazoo"),
        ("deltazoo.layers.norm", "from transformers import PreTrainedModel"),
        ("deltazoo.rules.kda", "import deltazoo.models"),
        ("deltazoo.models.modeling", "from deltazoo.training import train"),
        ("deltazoo.swap.surgery", "from deltazoo.training import train"),
        ("deltazoo.models.modeling", "import triton.language as tl"),
    ],
)
def test_a_forbidden_import_is_noticed(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source", "is_package"),
    [
        ("deltazoo.ops.api", "from deltazoo.ops.reference import recurrent_loop\nimport torch, math", False),
        (
            "deltazoo.ops.triton.chunk.scan",
            "import triton\nfrom deltazoo.ops.triton.chunk.prepare import prepare",
            False,
        ),
        ("deltazoo.ops.fused.kernels.swiglu", "import triton", False),
        ("deltazoo.ops", "from .api import delta_rule\nfrom . import decay", True),
        (
            "deltazoo.models.modeling",
            "from transformers import PreTrainedModel\nfrom deltazoo.layers import SwiGLU",
            False,
        ),
        ("deltazoo", "from deltazoo.spec import get_rule", True),
    ],
)
def test_a_permitted_import_is_not(module: str, source: str, is_package: bool) -> None:
    assert not violations(source, module, is_package=is_package)
