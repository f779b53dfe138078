"""Child processes that need not import torch again: each is a fork of a server, which has.

`run_interpreted` is for kernels in Triton's interpreter, which must be chosen before Triton is imported;
`run_after_transformers` for what happens where transformers is there and nothing of ours.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Timer

SERVER = """
import json, os, sys, traceback
import torch

torch.set_num_threads(1)
for line in sys.stdin:
    code, arguments, *outputs = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY), descriptor)
        sys.argv = ["-c", *arguments]
        status = 0
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            status = 1
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

TRANSFORMERS = "from transformers import AutoModelForCausalLM, PreTrainedModel\n"
INTERPRETER = "import pytest, torch._dynamo, torch.testing._internal.optests, deltazoo.layers, helpers\n"


@cache
def _server(imports: str) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    if imports == INTERPRETER:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    server = subprocess.Popen(
        [sys.executable, "-c", imports + SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment, start_new_session=True,
    )  # fmt: skip
    atexit.register(_kill, server)
    return server


def _kill(server: subprocess.Popen[str]) -> None:
    """End the server and its child."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def _run(imports: str, code: str, *arguments: object, timeout: float) -> subprocess.CompletedProcess[str]:
    """The end of `python -c code arguments` where the imports came first."""
    server = _server(imports)
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        for path in outputs:
            path.touch()
        print(json.dumps([code, [*map(str, arguments)], *map(str, outputs)]), file=server.stdin, flush=True)
        limit = Timer(timeout, _kill, [server])
        limit.start()
        status = server.stdout.readline()
        limit.cancel()
        said = [path.read_text() for path in outputs]
    if not status:
        _server.cache_clear()
        raise TimeoutError(f"no end within {timeout} s\n{said[0]}\n{said[1]}")
    return subprocess.CompletedProcess(code, int(status), *said)


def _output(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_after_transformers(code: str, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The end of `python -c code arguments` where `from transformers import AutoModelForCausalLM` came first.

    The environment and the folder are those of the first call: for what does not change them.
    """
    return _run(TRANSFORMERS, code, *arguments, timeout=timeout)


def run_well_after_transformers(code: str, *arguments: object) -> str:
    """What such a process printed; a failure shows its traceback."""
    return _output(run_after_transformers(code, *arguments))


def run_interpreted(code: str | Path, *arguments: object) -> str:
    """What `python -c code arguments`, or a script, prints where Triton's interpreter runs kernels, on a CPU.

    A failure shows its traceback. The interpreter multiplies bfloat16 wrongly: half precision is float16 there.
    """
    if isinstance(code, Path):
        code = f"import runpy; runpy.run_path({str(code.resolve())!r}, run_name='__main__')"
    return _output(_run(INTERPRETER, code, *arguments, timeout=900))
