"""Build wheel and source distribution, install the wheel into an empty virtual environment, and use it there.

The folder for both is an argument, and stays; without one they are built into a folder that goes.
"""

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USE = """
import importlib.util
import deltazoo, torch
from deltazoo.layers import GatedDeltaNet
from deltazoo.training.loading import presets
assert "site-packages" in deltazoo.__file__, deltazoo.__file__
assert "quickstart_cpu" in presets(), "the presets are missing from the wheel"
assert importlib.util.find_spec("matplotlib") is importlib.util.find_spec("fastapi") is None, "more than the core"
y = GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=32)(torch.randn(1, 70, 64))
assert y.shape == (1, 70, 64) and y.isfinite().all()
print("deltazoo", deltazoo.__version__, "works from the wheel")
"""
SMALL = (
    "training.steps=2",
    "training.rows_per_batch=1",
    "training.evaluation_rows=1",
    "tokenizer.vocab_size=300",
)


def run(*command: str, cwd: str | Path | None = None) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True, cwd=cwd)


def check_contents(wheel: Path, sdist: Path) -> None:
    """The library and its presets are in both, and nothing else."""
    folders = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name.split("-")[0] for name in folders} == {"deltazoo"}, folders
    with tarfile.open(sdist) as archive:
        parts = {name.split("/")[1] for name in archive.getnames()}
    assert {"src", "configs", "pyproject.toml"} <= parts and not {"tests", "experiments", "benchmarks"} & parts, parts


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        built = Path(sys.argv[1] if len(sys.argv) > 1 else folder)
        run(sys.executable, "-m", "build", "--outdir", str(built), str(ROOT))
        (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
        check_contents(wheel, sdist)
        venv.create(Path(folder) / "venv", with_pip=True)
        bin_folder = Path(folder) / "venv" / "bin"
        constraints = str(ROOT / "constraints.txt")
        run(str(bin_folder / "pip"), "install", "--quiet", "--no-compile", "--constraint", constraints, str(wheel))
        run(str(bin_folder / "python"), "-c", USE, cwd=folder)
        run(str(bin_folder / "deltazoo"), "list", cwd=folder)
        overrides = [part for override in SMALL for part in ("--set", override)]
        run(str(bin_folder / "deltazoo"), "train", "quickstart_cpu", *overrides, "--output", "run", cwd=folder)
        run(str(bin_folder / "deltazoo"), "generate", "run", "--prompt", "def ", "--max-new-tokens", "5", cwd=folder)


if __name__ == "__main__":
    main()
