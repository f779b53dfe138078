"""Change one line of the library at a time, as a wrong edit would, and see whether a test fails.

    python scripts/mutants.py [NAME ...]

Of each mutant a table line says which test noticed it, and the seconds until then. Exit status 1 if a mutant survives,
if its text is not found exactly once under src/, or if the noticing test fails on the unchanged source too. A mutant is
found by its text and tests by the ends of their paths, so that both may move.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """A text that stands once under src/, what takes its place, and the file of tests that should notice."""

    before: str
    after: str
    tests: str


MUTANTS = {
    "wrong key head of a group": Mutant(
        "self.k = tokens.chunk(k, dtype).repeat_interleave(self.group, 1)",
        "self.k = tokens.chunk(k, dtype).repeat(1, self.group, 1, 1)",
        "ops/test_reference.py",
    ),
    "packed documents that no model described pass": Mutant(
        "if positions is None and has_explicit_packing(kwargs):", "if False:", "test_packing_hook.py"
    ),
    "a row begins with another's state": Mutant(
        "torch._foreach_zero_(rows[row])",
        "pass",
        "generation/test_states.py",
    ),
    "the rule's further state does not move with its row": Mutant(
        "return LayerState(*(None if x is None else x[rows] for x in self))",
        "return LayerState(*(None if x is None else x[rows] for x in self[:2]), self.auxiliary)",
        "generation/test_cache.py",
    ),
    "step gate in the model's dtype": Mutant(
        'return torch.sigmoid(at_least_float32(x.project("b_proj")))',
        'return torch.sigmoid(x.project("b_proj"))',
        "layers/test_delta_attention.py",
    ),
    "decay that grows": Mutant("g = -rate * F.softplus(x)", "g = rate * F.softplus(x)", "ops/test_decay.py"),
    "taps reach into the document before": Mutant(
        "x.masked_fill((positions < lag)[..., None], 0)",
        "x.masked_fill((positions < 0)[..., None], 0)",
        "test_packing_hook.py",
    ),
    "a configuration key of others by another name": Mutant(
        '"num_householder": "num_micro_steps"', '"num_householders": "num_micro_steps"', "test_fla_checkpoints.py"
    ),
    "a checkpoint key of others by another name": Mutant(
        '"attn.g_norm_swish_gate.weight": "attn.o_norm.weight"',
        '"attn.g_norm.weight": "attn.o_norm.weight"',
        "test_fla_checkpoints.py",
    ),
    "output bias not copied": Mutant(
        "if y is not None}", 'if y is not None and (x, kind) != ("o", "bias")}', "swap/test_transfer.py"
    ),
    "queries scaled where the rule does not": Mutant(
        "scale=None if self.spec.scale_queries else 1.0,", "scale=None,", "test_equations.py"
    ),
    # Survivors of earlier reviews, until a test was written.
    "wrong key head in a kernel": Mutant(
        "return i_h // (HV // H) if GROUPED else i_h",
        "return i_h % H if GROUPED else i_h",
        "triton/test_delta_rule.py",
    ),
    "doubled steps in fast precision": Mutant(
        'None if expands or allow_neg_eigval else "fast"',
        'None if expands else "fast"',
        "layers/test_rule.py",
    ),
    "nothing listed to stay float32": Mutant(
        "model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *float32}",
        "model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ())}",
        "models/test_saving.py",
    ),
    "unswapped attention stays frozen": Mutant(
        "parameter.requires_grad_(self._trainable[name])",
        "parameter.requires_grad_(False)",
        "swap/test_transfer.py",
    ),
    "alignment with dropout": Mutant(
        "model.eval()  # dropout in the frozen layers", "pass  # dropout in the frozen layers", "test_distill.py"
    ),
    # Those that survived a run of random mutants.
    "logits read again are computed again": Mutant(
        "or (recording and not self._logits.requires_grad)",
        "or not self._logits.requires_grad",
        "models/test_late_logits.py",
    ),
    "rope that turns no channel passes": Mutant(
        "if not 0 < 2 * len(found) <= head_dim:",
        "if not 0 <= 2 * len(found) <= head_dim:",
        "models/test_configuration.py",
    ),
    "default depth of a named configuration": Mutant(
        '"gated_deltanet"\n    num_hidden_layers: int = 21',
        '"gated_deltanet"\n    num_hidden_layers: int = 22',
        "models/test_configuration.py",
    ),
    "default head size of a named configuration": Mutant(
        'mixer: str = "kda"\n    head_dim: int | None = 128',
        'mixer: str = "kda"\n    head_dim: int | None = 256',
        "models/test_configuration.py",
    ),
    "fla's norms without their dtype": Mutant(
        "values = torch.empty(hidden_size, device=device, dtype=dtype)",
        "values = torch.empty(hidden_size, device=device)",
        "test_fla_modules.py",
    ),
    "fla's RMSNorm with a bias unasked": Mutant(
        "elementwise_affine: bool = True,\n        bias: bool = False,",
        "elementwise_affine: bool = True,\n        bias: bool = True,",
        "test_fla_modules.py",
    ),
}


def only(paths: list[Path], what: str) -> Path:
    """The single path; an error says of what there is another number."""
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} times: {what}")
    return paths[0]


def run_tests(copy: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """pytest in the copy, up to the first failure."""
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def noticed(copy: Path, mutant: Mutant) -> str:
    """The test that fails in the changed copy; ValueError if none does."""
    sources = [path for path in (copy / "src").rglob("*.py") for _ in range(path.read_text().count(mutant.before))]
    source = only(sources, mutant.before)
    tests = only(list((copy / "tests").glob(f"**/{mutant.tests}")), mutant.tests)
    unchanged = source.read_text()
    source.write_text(unchanged.replace(mutant.before, mutant.after))
    try:
        done = run_tests(copy, [str(tests)])
    finally:
        source.write_text(unchanged)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0 or failed is None:
        raise ValueError("SURVIVED" if done.returncode == 0 else f"no test ran: {done.stdout[-300:]}")
    return failed[1]


def main() -> int:
    """Run the mutants named, or all."""
    if unknown := {*sys.argv[1:]} - {*MUTANTS}:
        sys.exit(f"no mutants {sorted(unknown)}; known: {sorted(MUTANTS)}")
    killers, lost = [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "site", "build", "dist"))
        for name in sys.argv[1:] or MUTANTS:
            begin = time.monotonic()
            try:
                outcome = noticed(copy, MUTANTS[name])
                killers.append(outcome)
            except ValueError as error:
                outcome, lost = str(error), lost + 1
            print(f"{name:52} {time.monotonic() - begin:4.0f} s  {outcome}", flush=True)
        if killers and run_tests(copy, sorted({*killers})).returncode:
            print("a test above fails on the unchanged source, too")
            lost += 1
    return min(lost, 1)


if __name__ == "__main__":
    sys.exit(main())
