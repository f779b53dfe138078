"""Machine, package versions and commit behind a result."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["Run", "describe_run", "git_commit", "gpu_name", "package_version", "processor_name"]

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Run:
    """Where, when and with what numbers were measured.

    Versions are None where a package is absent, and in files from before they were recorded. `copy_tb_s` and
    `matmul_tflop_s` are rates measured on the machine in the same run; `threads` is torch's number of CPU threads.
    """

    id: str
    date: str
    commit: str
    gpu: str | None
    driver: str | None
    cpu: str
    python: str
    torch: str
    cuda: str | None
    triton: str | None
    fla: str | None
    command: list[str] = field(default_factory=list)
    copy_tb_s: float | None = None
    matmul_tflop_s: float | None = None
    missing_peers: dict[str, str] = field(default_factory=dict)
    transformers: str | None = None
    liger: str | None = None
    threads: int | None = None
    flashqla: str | None = None
    tilelang: str | None = None

    @property
    def machine(self) -> str:
        """The GPU, or the CPU and its number of threads."""
        return self.gpu or f"{self.cpu}, {self.threads} {'thread' if self.threads == 1 else 'threads'}"

    @property
    def short_commit(self) -> str:
        """Ten digits of the commit, with the mark of uncommitted changes."""
        commit, plus, changes = self.commit.partition("+")
        return commit[:10] + plus + changes


def describe_run(*, device: str, commit: str | None, command: list[str], **measured: Any) -> Run:
    """The machine and the versions of this process.

    Args:
        device: what the run uses; a GPU is described only if it is one.
        commit: of the code; read from git when None.
        command: the command line, for the record.
        measured: further fields of `Run`.
    """
    now = datetime.now(UTC)
    gpu = gpu_name(device)
    commit = commit or git_commit()
    return Run(
        id=f"{now:%Y%m%dT%H%M%S.%f}-{commit[:12]}",
        date=now.isoformat(timespec="microseconds"),
        commit=commit,
        gpu=gpu,
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        cpu=processor_name(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=package_version("triton"),
        fla=package_version("fla-core"),
        transformers=package_version("transformers"),
        liger=package_version("liger-kernel"),
        flashqla=package_version("flash-qla"),
        tilelang=package_version("tilelang"),
        threads=torch.get_num_threads(),
        command=command,
        **measured,
    )


def git_commit(*folders: Path) -> str:
    """The checked-out commit, with "+changes" if files in `folders` differ from it; "unknown" without git.

    Args:
        folders: what has to equal the commit; the package if none is given.
    """
    commit = _output("git", "-C", str(_PACKAGE), "rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    changed = _output("git", "-C", str(_PACKAGE), "status", "--porcelain", "--", *map(str, folders or (_PACKAGE,)))
    return commit + "+changes" if changed else commit


def gpu_name(device: str) -> str | None:
    """The name of an NVIDIA GPU; None for other devices."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None


def processor_name() -> str:
    """The CPU's model name, or what the platform says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def package_version(package: str) -> str | None:
    """The installed version of a package, None if it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """The first line that a command prints; None if it fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0] or None
