"""The configurations that come with the project: in a checkout beside the sources, in a wheel inside the package."""

from pathlib import Path

from deltazoo.training.strict import unknown_name

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED, _CHECKOUT = _PACKAGE / "configs", _PACKAGE.parents[1] / "configs"


def presets() -> dict[str, Path]:
    """Name and file of every configuration that ships with the project."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_config(name: str) -> Path:
    """The file that ``name`` means: a path, or the name of a configuration that ships with the project.

    Raises:
        ValueError: neither; names the nearest.
    """
    if Path(name).is_file():
        return Path(name)
    if name in presets():
        return presets()[name]
    raise ValueError(f"there is no file {name!r}, and it names no preset: {unknown_name('preset', name, presets())}")
