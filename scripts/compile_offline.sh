#!/usr/bin/env bash
# Compile every kernel with the oldest Triton that is supported and with the one that is installed.
#   PYTHON=.venv/bin/python scripts/compile_offline.sh [arguments of compile_offline.py]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
oldest=3.6.0
folder=.triton-$oldest # beside the environment, not in it: one import path makes the difference
[ -d "$folder" ] || "$python" -m pip install --quiet --no-deps --target "$folder" "triton==$oldest"

"$python" scripts/compile_offline.py "$@"
PYTHONPATH=$folder "$python" scripts/compile_offline.py "$@"
