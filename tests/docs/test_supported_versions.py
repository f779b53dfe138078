"""make test-oldest runs on what pyproject.toml calls the oldest supported versions."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
SAME_AS_NEWEST = {"torch", "triton"}


def pins(name: str) -> dict[str, Version]:
    lines = (line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if "==" in line)
    return {package.lower(): Version(version) for package, version in (line.split("==") for line in lines)}


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [Requirement(line) for line in project["dependencies"]]
    bounds = {
        requirement.name.lower(): Version(specifier.version)
        for requirement in requirements
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    oldest, newest = pins("constraints-oldest.txt"), pins("constraints.txt")
    for package, bound in bounds.items():
        expected = newest[package] if package in SAME_AS_NEWEST else bound
        assert oldest[package] == expected, f"{package}: pyproject.toml says {expected}, constraints-oldest.txt another"
