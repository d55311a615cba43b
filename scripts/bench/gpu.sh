#!/bin/sh
# Everything that only a GPU can tell, without a network: correctness, then speeds. A call begins no part after 520 s.
#   scripts/bench/gpu.sh [OUTPUT.json] [options of scripts/bench/gpu.py]
# A failed capture of a graph can spoil what comes after it in the process, and all of it may take more than nine minutes:
#   gpu.sh OUT/checks.json --shapes;  gpu.sh OUT/8b.json --shapes 8b --targets;  gpu.sh OUT/7b.json --shapes 7b --targets
# Needs torch, transformers, safetensors, pyyaml and rich; an installed draft_heads is not needed.
set -eu
output=${1:-gpu.json}
[ $# -gt 0 ] && shift
case "$output" in /*) ;; *) output="$PWD/$output" ;; esac
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
if ! "$python" -c 'import draft_heads' 2>/dev/null; then
    packages=$(mktemp -d)
    trap 'rm -r "$packages"' EXIT
    mkdir "$packages/draft_heads"
    for room in configs data heads inference scripts train; do ln -s "$PWD/$room" "$packages/draft_heads/$room"; done
    export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" scripts/bench/gpu.py --output "$output" "$@"
