#!/bin/sh
# Everything that only a GPU can tell, in at most nine minutes on an H200, without a network: correctness, then speeds.
#   scripts/bench/gpu.sh [OUTPUT.json] [options of scripts/bench/gpu.py]
set -eu
cd "$(dirname "$0")/../.."
output=${1:-gpu.json}
[ $# -gt 0 ] && shift
exec "${PYTHON:-python}" scripts/bench/gpu.py --output "$output" "$@"
