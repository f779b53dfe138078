import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_distributed.py"


@pytest.mark.slow
@pytest.mark.feature(
    "DDP and FSDP2",
    models=[
        "delta_rule: gated_deltanet, pure",
        "delta_rule: kda, pure",
        "delta_rule: efla, pure",
        "delta_rule: gated_deltanet, hybrid",
    ],
)
def test_two_processes_equal_one():
    """DDP and FSDP2 on two CPU processes: losses and gradients of one process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("gradients by") == 8
