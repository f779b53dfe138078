#!/usr/bin/env bash
# Throughput through HTTP on one GPU: deltazoo serve beside deltazoo.generate, and beside transformers serve.
#     scripts/load_servers.sh RESULT.json [COMMIT]
# Some minutes. PYTHON names the interpreter; it needs the extras serve and test.
set -u
cd "$(dirname "$0")/.."
out=${1:?the file for results}
commit=${2:-$(git rev-parse HEAD)}
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}

script() { "$python" scripts/load_server.py "$@"; }
load() { script load --out "$out" --commit "$commit" --tokenizer "$@"; }
serve() { echo "$python -m deltazoo serve $1 --port {port} --name served --max-queue 1024 ${*:2}"; }

ours=$folder/gated_deltanet theirs=$folder/qwen3_next
script model "$ours" && {
    load "$ours" --label "gated_deltanet, deltazoo serve" --start "$(serve "$ours")"
    load "$ours" --label "gated_deltanet, deltazoo serve, widths to 256" --start "$(serve "$ours" --widths 1,2,4,8,16,32,64,128,256)"
    script generate "$ours" --out "$out" --commit "$commit"
}
script model "$theirs" --kind qwen3_next && {
    load "$theirs" --label "qwen3_next, deltazoo serve" --start "$(serve "$theirs" --context-limit 2048)"
    load "$theirs" --label "qwen3_next, transformers serve" --model "$theirs" --clients 1 4 --rounds 1 --processes 1 \
        --start "$python -m transformers.cli.transformers serve $theirs --port {port}"
}
