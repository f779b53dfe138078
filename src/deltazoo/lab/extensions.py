"""Files of users that register tasks, experiments and variants."""

import importlib.util
import sys
from pathlib import Path

from deltazoo.spec import list_variants

__all__ = ["load_file"]


def load_file(path: Path) -> list[str]:
    """Run a Python file that registers something, once per process.

    Returns:
        The names of the variants it registered.

    Raises:
        ValueError: no such file.
    """
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r} to load")
    name = f"deltazoo_lab_extension_{path.stem}"
    if name in sys.modules:
        if sys.modules[name].__file__ != str(path):
            raise ValueError(f"two loaded files are both called {path.stem!r}: rename one")
        return []
    before = set(list_variants())
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Known by name before it runs: tasks it defines have to be found again when they are sent to another process.
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return [variant for variant in list_variants() if variant not in before]
