"""Build a folder for the kernel hub: delta-rule functions of transformers on our operators, without deltazoo.

    python scripts/hub_kernel.py build/deltazoo-kernels

The folder holds the layers of `hub_layers.py` and every module of the library that they import, with relative imports,
once for NVIDIA GPUs and once for CPUs, in the layout that the library `kernels` loads. Its card shows the use.
"""

import argparse
import ast
import hashlib
import json
import re
import shutil
import sys
import tomllib
from base64 import b64encode
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "deltazoo-kernels"
BACKENDS = ("cuda", "cpu")
LAYERS = "deltazoo.layers"
"""Module of the layers within the folder; the library's own package of this name is never among their imports."""

FIGURES = ROOT / "benchmarks/results/hub_kernels_h200.json"
"""Written by `benchmarks.hub_kernels`."""

CARD = """---
library_name: kernels
license: apache-2.0
---

# {name}

Gated DeltaNet and Kimi Delta Attention for transformers' models, forward and backward, in Triton on NVIDIA GPUs
(compute capability 8.0 or newer) and in torch elsewhere: the code of deltazoo {version}, which need not be installed.

| layer | replaces |
|---|---|
{layers}

Wanted: torch 2.11 or newer, Triton 3.6 or newer on a GPU, and a pair of transformers and `kernels` that fit each other.
Tried: transformers 5.17 with kernels 0.16.2, transformers 5.22 with kernels 0.17.2. With all layers in place logits
equal those of transformers' torch code to 1e-5 in float32, and greedy text is the same (`tests/test_hub_kernel.py` in
deltazoo's repository: Qwen3.5 and Kimi Linear). Packed sequences stay apart (`cu_seq_lens_q` or `seq_idx`), which
transformers' torch code refuses.

## On a GPU

    from transformers import AutoModelForCausalLM, KernelConfig

    folder = "/path/to/{name}"
    names = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]  # Kimi Linear's end in _kda
    names += ["causal_conv1d_fn", "causal_conv1d_update", "RMSNormGated"]
    config = KernelConfig({{name: f"{{folder}}:{{name}}" for name in names}}, use_local_kernel=True)
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3.5-0.8B", device_map="cuda")
    model.train()  # layers chosen in training serve both; chosen in evaluation they do not train
    model.set_use_kernels(True, config)

transformers attaches layers to its functions, so every model of the same classes in the process runs on them.

## On a CPU

`KernelConfig` takes no names of layers for a CPU, but layers themselves:

    from pathlib import Path
    from kernels import LocalLayerRepository
    from transformers.integrations.hub_kernels import kernelize

    local = {{name: {{"cpu": LocalLayerRepository(Path(folder), layer_name=name)}} for name in names}}
    model.kernel_config = KernelConfig(local, use_local_kernel=True)
    kernelize(model)
{figures}
"""
REPLACED = {
    "chunk_gated_delta_rule": "the function of this name (Qwen3.5, Qwen3-Next, OLMo Hybrid)",
    "fused_recurrent_gated_delta_rule": "the function of this name",
    "chunk_kda": "the function of this name (Kimi Linear)",
    "fused_recurrent_kda": "the function of this name",
    "causal_conv1d_fn": "the function of this name: SiLU or no activation, with or without a bias",
    "causal_conv1d_update": "the function of this name",
    "RMSNormGated": "gated norms of these models: SiLU or sigmoid",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="replaced if it is there and was built by this program")
    folder = parser.parse_args().folder
    build(folder)
    print(f"{folder}: {len(sources())} modules for each of {', '.join(BACKENDS)}")
    return 0


def build(folder: Path) -> None:
    """Write the folder: `build/torch-cuda`, `build/torch-cpu` and the card.

    Raises:
        FileExistsError: a folder with other contents.
    """
    if folder.exists() and {path.name for path in folder.iterdir()} - {"build", "README.md"}:
        raise FileExistsError(f"{folder} holds other files than those of a kernel folder: name another one")
    shutil.rmtree(folder, ignore_errors=True)
    files = {path_of(module): relative(module, text) for module, text in sources().items()}
    files["__init__.py"] = 'from . import layers\n\n__all__ = ["layers"]\n'
    digests = {path: b64encode(hashlib.sha256(text.encode()).digest()).decode() for path, text in files.items()}
    contents = hashlib.sha256("".join(f"{path}{digest}" for path, digest in sorted(digests.items())).encode())
    for backend in BACKENDS:
        metadata = {
            "name": NAME,
            "id": f"_{NAME.replace('-', '_')}_{backend}_{contents.hexdigest()[:8]}",  # and torch.ops.ID
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digests},
        }
        for path, text in {**files, "metadata.json": json.dumps(metadata, indent=2) + "\n"}.items():
            target = folder / "build" / f"torch-{backend}" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(card(), encoding="utf-8")


