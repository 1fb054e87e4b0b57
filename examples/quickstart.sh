#!/usr/bin/env bash
# Train a small GPT with Megatron-LM on this machine, on one rank and on four context-parallel ranks; compare the losses.
# Needs Linux and Python 3.12, but no GPU. Usage: examples/quickstart.sh [--help | options of examples/quickstart.py]
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/environment.sh plot
exec .venv/bin/python examples/quickstart.py "$@"
