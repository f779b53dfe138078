"""Check, before any work is done, the files that a command is to write."""

from pathlib import Path

__all__ = ["check_output_file"]


def check_output_file(option: str, file: str | None) -> None:
    """Raise ValueError if the file that an option names, if any, cannot be one, or has no folder to go into."""
    if file is None:
        return
    if not Path(file).parent.is_dir():
        raise ValueError(f"there is no folder {str(Path(file).parent)!r} for {option} {file}")
    if Path(file).is_dir():
        raise ValueError(f"{option} names the file to write, and {file} is a folder")
