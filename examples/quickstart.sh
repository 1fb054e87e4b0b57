#!/usr/bin/env bash
# Train a small GPT with Megatron-LM on this machine, on one rank and on four context-parallel ranks; compare the losses.
# Needs Linux and Python 3.12, but no GPU. Usage: examples/quickstart.sh [--help | options of examples/quickstart.py]
# Runs in the active environment if cp-plugin[plot] is installed there, otherwise in a .venv of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python has='from importlib.metadata import version as of; of("cp-plugin"), of("matplotlib")'
python -c "$has" 2>/dev/null || { bash ci/environment.sh plot; python=.venv/bin/python; }
exec "$python" examples/quickstart.py "$@"
