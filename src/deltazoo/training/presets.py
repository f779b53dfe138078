"""The configurations that come with the project: the folder configs of a checkout, inside the package in a wheel."""

from pathlib import Path

from deltazoo.names import unknown
from deltazoo.training.config import RUN_CONFIG
from deltazoo.training.run_folder import nearest_run

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED, _CHECKOUT = _PACKAGE / "configs", _PACKAGE.parents[1] / "configs"


_CONVERSION = "swap_"  # the names of conversion recipes begin like this
_FOR_CPUS = "_cpu"  # the names of configurations for CPUs end like this; the comments of all others name GPUs


def presets(*, conversions: bool = False) -> dict[str, Path]:
    """Name and file of every training configuration, or of every conversion recipe, that ships with the project."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
    found = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {name: path for name, path in found.items() if name.startswith(_CONVERSION) == conversions}


def find_config(name: str, *, conversions: bool = False) -> Path:
    """The file that ``name`` means: a path, the folder of a run, or a configuration that ships with the project.

    Raises:
        ValueError: nothing of that name; the message names the nearest.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / RUN_CONFIG).is_file():
            raise ValueError(
                f"the folder {name!r} holds no run: it has no {RUN_CONFIG}; to train on the text in it: --text {name}"
            )
        return path / RUN_CONFIG
    known = presets(conversions=conversions)
    if name in known:
        return known[name]
    near = nearest_run(path)
    if near or path.parent != Path():
        raise ValueError(f"there is no file or folder {name!r}{near}")
    raise ValueError(f"there is no file or folder {name!r}, and it names no preset: {unknown('preset', name, known)}")


def is_for_gpus(name: str) -> bool:
    """Whether a name or path, as for `find_config`, means a training configuration of the project that is for GPUs."""
    path = find_config(name).resolve()
    return path in presets().values() and not path.stem.endswith(_FOR_CPUS)
