"""The configurations that come with the project: in a checkout beside the sources, in a wheel inside the package."""

from pathlib import Path

from deltazoo.training.strict import unknown_name

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED, _CHECKOUT = _PACKAGE / "configs", _PACKAGE.parents[1] / "configs"


_CONVERSION = "swap_"  # the names of conversion recipes begin with it


def presets(*, conversions: bool = False) -> dict[str, Path]:
    """Name and file of every training configuration, or of every conversion recipe, that ships with the project."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
    found = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {name: path for name, path in found.items() if name.startswith(_CONVERSION) == conversions}


def find_config(name: str, *, conversions: bool = False) -> Path:
    """The file that ``name`` means: a path, or the name of a configuration that ships with the project.

    Raises:
        ValueError: neither; names the nearest.
    """
    if Path(name).is_file():
        return Path(name)
    known = presets(conversions=conversions)
    if name in known:
        return known[name]
    raise ValueError(f"there is no file {name!r}, and it names no preset: {unknown_name('preset', name, known)}")
