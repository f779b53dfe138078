#!/usr/bin/env bash
# Throughput through HTTP on one GPU: deltazoo serve, deltazoo.generate, transformers serve, on one model of 374 M.
#     scripts/load_servers.sh RESULT.json [COMMIT]
# About three minutes. PYTHON names the interpreter; it needs the extras serve and test.
set -u
cd "$(dirname "$0")/.."
out=${1:?the file for results}
commit=${2:-$(git rev-parse HEAD)}
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}

script() { "$python" scripts/load_server.py "$@"; }
load() { script load --tokenizer "$folder/served" --out "$out" --commit "$commit" "$@"; }

script model "$folder/served" || exit
load --label "deltazoo serve" --start "$python -m deltazoo serve $folder/served --port {port} --max-queue 1024"
load --label "deltazoo serve, widths to 256" \
    --start "$python -m deltazoo serve $folder/served --port {port} --widths 1,16,64,256 --max-queue 1024"
script generate "$folder/served" --out "$out" --commit "$commit"
load --label "transformers serve" --model "$folder/served" --clients 1 16 --rounds 1 --processes 1 \
    --start "$python scripts/load_server.py transformers $folder/served --port {port}"
