"""Processes that have imported transformers and nothing of ours: each a fork of one that took the seconds for it."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from threading import Timer

SERVER = """
import json, os, sys, traceback
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

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


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server


def run_after_transformers(code: str, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The end of `python -c code arguments` where `from transformers import AutoModelForCausalLM` came first.

    The environment and the folder are those of the first call: for what does not change them.
    """
    server = _server()
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        for path in outputs:
            path.touch()
        print(json.dumps([code, [*map(str, arguments)], *map(str, outputs)]), file=server.stdin, flush=True)
        limit = Timer(timeout, server.kill)
        limit.start()
        status = server.stdout.readline()
        limit.cancel()
        said = [path.read_text() for path in outputs]
    if not status:
        _server.cache_clear()
        raise TimeoutError(f"no end within {timeout} s\n{said[0]}\n{said[1]}")
    return subprocess.CompletedProcess(code, int(status), *said)


def run_well_after_transformers(code: str, *arguments: object) -> str:
    """What such a process printed; a failure shows its traceback."""
    done = run_after_transformers(code, *arguments)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
