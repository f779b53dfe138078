"""The core's packages are enough to train, score, sample and swap; what needs more says the line to install."""

from __future__ import annotations

import json
from pathlib import Path

from helpers import run_python
from tiny_runs import run_config, write_text_folder

from deltazoo.training import save_config

CODE = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    # As if the named packages were not installed: asking for them finds nothing, importing them fails.

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.partition(".")[0] in sys.argv[1].split(",")
        return None if missing else super().find_spec(name, path, target)

sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
from deltazoo.cli import main

said = {}
for line in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(shown):
        try:
            main(line)
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
    said[line[0]] = status, "".join(shown.getvalue().split())  # a narrow console breaks lines anywhere
json.dump(said, open(sys.argv[3], "w"))
"""
EXTRAS = "matplotlib,fastapi,uvicorn,prometheus_client,openai,trl,peft,lm_eval,pytest,sklearn"


def test_the_core_alone_is_enough_but_for_what_says_so(tmp_path: Path) -> None:
    text, run = write_text_folder(tmp_path / "text", bytes_per_file=1000), tmp_path / "run"
    save_config(run_config(text, run), tmp_path / "config.yaml")
    lines = [
        ["train", str(tmp_path / "config.yaml")],
        ["eval", str(run)],
        ["generate", str(run), "--prompt", "def ", "--max-new-tokens", "3"],
        ["diagnose", str(run), "--length", "50", "--picture", str(tmp_path / "layers.png")],
        ["serve", str(run)],
        ["lm-eval", "--model", "hf"],
        ["check", "delta_net"],  # swaps it into a Llama, too
    ]
    run_python(CODE, EXTRAS, json.dumps(lines), str(tmp_path / "said.json"), timeout=300)
    said = json.loads((tmp_path / "said.json").read_text())
    assert {name for name, (status, _) in said.items() if status} == {"diagnose", "serve", "lm-eval"}, said
    for command, sentence in {
        "train": "not drawn: a picture needs matplotlib: pip install '.[plots]' in a checkout",
        "diagnose": "Error: a picture needs matplotlib: pip install '.[plots]' in a checkout",
        "serve": ": pip install '.[serve]' in a checkout",
        "lm-eval": "Error: lm-evaluation-harness is not installed: pip install '.[harness]' in a checkout",
    }.items():
        assert sentence.replace(" ", "") in said[command][1]
    assert (run / "model" / "model.safetensors").is_file() and not (run / "loss.png").exists()
