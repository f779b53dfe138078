#!/usr/bin/env bash
# Throughput through HTTP on one GPU: deltazoo serve beside deltazoo.generate, and beside transformers serve.
#     scripts/load_servers.sh RESULT.json [COMMIT]
# The servers start at once and are then asked one after the other. PYTHON names the interpreter, which needs the extras
# serve and test; DEVICE and SIZE are for a rehearsal on a CPU.
set -u
cd "$(dirname "$0")/.."
out=${1:?the file for results}
commit=${2:-$(git rev-parse HEAD)}
python=${PYTHON:-python3} device=${DEVICE:-cuda} size=${SIZE:-340m}
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$folder"' EXIT
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}

script() { "$python" scripts/load_server.py "$@"; }
model() { script model "$folder/$1" --kind "$1" --size "$size" --device "$device"; }
load() { # label, port, kind, options...
    script load --url "http://127.0.0.1:$2" --label "$1" --tokenizer "$folder/$3" --out "$out" --commit "$commit" --device "$device" "${@:4}"
}
ours() { # kind, port, options...
    exec "$python" -m deltazoo serve "$folder/$1" --port "$2" --name served --max-queue 1024 --device "$device" "${@:3}"
}
theirs() { # kind, port
    exec "$python" -m transformers.cli.transformers serve "$folder/$1" --port "$2" --device "$device"
}

widths=1,2,4,8,16,32,64,128,256
model gated_deltanet &
model qwen3_next &
wait
ours gated_deltanet 18001 --widths $widths &
ours qwen3_next 18002 --context-limit 2048 &
theirs qwen3_next 18003 &
script wait http://127.0.0.1:1800{1,2,3} --seconds "${WAIT:-300}" # one that starts slows the others down
load "gated_deltanet, deltazoo serve --widths $widths" 18001 gated_deltanet
load "qwen3_next, deltazoo serve --context-limit 2048" 18002 qwen3_next --clients 1 4 16 64
script generate "$folder/gated_deltanet" --out "$out" --commit "$commit" --device "$device"
# The slowest comes last: one request at a time, with layers in plain torch.
load "qwen3_next, transformers serve" 18003 qwen3_next --model "$folder/qwen3_next" --clients 1 4 --rounds 1 --processes 1
