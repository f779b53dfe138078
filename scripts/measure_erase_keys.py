"""Errors of the kernels with erase keys, undecayed reads and micro-steps, on hard inputs, in three dtypes. Needs a GPU.

    python scripts/measure_erase_keys.py --out benchmarks/results/erase_keys_h200.json --commit $(git rev-parse HEAD)

Every row is one call of the self-check's kind: relative errors, in the root-mean-square sense, of the output, the final
state and every gradient against the chunk form in float64 on the same rounded inputs. `plain_torch` has those of the
chunk form in float32 on these inputs, which are what rounding the results alone costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.provenance import describe_run
from benchmarks.result_files import write_results
from deltazoo.checks.kernel_check import Case, check_case

DTYPES = ("bfloat16", "float16", "float32")


def cases(K: int, T: int) -> Iterator[Case]:
    """Each kind of erase key, read and number of micro-steps, with random keys and with one key repeated."""
    updates: list[dict[str, Any]] = [
        {},
        dict(erase="gated"),
        dict(erase="free", beta=0.3),
        dict(erase="orthogonal", beta=0.3),
        dict(erase="opposite", beta=0.05),
        dict(num_micro_steps=2),
        dict(erase="gated", num_micro_steps=2),
        dict(erase="gated", erase_reads="undecayed"),
    ]
    for decay in ("none", "scalar", "channel"):
        for update in updates:
            if decay == "none" and update.get("erase_reads"):
                continue
            tokens = T // update.get("num_micro_steps", 1)
            case = Case(decay, K, K, B=1, T=tokens, initial_state=True, **update)
            if decay != "none":
                yield from (replace(case, mean_log_decay=mean) for mean in (-1e-3, -5.0))
            else:
                yield case
            if update.get("erase") in (None, "gated"):
                yield replace(case, keys="repeated", beta=1.0, mean_log_decay=-1e-3)


def row(case: Case, backend: str, device: str) -> dict[str, Any]:
    """The errors of one case, or why there are none."""
    found: dict[str, Any] = {"case": asdict(case)}
    try:
        found["errors"] = check_case(case, backend, device)
        found["plain_torch"] = check_case(case, "chunkwise", device)
    except Exception as error:  # a broken kernel may raise anything
        found["failure"] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="read from git unless given")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=int, default=128, help="channels of a head's keys and values")
    parser.add_argument("--rows", type=int, default=600, help="micro-steps of a sequence")
    parser.add_argument("--jobs", type=int, default=12, help="processes, which compile side by side")
    args = parser.parse_args()
    # Neighbours in this list share kernels, so a process takes several of them at a time.
    wanted = [replace(case, dtype=dtype) for dtype in DTYPES for case in cases(args.size, args.rows)]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        every = len(wanted)
        rows = list(pool.map(row, wanted, [args.backend] * every, [args.device] * every, chunksize=4))
    run = describe_run(device=args.device, commit=args.commit, command=[])
    write_results(args.out, run, rows=rows)
    for found in rows:
        errors = found.get("errors")
        worst = max(errors, key=errors.__getitem__) if errors else None
        detail = (
            f"{errors[worst]:.1e} in {worst}, plain torch {found['plain_torch'][worst]:.1e}" if errors else "FAILED"
        )
        print(f"{Case(**found['case'])}: {detail}")


if __name__ == "__main__":
    main()