def sources() -> dict[str, str]:
    """Source text by module: the layers, and every module of the library that one of them imports.

    Raises:
        ImportError: one of them imports another package than torch, Triton and Python's own.
    """
    found: dict[str, str] = {}
    waiting = [LAYERS]
    while waiting:
        module = waiting.pop()
        if module in found or module == "deltazoo":
            continue
        found[module] = source_of(module).read_text(encoding="utf-8")
        imported = imports(module, found[module])
        for name in sorted(imported):
            package = name.partition(".")[0]
            if package == "deltazoo":
                waiting.append(name)
            elif package not in sys.stdlib_module_names | {"torch", "triton"}:
                raise ImportError(f"{module} imports {package}, which a kernel of the hub may not need")
    return found


def imports(module: str, text: str) -> set[str]:
    """Modules that a module imports anywhere in it, their packages, and those behind lazy names that it uses."""
    tree, found = ast.parse(text), {module.rpartition(".")[0]}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            names = {f"{package}.{alias.name}" for alias in node.names}
            within = {name for name in names if package.startswith("deltazoo") and source_of(name)}
            found |= {package} | within
            for around in {package} | within:
                found |= lazy_modules(around, used | {alias.name for alias in node.names})
    return found - {""}


def lazy_modules(package: str, names: set[str]) -> set[str]:
    """Modules of a package from which `lazy_names` in its `__init__.py` takes some of these names."""
    path = source_of(package) if package.startswith("deltazoo") else None
    if path is None or path.name != "__init__.py":
        return set()
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    tables = [ast.literal_eval(call.args[1]) for call in calls if getattr(call.func, "id", "") == "lazy_names"]
    return {f"{package}.{module}" for table in tables for module, public in table.items() if names & set(public)}


def source_of(module: str) -> Path | None:
    """File of a module of the library; None for a name that is no module."""
    if module == LAYERS:
        return ROOT / "scripts/hub_layers.py"
    path = (ROOT / "src").joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def path_of(module: str) -> str:
    """Path of a module within the folder of a backend."""
    path = module.partition(".")[2].replace(".", "/")
    source = source_of(module)
    return f"{path}/__init__.py" if source is not None and source.name == "__init__.py" else f"{path}.py"


def relative(module: str, text: str) -> str:
    """The text with imports from the library relative to the module.

    Raises:
        ImportError: an import of the library that is not of the form `from deltazoo.MODULE import NAME`.
    """
    up = "." * (1 + path_of(module).count("/"))
    text = re.sub(r"^( *)from deltazoo\.([\w.]+) import ", rf"\1from {up}\2 import ", text, flags=re.MULTILINE)
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.partition(".")[0] == "deltazoo" for name in names):
            raise ImportError(f"{module}, line {node.lineno}: {ast.unparse(node)} cannot be made relative")
    return text


def card() -> str:
    """Text of README.md; its figures are those of `benchmarks/results`."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    layers = "\n".join(f"| `{name}` | {what} |" for name, what in REPLACED.items())
    return CARD.format(name=NAME, version=version, layers=layers, figures=figures())


def figures() -> str:
    """Section of the card with what `FIGURES` holds; empty before it was measured."""
    if not FIGURES.is_file():
        return ""
    content = json.loads(FIGURES.read_text(encoding="utf-8"))
    run, rows = content["runs"][-1], content["rows"]
    lines = [f"\n## Figures\n\n{run['gpu'] or run['cpu']}, torch {run['torch']}, Triton {run['triton']}, transformers"]
    lines[0] += f" {run['transformers']}, kernels {run['kernels']}; four layers of the default widths, random weights."
    lines += ["", "| model | call | transformers' torch code | these layers |", "|---|---|---:|---:|"]
    for row in rows:
        if row["measure"] != "results":
            call = f"{row['measure']}, {row['batch']} x {row['tokens']:,}, {row['dtype']}"
            lines.append(f"| `{row['model']}` | {call} | {row['torch_ms']:.1f} ms | {row['layers_ms']:.1f} ms |")
    lines.append("")
    for row in rows:
        if row["measure"] == "results":
            text = "the same" if row["same_text"] else "another"
            lines.append(
                f"`{row['model']}` in float32, {row['batch']} x {row['tokens']} tokens: logits of up to "
                f"{row['largest_logit']:.2f} differ by at most {row['logits']:.1e}; {text} greedy text."
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
