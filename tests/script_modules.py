"""The scripts of the repository as modules, for tests of what they compute."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def load_script(name: str) -> Any:
    """`scripts/NAME.py`, run anew; its dataclasses need it among the modules."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script
