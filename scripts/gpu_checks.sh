#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU: the tests marked gpu, the self-check, compute-sanitizer.
#
#   scripts/gpu_checks.sh [FOLDER]     results go to FOLDER (gpu_checks), one file per check; exit status 1 if any fails
#
# PYTHON names the interpreter, JOBS the processes at a time, which take GPUs in turn. Needs the package with its extra
# `test`, and torch with CUDA.
set -u
cd "$(dirname "$0")/.."
out=${1:-gpu_checks}
python=${PYTHON:-python3}
jobs=${JOBS:-$(env -u OMP_NUM_THREADS nproc)} # nproc would give that number
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HOME/.triton/cache}" # one for all processes: nothing is compiled twice
status=0

check() { # name, command...
    local name=$1 start=$SECONDS
    shift
    "$@" >"$out/$name.txt" 2>&1
    local result=$?
    [ $result -eq 0 ] || status=1
    echo "$name: exit status $result, $((SECONDS - start)) s; $(tail -n 1 "$out/$name.txt")"
}

"$python" -c 'import json, torch, triton; print(json.dumps(dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)))' >"$out/machine.json" || exit 1
check selfcheck "$python" -m deltazoo check --jobs "$jobs"
check tests "$python" -m pytest -v -m gpu -n "$jobs" --dist loadgroup --timeout 900 --timeout-method thread \
    --durations 50 --junitxml "$out/tests.xml"
check sanitizer "$python" scripts/sanitize.py --out "$out/sanitizer.json"
exit $status
