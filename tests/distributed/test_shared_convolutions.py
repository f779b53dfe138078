"""Short convolutions of pieces of rows that several ranks share, by their kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.processes

WORKER = Path(__file__).with_name("convolution_worker.py")


def run(count: int, **environment: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    done = subprocess.run(
        [*command, str(WORKER)], capture_output=True, text=True, env=os.environ | environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_pieces_give_what_whole_rows_give() -> None:
    """Interpreted, on three ranks."""
    pytest.importorskip("triton")
    run(3, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_pieces_give_what_whole_rows_give_on_gpus() -> None:
    """On two, or with a context of one rank on one."""
    run(min(torch.cuda.device_count(), 2))
